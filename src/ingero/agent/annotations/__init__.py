"""Annotations of workloads about themselves, taken on a local socket.

`place` finds and makes the socket's folder, `admission` decides what to believe, `listener` serves the connections,
`labels` keeps the latest. Wire format: `ingero.wire.annotations`.
"""
