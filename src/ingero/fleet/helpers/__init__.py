"""What several components need: sending queues, retries, pages, certificates. Above the contracts, below components.

Listening sockets and TLS contexts are in `ingero.serving`, because Echo and the agent serve too.
"""
