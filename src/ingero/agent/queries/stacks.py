"""``get_stacks``: which code paths make an operation, and how long it takes from each."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec

from ingero.agent.queries.pages import PageArgs, cut_page
from ingero.agent.queries.source import RecordingFile
from ingero.agent.queries.window import find_span
from ingero.agent.store.files import open_recording, store_errors, table_columns
from ingero.errors import BadDataError
from ingero.model.events import find_op, op_name
from ingero.model.untrusted import FRAME_CHARS, clean
from ingero.serving.query import Query
from ingero.units import parse_duration


class StacksArgs(PageArgs, frozen=True, forbid_unknown_fields=True):
    """Which operation's stacks."""

    op: Annotated[str, msgspec.Meta(description="such as cudaMalloc; empty for all")] = ""


class Stack(msgspec.Struct, frozen=True):
    """One code path, leaf first."""

    hash: str
    op: str
    n: int
    avg_us: float
    min_us: float
    max_us: float
    frames: list[str]


class StacksAnswer(msgspec.Struct, frozen=True):
    """Code paths, most used first."""

    stacks: list[Stack]
    note: str
    next_cursor: str


def _stacks(context: RecordingFile, args: StacksArgs) -> StacksAnswer:
    rows = _grouped(context, args)
    page, after = cut_page(rows, args.limit, args.cursor)
    with open_recording(context.path) as connection, store_errors(context.path):
        known = bool(table_columns(connection, "stack_traces"))
        frames = {
            row[0]: _frames(connection.execute(
                "SELECT frames, ips FROM stack_traces WHERE hash = ?", (row[0],)
            ).fetchone()) if known else []
            for row in page
        }  # fmt: skip
    stacks = [
        Stack(
            f"{stack & 0xFFFF_FFFF_FFFF_FFFF:016x}", op_name(source, op), n, round(mean / 1e3, 1),
            round(least / 1e3, 1), round(most / 1e3, 1), frames[stack],
        )
        for stack, source, op, n, mean, least, most in page
    ]  # fmt: skip
    note = "" if rows else "the recording holds no stacks for this"
    return StacksAnswer(
        stacks, note or "counts are of stored rows; a stack's rows may be a sample", after
    )


def _grouped(context: RecordingFile, args: StacksArgs) -> list[tuple[Any, ...]]:
    """(hash, source, op, rows, mean, least, most) by rows; sums are floats, so nothing overflows."""
    terms, parameters = ["stack_hash <> 0"], list[int]()
    if args.op:
        wanted = find_op(args.op)
        if wanted is None:
            raise BadDataError(f"no operation is called {clean(args.op)!r}")
        terms.append("source = ? AND op = ?")
        parameters += wanted
    if args.pids:
        terms.append(f"pid IN ({', '.join('?' * len(args.pids))})")
        parameters += args.pids
    if args.since:
        try:
            since_ns = parse_duration(args.since)
        except ValueError as error:
            raise BadDataError(f"since: {error}") from error
        terms.append("timestamp >= ?")
        parameters.append(find_span(context.path)[1] - since_ns)
    where = " AND ".join(terms)
    with open_recording(context.path) as connection, store_errors(context.path):
        if "stack_hash" not in table_columns(connection, "events"):
            return []
        return connection.execute(
            "SELECT stack_hash, source, op, count(*), avg(duration), min(duration), max(duration) "  # noqa: S608
            f"FROM events WHERE {where} GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1, 2, 3",
            parameters,
        ).fetchall()


def _frames(row: tuple[str, str] | None) -> list[str]:
    """Frames as text, leaf first: Python function and line where known, else symbol, else address."""
    if row is None:
        return []
    try:
        frames: Any = json.loads(row[0] or row[1] or "[]")
    except ValueError:
        return []
    if not isinstance(frames, list):
        return []
    return [clean(_frame_text(frame), FRAME_CHARS) for frame in frames]


def _frame_text(frame: object) -> str:
    if not isinstance(frame, dict):
        return str(frame)
    if frame.get("pf"):
        return f"{frame.get('pfn', '?')} ({frame['pf']}:{frame.get('pl', '?')})"
    where = f" ({frame['f']})" if frame.get("f") else ""
    return f"{frame.get('s') or frame.get('i') or '?'}{where}"


STACKS = Query(
    name="get_stacks",
    title="Code paths",
    says="Stacks of an operation, most used first, with mean, least and most time, leaf first.",
    args=StacksArgs,
    result=StacksAnswer,
    run=_stacks,
)
