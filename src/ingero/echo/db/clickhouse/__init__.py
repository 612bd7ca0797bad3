"""Rows on a ClickHouse server: the same tables, the same statements in its dialect, for sites that outgrow one machine.

Nothing outside imports ``clickhouse_connect``, and the store imports this only where a server was named.
"""
