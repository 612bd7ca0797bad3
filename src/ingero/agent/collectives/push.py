"""Pushes of one node's collectives: a batch per communicator and rank, and where ranks stand when nothing moves.

A batch goes out every push interval, and early when a rank's own time or its time inside collectives moves against its
own past: a slow rank sees the first, everybody who waits for it the second, so all of them speak at once.

Lossy: what Fleet does not take is kept and sent again, up to `MAX_KEPT_OPS`; beyond it the oldest are dropped, and so
is a request that it refused `MAX_REFUSALS` times without asking for patience (`PushCounts.n_dropped`). A batch that was
taken although its answer was lost is sent twice; Fleet drops repeats.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ingero.agent.collectives.device import DeviceCollectives
from ingero.agent.collectives.host import SETTLE_NS, CollectiveTracker, Finished, Place
from ingero.agent.health.account import CollectiveAccount
from ingero.agent.health.body import NodeIdentity
from ingero.agent.health.transport import PushReply, PushTransport
from ingero.model.arrays import Records
from ingero.model.collectives import ClockKind, CollectiveOp, CollectiveRun, Rank
from ingero.model.events import Source
from ingero.model.progress import RankProgress
from ingero.otlp.codec import Export
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S
from ingero.wire.collectives import build_collectives
from ingero.wire.progress import build_progress

MAX_KEPT_OPS: Final = 1_000_000
MAX_PUSH_OPS: Final = 65_536
"""Operations in one request, about a megabyte."""
MAX_REFUSALS: Final = 5
MOVED: Final = 0.08
"""Share of a rank's usual time per operation by which a change is pushed at once."""
RECENT_OPS: Final = 8
_ADAPT: Final = 0.02
"""Weight of an operation in what is usual: about fifty operations' memory."""
_LEARNED_OPS: Final = 20
STILL_NS: Final = 3 * NS_PER_S
STILL_PERIODS: Final = 10
"""A rank stands still when it entered nothing for this long and for this many of its usual periods."""
STANDING_GAP_NS: Final = NS_PER_S
LOUD_NS: Final = 60 * NS_PER_S
"""After this long standings are repeated at the push interval only."""


@dataclass(frozen=True, slots=True)
class PushPace:
    """How often.

    Attributes:
        interval_ns: Between regular pushes.
        early_gap_ns: Least time between an early push and the push before it.
    """

    interval_ns: int = 10 * NS_PER_S
    early_gap_ns: int = NS_PER_S


@dataclass(slots=True)
class PushCounts:
    """What happened since the start.

    Attributes:
        n_ops: Operations that Fleet took.
        n_dropped: Operations dropped because Fleet took none for too long, or will not take them.
        n_pushes: Requests that Fleet took.
        n_early: Batches that did not wait for the interval.
        n_failed: Requests that it did not take.
    """

    n_ops: int = 0
    n_dropped: int = 0
    n_pushes: int = 0
    n_early: int = 0
    n_failed: int = 0


@dataclass(slots=True)
class Usual:
    """What a rank's operations on one communicator usually take, and whether the newest differ.

    Attributes:
        own_ns: Usual own time.
        inside_ns: Usual time inside.
        n_ops: Operations learned from.
    """

    own_ns: float = 0.0
    inside_ns: float = 0.0
    n_ops: int = 0
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT_OPS))

    def add(self, ops: Records) -> bool:
        """Take operations whose times are known; True when the newest moved against what was usual before them."""
        ops = ops[(ops["own_ns"] >= 0) & (ops["inside_ns"] >= 0)]
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


