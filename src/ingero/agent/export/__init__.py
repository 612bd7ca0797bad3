"""What leaves a node for others' tools: local events as Prometheus metrics and as pages.

Beside the health loop, which it knows only by the lines on its socket. Sends nothing anywhere by itself.
"""
