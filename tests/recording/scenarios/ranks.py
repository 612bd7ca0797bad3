"""Recordings of several ranks that meet in collectives: together, late, apart, over a slow link, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ingero.model.events import HostOp, NcclOp, Source, TcpOp
from ingero.recording.scenarios.builder import RecordingBuilder
from ingero.recording.scenarios.loop import FUNCTION, LAUNCH, SYNC, Loop
from ingero.units import NS_PER_MS, NS_PER_S, NS_PER_US

N_RANKS: Final = 4
N_STEPS: Final = 60
_STEP_NS: Final = 40 * NS_PER_MS
_FIRST_PID: Final = 6000


def _no_ms(_seq: int, _rank: int) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """Ranks of one node that meet in an all-reduce every step.

    Attributes:
        late_ms: How much later than 12 ms after the step's beginning a rank arrives, by (step, rank).
        transfer_ms: From the last arrival to the end, by (step, communicator).
        differs_at: Step at which rank 1 calls an all-gather instead; -1 for never.
        smaller_at: Step at which rank 1 brings half of the bytes; -1 for never.
        ends_at: Rank 2's last step; the others enter one more and wait.
        n_comms: Communicators of four ranks each.
    """

    late_ms: Callable[[int, int], float] = _no_ms
    transfer_ms: Callable[[int, int], float] = field(default=lambda _seq, _comm: 2.0)
    differs_at: int = -1
    smaller_at: int = -1
    ends_at: int = N_STEPS
    n_comms: int = 1

    def build(self) -> RecordingBuilder:
        """The recording."""
        built = RecordingBuilder()
        for comm in range(self.n_comms):
            for rank in range(N_RANKS):
                self._rank(built, comm, rank)
        return built

    def _rank(self, built: RecordingBuilder, comm: int, rank: int) -> None:
        pid = _FIRST_PID + comm * N_RANKS + rank
        loop = Loop(built, pid, f"rank{rank}", seed=pid, gpu_id=comm * N_RANKS + rank)
        for seq in range(min(self.ends_at + (rank != 2), N_STEPS)):
            arrivals = [self._arrival_ns(seq, other) for other in range(N_RANKS)]
            end_ns = max(arrivals) + round(self.transfer_ms(seq, comm) * NS_PER_MS)
            op = NcclOp.ALL_GATHER if (seq, rank) == (self.differs_at, 1) else NcclOp.ALL_REDUCE
            is_stuck = seq == self.ends_at
            built.call(
                (Source.NCCL, op), arrivals[rank], 20_000 if is_stuck else end_ns - arrivals[rank], pid,
                gpu_id=comm * N_RANKS + rank,
                arg0=(32 if (seq, rank) == (self.smaller_at, 1) else 64) << 20,
                arg1=0xC0FFEE + comm, arg2=seq, arg3=rank << 32 | N_RANKS,
            )  # fmt: skip
            loop.at_ns = arrivals[rank] - 8 * NS_PER_MS
            loop.call(LAUNCH, 12 * NS_PER_US, arg0=FUNCTION)
            loop.call(SYNC, 7 * NS_PER_MS)

    def _arrival_ns(self, seq: int, rank: int) -> int:
        jitter_ns = (rank * 37_000 + seq * 91_000) % 300_000
        return (
            seq * _STEP_NS + 12 * NS_PER_MS + jitter_ns + round(self.late_ms(seq, rank) * NS_PER_MS)
        )


def balanced_ranks() -> RecordingBuilder:
    """Four ranks that arrive together."""
    return Meeting().build()


def late_rank() -> RecordingBuilder:
    """Rank 2 arrives last."""
    return Meeting(late_ms=lambda _seq, rank: 8.0 * (rank == 2)).build()


def late_rank_async() -> RecordingBuilder:
    """Rank 2 arrives last, and the calls only enqueue: the wait shows in the synchronisation behind them."""
    built = RecordingBuilder()
    for rank in range(4):
        for seq in range(60):
            arrival_ns = (
                seq * 40 * NS_PER_MS
                + (20 if rank == 2 else 12) * NS_PER_MS
                + seq * 7_000
                + rank * 11_000
            )
            done_ns = seq * 40 * NS_PER_MS + 22 * NS_PER_MS
            pid = 6000 + rank
            enqueued_ns = built.call(
                (Source.NCCL, NcclOp.ALL_REDUCE), arrival_ns, 20_000, pid, gpu_id=rank,
                arg0=64 << 20, arg1=0xC0FFEE, arg2=seq, arg3=rank << 32 | 4,
            )  # fmt: skip
            built.call(SYNC, enqueued_ns + 5_000, done_ns - enqueued_ns, pid, gpu_id=rank)
    return built


def rank_skew() -> RecordingBuilder:
    """Samples of uneven length: every rank arrives when its own is done."""
    late = np.random.default_rng(5).uniform(0, 32, (N_STEPS, N_RANKS))
    return Meeting(late_ms=lambda seq, rank: float(late[seq, rank])).build()


def slow_link() -> RecordingBuilder:
    """From the twentieth step on a link works at a fifth of its speed."""
    return Meeting(transfer_ms=lambda seq, _comm: 10.0 if seq >= 20 else 2.0).build()


def slow_link_from_the_start() -> RecordingBuilder:
    """One of four communicators is slow from its first operation on."""
    return Meeting(transfer_ms=lambda _seq, comm: 10.0 if comm == 3 else 2.0, n_comms=4).build()


def tcp_retransmits(*, hits_slow: bool = True) -> RecordingBuilder:
    """Segments are sent again during every third collective.

    Args:
        hits_slow: Those collectives take longer; without, all take the same time.
    """
    slow_ms = 12.0 if hits_slow else 2.0
    built = Meeting(transfer_ms=lambda seq, _comm: 2.0 if seq % 3 else slow_ms).build()
    for seq in range(0, N_STEPS, 3):
        for again in range(4):
            at_ns = seq * _STEP_NS + 12 * NS_PER_MS + (350 + again * 300) * NS_PER_US
            built.call((Source.TCP, TcpOp.RETRANSMIT), at_ns, 0, 0, arg0=0x0A000001_0A000002)
    return built


def collective_disagreement() -> RecordingBuilder:
    """Rank 1 takes another branch once."""
    return Meeting(differs_at=31).build()


def collective_of_other_size() -> RecordingBuilder:
    """Rank 1 brings half a tensor once."""
    return Meeting(smaller_at=31).build()


def collective_hang(*, silent_s: int = 40, is_over: bool = False) -> RecordingBuilder:
    """Rank 2 leaves the loop after forty steps; the others wait in the next collective, and a monitor goes on.

    Args:
        silent_s: How long the recording goes on.
        is_over: The others give up and end their processes.
    """
    built = Meeting(ends_at=40).build()
    for second in range(silent_s):
        at_ns = 41 * _STEP_NS + second * NS_PER_S
        built.call((Source.HOST, HostOp.EXEC), at_ns, 0, 77)
    for rank in range(N_RANKS) if is_over else ():
        built.call((Source.HOST, HostOp.EXIT), 42 * _STEP_NS, 0, _FIRST_PID + rank)
    return built


RANK_FAULTS: Final[dict[str, Callable[[], RecordingBuilder]]] = {
    "late_rank": late_rank,
    "rank_skew": rank_skew,
    "collective_disagreement": collective_disagreement,
    "collective_hang": collective_hang,
    "slow_link": slow_link,
    "tcp_retransmits": tcp_retransmits,
}
"""A firing recording for each rule about ranks."""
