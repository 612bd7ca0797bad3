"""A tenant's SQL: guarded, then run in a process that holds nothing but that tenant's rows.

DuckDB alone is no sandbox: its "SELECT" can delete, read the database file, pass the memory limit, ignore every
timeout and kill the instance for everybody (docs/decisions/0013-tenant-sql.md). So the parent never parses the text.
A small process (``fork_server``) forks a worker per statement; the worker checks the syntax tree against allow-lists,
says which tables it needs, gets those rows and no others as Arrow in a memfd, gives up its right to open anything,
and runs. The parent kills it at the deadline.
"""
