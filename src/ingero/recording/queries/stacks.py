"""``get_stacks``: which code paths make an operation, and how long it takes from each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from ingero.errors import BadDataError
from ingero.model.events import find_op, find_source, op_name
from ingero.model.untrusted import FRAME_CHARS, clean
from ingero.recording.queries.paging import PageArgs, cut_page
from ingero.recording.queries.recording_file import RecordingFile
from ingero.recording.queries.window import check_pids, find_span
from ingero.recording.store.files import open_recording, store_errors, table_columns
from ingero.recording.store.rows import BUCKET_NS
from ingero.serving.query import Query
from ingero.units import parse_duration


class StacksArgs(PageArgs, frozen=True, forbid_unknown_fields=True):
    """Which operation's stacks."""

    op: Annotated[str, msgspec.Meta(description="such as cudaMalloc; empty for all")] = ""
    source: Annotated[str, msgspec.Meta(description="such as cuda or nccl; empty for all")] = ""
    pid: Annotated[int, msgspec.Meta(ge=0, description="one process; the same as pids")] = 0


class StackAnswer(msgspec.Struct, frozen=True):
    """One code path, leaf first."""

    hash: str
    op: str
    n: int
    avg_us: float
    min_us: float
    max_us: float
    frames: list[str]


class FoldedStack(msgspec.Struct, frozen=True):
    """One code path of one operation, root first: what a flame graph is drawn from.

    Attributes:
        frames: From the outermost function to the innermost, then the operation.
        n_rows: Stored rows.
        n_calls: Calls that these rows stand for.
        total_ns: Time inside these calls.
    """

    frames: tuple[str, ...]
    n_rows: int
    n_calls: int
    total_ns: int


class FoldedStacks(msgspec.Struct, frozen=True):
    """Code paths, the one with the most time first.

    Attributes:
        stacks: The paths.
        call_share: Part of the calls of these operations that has a stack; None where nobody counted those of one.
    """

    stacks: list[FoldedStack]
    call_share: float | None


class StackShare(msgspec.Struct, frozen=True):
    """How many of an operation's calls have a stack; calls are counted by the minute, so a window may cut the first."""

    op: str
    calls_with_stack: Annotated[int, msgspec.Meta(description="sampled rows weighted")]
    calls: Annotated[int | None, msgspec.Meta(description="null: nobody counted them")]


class StacksAnswer(msgspec.Struct, frozen=True):
    """Code paths, most used first."""

    stacks: list[StackAnswer]
    shares: list[StackShare]
    note: str
    next_cursor: str


_ALL_OF_THEM: Final = (
    "every number is of the calls that have a stack; shares says how many of all calls these are"
)


def _stacks(context: RecordingFile, args: StacksArgs) -> StacksAnswer:
    rows = _grouped(context, args)
    page, after = cut_page(rows, args.limit, args.cursor)
    frames = _read_frames(context, {row[0] for row in page})
    stacks = [
        StackAnswer(
            f"{stack & 0xFFFF_FFFF_FFFF_FFFF:016x}", op_name(source, op), n, round(mean / 1e3, 1),
            round(least / 1e3, 1), round(most / 1e3, 1), frames[stack],
        )
        for stack, source, op, n, mean, least, most, *_ in page
    ]  # fmt: skip
    note = _ALL_OF_THEM if rows else "the recording holds no stacks for this"
    return StacksAnswer(stacks, _shares(context, args, rows), note, after)


def _shares(
    context: RecordingFile, args: StacksArgs, rows: Sequence[tuple[Any, ...]]
) -> list[StackShare]:
    with_stack: dict[tuple[int, int], int] = {}
    for _, source, op, *_, n_calls, _ in rows:
        with_stack[source, op] = with_stack.get((source, op), 0) + int(n_calls)
    counted = _count_calls(context, args)
    return [
        StackShare(op_name(*key), n, max(counted[key], n) if key in counted else None)
        for key, n in sorted(with_stack.items(), key=lambda item: -item[1])
    ]


