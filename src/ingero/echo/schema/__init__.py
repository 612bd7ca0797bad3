"""What the store holds: tables, columns, and the numbered steps that made them. No I/O."""

from ingero.echo.schema.migrations import MIGRATIONS, Migration
from ingero.echo.schema.tables import (
    COLLECTIVES,
    COSTS,
    EVENTS,
    HANGS,
    HISTOGRAMS,
    INCIDENTS,
    LOGS,
    NODES,
    SPANS,
    TABLES,
    TENANT_TABLES,
    VERDICTS,
    Table,
)

__all__ = [
    "COLLECTIVES",
    "COSTS",
    "EVENTS",
    "HANGS",
    "HISTOGRAMS",
    "INCIDENTS",
    "LOGS",
    "MIGRATIONS",
    "NODES",
    "SPANS",
    "TABLES",
    "TENANT_TABLES",
    "VERDICTS",
    "Migration",
    "Table",
]