class CollectivePusher:
    """Collects from the tracing thread, pushes from its own.

    Args:
        identity: The node.
        transport: The way to Fleet.
        tracker: Turns kernel records into rows.
        clock: Both clocks.
        pace: How often.
        device: What plug-ins for NCCL tell; None reads none.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        transport: PushTransport,
        tracker: CollectiveTracker,
        clock: Clock,
        pace: PushPace,
        device: DeviceCollectives | None = None,
    ) -> None:
        self.counts = PushCounts()
        self._device = device or DeviceCollectives()
        self._identity = identity
        self._transport = transport
        self._tracker = tracker
        self._clock = clock
        self._pace = pace
        self._lock = threading.Lock()
        self._offset_ns = clock.wall_ns() - clock.mono_ns()
        self._ranks: dict[int, int] = {}
        self._jobs: dict[int, str] = {}
        self._named: dict[tuple[int, int], Rank] = {}
        self._holders: dict[tuple[str, int], int] = {}
        self._kept: list[CollectiveRun] = []
        self._usual: dict[tuple[int, str], Usual] = {}
        self._exited: dict[int, int] = {}
        self._n_refusals = 0
        self._pushed_ns = self._stood_ns = clock.mono_ns()

    def account(self) -> CollectiveAccount:
        """What became of the node's collectives so far. Any thread; its numbers may be a moment apart."""
        counts, tracker, device = self.counts, self._tracker, self._device.counts
        return CollectiveAccount(
            taken=counts.n_ops,
            waiting=sum(len(run.ops) for run in list(self._kept)),
            dropped=counts.n_dropped,
            unknown_communicator=tracker.n_unknown,
            without_end=tracker.n_unsynced,
            plugin_told=device.n_ops,
            plugin_replaced=device.n_superseded,
            plugin_lost=device.n_lost,
            plugin_refused=device.n_refused,
            requests_taken=counts.n_pushes,
            requests_failed=counts.n_failed,
        )

    # ── From the tracing thread ─────────────────────────────────────────────

    def note_process(self, pid: int, rank: int, job: str = "") -> None:
        """A process, its global rank and its job; -1 and empty where its launcher gave none."""
        with self._lock:
            self._forget_name(pid)
            self._ranks[pid], self._jobs[pid] = rank, job
            if rank >= 0:
                self._name(pid, rank)
            self._device.note_process(pid)

    def note_exit(self, pid: int) -> None:
        """A process ended."""
        with self._lock:
            self._exited.setdefault(pid, self._clock.mono_ns())
            self._device.note_exit(pid)

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
        inside = frames[(frames["frame"]["source"] == Source.NCCL) & (frames["frame"]["seq"] > 0)]
        with self._lock:
            for pid, frame in zip(inside["pid"].tolist(), inside["frame"], strict=True):
                place = self._tracker.places(pid).get(f"{int(frame['comm_hash']):016x}")
                if place is not None and int(frame["seq"]) > place.entered:
                    place.entered, place.entry_ns = int(frame["seq"]), int(frame["entry_ns"])

    # ── On the pushing thread ───────────────────────────────────────────────

    def look(self) -> None:
        """Take what is complete, and push what is due."""
        now_ns = self._clock.mono_ns()
        with self._lock:
            finished = self._take_finished(now_ns)
            runs = [self._build_run(one) for one in finished]
            usual = [self._usual.setdefault((one.pid, one.comm), Usual()) for one in finished]
            moved = [known.add(one.ops) for known, one in zip(usual, finished, strict=True)]
            standings = self._find_standings(now_ns)
        self._keep(runs)
        since_ns = now_ns - self._pushed_ns
        is_early = any(moved) and since_ns >= self._pace.early_gap_ns
        if self._kept and (is_early or standings or since_ns >= self._pace.interval_ns):
            self.counts.n_early += is_early
            self._push_kept(now_ns)
        if standings:
            self._stood_ns = now_ns
            self._send(build_progress(standings, self._clock.wall_ns()))

    def finish(self) -> None:
        """Send what is left, once."""
        with self._lock:
            self._device.end()
        self.look()
        if self._kept:
            self._push_kept(self._clock.mono_ns())
        with self._lock:
            self._device.close()

    def _take_finished(self, now_ns: int) -> list[Finished]:
        """What is complete, by the device's clock where a plug-in tells of it."""
        self._device.read(now_ns)
        return self._device.take(self._tracker.take(now_ns), now_ns)

    def _places(self, pid: int) -> dict[str, Place]:
        """How far a process is: its plug-in's word, whose communicators are those of its rows, before the probes'."""
        return self._device.places(pid) or self._tracker.places(pid)

    def _build_run(self, one: Finished) -> CollectiveRun:
        ops = one.ops.copy()
        ops["entry_ns"] += self._offset_ns
        return CollectiveRun(
            self._rank_of(one.pid), one.comm, one.comm_rank, one.n_ranks, one.clock, ops
        )

    def _rank_of(self, pid: int) -> Rank:
        """The launcher's rank; where it gave none, the rank on the widest communicator, which is the job's own."""
        rank = self._ranks.get(pid, -1)
        if rank < 0:
            places = self._places(pid).values()
            widest = max(places, key=lambda place: place.n_ranks, default=None)
            rank = -1 if widest is None else widest.comm_rank
        return self._name(pid, rank)

    def _name(self, pid: int, rank: int) -> Rank:
        """Who a process is to Fleet.

        Two live processes of one job and rank are two jobs whose launchers did not tell them apart: the later one is
        named by its pid too. One that takes the place of one that ended is the same worker.
        """
        known = self._named.get((pid, rank))
        if known is None:
            identity, job = self._identity, self._jobs.get(pid, "")
            holder = self._holders.get((job, rank))
            if holder is None or holder in self._exited:
                self._holders[job, rank] = pid
            else:
                job = f"{job}/{pid}" if job else str(pid)
            known = Rank(identity.cluster_id, identity.node_id, rank, job=job)
            self._named[pid, rank] = known
        return known

    def _forget_name(self, pid: int) -> None:
        self._named = {key: rank for key, rank in self._named.items() if key[0] != pid}
        self._holders = {key: held for key, held in self._holders.items() if held != pid}

    def _keep(self, runs: list[CollectiveRun]) -> None:
        self._kept += runs
        n_kept = sum(len(run.ops) for run in self._kept)
        while n_kept > MAX_KEPT_OPS:
            dropped = len(self._kept.pop(0).ops)
            n_kept -= dropped
            self.counts.n_dropped += dropped

    def _push_kept(self, now_ns: int) -> None:
        """Send what is kept, oldest first, until Fleet does not take a request."""
        self._pushed_ns = now_ns
        while self._kept:
            first, rest = _cut(self._kept, MAX_PUSH_OPS)
            runs = join_runs(first)
            answer = self._send(build_collectives(runs, self._clock.wall_ns()))
            n_ops = sum(len(run.ops) for run in runs)
            if answer.is_taken:
                self.counts.n_ops += n_ops
            elif self._is_refused(answer):
                self.counts.n_dropped += n_ops
            else:
                return
            self._kept, self._n_refusals = rest, 0

    def _is_refused(self, answer: PushReply) -> bool:
        """Whether the first request will never be taken: refused again and again, though somebody answers."""
        if not answer.is_cut_off and answer.retry_after_ns is None:
            self._n_refusals += 1
        return self._n_refusals >= MAX_REFUSALS

    def _send(self, export: Export) -> PushReply:
        answer = self._transport.send(export, self._clock.wall_ns())
        if answer.is_taken:
            self.counts.n_pushes += 1
        else:
            self.counts.n_failed += 1
        return answer

    def _find_standings(self, now_ns: int) -> list[RankProgress]:
        """Ranks that ended, at once; ranks that stand still, every second."""
        # Once its last records are taken: one that came later would bring the process back.
        ended = [pid for pid, at_ns in self._exited.items() if now_ns - at_ns >= 2 * SETTLE_NS]
        gone = [one for pid in ended for one in self._say(pid, now_ns, is_gone=True)]
        for pid in ended:
            del self._exited[pid]
            self._tracker.forget(pid)
            self._device.forget(pid)
            self._ranks.pop(pid, None)
            self._jobs.pop(pid, None)
            self._usual = {key: usual for key, usual in self._usual.items() if key[0] != pid}
            self._forget_name(pid)
        pids = dict.fromkeys((*self._tracker.pids, *self._device.pids))
        still = [one for pid in pids for one in self._say(pid, now_ns)]
        quiet_ns = max((one.still_ns for one in still), default=0)
        gap_ns = STANDING_GAP_NS if quiet_ns < LOUD_NS else self._pace.interval_ns
        return gone + (still if now_ns - self._stood_ns >= gap_ns else [])

    def _say(self, pid: int, now_ns: int, *, is_gone: bool = False) -> list[RankProgress]:
        """Where a process stands, when it does or is gone: on every communicator, as each tells who waits."""
        places = self._places(pid)
        is_still = bool(places) and all(_is_still(place, now_ns) for place in places.values())
        if not is_still and not is_gone:
            return []
        return [
            RankProgress(
                self._rank_of(pid),
                comm,
                place.comm_rank,
                place.n_ranks,
                place.entered,
                place.left,
                CollectiveOp(place.op),
                max(now_ns - place.entry_ns, 0),
                is_gone,
            )
            for comm, place in places.items()
        ]


def join_runs(runs: Iterable[CollectiveRun]) -> list[CollectiveRun]:
    """One run per rank, communicator and clock, its operations in the order given."""
    parts: dict[tuple[Rank, str, int, int, ClockKind], list[Records]] = {}
    for run in runs:
        key = (run.rank, run.comm, run.comm_rank, run.n_ranks, run.clock)
        parts.setdefault(key, []).append(run.ops)
    return [CollectiveRun(*key, np.concatenate(ops)) for key, ops in parts.items()]


def _cut(runs: list[CollectiveRun], n_ops: int) -> tuple[list[CollectiveRun], list[CollectiveRun]]:
    """The first runs with at most ``n_ops`` operations, at least one run, and the rest."""
    upto = np.cumsum([len(run.ops) for run in runs])
    at = max(int(np.searchsorted(upto, n_ops, "right")), 1)
    return runs[:at], runs[at:]


def _is_still(place: Place, now_ns: int) -> bool:
    return now_ns - place.entry_ns > max(STILL_NS, STILL_PERIODS * place.period_ns)
