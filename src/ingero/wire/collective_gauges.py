"""Collectives as older agents report them: one gauge entry per event, without sequence numbers.

What these records lack is not invented here. Order is the order of the push; ``seq`` counts from 0 within it, so the
consumer continues the count per (node, communicator, rank) and marks what it concludes as approximate. The duration
is the host's enqueue call, never device time.

Known faults of the sender that are mended here: times are nanoseconds since boot and so date from 1970; operations
are named ``ncclAllReduce`` by some and ``allreduce`` by others; ``nccl.collective.bytes`` holds the element count.
Known faults that remain visible: on x86-64 rank, size and communicator are often all zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ingero.model.collectives import (
    COLLECTIVE_OP,
    UNKNOWN_NS,
    ClockKind,
    CollectiveOp,
    CollectiveRun,
    Rank,
)
from ingero.otlp.codec import Export, structs
from ingero.otlp.codec.export import MetricEntry
from ingero.otlp.codec.values import message_attributes, tree_attributes
from ingero.units import NS_PER_MS
from ingero.wire.collectives import MAX_DURATION_NS, MAX_EXPORT_OPS, MAX_RANKS
from ingero.wire.names import Attribute, MetricName
from ingero.wire.push import UNKNOWN_RANK, ResourceCache, ResourceFacts, read_resource

UNKNOWN_COMM: Final = "0" * 16
"""Communicator hash of a sender that could not read the unique id."""

EARLIEST_WALL_NS: Final = 946_684_800_000_000_000
"""2000-01-01. A point dated before is on the sender's monotonic clock."""

_OPS: Final = {
    "allreduce": CollectiveOp.ALL_REDUCE,
    "allgather": CollectiveOp.ALL_GATHER,
    "reducescatter": CollectiveOp.REDUCE_SCATTER,
    "bcast": CollectiveOp.BROADCAST,
    "broadcast": CollectiveOp.BROADCAST,
    "reduce": CollectiveOp.REDUCE,
    "send": CollectiveOp.SEND,
    "recv": CollectiveOp.RECV,
    "barrier": CollectiveOp.BARRIER,
    "alltoall": CollectiveOp.ALL_TO_ALL,
}
_NOT_COLLECTIVE: Final = frozenset({"comminitall", "comminitrank", "commdestroy"})
_TYPE_BYTES: Final = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)
"""Size of an ncclDataType_t. Source: nccl.h 2.24 (int8 … float64, bfloat16, float8e4m3, float8e5m2)."""
_NAME: Final = re.compile(r"^(?:p?nccl)?", re.IGNORECASE)


def parse_op(name: str) -> CollectiveOp | None:
    """The operation behind ``ncclAllReduce``, ``allreduce`` or ``all_reduce``; None for what is no operation.

    A name that is not known is `CollectiveOp.UNKNOWN`.
    """
    plain = _NAME.sub("", name).lower().replace("_", "").replace("-", "")
    return None if plain in _NOT_COLLECTIVE else _OPS.get(plain, CollectiveOp.UNKNOWN)


@dataclass(frozen=True, slots=True)
class GaugeRead:
    """What a metrics export held.

    Attributes:
        runs: One per node, communicator and rank, in order of first appearance. ``seq`` is the place in this push,
            ``entry_ns`` wall time, ``inside_ns`` the enqueue call, ``own_ns`` unknown; the clock is ENQUEUE.
        n_refused: Points that could not be read or were beyond the cap; count them.
    """

    runs: list[CollectiveRun]
    n_refused: int = 0


_Key = tuple[int, str, str, int, int]  # time, operation, communicator, rank, peer


@dataclass(slots=True)
class _Events:
    """Events of one (communicator, rank, size) of one resource, in order."""

    entries_ns: list[int] = field(default_factory=list)
    insides_ns: list[int] = field(default_factory=list)
    ops: list[CollectiveOp] = field(default_factory=list)
    keys: list[_Key] = field(default_factory=list)


def read_collective_gauges(
    export: Export, received_wall_ns: int, cache: ResourceCache
) -> GaugeRead:
    """Every collective event of a metrics export.

    Args:
        export: A metrics export.
        received_wall_ns: When it arrived: the newest of a resource's 1970-dated events gets this time, the others
            keep their distance to it.
        cache: Kept by the caller between pushes.
    """
    runs: list[CollectiveRun] = []
    n_refused = 0
    room = MAX_EXPORT_OPS
    for entry, metrics in export.metrics:
        groups, counts, n_bad = _gather(metrics, room, is_message=export.is_message)
        n_refused += n_bad
        if not groups:
            continue
        room -= sum(len(events.ops) for events in groups.values())
        who = read_resource(entry, cache, is_message=export.is_message)
        shift_ns = _find_shift(groups, received_wall_ns)
        runs += [_build_run(who, key, events, counts, shift_ns) for key, events in groups.items()]
    return GaugeRead(runs, n_refused)


