"""What a process did since it is slow, and what that is compared with: itself before, or its peers."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Final

from ingero.agent.diagnosis.history import CounterHistory
from ingero.model.counters import Work, WorkRates
from ingero.model.diagnosis import CauseKind, DiagnosisRequest
from ingero.recording.causal.excess import (
    can_be_compared,
    find_excess_causes,
    find_fall,
    find_rise,
)
from ingero.recording.causal.work_rates import MIN_OPS, find_held, find_rates
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

COUNTED: Final = frozenset({CauseKind.CPU_QUOTA, CauseKind.CPU_CONTENTION, CauseKind.CPU_STEAL})
"""Causes that the kernel counts."""
SETTLED_SHARE: Final = 0.5
"""Of the excess, from which another cause seldom comes first: by waits for a disk, of more than the excess."""
BEFORE_NS: Final = 60 * NS_PER_S
"""How far before onset, and after it, counters are looked at."""
GUARD_NS: Final = NS_PER_S
"""Left out before onset, which is an estimate."""
PEERS_NS: Final = 20 * NS_PER_S
"""Of a worker's time, that another one is compared with."""


@dataclass(frozen=True, slots=True)
class WorkComparison:
    """Finds work to compare. Never blocks.

    Attributes:
        history: What the node's ranks did.
        clock: Both clocks.
    """

    history: CounterHistory
    clock: Clock

    def is_counted(self, pid: int, request: DiagnosisRequest) -> bool:
        """Whether the kernel's counters alone explain most of why a process is slow."""
        after, then = self.find(pid, request)
        then = then or request.peers_work
        if after is None or then is None:
            return False
        causes = find_excess_causes(request.excess_share, after, then, None).causes
        return any(one.kind in COUNTED and one.share >= SETTLED_SHARE for one in causes[:1])

    def find(self, pid: int, request: DiagnosisRequest) -> tuple[Work | None, WorkRates | None]:
        """What a process did since it is slow, and before that; None where that is unknown or cannot be compared."""
        now_ns = self.clock.mono_ns()
        onset_ns = request.since_ns - self.history.offset_ns
        since_ns = max(min(onset_ns, now_ns), now_ns - BEFORE_NS)
        before = self._find_before(pid, since_ns)
        if before is None:
            since_ns = self._find_rise(pid, since_ns, now_ns)
            before = self._find_before(pid, since_ns)
        after = self.history.find_work(pid, since_ns, now_ns)
        if after is None or before is None:
            return after, None
        then = find_rates(before, find_held(after, before))
        peers_ns = self._find_peers_own(request, before.first.mono_ns, before.last.mono_ns)
        if then is None or not can_be_compared(then, after, request.excess_share, peers_ns):
            return after, None
        return after, then

    def _find_peers_own(
        self, request: DiagnosisRequest, start_ns: int, end_ns: int
    ) -> float | None:
        """The median own time of an operation of its peers on this node; None where no peer did enough."""
        followed = [self.history.find(peer, request.job) for peer in request.peers]
        works = [self.history.find_work(one[0], start_ns, end_ns) for one in followed if one]
        known_ns = [work.own_ns / work.n_ops for work in works if work and work.n_ops >= MIN_OPS]
        return median(known_ns) if known_ns else None

    def _find_before(self, pid: int, since_ns: int) -> Work | None:
        """What a process did before it was slow, up to a moment before where there is enough of that.

        The start of a program, with few and long operations, is left out where it can be seen and enough is left.
        """
        for guard_ns in (GUARD_NS, 0):
            end_ns = since_ns - guard_ns
            ops = self.history.find_ops(pid, end_ns - BEFORE_NS, end_ns)
            at = find_fall(ops["own_ns"])
            settled_ns = [] if at is None else [int(ops["entry_ns"][at])]
            for start_ns in (*settled_ns, end_ns - BEFORE_NS):
                work = self.history.find_work(pid, start_ns, end_ns)
                if work is not None and work.n_ops >= MIN_OPS:
                    return work
        return None

    def _find_rise(self, pid: int, since_ns: int, now_ns: int) -> int:
        """When own time rose, where Fleet's onset is an estimate that leaves nothing before it; else that onset."""
        ops = self.history.find_ops(pid, since_ns, now_ns)
        at = find_rise(ops["own_ns"])
        return since_ns if at is None else int(ops["entry_ns"][at])

    def find_recent(self, pid: int) -> WorkRates | None:
        """What an operation took a process of late."""
        now_ns = self.clock.mono_ns()
        work = self.history.find_work(pid, now_ns - PEERS_NS, now_ns)
        return None if work is None else find_rates(work)
