"""Columnar collective batches: one OTLP log record per communicator, rank and push.

The body is a block of packed columns of `ingero.model.collectives.COLLECTIVE_OP`; the attributes say whose they are.
``docs/specs/collective-batch.md`` is the specification, and the numbers in brackets here are its requirements.

Everything is vectorised per record. A body is refused before anything is allocated for it: its length must be what
its header says, and the header's count is capped, so a hostile record costs its own bytes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ingero.errors import BadDataError
from ingero.model.arrays import Records
from ingero.model.collectives import (
    COLLECTIVE_OP,
    FULL_LIMIT,
    MAX_SEQ,
    UNKNOWN_NS,
    ClockKind,
    CollectiveOp,
    CollectiveRun,
    Rank,
)
from ingero.otlp.codec import Export, LogEntry, build_attributes, read_log_entries, structs
from ingero.otlp.names import Signal
from ingero.wire.log_records import read_sender
from ingero.wire.names import COLLECTIVE_EVENT, Attribute, Scope
from ingero.wire.process_resource import ProcessResource, read_process_resource
from ingero.wire.push import UNKNOWN_RANK

MAGIC: Final = b"IGCB"
VERSION: Final = 1
MAX_OPS: Final = 65_536
"""Operations in one record [5]; longer runs are cut."""
MAX_EXPORT_OPS: Final = 1_048_576
"""Operations in one export [14]; records beyond are refused."""
MAX_RANKS: Final = 1 << 24
MAX_DURATION_NS: Final = 1 << 50
"""13 days. Longer durations are refused, so that sums over a record cannot overflow [11]."""

MAX_LATE_NS: Final = 1 << 62

_HEADER: Final = struct.Struct("<4sBBHI")  # magic, version, columns, reserved, operations
_COLUMN: Final = struct.Struct("<BBQQ")  # mode, width, first, base
_COLUMNS: Final = ("seq", "entry_ns", "inside_ns", "own_ns", "n_bytes", "op")
_DATA_AT: Final = _HEADER.size + _COLUMN.size * len(_COLUMNS)
_PLAIN: Final = 0
_DELTA: Final = 1
_WIDTHS: Final = {0: None, 1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}
_MIN_OP_WIDTH: Final = 1
_MAX_OP: Final = max(CollectiveOp)
_WRAP: Final = 1 << 64
_COMM: Final = re.compile(r"[0-9a-f]{16}")
_MAX_LABELS: Final = 32
_MAX_LABEL_CHARS: Final = 256

_Column = npt.NDArray[np.uint64]


@dataclass(slots=True)
class CollectiveRead:
    """What a logs export held; reads one record after the other.

    Attributes:
        runs: Every batch that could be read, in order.
        n_refused: Batches that could not; count them.
        first_problem: Why the first of them could not; empty when none was refused.
        n_ops: Operations of all runs.
        late_ns: By run, how long its agent kept it because Fleet was away; 0 for what is of now.
        pushed_ns: By run, when its agent pushed it, by that agent's wall clock; 0 where it does not say.
    """

    runs: list[CollectiveRun] = field(default_factory=list)
    n_refused: int = 0
    first_problem: str = ""
    n_ops: int = 0
    late_ns: list[int] = field(default_factory=list)
    pushed_ns: list[int] = field(default_factory=list)

    def add(self, entry: LogEntry) -> None:
        """Read one record; one that cannot be read costs only itself."""
        attributes = entry.attributes
        try:
            late_ns = _get_int(attributes, Attribute.COLLECTIVE_LATE_NS, 0, MAX_LATE_NS, 0)
            run = _read_record(entry, attributes, MAX_EXPORT_OPS - self.n_ops)
        except BadDataError as error:
            self.n_refused += 1
            self.first_problem = self.first_problem or error.message
        else:
            self.n_ops += len(run.ops)
            self.runs.append(run)
            self.late_ns.append(late_ns)
            self.pushed_ns.append(entry.time_unix_nano)


def pack_ops(ops: Records) -> bytes:
    """Pack rows of COLLECTIVE_OP, shape (n,) with n ≤ `MAX_OPS`, into a record's body.

    Raises:
        ValueError: Too many rows; cut the run first.
    """
    n_ops = len(ops)
    if n_ops > MAX_OPS:
        raise ValueError(f"{n_ops} operations in one record; {MAX_OPS} is the limit")
    headers, data = [], []
    for name in _COLUMNS:
        header, packed = _pack_column(ops[name], _MIN_OP_WIDTH if name == "op" else 0)
        headers.append(header)
        data.append(packed)
    return b"".join([_HEADER.pack(MAGIC, VERSION, len(_COLUMNS), 0, n_ops), *headers, *data])


def _pack_column(values: npt.NDArray[Any], min_width: int) -> tuple[bytes, bytes]:
    """The column's header and data, in the narrower of the two modes."""
    if not len(values):
        return _COLUMN.pack(_PLAIN, min_width, 0, 0), b""
    plain_base = int(values.min())
    bits = (
        values.astype(np.int64).view(np.uint64)
        if values.dtype.kind == "i"
        else values.astype(np.uint64)
    )
    plain = bits - np.uint64(plain_base % _WRAP)
    steps = np.diff(bits).view(np.int64)
    step_base = int(steps.min()) if len(steps) else 0
    deltas = np.zeros(len(values), np.uint64)
    deltas[1:] = steps.view(np.uint64) - np.uint64(step_base % _WRAP)
    plain_width = max(_width(plain), min_width)
    delta_width = max(_width(deltas), min_width)
    if delta_width < plain_width:
        first = (int(bits[0]) - step_base) % _WRAP
        header = _COLUMN.pack(_DELTA, delta_width, first, step_base % _WRAP)
        return header, _narrow(deltas, delta_width)
    header = _COLUMN.pack(_PLAIN, plain_width, 0, plain_base % _WRAP)
    return header, _narrow(plain, plain_width)


