"""Settings of the e-detector, and its two tiers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.model.arrays import FloatArray

ALARM: Final = 0
NOTICE: Final = 1
N_TIERS: Final = 2
MIN_PEERS: Final = 3
"""Fewest comparable workers, the judged one included."""
SUMS_BUDGET: Final = 0.1
"""Share of the budget of false alarms that the sums bet has; the others lose hardly anything by it."""
SPAN_OPS: Final = 8
"""Operations whose sum is one bet: enough that bursts even out, few enough that some seconds have many of them."""
_POOL_TARGET: Final = 4096
MIN_WINDOW: Final = 4


@dataclass(frozen=True, slots=True)
class EDetectorSettings:
    """Which slowdowns are reported, and the rate of false alarms.

    Attributes:
        alpha: Budget: at most this many false alarms per operation and worker.
        alarm_slowdown: Slowdown that makes a culprit; 0.10 is 10 %.
        notice_slowdown: Slowdown that makes a drag.
        window_ops: Operations whose residuals the pooled bet uses. Groups so large that this would exceed about 4096
            residuals use fewer.
        use_rank: Place the rank bet.
        use_pooled: Place the pooled bet.
        use_peeling: Take workers in alarm out of the reference.
        use_majority: Place the majority bet; a rank bet too, so never without those.
        use_far: Place the far bet; a pooled bet too, so never without that.
        use_sums: Place the sums bet; never without both of the first two.
        dependent_ops: Least effective block length where shared causes in residuals reach beyond δ.
        notice_spread: The notice tier's δ is raised to this many standard deviations of the persistent bias of the
            worker's peers (`ingero.detect.ranks.persistence`), to the alarm tier's at most; 0 never raises it.
    """

    alpha: float = 1e-6
    alarm_slowdown: float = 0.10
    notice_slowdown: float = 0.03
    window_ops: int = 200
    use_rank: bool = True
    use_pooled: bool = True
    use_peeling: bool = True
    use_majority: bool = True
    use_far: bool = True
    use_sums: bool = True
    dependent_ops: int = 2
    notice_spread: float = 0.0

    @property
    def slowdowns(self) -> FloatArray:
        """δ of each tier, in the order ALARM, NOTICE."""
        return np.array([self.alarm_slowdown, self.notice_slowdown])

    def window_for(self, n_peers: int) -> int:
        """Operations in the residual window of a group of this size."""
        return min(self.window_ops, max(MIN_WINDOW, _POOL_TARGET // n_peers))

    @property
    def log_slowdowns(self) -> FloatArray:
        """log(1 + δ) of each tier, in the same order."""
        return np.log1p(self.slowdowns)

    @property
    def log_threshold(self) -> float:
        """Natural log of the evidence that makes an alarm."""
        return math.log(1.0 / self.alpha)

    @property
    def has_majority(self) -> bool:
        """Whether the majority bet is placed."""
        return self.use_majority and self.use_rank

    @property
    def has_far(self) -> bool:
        """Whether the far bet is placed."""
        return self.use_far and self.use_pooled

    @property
    def has_sums(self) -> bool:
        """Whether the sums bet is placed."""
        return self.use_sums and self.use_rank and self.use_pooled

    @property
    def log_weights(self) -> FloatArray:
        """Natural logs of the budget's shares of the first processes, which are alike, and of the sums bet's."""
        n_alike = 1 + (self.use_rank and self.use_pooled) + self.has_majority + self.has_far
        for_sums = SUMS_BUDGET if self.has_sums else 0.0
        return np.log([(1.0 - for_sums) / n_alike, SUMS_BUDGET])
