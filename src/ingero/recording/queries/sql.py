"""``run_sql``: any SELECT over the recording."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final

import msgspec

from ingero.recording.queries.paging import Tsc
from ingero.recording.queries.recording_file import RecordingFile
from ingero.recording.store.sql import MAX_ROWS, SqlLimits, SqlRows, run_sql
from ingero.serving.query import Query
from ingero.units import NS_PER_S

MAX_ANSWER_BYTES: Final = 1024 * 1024
"""Of the values of one answer to another program, as text."""


class SqlArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One statement."""

    query: Annotated[
        str, msgspec.Meta(description="one SELECT; tables: events, event_aggregates, …")
    ]
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS)] = 1000
    tsc: Tsc = True


class SqlMeta(msgspec.Struct, frozen=True):
    """How much came back."""

    rows: int
    truncated: bool
    duration_ms: float


class SqlResult(msgspec.Struct, frozen=True):
    """Rows as lists, in the order of `columns`."""

    meta: SqlMeta
    columns: list[str]
    data: list[list[Any]]


def plain_value(value: float | str | bytes | None) -> int | float | str | None:
    """A value as text has it: bytes become hex."""
    return value.hex() if isinstance(value, bytes) else value


def plain_rows(answer: SqlRows) -> list[list[Any]]:
    """Rows as JSON has them: bytes become hex, and an infinite number null."""
    return [
        [
            None if isinstance(value, float) and not math.isfinite(value) else plain_value(value)
            for value in row
        ]
        for row in answer.rows
    ]


def _run(context: RecordingFile, args: SqlArgs) -> SqlResult:
    limits = SqlLimits(args.limit, 30 * NS_PER_S, MAX_ANSWER_BYTES)
    answer = run_sql(context.path, args.query, limits, stop=context.stop)
    meta = SqlMeta(len(answer.rows), answer.is_truncated, round(answer.duration_ns / 1e6, 3))
    return SqlResult(meta, list(answer.columns), plain_rows(answer))


SQL = Query(
    name="run_sql",
    title="SQL over the recording",
    description=(
        "Run one SELECT, read-only, up to 30 s, 10000 rows and 1 MiB. events(timestamp ns, pid, tid, source, op, "
        "duration ns, arg0, arg1, ret_code, stack_hash, node, cgroup_id, …); sources and ops name the codes; "
        "event_aggregates holds exact counts per minute; process_names names pids. Rows may be a sample: coverage "
        "and event_aggregates say of how many."
    ),
    args=SqlArgs,
    result=SqlResult,
    run=_run,
)