def _width(offsets: _Column) -> int:
    top = int(offsets.max())
    return next(width for width in _WIDTHS if top < 1 << 8 * width)


def _narrow(offsets: _Column, width: int) -> bytes:
    kind = _WIDTHS[width]
    return b"" if kind is None else offsets.astype(kind).tobytes()


def unpack_ops(body: bytes, max_ops: int = MAX_OPS, limit_use: int = 0) -> Records:
    """Unpack a record's body into rows of COLLECTIVE_OP, shape (n,), read-only, each with that use of the CPU limit.

    Operations of a kind this version does not know become ``UNKNOWN`` [12].

    Raises:
        BadDataError: It breaks a requirement of the specification.
    """
    n_ops = _read_header(body, min(max_ops, MAX_OPS))
    columns = [
        _COLUMN.unpack_from(body, _HEADER.size + _COLUMN.size * i) for i in range(len(_COLUMNS))
    ]
    _check_length(body, n_ops, columns)
    ops = np.zeros(n_ops, COLLECTIVE_OP)
    ops["limit_use"] = limit_use
    at = _DATA_AT
    for name, (mode, width, first, base) in zip(_COLUMNS, columns, strict=True):
        values = _unpack_column(body, at, n_ops, (mode, width, first, base))
        at += width * n_ops
        ops[name] = _checked(name, values)
    ops.flags.writeable = False
    return ops


def _read_header(body: bytes, max_ops: int) -> int:
    if len(body) < _DATA_AT:
        raise BadDataError(f"a collective batch of {len(body)} bytes; {_DATA_AT} is the least")
    magic, version, n_columns, reserved, n_ops = _HEADER.unpack_from(body)
    if magic != MAGIC:
        raise BadDataError("a collective batch without its magic bytes")
    if version != VERSION:
        raise BadDataError(f"a collective batch of version {version}; this is version {VERSION}")
    if n_columns != len(_COLUMNS) or reserved:
        raise BadDataError(f"a collective batch with {n_columns} columns and reserved {reserved}")
    if n_ops > max_ops:
        raise BadDataError(
            f"{n_ops} operations; {MAX_OPS} in a record and {MAX_EXPORT_OPS} in an export are the limits"
        )
    return int(n_ops)


def _check_length(body: bytes, n_ops: int, columns: Sequence[tuple[int, int, int, int]]) -> None:
    for name, (mode, width, first, _) in zip(_COLUMNS, columns, strict=True):
        if mode not in {_PLAIN, _DELTA} or width not in _WIDTHS or (mode == _PLAIN and first):
            raise BadDataError(f"column {name} has mode {mode}, width {width}, first {first}")
    if columns[-1][1] < _MIN_OP_WIDTH:
        raise BadDataError("the op column has width 0")
    expected = _DATA_AT + n_ops * sum(width for _, width, _, _ in columns)
    if len(body) != expected:
        raise BadDataError(f"a collective batch of {len(body)} bytes says it has {expected}")


