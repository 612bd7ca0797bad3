"""What tells records without a time from others of their series, so that a sender's retry of them is known.

A time of 0 is legal in OTLP and means that it is unknown. Beside a record that has one, the whole request stands in for
it: a retry is the same request, and another report has later times. Where nothing in a request has a time, a retry is
no different from the next report of values that have not changed: the arrival stands in for it, so both are kept.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ingero.echo.db.deduplication import stable_hash
from ingero.echo.db.rows import Rows, TableRows
from ingero.echo.schema.tables import EVENTS

_VALUE: Final = EVENTS.names.index("value_double")
_LARGEST: Final = 2**63 - 1


def date_rows(rows: Rows, now_ns: int) -> None:
    """Replace the times of 0 in a request.

    Args:
        rows: What one request wants written, nothing of it left out yet.
        now_ns: Its arrival.
    """
    tables = [table for table in rows.tables.values() if table.series]
    undated = [table for table in tables if 0 in table.time_ns]
    if not undated:
        return
    is_dated = any(any(table.time_ns) for table in tables)
    stand_in = _hash_request(rows) if is_dated else now_ns
    for table in undated:
        table.time_ns[:] = [time_ns or stand_in for time_ns in table.time_ns]


def _hash_request(rows: Rows) -> int:
    parts: list[bytes] = []
    for name, table in sorted(rows.tables.items()):
        parts += (name.encode(), *_hashed(table))
        if name == EVENTS.name:
            parts.append(np.array(table.columns[_VALUE], dtype=np.float64).tobytes())
    return (stable_hash(*parts) & _LARGEST) or 1


def _hashed(table: TableRows) -> tuple[bytes, ...]:
    return (
        np.array(table.series, dtype=np.uint64).tobytes(),
        np.array(table.time_ns, dtype=np.int64).tobytes(),
        np.array(table.content, dtype=np.uint64).tobytes(),
        np.array(table.uids, dtype=np.uint64).tobytes(),
    )
