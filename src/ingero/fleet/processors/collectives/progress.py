"""Where the ranks of each cluster stopped, and which of them the others wait for.

Of processes that ended without success the first is at fault, and the others ended of it (`ingero.detect.endings`).

A rank that never arrived, or never left, is named when others have waited `PATIENCE_NS` for it: one whose data loader
begins anew, or that compiles or writes a checkpoint, arrives before.

What an agent reports of a stopped rank is forgotten when the rank reports a later operation, or after `FRESH_NS`. A
member of which no agent reported for `SILENT_NS`, or whose process ended, counts as silent; until then no rank is named
for a communicator where it is missing, because its own agent may report soon. Members are known from what ranks
reported while the job moved. Ranks whose communicators are connected are a job, and each job is judged by itself.

A rank whose process ended and that reports again is another process, and no member of what that one had: its job, which
may have given other ranks to its nodes since, is not the same.

Communicators of which nothing was reported for the idle timeout are forgotten. One in which somebody stands is not,
however long: agents repeat what they say of a stopped rank for as long as it stands.

Lossy: ranks whose launcher gave no global rank cannot be named and are left out. `MAX_COMMS` bounds a cluster: beyond
it the communicator goes that is silent the longest and in which nobody stands. `MAX_RANKS` bounds a communicator.
What finds no room is counted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from ingero.detect.endings import blame_first_ended
from ingero.detect.hang import find_hang
from ingero.fleet.helpers.caps import CapWatch
from ingero.fleet.processors.collectives.engine import CAP_QUIET_NS, CapChange
from ingero.model.collectives import CollectiveOp, CollectiveRun, Worker
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

PATIENCE_NS: Final = 6 * NS_PER_S
"""How long ranks wait for one whose process runs before it is named; one that is stopped or ended is named at once."""
FRESH_NS: Final = 15 * NS_PER_S
"""Older reports say nothing of now. Agents repeat theirs every 5 s at least while a job makes no progress."""
ENDED_NS: Final = 60 * NS_PER_S
"""For how long the process of a job that ended first is named."""
REPORTED_NS: Final = 2 * NS_PER_S
"""Within this time every agent has reported a process that ended."""
SILENT_NS: Final = 8 * NS_PER_S
"""A member whose agent reported nothing this long is named although nothing is known of it."""
MAX_RANKS: Final = 20_000
MAX_COMMS: Final = 16_384
CAP: Final = "standing_cap"
"""The reason of what finds no room, as `telemetry.REFUSED` has it."""
_MAX_PENDING: Final = 16


@dataclass(slots=True)
class _Cluster:
    """One cluster.

    Attributes:
        seen_ns: When anything of it was reported.
        pruned_ns: When what is old was dropped.
        members: By communicator and rank there.
        n_ranks: Of each communicator, as was reported last.
        comm_seen_ns: When something of a communicator was reported, the longest silent one first.
        stalls: By communicator, who stands there, with when that was reported.
        reported_ns: When something of a worker was reported.
        ended: Where processes were when they ended.
        gone: By worker, the communicators of its process that ended, with where it was there.
    """

    seen_ns: int = 0
    pruned_ns: int = 0
    members: dict[str, dict[int, Worker]] = field(default_factory=dict)
    n_ranks: dict[str, int] = field(default_factory=dict)
    comm_seen_ns: dict[str, int] = field(default_factory=dict)
    stalls: dict[str, dict[Worker, tuple[RankProgress, int]]] = field(default_factory=dict)
    reported_ns: dict[Worker, int] = field(default_factory=dict)
    ended: dict[Worker, RankProgress] = field(default_factory=dict)
    gone: dict[Worker, dict[str, RankProgress]] = field(default_factory=dict)

    def take_back(self, worker: Worker) -> None:
        """A worker reports: where a process of it ended before, another goes on in its place."""
        self.ended.pop(worker, None)
        for comm, last in self.gone.pop(worker, {}).items():
            members = self.members.get(comm, {})
            if members.get(last.comm_rank) == worker:
                del members[last.comm_rank]

    def is_of_gone(self, run: CollectiveRun, late_ns: int) -> bool:
        """Whether a run is what a process that ended did before its end; another one counts from the start again."""
        comms, seqs = self.gone.get(run.rank.worker, {}), run.ops["seq"]
        if late_ns > 0 or run.comm not in comms or not seqs.size:
            return late_ns > 0 and bool(comms)
        return bool(seqs.min() > 1 and seqs.max() <= comms[run.comm].entered)

    def drop_stall(self, comm: str, worker: Worker) -> None:
        """A worker does not stand in a communicator."""
        stalls = self.stalls.get(comm, {})
        stalls.pop(worker, None)
        if not stalls:
            self.stalls.pop(comm, None)

    def prune(self, idle_timeout_ns: int, now_ns: int) -> None:
        """Drop what says nothing any more."""
        self.pruned_ns = now_ns
        for comm, stalls in list(self.stalls.items()):
            for worker, (_, arrived_ns) in list(stalls.items()):
                if now_ns - arrived_ns > FRESH_NS:
                    self.drop_stall(comm, worker)
        self.reported_ns = {
            worker: ns for worker, ns in self.reported_ns.items() if now_ns - ns < SILENT_NS
        }
        self.ended = {
            worker: stall
            for worker, stall in self.ended.items()
            if stall.ending is not None and now_ns - stall.ending.at_ns <= ENDED_NS
        }
        for comm, seen_ns in list(self.comm_seen_ns.items()):
            if now_ns - seen_ns <= idle_timeout_ns:
                break
            self._drop(comm)
        self.gone = {
            worker: comms
            for worker, comms in self.gone.items()
            if any(map(self.members.get, comms))
        }

    def make_room(self) -> bool:
        """Whether another communicator fits; where none does, one goes in which nobody stands."""
        if len(self.members) >= MAX_COMMS:
            silent = next((comm for comm in self.comm_seen_ns if comm not in self.stalls), None)
            if silent is None:
                return False
            self._drop(silent)
        return True

    def note_size(self, comm: str, n_ranks: int) -> None:
        """A communicator has so many members; of a job that meets there again with fewer, the others are none."""
        if n_ranks < self.n_ranks.get(comm, n_ranks):
            members = self.members[comm]
            self.members[comm] = {at: who for at, who in members.items() if at < n_ranks}
        self.n_ranks[comm] = n_ranks

    def _drop(self, comm: str) -> None:
        del self.members[comm], self.n_ranks[comm], self.comm_seen_ns[comm]
        self.stalls.pop(comm, None)
        for worker in [worker for worker, stall in self.ended.items() if stall.comm == comm]:
            del self.ended[worker]


@dataclass(frozen=True, slots=True)
class _Past:
    """What happened to ranks before they stood, and how long they do.

    Attributes:
        failed: Where processes that ended without success were then, with when that was.
        moved_ns: When ranks that stand entered their last operation.
        waited_ns: For how long ranks have waited in an operation.
    """

    failed: Mapping[Worker, RankProgress]
    moved_ns: Mapping[Worker, int]
    waited_ns: Mapping[Worker, int]


class ProgressTracker:
    """What is known of stopped ranks in every cluster. Pushes and questions may come from different threads."""

    def __init__(self, idle_timeout_ns: int) -> None:
        self._idle_timeout_ns = idle_timeout_ns
        self._lock = threading.Lock()
        self._clusters: dict[str, _Cluster] = {}
        self._found: dict[str, tuple[HangReport, float, int]] = {}
        self._n_refused = 0
        self._caps: CapWatch[str] = CapWatch(CAP_QUIET_NS)
        self._cap_changes: list[CapChange] = []

    def note_moving(
        self, runs: Sequence[CollectiveRun], now_ns: int, late_ns: Sequence[int] = ()
    ) -> None:
        """Ranks reported operations, so long after they could have: they move, and are members."""
        with self._lock:
            for run, late in zip(runs, late_ns or [0] * len(runs), strict=True):
                cluster = self._find(run.rank.cluster_id, now_ns)
                worker = run.rank.worker
                if worker.rank < 0 or cluster.is_of_gone(run, late):
                    continue
                cluster.take_back(worker)
                if not self._join(cluster, run, now_ns):
                    continue
                cluster.reported_ns[worker] = now_ns
                known = cluster.stalls.get(run.comm, {}).get(worker)
                if known and run.ops.size and int(run.ops["seq"].max()) > known[0].entered:
                    cluster.drop_stall(run.comm, worker)

    def add(self, stalls: Iterable[RankProgress], now_ns: int) -> None:
        """Take what agents say of ranks that stopped."""
        with self._lock:
            for stall in stalls:
                cluster = self._find(stall.rank.cluster_id, now_ns)
                worker = stall.rank.worker
                if worker.rank < 0 or not self._join(cluster, stall, now_ns):
                    continue
                if stall.ending is not None:
                    _note_ending(cluster, stall, stall.ending, now_ns)
                if stall.is_gone:
                    cluster.gone.setdefault(worker, {})[stall.comm] = stall
                    cluster.reported_ns.pop(worker, None)
                    cluster.drop_stall(stall.comm, worker)
                    continue
                cluster.reported_ns[worker] = now_ns
                cluster.stalls.setdefault(stall.comm, {})[worker] = (stall, now_ns)

    def forget(self, cluster_id: str) -> None:
        """Know nothing of a cluster any more."""
        with self._lock:
            self._clusters.pop(cluster_id, None)
            self._found.pop(cluster_id, None)

    def find_hang(self, cluster_id: str, now_ns: int) -> tuple[HangReport, float]:
        """Whom the stopped ranks wait for, and for how many seconds the longest has waited.

        Raises:
            KeyError: Nothing is known of the cluster.
        """
        with self._lock:
            cluster = self._clusters[cluster_id]
            fresh = [
                (stall, now_ns - arrived_ns)
                for stalls in cluster.stalls.values()
                for stall, arrived_ns in stalls.values()
                if now_ns - arrived_ns <= FRESH_NS
            ]
            undecided = _find_undecided(cluster, fresh, now_ns)
            fresh = [(stall, age) for stall, age in fresh if stall.comm not in undecided]
            ended = _find_failed(cluster, now_ns)
            comms = {stall.comm for stall, _ in fresh} | _find_broken(cluster.members, ended)
            comms -= _find_ending(cluster.members, ended, now_ns)
            members = {comm: dict(cluster.members[comm]) for comm in comms}
        moved_ns: dict[Worker, int] = {}
        waited_ns: dict[Worker, int] = {}
        for stall, age_ns in fresh:
            stood_ns, worker = age_ns + stall.still_ns, stall.rank.worker
            entered_ns = now_ns - stood_ns
            moved_ns[worker] = max(moved_ns.get(worker, entered_ns), entered_ns)
            if stall.left is not None and stall.left < stall.entered:
                waited_ns[worker] = max(waited_ns.get(worker, 0), stood_ns)
        past = _Past(ended, moved_ns, waited_ns)
        reports = [
            _find_hang_of(members, comms, [one for one, _ in fresh if one.comm in comms], past)
            for comms in _find_jobs(members)
        ]
        return join_reports(reports), max(waited_ns.values(), default=0) / NS_PER_S

    def find_hangs(self, now_ns: int) -> dict[str, tuple[HangReport, float]]:
        """What `find_hang` says of each cluster that is known; kept for `read_hang`."""
        found = {}
        for cluster_id in list(self._clusters):
            with suppress(KeyError):  # forgotten meanwhile by a push on another thread
                found[cluster_id] = self.find_hang(cluster_id, now_ns)
        with self._lock:
            self._found = {
                cluster_id: (*one, now_ns)
                for cluster_id, one in found.items()
                if cluster_id in self._clusters
            }
        return found

    def read_hang(self, cluster_id: str, now_ns: int) -> tuple[HangReport, float]:
        """What `find_hangs` found last, with how long the longest has waited by now; where that is old, `find_hang`.

        Raises:
            KeyError: Nothing is known of the cluster.
        """
        with self._lock:
            report, waiting_s, found_ns = self._found.get(cluster_id, (None, 0.0, 0))
            is_known = cluster_id in self._clusters
        age_ns = now_ns - found_ns
        if report is None or not is_known or age_ns > FRESH_NS:
            return self.find_hang(cluster_id, now_ns)
        return report, waiting_s + (age_ns / NS_PER_S if waiting_s else 0.0)

    def take_refused(self) -> int:
        """How many records found no room since the last call."""
        with self._lock:
            n_refused, self._n_refused = self._n_refused, 0
        return n_refused

    def take_cap_changes(self, now_ns: int) -> list[CapChange]:
        """Clusters whose cap began or ceased to refuse since the last call."""
        with self._lock:
            changes, self._cap_changes = self._cap_changes, []
            changes += [
                CapChange(CAP, cluster_id, is_on=False, n_refused=n_refused)
                for cluster_id, n_refused in self._caps.take_ended(now_ns)
            ]
        return changes

    def _find(self, cluster_id: str, now_ns: int) -> _Cluster:
        for name, known in list(self._clusters.items()):
            if now_ns - known.seen_ns > self._idle_timeout_ns:
                del self._clusters[name]
        cluster = self._clusters.setdefault(cluster_id, _Cluster())
        cluster.seen_ns = now_ns
        return cluster

    def _join(self, cluster: _Cluster, record: CollectiveRun | RankProgress, now_ns: int) -> bool:
        """Note a member; False when a cap is reached."""
        if now_ns - cluster.pruned_ns >= FRESH_NS:
            cluster.prune(self._idle_timeout_ns, now_ns)
        comm, ranks = record.comm, cluster.members.get(record.comm)
        is_new = ranks is None or record.comm_rank not in ranks
        if is_new and (not cluster.make_room() if ranks is None else len(ranks) >= MAX_RANKS):
            self._n_refused += 1
            if self._caps.refuse(record.rank.cluster_id, now_ns):
                self._cap_changes.append(CapChange(CAP, record.rank.cluster_id, is_on=True))
            return False
        cluster.members.setdefault(comm, {})[record.comm_rank] = record.rank.worker
        cluster.note_size(comm, record.n_ranks)
        cluster.comm_seen_ns.pop(comm, None)
        cluster.comm_seen_ns[comm] = now_ns
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
    past: _Past,
) -> HangReport:
    """Whom the ranks of one job wait for, or of whom they ended."""
    groups = {
        comm: StoppedGroup(comm, tuple(members[comm][at].rank for at in sorted(members[comm])))
        for comm in comms
    }
    who = {worker.rank: worker for comm in groups for worker in members[comm].values()}
    report = find_hang(build_states(stalls, groups))
    failed = {rank: past.failed[worker] for rank, worker in who.items() if worker in past.failed}
    moved_ns = {
        rank: past.moved_ns[worker] for rank, worker in who.items() if worker in past.moved_ns
    }
    waited_ns = {
        rank: past.waited_ns[worker] for rank, worker in who.items() if worker in past.waited_ns
    }
    roots = tuple(
        replace(root, node_id=who[root.rank].node_id, job=who[root.rank].job)
        for root in blame_first_ended(report.roots, failed, moved_ns, groups)
        if not _may_arrive(root, waited_ns)
    )
    return replace(report, roots=roots)


def _may_arrive(root: HangRoot, waited_ns: Mapping[int, int]) -> bool:
    """Whether a rank's process runs and nobody has waited for it for long."""
    return root.cause in {HangCause.ABSENT, HangCause.STUCK} and all(
        waited_ns.get(rank, 0) < PATIENCE_NS for rank in root.blocks
    )


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
