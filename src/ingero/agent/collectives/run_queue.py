"""Runs of operations that wait until Fleet takes them.

Lossy: beyond `MAX_KEPT_OPS` the oldest are dropped, and so is a request that Fleet refused `MAX_REFUSALS` times without
asking the agent to wait (`PushCounts.n_dropped`). A batch that was taken although its answer was lost is sent twice;
Fleet drops repeats.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.agent.health.transport import PushReply, PushTransport
from ingero.model.arrays import Records
from ingero.model.collectives import ClockKind, CollectiveRun, Rank
from ingero.otlp.codec import Export
from ingero.telemetry.clock import Clock
from ingero.wire.collectives import build_collectives

MAX_KEPT_OPS: Final = 1_000_000
MAX_PUSH_OPS: Final = 65_536
"""Operations in one request, about a megabyte."""
MAX_REFUSALS: Final = 5


@dataclass(slots=True)
class PushCounts:
    """Operations and requests since the start.

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


class RunQueue:
    """Sends runs to Fleet, and keeps what it did not take. One thread.

    Args:
        transport: Sends.
        clock: Both clocks.

    Attributes:
        counts: What became of operations and requests.
        kept: Runs that wait, oldest first.
    """

    def __init__(self, transport: PushTransport, clock: Clock) -> None:
        self.counts = PushCounts()
        self.kept: list[CollectiveRun] = []
        self._transport = transport
        self._clock = clock
        self._n_refusals = 0

    def put(self, runs: list[CollectiveRun]) -> None:
        """Keep runs; the oldest are dropped beyond the limit."""
        self.kept += runs
        n_kept = sum(len(run.ops) for run in self.kept)
        while n_kept > MAX_KEPT_OPS:
            dropped = len(self.kept.pop(0).ops)
            n_kept -= dropped
            self.counts.n_dropped += dropped

    def push(self) -> None:
        """Send what is kept, oldest first, until Fleet does not take a request."""
        while self.kept:
            first, rest = _cut(self.kept, MAX_PUSH_OPS)
            runs = join_runs(first)
            answer = self.send(build_collectives(runs, self._clock.wall_ns()))
            n_ops = sum(len(run.ops) for run in runs)
            if answer.is_taken:
                self.counts.n_ops += n_ops
            elif self._is_refused(answer):
                self.counts.n_dropped += n_ops
            else:
                return
            self.kept, self._n_refusals = rest, 0

    def send(self, export: Export) -> PushReply:
        """Send one request, and count it."""
        answer = self._transport.send(export, self._clock.wall_ns())
        if answer.is_taken:
            self.counts.n_pushes += 1
        else:
            self.counts.n_failed += 1
        return answer

    def _is_refused(self, answer: PushReply) -> bool:
        """Whether the first request will never be taken: it was answered and refused again and again."""
        if not answer.is_cut_off and answer.retry_after_ns is None:
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
