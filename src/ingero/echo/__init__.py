"""``ingero-echo``: the site's memory. OTLP in, a DuckDB store, questions over MCP and HTTP.

    service ─► ingest | queries ─► db ─► schema

``schema`` names tables and columns, ``db`` alone touches DuckDB, ``ingest`` turns OTLP into columns, ``queries`` holds
the questions, ``service`` listens. Refuses to run a tenant's SQL inside the process that holds other tenants' rows.
"""