def _unpack_column(body: bytes, at: int, n_ops: int, column: tuple[int, int, int, int]) -> _Column:
    mode, width, first, base = column
    kind = _WIDTHS[width]
    offsets = (
        np.zeros(n_ops, np.uint64)
        if kind is None
        else np.frombuffer(body, kind, n_ops, at).astype(np.uint64)
    )
    offsets += np.uint64(base)
    if mode == _DELTA:
        np.cumsum(offsets, out=offsets)
        offsets += np.uint64(first)
    return offsets


def _checked(name: str, values: _Column) -> npt.NDArray[Any]:
    if name == "seq":
        if len(values) and int(values.max()) > MAX_SEQ:
            raise BadDataError(f"column {name} holds {int(values.max())}; at most {MAX_SEQ}")
        return values
    if name == "op":
        return np.where(values > _MAX_OP, CollectiveOp.UNKNOWN, values)
    signed = values.view(np.int64)
    least = 0 if name == "entry_ns" else UNKNOWN_NS
    if len(signed) and int(signed.min()) < least:
        raise BadDataError(f"column {name} holds {int(signed.min())}")
    if name in {"inside_ns", "own_ns"} and len(signed) and int(signed.max()) > MAX_DURATION_NS:
        raise BadDataError(f"column {name} holds {int(signed.max())} ns")
    return signed


def build_collectives(
    runs: Iterable[CollectiveRun],
    wall_ns: int,
    resource: Mapping[str, Any] | None = None,
    *,
    late_ns: int = 0,
) -> Export:
    """One logs export of any number of runs: a resource per node and place of a process, a record per run.

    Args:
        runs: Of any nodes; those longer than `MAX_OPS` become several records.
        wall_ns: When this is pushed, for the records' observed time.
        resource: Further attributes of every resource.
        late_ns: How long the sender kept them because nobody took them.
    """
    records = (
        (run.rank, record) for run in runs for record in _build_records(run, wall_ns, late_ns)
    )
    return build_rank_logs(records, str(VERSION), resource)


def build_rank_logs(
    records: Iterable[tuple[Rank, structs.LogRecord]],
    version: str,
    resource: Mapping[str, Any] | None = None,
) -> Export:
    """What ranks of any nodes report, as one logs export: a resource per node and place of a process.

    Args:
        records: Each with the rank that it is about.
        version: Of the scope.
        resource: Further attributes of every resource.
    """
    by_place: dict[tuple[str, str, ProcessResource], list[structs.LogRecord]] = {}
    for rank, record in records:
        place = (rank.cluster_id, rank.node_id, rank.resource)
        by_place.setdefault(place, []).append(record)
    scope = structs.InstrumentationScope(str(Scope.COLLECTIVES), version)
    entries = [
        structs.ResourceLogs(
            structs.Resource(
                build_attributes({
                    **(resource or {}),
                    Attribute.NODE_ID: node_id,
                    Attribute.CLUSTER_ID: cluster_id,
                    **dict(process),
                })
            ),
            [structs.ScopeLogs(scope, logs)],
        )
        for (cluster_id, node_id, process), logs in by_place.items()
    ]
    return Export.from_tree(Signal.LOGS, structs.LogsRequest(entries))


def _build_records(run: CollectiveRun, wall_ns: int, late_ns: int) -> Iterator[structs.LogRecord]:
    attributes: dict[str, Any] = {
        Attribute.COLLECTIVE_COMM: run.comm,
        Attribute.COLLECTIVE_COMM_RANK: run.comm_rank,
        Attribute.COLLECTIVE_N_RANKS: run.n_ranks,
        Attribute.COLLECTIVE_CLOCK: run.clock.name.lower(),
    }
    if run.rank.rank != UNKNOWN_RANK:
        attributes[Attribute.RANK] = run.rank.rank
    if run.rank.n_gpus != 1:
        attributes[Attribute.RANK_GPUS] = run.rank.n_gpus
    if run.rank.job:
        attributes[Attribute.RANK_JOB] = run.rank.job
    if late_ns:
        attributes[Attribute.COLLECTIVE_LATE_NS] = min(late_ns, MAX_LATE_NS)
    if run.rank.labels:
        attributes[Attribute.RANK_LABELS] = dict(run.rank.labels)
    for start in range(0, len(run.ops), MAX_OPS):
        ops = run.ops[start : start + MAX_OPS]
        yield structs.LogRecord(
            observed_time_unix_nano=wall_ns,
            event_name=COLLECTIVE_EVENT,
            body=structs.AnyValue(bytes_value=pack_ops(ops)),
            attributes=build_attributes({
                **attributes,
                **_build_limit_use(ops),
                Attribute.COLLECTIVE_COUNT: len(ops),
            }),
        )


