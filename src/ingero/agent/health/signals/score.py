"""The health score: a weighted mean of four shares, halved when the worst of them is bad.

Pure. The formula and its constants are the wire's, so that scores of different agents compare.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ingero.agent.health.signals.reading import Signals
from ingero.errors import ConfigError, ConfigProblem

_SUM_TOLERANCE: Final = 1e-6


@dataclass(frozen=True, slots=True)
class ScoreSettings:
    """How signals become a score.

    Attributes:
        weights: In the order of `Signals`; each above 0, together 1.
        penalty_floor: At or below this least signal the score is halved.
        degradation_zone: Below this least signal the penalty starts.

    Raises:
        ConfigError: The constants contradict each other; lists every problem.
    """

    weights: tuple[float, float, float, float] = (0.40, 0.25, 0.20, 0.15)
    penalty_floor: float = 0.25
    degradation_zone: float = 0.35

    def __post_init__(self) -> None:
        problems = []
        if any(not weight > 0 for weight in self.weights):
            problems.append(ConfigProblem("weights", "each must be above 0"))
        if not abs(sum(self.weights) - 1) <= _SUM_TOLERANCE:
            problems.append(
                ConfigProblem("weights", f"must add up to 1, not {sum(self.weights):g}")
            )
        if not 0 <= self.penalty_floor < self.degradation_zone <= 1:
            problems.append(
                ConfigProblem("penalty_floor", "needs 0 <= penalty_floor < degradation_zone <= 1")
            )
        if problems:
            raise ConfigError(problems)


DEFAULTS: Final = ScoreSettings()


def compute_score(signals: Signals, settings: ScoreSettings = DEFAULTS) -> float | None:
    """Score four shares, 0..1 and 1 is healthy; None when not one of them is known.

    An absent signal takes no part: the weights of the others are scaled up to 1. A NaN or infinity counts as 0, as on
    the wire; the loop makes it absent before it comes here.

    Source: wire contract of agent v0.17, ``health score``; vectors in ``tests/agent/health/test_score.py``.
    """
    known = [
        (weight, clamp_share(value))
        for weight, value in zip(settings.weights, signals, strict=True)
        if value is not None
    ]
    if not known:
        return None
    total = 1.0 if len(known) == len(signals) else sum(weight for weight, _ in known)
    raw = sum(weight * value for weight, value in known) / total
    worst = min(value for _, value in known)
    return clamp_share(raw * _penalty(worst, settings))


def clamp_share(value: float) -> float:
    """Force a number into 0..1; what is not finite becomes 0."""
    return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0


def _penalty(worst: float, settings: ScoreSettings) -> float:
    if worst >= settings.degradation_zone:
        return 1.0
    if worst <= settings.penalty_floor:
        return 0.5
    span = settings.degradation_zone - settings.penalty_floor
    return 0.5 + 0.5 * (worst - settings.penalty_floor) / span