def read_folded_stacks(context: RecordingFile, args: StacksArgs) -> FoldedStacks:
    """Every code path, the one with the most time first; of ``args`` only ``op``, ``pids`` and ``since`` count.

    Stacks that read alike are one, whatever their ids: the ranks of a job then lie on top of each other.

    Raises:
        BadDataError: The operation or the duration is not one.
        StoreError: The recording cannot be read.
    """
    rows = _grouped(context, args)
    frames = _read_frames(context, {row[0] for row in rows})
    sums: dict[tuple[str, ...], list[int]] = {}
    for stack, source, op, n, mean, _, _, n_calls, weighted_ns in rows:
        path = (*reversed(frames[stack] or ["[unknown]"]), op_name(source, op))
        into = sums.setdefault(path, [0, 0, 0])
        for i, value in enumerate((n, n_calls, weighted_ns or mean * n)):
            into[i] += int(value)
    folded = [FoldedStack(path, *numbers) for path, numbers in sums.items()]
    folded.sort(key=lambda stack: (-stack.total_ns, stack.frames))
    return FoldedStacks(folded, _share_of_calls(_shares(context, args, rows)))


def _share_of_calls(shares: Sequence[StackShare]) -> float | None:
    calls = [one.calls for one in shares if one.calls is not None]
    if len(calls) < len(shares):
        return None
    return sum(one.calls_with_stack for one in shares) / max(sum(calls), 1)


def _read_frames(context: RecordingFile, hashes: set[int]) -> dict[int, list[str]]:
    """Frames of each stack, leaf first; none where the recording does not have them."""
    with open_recording(context.path) as connection, store_errors(context.path):
        if not table_columns(connection, "stack_traces"):
            return {key: [] for key in hashes}
        return {
            key: _frames(
                connection.execute(
                    "SELECT CAST(frames AS TEXT), CAST(ips AS TEXT) FROM stack_traces WHERE hash = ?",
                    (key,),
                ).fetchone()
            )
            for key in hashes
        }


def _grouped(context: RecordingFile, args: StacksArgs) -> list[tuple[Any, ...]]:
    """(hash, source, op, rows, mean, least, most, calls, weighted time), most rows first; no sum overflows."""
    where, parameters = _condition(context, args, "timestamp")
    where = f"stack_hash <> 0 AND {where}"
    with open_recording(context.path) as connection, store_errors(context.path):
        columns = table_columns(connection, "events")
        if "stack_hash" not in columns:
            return []
        weight = "weight" if "weight" in columns else "1"
        for name in ("stack_hash", "source", "op", "duration"):
            where += f" AND typeof({name}) = 'integer'"
        return connection.execute(
            "SELECT stack_hash, source, op, count(*), avg(duration), min(duration), max(duration), "  # noqa: S608
            f"total({weight}), total(duration * 1.0 * {weight}) "
            f"FROM events WHERE {where} GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1, 2, 3",
            parameters,
        ).fetchall()


def _count_calls(context: RecordingFile, args: StacksArgs) -> dict[tuple[int, int], int]:
    """Calls of each operation, with and without a stack, in the minutes that the window touches."""
    where, parameters = _condition(context, args, f"bucket + {BUCKET_NS - 1}")
    with open_recording(context.path) as connection, store_errors(context.path):
        if not table_columns(connection, "event_aggregates"):
            return {}
        for name in ("source", "op", "count"):
            where += f" AND typeof({name}) = 'integer'"
        rows = connection.execute(
            f"SELECT source, op, total(count) FROM event_aggregates WHERE {where} GROUP BY 1, 2",  # noqa: S608
            parameters,
        ).fetchall()
    return {(source, op): int(n) for source, op, n in rows if n}


def _condition(context: RecordingFile, args: StacksArgs, time: str) -> tuple[str, list[int]]:
    """SQL that holds for rows of the operation, the processes and the window, and its parameters."""
    terms, parameters = ["1"], list[int]()
    if args.op:
        wanted = find_op(args.op)
        if wanted is None:
            raise BadDataError(f"no operation is called {clean(args.op)!r}")
        terms.append("source = ? AND op = ?")
        parameters += wanted
    if args.source:
        source = find_source(args.source)
        if source is None:
            raise BadDataError(f"no source is called {clean(args.source)!r}")
        terms.append("source = ?")
        parameters.append(source)
    if pids := [*args.pids, *([args.pid] if args.pid else [])]:
        check_pids(pids)
        terms.append(f"pid IN ({', '.join('?' * len(pids))})")
        parameters += pids
    if args.since:
        try:
            since_ns = parse_duration(args.since)
        except ValueError as error:
            raise BadDataError(f"since: {error}") from error
        terms.append(f"{time} >= ?")
        first_ns, last_ns = find_span(context.path)
        parameters.append(max(last_ns - since_ns, first_ns))
    return " AND ".join(terms), parameters


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
    description="Stacks of an operation, most used first, with mean, least and most time, leaf first.",
    args=StacksArgs,
    result=StacksAnswer,
    run=_stacks,
)
