"""The per-event gauges of older agents: read, dated, compared.

Such a point has no sequence number, its time is the host's time inside the call (not the device's), only about a tenth
of the events arrive, and rank, size and communicator are 0 where the agent's probe could not read them (facts of the
agent, v0.17). So ranks can be compared by their recent durations only, every lag is marked approximate, and no
verdict is drawn from them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Final

from msgspec.structs import replace

from ingero.fleet.processors.collectives.lags import gauge_lags
from ingero.otlp.codec import Export, Point, iter_points, structs
from ingero.wire.names import MAX_ID_LENGTH, MIN_PLAUSIBLE_NS, Attribute, MetricName

PREFIX: Final = "nccl.collective."
_UNKNOWN_COMMS: Final = frozenset({"", "0", "0000000000000000"})
_MAX_MEMBERS: Final = 4096


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Ranks that are compared: one operation on one communicator of one cluster."""

    cluster_id: str
    comm: str
    op: str


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a group. Several nodes may report rank 0 when none of them knows its rank."""

    node_id: str
    rank: int


@dataclass(frozen=True, slots=True)
class GaugeLag:
    """One rank's approximate lag in one group."""

    group: GroupKey
    member: Member
    lag_ms: float
    n_ranks: int


class GaugeTracker:
    """Recent durations by group and rank; any thread. Bounded: groups and members beyond the caps are refused.

    Args:
        window_ns: How old a duration may be to be compared.
        max_groups: Groups that are kept.
        count_point: Called with 1 for each duration point that is read.
        count_refused: Called with 1 for each rank's durations that a cap keeps out.
    """

    def __init__(
        self,
        window_ns: int,
        max_groups: int,
        count_point: Callable[[float], None],
        count_refused: Callable[[float], None],
    ) -> None:
        self._count_point = count_point
        self._count_refused = count_refused
        self._window_ns = window_ns
        self._max_groups = max_groups
        self._groups: dict[GroupKey, dict[Member, tuple[float, int]]] = {}
        self._changed: set[GroupKey] = set()
        self._lock = threading.Lock()

    def add(self, export: Export, cluster_hint: str, now_ns: int) -> None:
        """Remember each rank's median duration per group of this push."""
        durations: dict[tuple[GroupKey, Member], list[float]] = {}
        for point in iter_points(export):
            if point.name == MetricName.COLLECTIVE_DURATION_MS and point.value is not None:
                self._count_point(1)
                found = _read_point(point, cluster_hint)
                if found is not None:
                    durations.setdefault(found, []).append(float(point.value))
        with self._lock:
            for (group, member), values in durations.items():
                self._put(group, member, median(values), now_ns)

    def take_lags(self, now_ns: int) -> list[GaugeLag]:
        """The lags of the groups that changed since the last call; forgets what is older than the window."""
        with self._lock:
            return self._take_lags(now_ns)

    def _take_lags(self, now_ns: int) -> list[GaugeLag]:
        cutoff_ns = now_ns - self._window_ns
        for group in list(self._groups):
            members = self._groups[group]
            fresh = {member: seen for member, seen in members.items() if seen[1] >= cutoff_ns}
            if fresh:
                self._groups[group] = fresh
            else:
                del self._groups[group]
        changed, self._changed = self._changed, set()
        found = []
        for group in sorted(changed & self._groups.keys(), key=repr):
            members = self._groups[group]
            lags = gauge_lags({member: value for member, (value, _) in members.items()})
            found += [
                GaugeLag(group, member, lag_ms, len(members))
                for member, lag_ms in lags.items()
                if isinstance(member, Member)
            ]
        return found

    def _put(self, group: GroupKey, member: Member, value: float, now_ns: int) -> None:
        members = self._groups.get(group)
        if members is None:
            if len(self._groups) >= self._max_groups:
                self._count_refused(1)
                return
            members = self._groups[group] = {}
        if member not in members and len(members) >= _MAX_MEMBERS:
            self._count_refused(1)
            return
        members[member] = (value, now_ns)
        self._changed.add(group)


def _read_point(point: Point, cluster_hint: str) -> tuple[GroupKey, Member] | None:
    """Who a duration is of; None when it cannot be compared: no communicator, or no node."""
    attributes = point.attributes
    comm = attributes.get(Attribute.NCCL_COMM_ID_HASH)
    op = attributes.get(Attribute.NCCL_OP_TYPE)
    node_id = point.resource.get(Attribute.NODE_ID)
    cluster_id = point.resource.get(Attribute.CLUSTER_ID) or cluster_hint
    rank = attributes.get(Attribute.NCCL_RANK, 0)
    texts = (comm, op, node_id, cluster_id)
    if not all(isinstance(text, str) and len(text) <= MAX_ID_LENGTH for text in texts):
        return None
    if comm in _UNKNOWN_COMMS or not node_id or not isinstance(rank, int):
        return None
    return GroupKey(str(cluster_id), str(comm), normalise_op(str(op))), Member(str(node_id), rank)


def normalise_op(op: str) -> str:
    """``ncclAllReduce`` and ``allreduce`` are one operation."""
    return op.lower().removeprefix("nccl")


def has_gauges(export: Export) -> bool:
    """Whether any metric is a per-event collective gauge, wherever in the export it stands."""
    for _, metrics in export.metrics:
        for _, _, name, _, _ in metrics:
            if name.startswith(PREFIX):
                return True
    return False


def date_by_arrival(export: Export, received_wall_ns: int) -> Export:
    """The export with each collective point that is dated by the sender's boot dated by its arrival instead.

    Returns the same object when there is nothing to change; never changes the one given.
    """
    if not any(
        point.name.startswith(PREFIX) and point.time_unix_nano < MIN_PLAUSIBLE_NS
        for point in iter_points(export)
    ):
        return export
    entries = [
        replace(
            entry,
            scope_metrics=[
                replace(
                    scope, metrics=[_date_metric(one, received_wall_ns) for one in scope.metrics]
                )
                for scope in entry.scope_metrics
            ],
        )
        for entry in export.tree.resource_metrics
    ]
    return Export.from_tree(export.signal, structs.MetricsRequest(entries), export.size_bytes)


def _date_metric(metric: structs.Metric, wall_ns: int) -> structs.Metric:
    if not metric.name.startswith(PREFIX) or metric.gauge is None:
        return metric
    points = [
        point
        if point.time_unix_nano >= MIN_PLAUSIBLE_NS
        else replace(point, time_unix_nano=wall_ns)
        for point in metric.gauge.data_points
    ]
    return replace(metric, gauge=structs.Gauge(points))
