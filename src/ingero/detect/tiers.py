"""What the e-detector is told and what it tells: its settings, its two tiers, and who entered or left alarm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.model.arrays import FloatArray

ALARM: Final = 0
NOTICE: Final = 1
N_TIERS: Final = 2
MIN_PEERS: Final = 3
"""Fewest comparable workers, the judged one included."""
_POOL_TARGET: Final = 4096
_MIN_WINDOW: Final = 4


@dataclass(frozen=True, slots=True)
class EDetectorSettings:
    """What is worth naming, and how rarely to be wrong.

    Attributes:
        alpha: Budget: at most this many false alarms per operation and worker.
        alarm_slowdown: Slowdown that makes a culprit; 0.10 is 10 %.
        notice_slowdown: Slowdown that makes a drag.
        window_ops: Operations whose residuals the pooled bet looks back on. Groups so large that this would exceed
            about 4096 residuals look back on fewer.
        use_rank: Place the rank bet.
        use_pooled: Place the pooled bet.
        use_peeling: Take workers in alarm out of the reference.
        use_majority: Place the majority bet; a rank bet too, so never without those.
        dependent_ops: How many operations share one cause at least where what lasts in residuals is wider than δ.
        notice_spread: The notice tier's δ is raised to this many standard deviations of what the worker's peers
            differ by for good (`ingero.detect.lasting`), to the alarm tier's at most; 0 never raises it.
    """

    alpha: float = 1e-6
    alarm_slowdown: float = 0.10
    notice_slowdown: float = 0.03
    window_ops: int = 200
    use_rank: bool = True
    use_pooled: bool = True
    use_peeling: bool = True
    use_majority: bool = True
    dependent_ops: int = 2
    notice_spread: float = 0.0

    @property
    def slowdowns(self) -> FloatArray:
        """δ of each tier, in the order ALARM, NOTICE."""
        return np.array([self.alarm_slowdown, self.notice_slowdown])

    def window_for(self, n_peers: int) -> int:
        """Operations in the residual window of a group of this size."""
        return min(self.window_ops, max(_MIN_WINDOW, _POOL_TARGET // n_peers))


@dataclass(frozen=True, slots=True)
class Crossing:
    """A worker entered or left alarm.

    Attributes:
        group: Index of the peer group in the bank.
        worker: Index of the worker in its group.
        tier: ALARM or NOTICE.
        op: Ordinal of the operation within the group at which it happened, from 0.
        onset_op: Ordinal at which the slowdown began.
        is_alarm: True for entering, False for leaving.
        log10_evidence: Of S when entering, of the reversed test when clearing.
        is_pooled: The pooled bet had won more than those on ranks.
        is_retracted: It left because operations turned out to depend on each other for longer than was known.
        log_peak: Natural log of the most that it has won, dependence left aside.
    """

    group: int
    worker: int
    tier: int
    op: int
    onset_op: int
    is_alarm: bool
    log10_evidence: float = 0.0
    is_pooled: bool = False
    is_retracted: bool = False
    log_peak: float = 0.0
