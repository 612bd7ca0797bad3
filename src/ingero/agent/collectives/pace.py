"""How often a process enters operations on one communicator."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

KEPT_STEPS: Final = 10
_FEW_STEPS: Final = 3


@dataclass(slots=True)
class Pace:
    """What usually lies between two entries.

    A job pauses now and then for many times that, for a checkpoint, an evaluation or at its start: one such step must
    not change what is usual, or a hang soon afterwards is seen only after many times the pause. Steps that stay longer
    are usual once they are half of those that are kept.

    Attributes:
        steps: The last times between two entries, each as read: the mean where several were entered since the last.
        period_ns: Their median, the shorter of two; 0 while there is only one, which may be the start of the program.
    """

    steps: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    period_ns: float = 0.0

    def add(self, elapsed_ns: int, n_entered: int) -> None:
        """Take how long it took to enter so many operations; nothing where none was entered."""
        if n_entered <= 0:
            return
        self.steps.append(elapsed_ns / n_entered)
        if len(self.steps) >= _FEW_STEPS:
            self.period_ns = median(self.steps)
        elif len(self.steps) > 1:
            self.period_ns = min(self.steps)
