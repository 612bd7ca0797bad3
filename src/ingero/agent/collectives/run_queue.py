"""Runs of operations that wait until Fleet takes them: in memory while Fleet is there, on disk while it is away.

While anything waits on disk, what is new goes behind it, so that Fleet reads every operation in order. A Fleet that is
back gets `DRAIN_SPEED` times what it would get otherwise, with how late it is, and may ask to wait.

Lossy: what the spill gives up (`ingero.agent.health.spill`), what is beyond `MAX_KEPT_OPS` where there is no spill or
the disk takes nothing, and a request that Fleet refused `MAX_REFUSALS` times (`PushCounts.n_dropped`). A batch that was
taken although its answer was lost is sent twice; Fleet drops repeats.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.agent.health.push_queue import MAX_PAUSE_NS
from ingero.agent.health.spill import Spill, SpilledBatch
from ingero.agent.health.transport import PushReply, PushTransport
from ingero.errors import BadDataError, RetryableError
from ingero.model.arrays import Records
from ingero.model.collectives import ClockKind, CollectiveRun, Rank
from ingero.otlp.codec import Export, decode_protobuf, encode_protobuf
from ingero.otlp.names import Signal
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S
from ingero.wire.collectives import build_collectives, read_collectives

MAX_KEPT_OPS: Final = 1_000_000
MAX_PUSH_OPS: Final = 65_536
"""Operations in one request, about a megabyte."""
MAX_REFUSALS: Final = 5
DRAIN_SPEED: Final = 20
"""Spilled batches sent in the time in which one is made: an hour's take three minutes."""
_MAX_AT_ONCE: Final = 8
_SPREAD: Final = 0.2
_UNREADABLE_PAUSE_NS: Final = NS_PER_S
"""Between two attempts to read what is spilled."""


@dataclass(slots=True)
class PushCounts:
    """Operations and requests since the start.

    Attributes:
        n_ops: Operations that Fleet took.
        n_dropped: Operations dropped because Fleet took none for too long, or will not take them. Of a request that it
            took in part, as many as its records have on average.
        n_pushes: Requests that Fleet took.
        n_early: Batches that did not wait for the interval.
        n_failed: Requests that it did not take.
        n_late_ops: Operations that Fleet took from disk.
    """

    n_ops: int = 0
    n_dropped: int = 0
    n_pushes: int = 0
    n_early: int = 0
    n_failed: int = 0
    n_late_ops: int = 0


