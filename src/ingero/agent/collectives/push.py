"""Pushes of one node's collectives: a batch per communicator and rank, and progress records when nothing moves.

A batch goes out every push interval, and early when a rank's own time or its time inside collectives moves against its
own past. A slow rank sees the first, the ranks that wait for it see the second, so all of them push at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from ingero.agent.capture.discover.processes import is_stopped
from ingero.agent.collectives.device import DeviceCollectives
from ingero.agent.collectives.host import SETTLE_NS, CollectiveTracker, CommPosition, Finished
from ingero.agent.collectives.newest import put_newest
from ingero.agent.collectives.rank_names import RankNames, number_job
from ingero.agent.collectives.run_queue import PushCounts, RunQueue
from ingero.agent.health.collective_counts import CollectiveCounts
from ingero.agent.health.push_body import NodeIdentity
from ingero.agent.health.spill import SpillCounts
from ingero.detect.usual_work import UsualWork
from ingero.model.arrays import Records
from ingero.model.collectives import CollectiveOp, CollectiveRun, Rank, Worker
from ingero.model.progress import Ending, RankProgress
from ingero.otlp.codec import Export
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S
from ingero.wire.process_resource import ProcessResource
from ingero.wire.progress import build_progress

MOVED: Final = 0.08
"""Share of a rank's usual time per operation by which a change is pushed at once."""
RECENT_OPS: Final = 8
_ADAPT: Final = 0.02
"""Weight of an operation in what is usual: about fifty operations' memory."""
_LEARNED_OPS: Final = 20
STILL_NS: Final = 3 * NS_PER_S
STILL_PERIODS: Final = 10
"""A rank stands still when it entered nothing for this long and for this many periods of its busiest communicator."""
PROGRESS_GAP_NS: Final = NS_PER_S
FREQUENT_NS: Final = 60 * NS_PER_S
"""After this long progress records are repeated at the push interval, or every `MAX_PROGRESS_GAP_NS`."""
MAX_PROGRESS_GAP_NS: Final = 5 * NS_PER_S
"""Fleet forgets one after 15 s, and then takes the rank for silent: one of them may be lost."""
ENDED_NS: Final = 60 * NS_PER_S
"""How long Fleet can use that a process ended: until then its last records are sent again where they did not arrive."""
MAX_GONE: Final = 4096
"""Such records that are kept; beyond that the oldest go."""


@dataclass(frozen=True, slots=True)
class PushPace:
    """How often batches are pushed.

    Attributes:
        interval_ns: Between regular pushes.
        early_gap_ns: Least time between an early push and the push before it.
    """

    interval_ns: int = 10 * NS_PER_S
    early_gap_ns: int = NS_PER_S


@dataclass(slots=True)
class UsualTimes:
    """What a rank's operations on one communicator usually take, and whether the newest differ.

    Operations that are entered with next to no work before them are left out: where a step's first bucket of four holds
    all that it waits for, the other three would hide it.

    Attributes:
        own_ns: Usual own time.
        inside_ns: Usual time inside.
        n_ops: Operations learned from.
        recent: Own time and time inside of the last of these.
        work: How much work there usually is before one.
    """

    own_ns: float = 0.0
    inside_ns: float = 0.0
    n_ops: int = 0
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT_OPS))
    work: UsualWork = field(default_factory=UsualWork)

    def add(self, ops: Records) -> bool:
        """Take operations whose times are known; True when the newest moved against what was usual before them."""
        ops = ops[(ops["own_ns"] >= 0) & (ops["inside_ns"] >= 0)]
        ops = ops[ops["own_ns"] >= self.work.find_least(ops["own_ns"].astype(np.float64))]
        if not len(ops):
            return False
        newest = ops[-RECENT_OPS:]
        self.recent.extend(
            zip(newest["own_ns"].tolist(), newest["inside_ns"].tolist(), strict=True)
        )
        own_ns, inside_ns = np.median(np.array(self.recent), axis=0).tolist()
        is_known = self.n_ops >= _LEARNED_OPS and len(self.recent) == RECENT_OPS
        usual_ns = self.own_ns + self.inside_ns
        has_moved = is_known and (
            max(abs(own_ns - self.own_ns), abs(inside_ns - self.inside_ns)) > MOVED * usual_ns
        )
        weight = 1.0 if not self.n_ops else 1.0 - (1.0 - _ADAPT) ** len(ops)
        self.own_ns += weight * (float(np.median(ops["own_ns"])) - self.own_ns)
        self.inside_ns += weight * (float(np.median(ops["inside_ns"])) - self.inside_ns)
        self.n_ops += len(ops)
        return has_moved


