"""Where the ranks of each cluster stopped, and which of them the others wait for.

A standing is forgotten when the rank reports a later operation or has said nothing for `FRESH_NS`. A member that said
nothing for `SILENT_NS`, or whose agent says that its process ended, counts as silent; until then nobody is named for a
communicator where it is missing, because its own agent may be about to speak. Who is a member is remembered from what
ranks reported while the job moved.

Lossy: ranks whose launcher told no global rank cannot be named and are left out; `MAX_RANKS` bounds a cluster.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ingero.detect.hang import find_hang
from ingero.model.collectives import CollectiveRun
from ingero.model.hang import Group, HangReport, PendingOp, RankState
from ingero.model.standing import Standing
from ingero.units import NS_PER_S

FRESH_NS: Final = 15 * NS_PER_S
"""Older standings say nothing of now. Agents repeat theirs every second while a job stands."""
SILENT_NS: Final = 8 * NS_PER_S
"""A member whose agent said nothing this long is named although nothing is known of it."""
MAX_RANKS: Final = 20_000
MAX_COMMS: Final = 16_384
_MAX_PENDING: Final = 16


@dataclass(slots=True)
class _Cluster:
    seen_ns: int = 0
    members: dict[str, dict[int, int]] = field(default_factory=dict)
    standings: dict[tuple[int, str], tuple[Standing, int]] = field(default_factory=dict)
    heard_ns: dict[int, int] = field(default_factory=dict)


class StandingBook:
    """Every cluster's standings. Pushes and questions may come from different threads."""

    def __init__(self, idle_timeout_ns: int) -> None:
        self._idle_timeout_ns = idle_timeout_ns
        self._lock = threading.Lock()
        self._clusters: dict[str, _Cluster] = {}

    def note_moving(self, runs: Iterable[CollectiveRun], now_ns: int) -> None:
        """Ranks reported operations: they move, and are members."""
        with self._lock:
            for run in runs:
                cluster = self._find(run.rank.cluster_id, now_ns)
                if run.rank.rank < 0 or not self._join(
                    cluster, run.comm, run.comm_rank, run.rank.rank
                ):
                    continue
                cluster.heard_ns[run.rank.rank] = now_ns
                key = (run.rank.rank, run.comm)
                known = cluster.standings.get(key)
                if known and run.ops.size and int(run.ops["seq"].max()) > known[0].entered:
                    del cluster.standings[key]

    def add(self, standings: Iterable[Standing], now_ns: int) -> None:
        """Take what agents say of ranks that stopped."""
        with self._lock:
            for standing in standings:
                cluster = self._find(standing.rank.cluster_id, now_ns)
                if standing.rank.rank < 0 or not self._join(
                    cluster, standing.comm, standing.comm_rank, standing.rank.rank
                ):
                    continue
                if standing.is_gone:
                    cluster.heard_ns.pop(standing.rank.rank, None)
                    cluster.standings.pop((standing.rank.rank, standing.comm), None)
                    continue
                cluster.heard_ns[standing.rank.rank] = now_ns
                cluster.standings[standing.rank.rank, standing.comm] = (standing, now_ns)

    def find_hang(self, cluster_id: str, now_ns: int) -> tuple[HangReport, float]:
        """Whom the standing ranks wait for, and for how many seconds the longest has stood.

        Raises:
            KeyError: Nothing is known of the cluster.
        """
        with self._lock:
            cluster = self._clusters[cluster_id]
            fresh = [
                (standing, now_ns - arrived_ns)
                for standing, arrived_ns in cluster.standings.values()
                if now_ns - arrived_ns <= FRESH_NS
            ]
            undecided = _find_undecided(cluster, fresh, now_ns)
            fresh = [(standing, age) for standing, age in fresh if standing.comm not in undecided]
            groups = {
                comm: Group(comm, tuple(ranks[at] for at in sorted(ranks)))
                for comm, ranks in cluster.members.items()
                if any(standing.comm == comm for standing, _ in fresh)
            }
        waiting = [
            (standing.still_ns + age_ns) / NS_PER_S
            for standing, age_ns in fresh
            if standing.left is not None and standing.left < standing.entered
        ]
        states = build_states([standing for standing, _ in fresh], groups)
        return find_hang(states), max(waiting, default=0.0)

    def clusters(self) -> list[str]:
        """Clusters that are known."""
        with self._lock:
            return list(self._clusters)

    def _find(self, cluster_id: str, now_ns: int) -> _Cluster:
        for name, known in list(self._clusters.items()):
            if now_ns - known.seen_ns > self._idle_timeout_ns:
                del self._clusters[name]
        cluster = self._clusters.setdefault(cluster_id, _Cluster())
        cluster.seen_ns = now_ns
        return cluster

    @staticmethod
    def _join(cluster: _Cluster, comm: str, comm_rank: int, rank: int) -> bool:
        """Note a member; False when a cap is reached."""
        ranks = cluster.members.get(comm)
        if ranks is None:
            if len(cluster.members) >= MAX_COMMS:
                return False
            ranks = cluster.members[comm] = {}
        if comm_rank not in ranks and len(ranks) >= MAX_RANKS:
            return False
        ranks[comm_rank] = rank
        return True