class RunQueue:
    """Sends runs to Fleet, and keeps what it did not take. One thread.

    Args:
        transport: Sends.
        clock: Both clocks.
        interval_ns: Between regular pushes.
        spill: Where runs wait while Fleet is away; None keeps them in memory alone.

    Attributes:
        counts: What became of operations and requests.
        kept: Runs that wait in memory, oldest first; later ones than those of the spill.
        spill: As given.
    """

    def __init__(
        self,
        transport: PushTransport,
        clock: Clock,
        interval_ns: int = 10 * NS_PER_S,
        spill: Spill | None = None,
    ) -> None:
        self.counts = PushCounts()
        self.kept: list[CollectiveRun] = []
        self.spill = spill
        self._transport = transport
        self._clock = clock
        self._interval_ns = interval_ns
        self._n_refusals = 0
        self._drain_ns = clock.mono_ns()
        self._random = random.SystemRandom()

    @property
    def is_spilling(self) -> bool:
        """Whether anything waits on disk."""
        return self.spill is not None and self.spill.n_batches > 0

    @property
    def n_dropped(self) -> int:
        """Operations that Fleet never receives."""
        spill = self.spill
        return self.counts.n_dropped + (0 if spill is None else spill.counts.n_expired_items)

    def put(self, runs: list[CollectiveRun]) -> None:
        """Keep runs; the oldest are dropped beyond the limit."""
        self.kept += runs
        n_kept = sum(len(run.ops) for run in self.kept)
        while n_kept > MAX_KEPT_OPS:
            dropped = len(self.kept.pop(0).ops)
            n_kept -= dropped
            self.counts.n_dropped += dropped

    def push(self) -> None:
        """Send what is kept, oldest first, or spill it while Fleet is away."""
        while self.kept:
            first, rest = _cut(self.kept, MAX_PUSH_OPS)
            runs = join_runs(first)
            n_ops = sum(len(run.ops) for run in runs)
            if not self.is_spilling:
                export = build_collectives(runs, self._clock.wall_ns())
                answer = self.send(export)
                if answer.is_taken or self._is_refused(answer):
                    self._settle(answer, n_ops, export.n_items)
                    self.kept = rest
                    continue
                self._pause(answer)
            if not self._store(runs, n_ops):
                return
            self.kept = rest

    def drain(self) -> None:
        """Send what is due of the spill, oldest first."""
        for _ in range(_MAX_AT_ONCE):
            if not self.is_spilling or self._clock.mono_ns() < self._drain_ns:
                return
            assert self.spill is not None
            try:
                first = self.spill.peek()
            except RetryableError:  # the spill counts it; what is new goes behind it meanwhile
                self._drain_ns = self._clock.mono_ns() + _UNREADABLE_PAUSE_NS
                return
            if first is None:
                return
            try:
                export = self._build_late(first)
            except BadDataError as error:
                self.spill.refuse_first(error.message)
                continue
            answer = self.send(export)
            if not answer.is_taken and not self._is_refused(answer):
                self._pause(answer)
                return
            self.counts.n_late_ops += first.n_items if answer.is_taken else 0
            self._settle(answer, first.n_items, export.n_items)
            self.spill.pop()
            gap_ns = self._interval_ns // DRAIN_SPEED
            # What could not be checked in time is caught up with, up to a second's.
            least_ns = self._clock.mono_ns() - NS_PER_S
            self._drain_ns = max(self._drain_ns, least_ns) + gap_ns

    def send(self, export: Export) -> PushReply:
        """Send one request, and count it."""
        answer = self._transport.send(export, self._clock.wall_ns())
        if answer.is_taken:
            self.counts.n_pushes += 1
        else:
            self.counts.n_failed += 1
        return answer

    def _store(self, runs: list[CollectiveRun], n_ops: int) -> bool:
        if self.spill is None:
            return False
        body = encode_protobuf(build_collectives(runs, self._clock.wall_ns()))
        return self.spill.put(body, n_ops)

    def _build_late(self, batch: SpilledBatch) -> Export:
        """A stored batch as it is sent now. Raises BadDataError when it holds none."""
        read = read_collectives(decode_protobuf(batch.body, Signal.LOGS))
        if read.n_refused or not read.runs:
            raise BadDataError(read.first_problem or "no collectives")
        now_ns = self._clock.wall_ns()
        return build_collectives(read.runs, now_ns, late_ns=max(now_ns - batch.wall_ns, 0))

    def _pause(self, answer: PushReply) -> None:
        """The next try after an interval, or after the pause that Fleet asked for; many agents do not come at once."""
        pause_ns = max(min(answer.retry_after_ns or 0, MAX_PAUSE_NS), self._interval_ns)
        spread = 1 + _SPREAD * self._random.uniform(-1, 1)
        self._drain_ns = self._clock.mono_ns() + round(pause_ns * spread)

    def _settle(self, answer: PushReply, n_ops: int, n_records: int) -> None:
        """Count operations that are delivered or given up; which of its records a receiver refuses it does not say."""
        n_lost = n_ops
        if answer.is_taken:
            n_lost = round(n_ops * min(answer.n_rejected / max(n_records, 1), 1.0))
        self.counts.n_ops += n_ops - n_lost
        self.counts.n_dropped += n_lost
        self._n_refusals = 0

    def _is_refused(self, answer: PushReply) -> bool:
        """Whether the first request will never be taken: it was answered and refused again and again."""
        if answer.is_settled:
            self._n_refusals += 1
        return self._n_refusals >= MAX_REFUSALS


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
