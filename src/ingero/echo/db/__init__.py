"""Everything that touches DuckDB: one writer, deadline-bound readers, repair, backup, and the sandbox's worker.

Above ``schema``; ``ingest`` and ``queries`` see `Store`, `Rows` and `Reader` only. Refuses to run SQL that came from
outside in the instance that holds the data: that is the sandbox's worker process.
"""