def _find_undecided(
    cluster: _Cluster, fresh: Iterable[tuple[Standing, int]], now_ns: int
) -> set[str]:
    """Communicators with a member whose agent spoke lately and has not said that it stands."""
    told: dict[str, set[int]] = {}
    for standing, _ in fresh:
        told.setdefault(standing.comm, set()).add(standing.rank.rank)
    return {
        comm
        for comm, ranks in told.items()
        if any(
            rank not in ranks and now_ns - heard_ns < SILENT_NS
            for rank in cluster.members[comm].values()
            if (heard_ns := cluster.heard_ns.get(rank)) is not None
        )
    }


def build_states(standings: Iterable[Standing], groups: Mapping[str, Group]) -> list[RankState]:
    """One state per rank, its pending operations in sequence."""
    by_rank: dict[int, list[Standing]] = {}
    for standing in standings:
        by_rank.setdefault(standing.rank.rank, []).append(standing)
    return [
        RankState(
            rank=rank,
            groups={one.comm: groups[one.comm] for one in mine},
            entered={one.comm: one.entered for one in mine},
            left={one.comm: one.left for one in mine if one.left is not None},
            pending=tuple(op for one in mine for op in _pending(one)),
        )
        for rank, mine in sorted(by_rank.items())
    ]


def _pending(standing: Standing) -> list[PendingOp]:
    if standing.left is None:  # nothing says whether it was ever left
        return []
    first = max(standing.left, standing.entered - _MAX_PENDING) + 1
    return [
        PendingOp(standing.comm, seq, standing.op.name.lower())
        for seq in range(first, standing.entered + 1)
    ]


def hang_json(report: HangReport, standing_s: float) -> dict[str, Any]:
    """The answer as JSON-able values."""
    return {
        "missing_ranks": list(report.missing_ranks),
        "standing_s": round(standing_s, 3),
        "roots": [
            {
                "rank": root.rank,
                "cause": root.cause.value,
                "comm": root.group.name,
                "missing_seq": root.missing_seq,
                "last_finished_seq": root.last_left,
                "blocks": list(root.blocks),
            }
            for root in report.roots
        ],
        "deadlocks": [list(circle) for circle in report.deadlocks],
        "waits": [
            {
                "rank": wait.rank,
                "op": wait.op.op,
                "comm": wait.op.group,
                "seq": wait.op.seq,
                "waits_for": list(wait.waits_for),
            }
            for wait in report.waits
        ],
        "ranks_read": list(report.ranks_read),
        "ranks_known": list(report.ranks_known),
    }
