"""The server side of OTLP, shared by every program that receives it: HTTP, gRPC, limits, encodings, answers.

A program brings an `OtlpHandler`: who may send, and what becomes of a body. The layers put this room in ``serving``
and not in ``otlp``: it needs listening sockets, admission of connections and TLS, which stand here
(``docs/decisions/0057-one-otlp-server-and-client.md``).
"""
