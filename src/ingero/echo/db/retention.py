"""Retention by age and by size. Runs on the writer's connection, between commits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import ClassVar, Final

import duckdb

from ingero.echo.db.engine import checkpoint, fetch_row, used_bytes
from ingero.echo.db.errors import translate_errors
from ingero.echo.db.retention_clock import RetentionTime
from ingero.echo.schema.tables import APPENDED, NODES, SENT, USAGE
from ingero.units import NS_PER_US

_SIZE_TARGET: Final = 0.9
"""A database over its size is trimmed to this share of it, so that trimming is rare."""


@dataclass(frozen=True, slots=True)
class Horizon:
    """Which arrivals of a table are gone; UTC without a zone.

    Attributes:
        before: Rows that arrived earlier.
        stepped: And rows that arrived from here on,
        until: earlier than this.
    """

    before: datetime
    stepped: datetime
    until: datetime

    CONDITION: ClassVar[str] = "(ingested_at < ? OR (ingested_at >= ? AND ingested_at < ?))"
    """That a row is gone, with `params`."""

    @property
    def params(self) -> tuple[datetime, datetime, datetime]:
        """Of `CONDITION`."""
        return self.before, self.stepped, self.until

    @staticmethod
    def at(before: datetime) -> Horizon:
        """All rows that arrived earlier."""
        return Horizon(before, before, before)


@dataclass(frozen=True, slots=True)
class Retention:
    """How much is kept.

    Attributes:
        max_age_ns: Rows that arrived longer ago go; None keeps them.
        max_bytes: Oldest arrivals go when the blocks in use pass this; None never.
        by_table: Tables with an age of their own; None keeps their rows. ``usage`` is kept for as long as any rows that
            it counts at least, since quotas go by it.
    """

    max_age_ns: int | None
    max_bytes: int | None
    by_table: Mapping[str, int | None] = field(default_factory=dict)

    def find_horizons(self, now: RetentionTime) -> Mapping[str, Horizon]:
        """By table, and ``nodes``, which arrivals go; without tables whose rows are kept."""
        names = (*(table.name for table in SENT), NODES.name)
        ages = {name: self.by_table.get(name, self.max_age_ns) for name in names}
        longest = [*ages.values(), self.by_table.get(USAGE.name, 0)]
        known = [age_ns for age_ns in longest if age_ns is not None]
        ages[USAGE.name] = max(known) if len(known) == len(longest) else None
        return {
            name: Horizon(now.known - age, now.stepped, now.wall - age)
            for name, age_ns in ages.items()
            if age_ns is not None
            for age in (timedelta(microseconds=age_ns // NS_PER_US),)
        }


def trim(
    connection: duckdb.DuckDBPyConnection,
    retention: Retention,
    now: RetentionTime,
    wal_bytes: int,
) -> tuple[int, int]:
    """Delete what retention no longer keeps, then give the blocks back.

    The file does not shrink; freed blocks are used again.

    Args:
        connection: The writer's.
        retention: What to keep.
        now: What retention goes by.
        wal_bytes: Size of the write-ahead log, whose rows are in no block yet.

    Returns:
        Rows deleted for their age, and for the size.
    """
    n_sized = 0
    n_aged = _delete_until(connection, retention.find_horizons(now))
    limit = retention.max_bytes
    if limit is not None and used_bytes(connection) + wal_bytes > limit:
        checkpoint(connection)
        n_sized = _trim_to_size(connection, limit)
    if n_aged or n_sized:
        checkpoint(connection)
    return n_aged, n_sized


def _trim_to_size(connection: duckdb.DuckDBPyConnection, max_bytes: int) -> int:
    """Delete the oldest arrivals until the live rows' share of the blocks fits.

    Deleted rows stay in their row group (122 880 rows) until it is rewritten, so blocks in use alone would ask for
    more deletions than needed.
    """
    n_live, n_stored = _count_rows(connection)
    live_bytes = used_bytes(connection) * n_live // max(n_stored, 1)
    if live_bytes <= max_bytes:
        return 0
    arrivals = " UNION ALL ".join(
        f"SELECT ingested_at, count(*) AS n FROM {table.name} GROUP BY ingested_at"  # noqa: S608 - our names
        for table in APPENDED
    )
    sql = (
        "SELECT min(ingested_at) FROM ("  # noqa: S608 - our names
        "SELECT ingested_at, sum(sum(n)) OVER (ORDER BY ingested_at) AS upto "
        f"FROM ({arrivals}) GROUP BY ingested_at) WHERE upto >= ?"
    )
    with translate_errors("find the oldest rows"):
        share = math.ceil(n_live * (1 - _SIZE_TARGET * max_bytes / live_bytes))
        (oldest,) = fetch_row(connection, sql, [share])
    if oldest is None:
        return 0
    upto = Horizon.at(oldest + timedelta(microseconds=1))
    return _delete_until(connection, {table.name: upto for table in (*APPENDED, NODES)})


def _count_rows(connection: duckdb.DuckDBPyConnection) -> tuple[int, int]:
    n_live = n_stored = 0
    for table in APPENDED:
        with translate_errors("count rows"):
            row = fetch_row(
                connection,
                f"SELECT (SELECT count(*) FROM {table.name}), coalesce(sum(count), 0) "  # noqa: S608 - our names
                f"FROM pragma_storage_info('{table.name}') WHERE column_id = 0 AND segment_type = 'TIMESTAMP'",
            )
        n_live += int(row[0])
        n_stored += int(row[1])
    return n_live, n_stored


def _delete_until(connection: duckdb.DuckDBPyConnection, horizons: Mapping[str, Horizon]) -> int:
    """Rows of the tables that only grow; a node's row is a summary, and is not counted."""
    n_deleted = 0
    for name, horizon in horizons.items():
        with translate_errors(f"delete old rows of {name}"):
            sql = f"DELETE FROM {name} WHERE {horizon.CONDITION}"  # noqa: S608 - our names
            n_rows = int(fetch_row(connection, sql, horizon.params)[0])
        n_deleted += n_rows if name != NODES.name else 0
    return n_deleted
