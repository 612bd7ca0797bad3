"""What several components need: sending queues and retries, client settings. Below every component, above the contracts.

Listening sockets and TLS contexts are in `ingero.serving`, because Echo and the agent serve too.
"""
