"""The listeners: OTLP in, MCP and HTTP out, health; and who may do what on them.

On top of ``ingest`` and ``queries``. Refuses to listen without TLS anywhere but on loopback, and there only with
``insecure_no_tls``.
"""
