"""Where the ranks of each cluster stopped, and which of them the others wait for.

Of processes that ended without success the first is at fault, and the others ended of it (`ingero.detect.endings`).

What an agent reports of a stopped rank is forgotten when the rank reports a later operation, or after `FRESH_NS`. A
member of which no agent reported for `SILENT_NS`, or whose process ended, counts as silent; until then no rank is named
for a communicator where it is missing, because its own agent may report soon. Members are known from what ranks
reported while the job moved. Ranks whose communicators are connected are a job, and each job is judged by itself.

Lossy: ranks whose launcher gave no global rank cannot be named and are left out; `MAX_RANKS` bounds a cluster.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ingero.detect.endings import find_first_ended
from ingero.detect.hang import find_hang
from ingero.detect.snapshots import MIN_HANG_NS
from ingero.model.collectives import CollectiveOp, CollectiveRun, Worker
from ingero.model.diagnosis import Diagnosis
from ingero.model.hang import (
    HangCause,
    HangReport,
    HangRoot,
    PendingOp,
    RankState,
    StoppedGroup,
)
from ingero.model.progress import Ending, RankProgress
from ingero.units import NS_PER_S
from ingero.wire.diagnosis import diagnosis_json

FRESH_NS: Final = 15 * NS_PER_S
"""Older reports say nothing of now. Agents repeat theirs every second while a job makes no progress."""
ENDED_NS: Final = 60 * NS_PER_S
"""For how long the process of a job that ended first is named."""
REPORTED_NS: Final = 2 * NS_PER_S
"""Within this time every agent has reported a process that ended."""
SILENT_NS: Final = 8 * NS_PER_S
"""A member whose agent reported nothing this long is named although nothing is known of it."""
MAX_RANKS: Final = 20_000
MAX_COMMS: Final = 16_384
_MAX_PENDING: Final = 16


@dataclass(slots=True)
class _Cluster:
    seen_ns: int = 0
    members: dict[str, dict[int, Worker]] = field(default_factory=dict)
    stalls: dict[tuple[Worker, str], tuple[RankProgress, int]] = field(default_factory=dict)
    reported_ns: dict[Worker, int] = field(default_factory=dict)
    ended: dict[Worker, RankProgress] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Ends:
    """What is known of the ends of processes.

    Attributes:
        failed: Where processes that ended without success were then, with when that was.
        moved_ns: When ranks that stand entered their last operation.
    """

    failed: Mapping[Worker, RankProgress]
    moved_ns: Mapping[Worker, int]


class ProgressTracker:
    """What is known of stopped ranks in every cluster. Pushes and questions may come from different threads."""

    def __init__(self, idle_timeout_ns: int) -> None:
        self._idle_timeout_ns = idle_timeout_ns
        self._lock = threading.Lock()
        self._clusters: dict[str, _Cluster] = {}

    def note_moving(self, runs: Iterable[CollectiveRun], now_ns: int) -> None:
        """Ranks reported operations: they move, and are members."""
        with self._lock:
            for run in runs:
                cluster = self._find(run.rank.cluster_id, now_ns)
                worker = run.rank.worker
                if worker.rank < 0 or not self._join(cluster, run.comm, run.comm_rank, worker):
                    continue
                cluster.reported_ns[worker] = now_ns
                cluster.ended.pop(worker, None)
                key = (worker, run.comm)
                known = cluster.stalls.get(key)
                if known and run.ops.size and int(run.ops["seq"].max()) > known[0].entered:
                    del cluster.stalls[key]

    def add(self, stalls: Iterable[RankProgress], now_ns: int) -> None:
        """Take what agents say of ranks that stopped."""
        with self._lock:
            for stall in stalls:
                cluster = self._find(stall.rank.cluster_id, now_ns)
                worker, comm = stall.rank.worker, stall.comm
                if worker.rank < 0 or not self._join(cluster, comm, stall.comm_rank, worker):
                    continue
                if stall.ending is not None:
                    _note_ending(cluster, stall, stall.ending, now_ns)
                if stall.is_gone:
                    cluster.reported_ns.pop(worker, None)
                    cluster.stalls.pop((worker, comm), None)
                    continue
                cluster.reported_ns[worker] = now_ns
                cluster.stalls[worker, comm] = (stall, now_ns)

    def forget(self, cluster_id: str) -> None:
        """Know nothing of a cluster any more."""
        with self._lock:
            self._clusters.pop(cluster_id, None)

    def find_hang(self, cluster_id: str, now_ns: int) -> tuple[HangReport, float]:
        """Whom the stopped ranks wait for, and for how many seconds the longest has waited.

        Raises:
            KeyError: Nothing is known of the cluster.
        """
        with self._lock:
            cluster = self._clusters[cluster_id]
            fresh = [
                (stall, now_ns - arrived_ns)
                for stall, arrived_ns in cluster.stalls.values()
                if now_ns - arrived_ns <= FRESH_NS
            ]
            undecided = _find_undecided(cluster, fresh, now_ns)
            fresh = [(stall, age) for stall, age in fresh if stall.comm not in undecided]
            ended = _find_failed(cluster, now_ns)
            comms = {stall.comm for stall, _ in fresh} | _find_broken(cluster.members, ended)
            comms -= _find_ending(cluster.members, ended, now_ns)
            members = {comm: dict(cluster.members[comm]) for comm in comms}
        moved_ns: dict[Worker, int] = {}
        for stall, age_ns in fresh:
            entered_ns = now_ns - age_ns - stall.still_ns
            worker = stall.rank.worker
            moved_ns[worker] = max(moved_ns.get(worker, entered_ns), entered_ns)
        ends = _Ends(ended, moved_ns)
        waiting = [
            (stall.still_ns + age_ns) / NS_PER_S
            for stall, age_ns in fresh
            if stall.left is not None and stall.left < stall.entered
        ]
        reports = [
            _find_hang_of(members, comms, [one for one, _ in fresh if one.comm in comms], ends)
            for comms in _find_jobs(members)
        ]
        return join_reports(reports), max(waiting, default=0.0)

    def find_hangs(self, now_ns: int) -> dict[str, tuple[HangReport, float]]:
        """What `find_hang` says of each cluster that is known."""
        found = {}
        for cluster_id in list(self._clusters):
            with suppress(KeyError):  # forgotten meanwhile by a push on another thread
                found[cluster_id] = self.find_hang(cluster_id, now_ns)
        return found

    def _find(self, cluster_id: str, now_ns: int) -> _Cluster:
        for name, known in list(self._clusters.items()):
            if now_ns - known.seen_ns > self._idle_timeout_ns:
                del self._clusters[name]
        cluster = self._clusters.setdefault(cluster_id, _Cluster())
        cluster.seen_ns = now_ns
        return cluster

    @staticmethod
    def _join(cluster: _Cluster, comm: str, comm_rank: int, worker: Worker) -> bool:
        """Note a member; False when a cap is reached."""
        ranks = cluster.members.get(comm)
        if ranks is None:
            if len(cluster.members) >= MAX_COMMS:
                return False
            ranks = cluster.members[comm] = {}
        if comm_rank not in ranks and len(ranks) >= MAX_RANKS:
            return False
        ranks[comm_rank] = worker
        return True


def _find_undecided(
    cluster: _Cluster, fresh: Iterable[tuple[RankProgress, int]], now_ns: int
) -> set[str]:
    """Communicators with a member whose agent reported lately and has not said that it stopped."""
    workers_of: dict[str, set[Worker]] = {}
    for stall, _ in fresh:
        workers_of.setdefault(stall.comm, set()).add(stall.rank.worker)
    return {
        comm
        for comm, workers in workers_of.items()
        if any(
            worker not in workers and now_ns - reported_ns < SILENT_NS
            for worker in cluster.members[comm].values()
            if (reported_ns := cluster.reported_ns.get(worker)) is not None
        )
    }


def _find_jobs(members: Mapping[str, Mapping[int, Worker]]) -> list[set[str]]:
    """Communicators that share workers, directly or through others, together."""
    first_of: dict[Worker, str] = {}
    leader = {comm: comm for comm in members}

    def find_leader(comm: str) -> str:
        while leader[comm] != comm:
            leader[comm] = comm = leader[leader[comm]]
        return comm

    for comm, by_rank in members.items():
        for worker in by_rank.values():
            leader[find_leader(first_of.setdefault(worker, comm))] = find_leader(comm)
    jobs: dict[str, set[str]] = {}
    for comm in sorted(members, reverse=True):
        jobs.setdefault(find_leader(comm), set()).add(comm)
    return [*reversed(jobs.values())]


def _find_hang_of(
    members: Mapping[str, Mapping[int, Worker]],
    comms: Iterable[str],
    stalls: Sequence[RankProgress],
    ends: _Ends,
) -> HangReport:
    """Whom the ranks of one job wait for, or of whom they ended."""
    groups = {
        comm: StoppedGroup(comm, tuple(members[comm][at].rank for at in sorted(members[comm])))
        for comm in comms
    }
    who = {worker.rank: worker for comm in groups for worker in members[comm].values()}
    report = find_hang(build_states(stalls, groups))
    failed = {rank: ends.failed[worker] for rank, worker in who.items() if worker in ends.failed}
    moved_ns = {
        rank: ends.moved_ns[worker] for rank, worker in who.items() if worker in ends.moved_ns
    }
    roots = tuple(
        replace(root, node_id=who[root.rank].node_id, job=who[root.rank].job)
        for root in blame_first_ended(report.roots, failed, moved_ns, groups)
    )
    return replace(report, roots=roots)


def blame_first_ended(
    roots: Sequence[HangRoot],
    failed: Mapping[int, RankProgress],
    moved_ns: Mapping[int, int],
    groups: Mapping[str, StoppedGroup],
) -> tuple[HangRoot, ...]:
    """The roots of a job of which processes ended without success: of those only the first.

    A rank that still ran when the first ended, and stands since, is about to end of it too.

    Args:
        roots: Whom ranks wait for.
        failed: Where the ranks that ended without success were then.
        moved_ns: When ranks that stand entered their last operation, on the clock of the endings.
        groups: Of the job.
    """
    first = find_first_ended({
        rank: stall.ending for rank, stall in failed.items() if stall.ending is not None
    })
    first_ns = min(
        (one.at_ns for rank in first if (one := failed[rank].ending) is not None), default=None
    )
    kept = [
        root
        for root in roots
        if root.rank not in failed
        and (first_ns is None or moved_ns.get(root.rank, 0) < first_ns - MIN_HANG_NS)
    ]
    known = {root.rank: root for root in roots}
    for rank in first:
        stall = failed[rank]
        root = known.get(rank) or HangRoot(
            rank, HangCause.ENDED, groups[stall.comm], stall.entered + 1, stall.left, ()
        )
        followers = {other.rank for other in roots if other not in kept}
        blocks = tuple(sorted({*root.blocks, *failed.keys(), *followers} - set(first)))
        if blocks:
            kept.append(replace(root, cause=HangCause.ENDED, blocks=blocks))
    return tuple(sorted(kept, key=lambda root: root.rank))


def _note_ending(cluster: _Cluster, stall: RankProgress, ending: Ending, now_ns: int) -> None:
    """Keep where a process was when it ended, on its widest communicator, with the time of its end on our clock."""
    worker = stall.rank.worker
    known = cluster.ended.get(worker)
    if known is None or known.n_ranks < stall.n_ranks:
        at_ns = now_ns - ending.at_ns
        cluster.ended[worker] = replace(stall, ending=replace(ending, at_ns=at_ns))


def _find_failed(cluster: _Cluster, now_ns: int) -> dict[Worker, RankProgress]:
    """Processes that ended without success, and not too long ago."""
    return {
        worker: stall
        for worker, stall in cluster.ended.items()
        if stall.ending is not None
        and stall.ending.has_failed
        and now_ns - stall.ending.at_ns <= ENDED_NS
    }


def _find_ending(
    members: Mapping[str, Mapping[int, Worker]],
    failed: Mapping[Worker, RankProgress],
    now_ns: int,
) -> set[str]:
    """Communicators with a member that has just failed: another may have failed before it, which is yet to come."""
    just = {
        worker
        for worker, stall in failed.items()
        if stall.ending is not None and now_ns - stall.ending.at_ns < REPORTED_NS
    }
    if not just:
        return set()
    return {comm for comm, ranks in members.items() if not just.isdisjoint(ranks.values())}


def _find_broken(
    members: Mapping[str, Mapping[int, Worker]], failed: Mapping[Worker, RankProgress]
) -> set[str]:
    """Communicators of which at least two members ended without success."""
    if not failed:
        return set()
    return {
        comm
        for comm, ranks in members.items()
        if sum(worker in failed for worker in ranks.values()) > 1
    }


def join_reports(reports: Sequence[HangReport]) -> HangReport:
    """One report for the jobs of a cluster, each of which was judged by itself."""
    return HangReport(
        roots=tuple(sorted((r for one in reports for r in one.roots), key=lambda r: r.rank)),
        deadlocks=tuple(circle for one in reports for circle in one.deadlocks),
        waits=tuple(sorted((w for one in reports for w in one.waits), key=lambda w: w.rank)),
        ranks_read=tuple(sorted({rank for one in reports for rank in one.ranks_read})),
        ranks_known=tuple(sorted({rank for one in reports for rank in one.ranks_known})),
    )


def build_states(
    stalls: Iterable[RankProgress], groups: Mapping[str, StoppedGroup]
) -> list[RankState]:
    """One state per rank, its pending operations in sequence."""
    by_rank: dict[int, list[RankProgress]] = {}
    ops: dict[tuple[str, int, CollectiveOp], PendingOp] = {}
    for stall in stalls:
        by_rank.setdefault(stall.rank.rank, []).append(stall)
    return [
        RankState(
            rank=rank,
            groups={one.comm: groups[one.comm] for one in mine},
            entered={one.comm: one.entered for one in mine},
            left={one.comm: one.left for one in mine if one.left is not None},
            pending=tuple(op for one in mine for op in _list_pending(one, ops)),
            is_stopped=any(one.is_stopped for one in mine),
        )
        for rank, mine in sorted(by_rank.items())
    ]


def _list_pending(
    stall: RankProgress, ops: dict[tuple[str, int, CollectiveOp], PendingOp]
) -> list[PendingOp]:
    """What a rank entered and did not leave; each operation is made once for all ranks, in ``ops``."""
    if stall.left is None:  # nothing says whether it was ever left
        return []
    found = []
    for seq in range(max(stall.left, stall.entered - _MAX_PENDING) + 1, stall.entered + 1):
        key = (stall.comm, seq, stall.op)
        if key not in ops:
            ops[key] = PendingOp(stall.comm, seq, stall.op.name.lower())
        found.append(ops[key])
    return found


def hang_json(
    report: HangReport, standing_s: float, known: Mapping[Worker, Diagnosis]
) -> dict[str, Any]:
    """The answer as JSON-able values.

    Args:
        report: Whom ranks wait for.
        standing_s: For how long.
        known: What agents answered of those.
    """
    return {
        "missing_ranks": list(report.missing_ranks),
        "standing_s": round(standing_s, 3),
        "roots": [
            {
                "rank": root.rank,
                "node_id": root.node_id,
                "job": root.job,
                "cause": root.cause.value,
                "comm": root.group.name,
                "missing_seq": root.missing_seq,
                "last_finished_seq": root.last_left,
                "blocks": list(root.blocks),
                "diagnosis": _explain(known.get(Worker(root.node_id, root.job, root.rank))),
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


def _explain(diagnosis: Diagnosis | None) -> dict[str, Any] | None:
    return None if diagnosis is None else diagnosis_json(diagnosis)
