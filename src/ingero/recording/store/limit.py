"""Keeping a recording to its size: how large the log and one transaction may be, and which rows go first."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Final

from ingero.recording.store.rows import BUCKET_NS
from ingero.recording.store.schema import BUCKETED_TABLES, TIMED_TABLES

_MAX_LOG_BYTES: Final = 4 << 20
_MIN_LOG_BYTES: Final = 64 << 10
_ROW_BYTES: Final = 512
"""What a row may add to the log: its share of the pages of the table and of both indexes, with room to spare."""
_MAX_ROUNDS: Final = 20
_VACUUMED_PAGES: Final = 64


@dataclass(frozen=True, slots=True)
class SizeLimits:
    """How a size that the user gave is divided.

    Attributes:
        database_bytes: Above this the oldest rows go; 0 for no limit.
        log_bytes: The log is folded into the file above this. It may be twice as long for a moment, and longer while
            somebody reads an old state.
        chunk_rows: Rows of one transaction.
    """

    database_bytes: int
    log_bytes: int
    chunk_rows: int

    @classmethod
    def divide(cls, max_bytes: int, rollover_bytes: int) -> SizeLimits:
        """Limits for a cap or a rollover size; 0 is none."""
        given = max_bytes or rollover_bytes
        log = min(max(given // 8, _MIN_LOG_BYTES), _MAX_LOG_BYTES) if given else _MAX_LOG_BYTES
        database = max(max_bytes - 2 * log, max_bytes // 2) if max_bytes else 0
        return cls(database, log, log // _ROW_BYTES)


def shrink(connection: sqlite3.Connection, limits: SizeLimits) -> int:
    """Delete the oldest rows while a recording is over its limit; returns how many events went.

    Raises:
        sqlite3.Error: The disk did not take a change.
    """
    n_pruned = 0
    for _ in range(_MAX_ROUNDS):
        n_pages, n_free, page_bytes = (
            int(connection.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
        if (n_pages - n_free) * page_bytes <= limits.database_bytes:
            if n_free and n_pages * page_bytes > limits.database_bytes:
                # yields a row for each page that it frees, and goes on only while they are fetched
                connection.execute(f"PRAGMA incremental_vacuum({_VACUUMED_PAGES})").fetchall()
            break
        with connection:
            until_ns = _find_cutoff(connection, limits.chunk_rows)
            if until_ns is None:
                break
            n_pruned += _delete_until(connection, until_ns)
    return n_pruned


def _find_cutoff(connection: sqlite3.Connection, n_rows: int) -> int | None:
    """The time up to which the oldest `n_rows` of events or of annotations reach, or a minute of counts."""
    found = []
    for table in ("events", "annotations"):
        row = connection.execute(
            f"SELECT max(timestamp) FROM (SELECT timestamp FROM {table} ORDER BY timestamp LIMIT ?)",  # noqa: S608
            (n_rows,),
        ).fetchone()
        if row[0] is not None:
            found.append(int(row[0]))
    if found:
        return min(found)
    first, last = connection.execute("SELECT min(bucket), max(bucket) FROM coverage").fetchone()
    return None if first is None or first == last else int(first) + BUCKET_NS


def _delete_until(connection: sqlite3.Connection, until_ns: int) -> int:
    """Delete rows up to a time and counts of whole minutes before it; the minute that is cut keeps its counts."""
    minute_ns = until_ns // BUCKET_NS * BUCKET_NS
    gone = connection.execute(
        "SELECT count(*), source, op, pid, node FROM events WHERE timestamp BETWEEN ? AND ? "
        "GROUP BY source, op, pid, node",
        (minute_ns, until_ns),
    ).fetchall()
    connection.executemany(
        "UPDATE event_aggregates SET stored = max(stored - ?, 0) "
        "WHERE source = ? AND op = ? AND pid = ? AND node = ? AND bucket = ?",
        [(*row, minute_ns) for row in gone],
    )
    connection.executemany(
        "UPDATE coverage SET stored = stored - ?1, sampled_out = sampled_out + ?1 "
        "WHERE source = ?2 AND node = ?5 AND bucket = ?6",
        [(*row, minute_ns) for row in gone],
    )
    n_events = 0
    for table, column in TIMED_TABLES:
        cursor = connection.execute(f"DELETE FROM {table} WHERE {column} <= ?", (until_ns,))  # noqa: S608
        n_events += cursor.rowcount if table == "events" else 0
    for table in BUCKETED_TABLES:
        connection.execute(f"DELETE FROM {table} WHERE bucket < ?", (minute_ns,))  # noqa: S608
    return n_events
