"""Whether a cluster's evidence is of now: after Fleet was away, agents first deliver what they kept meanwhile.

What is judged then happened minutes or hours ago, and the next minute of it may say the opposite. So nothing is
concluded of a cluster while most of the ranks that report deliver late evidence, for `MAX_CATCHING_UP_NS` at most. A
few late ones, as of a node whose network was down, hold up nobody.
"""

from __future__ import annotations

from typing import Final

from ingero.model.collectives import Worker
from ingero.units import NS_PER_S

MIN_LATE_NS: Final = 60 * NS_PER_S
"""What waited less at its agent is taken as of now: a Fleet that restarts is away for seconds."""
RECENT_NS: Final = 30 * NS_PER_S
"""A rank that reported nothing for this long is not counted."""
MAX_CATCHING_UP_NS: Final = 1800 * NS_PER_S
"""No sender can keep a cluster from being judged for longer."""

_MAX_WORKERS: Final = 65_536
"""Names of more workers than this begin anew: they are a sender's."""


class Lateness:
    """What one cluster's ranks reported last: late evidence, or such of now. Not thread-safe."""

    def __init__(self) -> None:
        self._reports: dict[Worker, tuple[int, int]] = {}
        self._since_ns: int | None = None
        self._late_until_ns: int | None = None

    def note(self, worker: Worker, late_ns: int, now_ns: int) -> None:
        """Note that a rank reported."""
        if len(self._reports) >= _MAX_WORKERS:
            self._reports = {}
        self._reports[worker] = (now_ns, late_ns)
        if late_ns >= MIN_LATE_NS:
            self._late_until_ns = now_ns + RECENT_NS

    def find_late_ns(self, now_ns: int) -> int:
        """How late the evidence is that most ranks deliver; 0 when it is of now."""
        if self._late_until_ns is None or now_ns > self._late_until_ns:
            self._late_until_ns = self._since_ns = None
            return 0
        self._reports = {
            worker: report
            for worker, report in self._reports.items()
            if now_ns - report[0] <= RECENT_NS
        }
        late = sorted(ns for _, ns in self._reports.values() if ns >= MIN_LATE_NS)
        if 2 * len(late) <= len(self._reports):
            self._since_ns = None
            return 0
        if self._since_ns is None:
            self._since_ns = now_ns
        return late[len(late) // 2] if now_ns - self._since_ns <= MAX_CATCHING_UP_NS else 0