OnFinished = Callable[[int, Rank, Records], int]
"""A process, who it is to Fleet, and its newest operations: rows of COLLECTIVE_OP, entries on the monotonic clock.
Returns its use of its CPU limit, as these have it."""


@dataclass(slots=True)
class _Sent:
    """When what last went out, on the monotonic clock, and what Fleet has yet to take.

    Attributes:
        pushed_ns: Batches.
        stalled_ns: Progress records of ranks that stand.
        gone_ns: Those of processes that ended.
        gone: Of processes that ended the last records, with when they were made.
    """

    pushed_ns: int
    stalled_ns: int
    gone_ns: int
    gone: list[tuple[int, RankProgress]] = field(default_factory=list)


class CollectivePusher:
    """Collects from the tracing thread, pushes from its own.

    Args:
        identity: The node.
        queue: Sends to Fleet, and keeps what it does not take.
        tracker: Turns kernel records into rows.
        clock: Both clocks.
        pace: How often batches are pushed.
        device: What plug-ins for NCCL tell; None reads none.

    Attributes:
        on_finished: Called with what is complete, on the pushing thread; must not block.
        offset_ns: Wall clock less monotonic clock, as of the start: entry times are on a clock that never steps.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        queue: RunQueue,
        tracker: CollectiveTracker,
        clock: Clock,
        pace: PushPace,
        device: DeviceCollectives | None = None,
    ) -> None:
        self._device = device or DeviceCollectives()
        self._tracker = tracker
        self._clock = clock
        self._pace = pace
        self._lock = threading.Lock()
        self.offset_ns = clock.wall_ns() - clock.mono_ns()
        self._exited: dict[int, tuple[int, Ending | None]] = {}
        self._names = RankNames(identity, self._exited)
        self._queue = queue
        self._usual: dict[int, dict[str, UsualTimes]] = {}
        began_ns = clock.mono_ns()
        self._sent = _Sent(began_ns, began_ns, began_ns)
        self.on_finished: OnFinished = lambda _pid, _rank, _ops: 0

    @property
    def counts(self) -> PushCounts:
        """What became of operations and requests."""
        return self._queue.counts

    def count_outcomes(self) -> CollectiveCounts:
        """What became of the node's collectives so far. Any thread; its numbers may be a moment apart."""
        counts, tracker, device = self.counts, self._tracker, self._device.counts
        spill = self._queue.spill
        spilled = SpillCounts() if spill is None else spill.counts
        return CollectiveCounts(
            taken=counts.n_ops,
            waiting=sum(len(run.ops) for run in list(self._queue.kept)),
            dropped=self._queue.n_dropped,
            unknown_communicator=tracker.n_unknown,
            without_end=tracker.n_unsynced,
            plugin_told=device.n_ops,
            plugin_replaced=device.n_superseded,
            plugin_lost=device.n_lost,
            plugin_refused=device.n_refused,
            plugin_unplaced=device.n_unplaced,
            requests_taken=counts.n_pushes,
            requests_failed=counts.n_failed,
            taken_late=counts.n_late_ops,
            spill_batches=0 if spill is None else spill.n_batches,
            spill_bytes=0 if spill is None else spill.n_bytes,
            spill_damaged=spilled.n_damaged,
            spill_failed=spilled.n_write_failures
            + spilled.n_read_failures
            + spilled.n_remove_failures,
            spill_problem=spilled.problem,
        )

    def take_unknown(self) -> list[str]:
        """Processes whose collectives Fleet will not get, as nobody saw their communicators made; each once."""
        with self._lock:
            pids = self._tracker.take_unknown()
            return [
                f"rank {rank} (PID {pid})"
                if (rank := self._names.find_rank(pid)) >= 0
                else f"PID {pid}"
                for pid in pids
                if not self._device.positions(pid)
            ]

    # ── From the tracing thread ─────────────────────────────────────────────

    def note_process(
        self,
        pid: int,
        rank: int,
        job: str = "",
        meeting: str = "",
        resource: ProcessResource = (),
    ) -> None:
        """A process: its global rank, job, where that meets and where it runs; -1 and empty where nothing is known."""
        with self._lock:
            self._names.add(pid, rank, job, resource)
            self._tracker.note_job(pid, number_job(job, meeting))
            self._device.note_process(pid)

    def note_exit(self, pid: int, ending: Ending | None = None) -> None:
        """A process ended; how, on the monotonic clock, where that is known."""
        with self._lock:
            self._exited.setdefault(pid, (self._clock.mono_ns(), ending))
            self._device.note_exit(pid)

    def note_exec(self, pid: int, at_ns: int) -> None:
        """A process became another program; when, on the monotonic clock."""
        with self._lock:
            self._tracker.note_exec(pid, at_ns)

    def add_collectives(self, records: Records) -> None:
        """``struct ig_collective``, copied."""
        with self._lock:
            self._tracker.add_collectives(records)

    def add_calls(self, records: Records) -> None:
        """``struct ig_call``; read before this returns."""
        with self._lock:
            self._tracker.add_calls(records)

    def note_in_flight(self, frames: Records) -> None:
        """Calls that have not returned: a collective that blocks in its own call was entered too."""
        with self._lock:
            self._tracker.note_inside(frames)

    # ── On the pushing thread ───────────────────────────────────────────────

    def push_due(self, *, is_last: bool = False) -> None:
        """Take what is complete, and push what is due; at last also what would wait for later records."""
        now_ns = self._clock.mono_ns()
        with self._lock:
            ended = self._find_ended(now_ns, is_last=is_last)
            # By the device's clock where a plug-in has it; all there is of processes that ended.
            self._device.read(now_ns)
            rows = self._tracker.take(now_ns, None if is_last else ended)
            finished = self._device.take(rows, now_ns)
            runs = [self._build_run(one) for one in finished]
            for one, run in zip(finished, runs, strict=True):
                run.ops["limit_use"] = self.on_finished(one.pid, run.rank, one.ops)
            moved = [_learn(self._usual.setdefault(one.pid, {}), one) for one in finished]
            gone = self._forget_ended(ended, now_ns)
            stalled = self._find_stalled(now_ns)
            living = {run.rank.worker for run in runs} | {one.rank.worker for one in stalled}
            last = self._find_gone(gone, living, now_ns)
        progress = last + stalled
        self._queue.put(runs)
        self._queue.drain()
        since_ns = now_ns - self._sent.pushed_ns
        is_early = (
            any(moved) and since_ns >= self._pace.early_gap_ns and not self._queue.is_spilling
        )
        if self._queue.kept and (is_early or progress or since_ns >= self._pace.interval_ns):
            self.counts.n_early += is_early
            self._sent.pushed_ns = now_ns
            self._queue.push()
        if stalled:
            self._sent.stalled_ns = now_ns
        if last:
            self._sent.gone_ns = now_ns
        if progress and self._queue.send(_export_progress(progress, self._clock)).is_settled:
            self._sent.gone.clear()

    def finish(self) -> None:
        """Send what is left, once."""
        with self._lock:
            self._device.end()
        self.push_due(is_last=True)
        self._queue.push()
        with self._lock:
            self._device.close()

    def _positions(self, pid: int) -> dict[str, CommPosition]:
        """How far a process is: by its plug-in, whose communicators are those of its rows, else by the probes."""
        return self._device.positions(pid) or self._tracker.positions(pid)

    def _build_run(self, one: Finished) -> CollectiveRun:
        ops = one.ops.copy()
        ops["entry_ns"] += self.offset_ns
        return CollectiveRun(
            self._rank_of(one.pid), one.comm, one.comm_rank, one.n_ranks, one.clock, ops
        )

    def _rank_of(self, pid: int) -> Rank:
        """The launcher's rank; where it gave none, the rank on the widest communicator, which is the job's own."""
        rank = self._names.find_rank(pid)
        if rank < 0:
            positions = self._positions(pid).values()
            widest = max(positions, key=lambda position: position.n_ranks, default=None)
            rank = -1 if widest is None else widest.comm_rank
        return self._names.name(pid, rank)

    def _find_ended(self, now_ns: int, *, is_last: bool) -> list[int]:
        """Processes that ended and whose last records are there: one that came later would bring the process back."""
        return [
            pid
            for pid, (at_ns, _) in self._exited.items()
            if is_last or now_ns - at_ns >= 2 * SETTLE_NS
        ]

    def _forget_ended(self, ended: Iterable[int], now_ns: int) -> list[RankProgress]:
        """The last progress records of processes that ended, which are forgotten."""
        gone = [
            replace(one, is_gone=True, ending=self._exited[pid][1])
            for pid in ended
            for one in self._build_progress(pid, now_ns, is_gone=True)
        ]
        for pid in ended:
            del self._exited[pid]
            self._tracker.forget(pid)
            self._device.forget(pid)
            self._usual.pop(pid, None)
            self._names.forget(pid)
        return gone

    def _find_gone(
        self, new: Sequence[RankProgress], living: Collection[Worker], now_ns: int
    ) -> list[RankProgress]:
        """Last records of processes that ended, which Fleet has not taken: the new at once, the others every second.

        Those of a worker that another process is by now are no longer true.
        """
        kept = [
            (made_ns, one)
            for made_ns, one in self._sent.gone
            if now_ns - made_ns <= ENDED_NS and one.rank.worker not in living
        ]
        self._sent.gone = [*kept, *((now_ns, one) for one in new)][-MAX_GONE:]
        is_due = bool(new) or now_ns - self._sent.gone_ns >= PROGRESS_GAP_NS
        return [one for _, one in self._sent.gone] if is_due else []

    def _find_stalled(self, now_ns: int) -> list[RankProgress]:
        """Ranks that make no progress: every second at first, later at the push interval or more often."""
        pids = dict.fromkeys((*self._tracker.pids, *self._device.pids))
        stalled = [one for pid in pids for one in self._build_progress(pid, now_ns)]
        longest_ns = max((one.still_ns for one in stalled), default=0)
        gap_ns = (
            PROGRESS_GAP_NS
            if longest_ns < FREQUENT_NS
            else min(self._pace.interval_ns, MAX_PROGRESS_GAP_NS)
        )
        return stalled if now_ns - self._sent.stalled_ns >= gap_ns else []

    def _build_progress(
        self, pid: int, now_ns: int, *, is_gone: bool = False
    ) -> list[RankProgress]:
        """Progress records of a process that stalls or is gone, one per communicator: each shows who waits."""
        positions = self._positions(pid)
        if not is_gone and not _is_still(positions.values(), now_ns):
            return []
        is_held = not is_gone and is_stopped(pid)
        return [
            RankProgress(
                self._rank_of(pid),
                comm,
                position.comm_rank,
                position.n_ranks,
                position.entered,
                position.left,
                CollectiveOp(position.op),
                max(now_ns - position.entry_ns, 0),
                is_stopped=is_held,
            )
            for comm, position in positions.items()
        ]


def _learn(usual: dict[str, UsualTimes], one: Finished) -> bool:
    """Add to what is usual of a process's communicators; True when the newest operations moved against it."""
    known = usual.get(one.comm) or UsualTimes()
    put_newest(usual, one.comm, known)
    return known.add(one.ops)


def _export_progress(progress: list[RankProgress], clock: Clock) -> Export:
    """Progress records as of now, with how long ago processes ended in place of when."""
    now_ns = clock.mono_ns()
    records = [
        one
        if one.ending is None
        else replace(one, ending=replace(one.ending, at_ns=max(now_ns - one.ending.at_ns, 0)))
        for one in progress
    ]
    return build_progress(records, clock.wall_ns())


def _is_still(positions: Collection[CommPosition], now_ns: int) -> bool:
    """Whether a process entered nothing for long; one communicator that is used once an hour does not hide it."""
    if not positions:
        return False
    periods = [one.pace.period_ns for one in positions if one.pace.period_ns > 0]
    still_ns = now_ns - max(one.entry_ns for one in positions)
    return still_ns > max(STILL_NS, STILL_PERIODS * min(periods, default=0.0))
