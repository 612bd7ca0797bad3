"""What workloads say of themselves, taken on a local socket.

`place` finds and makes the socket's folder, `admission` decides what to believe, `listener` serves the connections, `labels`
knows what was said last. Wire format: `ingero.wire.annotations`.
"""
