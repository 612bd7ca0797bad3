"""Numbered steps from an empty database to today's. A step that was released is never edited; add the next one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from ingero.echo.schema.tables import (
    BIGINT,
    DOUBLE,
    HANGS,
    INT,
    NODES,
    TABLES,
    TEXT,
    TS,
    UBIGINT,
    USAGE,
    Table,
)

_TYPES: Final = {
    TS: "TIMESTAMP",
    TEXT: "VARCHAR",
    DOUBLE: "DOUBLE",
    BIGINT: "BIGINT",
    UBIGINT: "UBIGINT",
    INT: "INTEGER",
}
_LATER: Final = (HANGS, USAGE)
"""Tables that a step of their own makes."""
_NEVER_NULL: Final = frozenset({"ts", "cluster_id", "node_id", "metric_name", "ingested_at"})


_CLOCK: Final = (
    "CREATE TABLE retention_clock "
    "(known TIMESTAMP NOT NULL, wall TIMESTAMP NOT NULL, stepped TIMESTAMP, steady_ns BIGINT NOT NULL)"
)


@dataclass(frozen=True, slots=True)
class Migration:
    """One step, applied in one transaction.

    Attributes:
        number: 1, 2, 3 … without a gap.
        title: What it does.
        statements: SQL, in order.
    """

    number: int
    title: str
    statements: tuple[str, ...]


def build_table(table: Table) -> str:
    """The statement that makes a table; its columns stand in `Table` alone.

    A table that gets another column has it in the step that made the table, for new databases, and in a later step as
    ``ADD COLUMN IF NOT EXISTS``, for older ones.
    """
    columns = [_build_column(field) for field in table.arrow_schema()]
    if table is NODES:
        columns.append("PRIMARY KEY (cluster_id, node_id)")
    return f"CREATE TABLE {table.name} ({', '.join(columns)})"


def _build_column(field: pa.Field) -> str:
    kind = (
        f"{_TYPES[field.type.value_type]}[]" if pa.types.is_list(field.type) else _TYPES[field.type]
    )
    return f"{field.name} {kind}{' NOT NULL' if field.name in _NEVER_NULL else ''}"


MIGRATIONS: Final = (
    Migration(
        1,
        "events, histograms, collectives, incidents, verdicts, costs, logs, spans, nodes",
        (
            *(build_table(table) for table in TABLES.values() if table not in _LATER),
            # What was written lately, so that a sender's retry after our restart is still recognised.
            "CREATE TABLE ingest_keys (key UBIGINT NOT NULL, ingested_at TIMESTAMP NOT NULL)",
        ),
    ),
    Migration(
        2,
        "a secret of the database in the keys of rows",
        (
            "CREATE TABLE ingest_secret (secret UBIGINT NOT NULL)",
            "INSERT INTO ingest_secret SELECT hash(gen_random_uuid())",
            "DELETE FROM ingest_keys",  # made without it, so no row will ever match them
        ),
    ),
    Migration(3, "hangs", (build_table(HANGS),)),
    Migration(4, "usage", (build_table(USAGE),)),
    Migration(
        5,
        "the time of the last upkeep, so that a clock that is ahead deletes nothing",
        (_CLOCK,),
    ),
    Migration(
        6,
        "which points are of one sender",
        (
            "ALTER TABLE events ADD COLUMN IF NOT EXISTS stream VARCHAR",
            "ALTER TABLE histograms ADD COLUMN IF NOT EXISTS stream VARCHAR",
        ),
    ),
)
"""Every step; the last one's number is the schema's version."""