_Group = tuple[str, int, int]  # communicator, rank, size


def _gather(
    metrics: list[MetricEntry], room: int, *, is_message: bool
) -> tuple[dict[_Group, _Events], dict[_Key, int], int]:
    groups: dict[_Group, _Events] = {}
    counts: dict[_Key, int] = {}
    n_refused = 0
    for name, point, value in _iter_numbers(metrics, is_message=is_message):
        attributes = (message_attributes if is_message else tree_attributes)(point.attributes)
        op = parse_op(str(attributes.get(Attribute.NCCL_OP_TYPE, "")))
        if op is None:
            continue
        key, group = _identify(point.time_unix_nano, attributes)
        if name == MetricName.COLLECTIVE_BYTES:
            counts[key] = _element_bytes(value, attributes)
        elif room <= 0 or not 0 <= value * NS_PER_MS <= MAX_DURATION_NS:  # also refuses NaN
            n_refused += 1
        else:
            room -= 1
            events = groups.setdefault(group, _Events())
            events.entries_ns.append(point.time_unix_nano)
            events.insides_ns.append(round(value * NS_PER_MS))
            events.ops.append(op)
            events.keys.append(key)
    return groups, counts, n_refused


def _iter_numbers(
    metrics: list[MetricEntry], *, is_message: bool
) -> Iterator[tuple[str, structs.Proto, float]]:
    for _, _, name, kind, points in metrics:
        if name in _WANTED and kind in {"gauge", "sum"}:
            for point in points:
                value = _number(point, is_message=is_message)
                if value is not None:
                    yield name, point, value


_WANTED: Final = frozenset({
    str(MetricName.COLLECTIVE_DURATION_MS),
    str(MetricName.COLLECTIVE_BYTES),
})


def _number(point: structs.Proto, *, is_message: bool) -> float | None:
    """The value of a number's point; None when it has none."""
    if is_message:
        which = point.WhichOneof("value")
        return None if which is None else float(getattr(point, which))
    value = point.as_double if point.as_double is not None else point.as_int
    return None if value is None else float(value)


def _identify(time_ns: int, attributes: dict[str, structs.Value]) -> tuple[_Key, _Group]:
    comm = str(attributes.get(Attribute.NCCL_COMM_ID_HASH) or UNKNOWN_COMM)[:64]
    rank = _small(attributes.get(Attribute.NCCL_RANK))
    n_ranks = _small(attributes.get(Attribute.NCCL_NRANKS))
    op = str(attributes.get(Attribute.NCCL_OP_TYPE, ""))
    peer = _small(attributes.get(Attribute.NCCL_PEER_RANK))
    return (time_ns, op, comm, rank, peer), (comm, rank, n_ranks)


def _small(value: structs.Value) -> int:
    return value if isinstance(value, int) and 0 <= value <= MAX_RANKS else 0


def _element_bytes(count: float, attributes: dict[str, structs.Value]) -> int:
    kind = attributes.get(Attribute.NCCL_DATATYPE)
    if not isinstance(kind, int) or not 0 <= kind < len(_TYPE_BYTES) or not math.isfinite(count):
        return UNKNOWN_NS
    n_bytes = int(count) * _TYPE_BYTES[kind]
    return n_bytes if 0 <= n_bytes < 1 << 62 else UNKNOWN_NS


def _find_shift(groups: dict[_Group, _Events], received_wall_ns: int) -> int:
    """What turns the resource's monotonic times into wall time; 0 when they already are."""
    newest_ns = max(max(events.entries_ns) for events in groups.values())
    return received_wall_ns - newest_ns if newest_ns < EARLIEST_WALL_NS else 0


def _build_run(
    who: ResourceFacts,
    group: _Group,
    events: _Events,
    counts: dict[_Key, int],
    shift_ns: int,
) -> CollectiveRun:
    comm, comm_rank, n_ranks = group
    ops = np.empty(len(events.ops), COLLECTIVE_OP)
    ops["seq"] = np.arange(len(events.ops))
    ops["entry_ns"] = np.minimum(np.array(events.entries_ns, np.uint64), 1 << 62).astype(np.int64)
    ops["entry_ns"] += shift_ns
    ops["inside_ns"] = events.insides_ns
    ops["own_ns"] = UNKNOWN_NS
    ops["n_bytes"] = [counts.get(key, UNKNOWN_NS) for key in events.keys]
    ops["op"] = events.ops
    ops.flags.writeable = False
    rank = Rank(who.cluster_id, who.node_id, who.rank if who.rank >= 0 else UNKNOWN_RANK)
    return CollectiveRun(rank, comm, comm_rank, n_ranks, ClockKind.ENQUEUE, ops)