def _build_limit_use(ops: Records) -> dict[str, float]:
    """The mean use of the CPU limit while these were entered; nothing where there is no limit."""
    limit_use = round(float(ops["limit_use"].mean())) if ops.size else 0
    return {Attribute.RANK_LIMIT_USE: limit_use / FULL_LIMIT} if limit_use else {}


def read_collectives(export: Export) -> CollectiveRead:
    """Every collective batch of a logs export; other log records are passed over."""
    read = CollectiveRead()
    read_log_entries(export, {COLLECTIVE_EVENT: read})
    return read


def _read_record(
    entry: LogEntry, attributes: Mapping[str, structs.Value], room: int
) -> CollectiveRun:
    raw = entry.record.body
    body = raw.bytes_value if raw is not None else None
    if not body:
        raise BadDataError("a collective batch without a body")
    comm = attributes.get(Attribute.COLLECTIVE_COMM)
    if not isinstance(comm, str) or _COMM.fullmatch(comm) is None:
        raise BadDataError(f"{Attribute.COLLECTIVE_COMM} is {comm!r:.60}; 16 hexadecimal digits")
    n_ranks = _get_int(attributes, Attribute.COLLECTIVE_N_RANKS, 1, MAX_RANKS)
    clock = attributes.get(Attribute.COLLECTIVE_CLOCK)
    if not isinstance(clock, str) or clock not in _CLOCKS:
        raise BadDataError(
            f"{Attribute.COLLECTIVE_CLOCK} is {clock!r:.60}; one of {', '.join(_CLOCKS)}"
        )
    return CollectiveRun(
        rank=_read_rank(attributes, entry.resource),
        comm=comm,
        comm_rank=_get_int(attributes, Attribute.COLLECTIVE_COMM_RANK, 0, n_ranks - 1),
        n_ranks=n_ranks,
        clock=_CLOCKS[clock],
        ops=unpack_ops(body, room, _read_limit_use(attributes)),
    )


_CLOCKS: Final = {clock.name.lower(): clock for clock in ClockKind}


def _read_rank(
    attributes: Mapping[str, structs.Value], resource: Mapping[str, structs.Value]
) -> Rank:
    cluster_id, node_id = read_sender(resource, "a collective batch")
    labels = attributes.get(Attribute.RANK_LABELS)
    return Rank(
        cluster_id=cluster_id,
        node_id=node_id,
        rank=_get_int(attributes, Attribute.RANK, UNKNOWN_RANK, MAX_RANKS, UNKNOWN_RANK),
        n_gpus=_get_int(attributes, Attribute.RANK_GPUS, 1, 1024, 1),
        labels=_read_labels(labels) if labels is not None else (),
        job=read_job(attributes),
        resource=read_process_resource(resource),
    )


def read_job(attributes: Mapping[str, structs.Value]) -> str:
    """The job that a record names; empty where it names none.

    Raises:
        BadDataError: It is no text.
    """
    job = attributes.get(Attribute.RANK_JOB, "")
    if not isinstance(job, str):
        raise BadDataError(f"{Attribute.RANK_JOB} is {job!r:.60}; a string")
    return job


def _read_limit_use(attributes: Mapping[str, structs.Value]) -> int:
    """In thousandths; more than the whole is the whole: a limit may be lowered while time is counted."""
    used = attributes.get(Attribute.RANK_LIMIT_USE, 0.0)
    if not isinstance(used, int | float) or isinstance(used, bool) or not used >= 0:
        raise BadDataError(f"{Attribute.RANK_LIMIT_USE} is {used!r:.60}; a number from 0 to 1")
    return round(min(used, 1.0) * FULL_LIMIT)


def _read_labels(labels: structs.Value) -> tuple[tuple[str, str], ...]:
    if not isinstance(labels, dict) or len(labels) > _MAX_LABELS:
        raise BadDataError(f"{Attribute.RANK_LABELS} is no map of at most {_MAX_LABELS} entries")
    pairs = tuple(sorted((key, str(value)) for key, value in labels.items()))
    if any(len(key) + len(value) > _MAX_LABEL_CHARS for key, value in pairs):
        raise BadDataError(
            f"{Attribute.RANK_LABELS} has an entry over {_MAX_LABEL_CHARS} characters"
        )
    return pairs


def _get_int(
    attributes: Mapping[str, structs.Value],
    key: Attribute,
    least: int,
    most: int,
    default: int | None = None,
) -> int:
    value = attributes.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BadDataError(f"{key} is {value!r:.60}; an integer from {least} to {most}")
    return value
