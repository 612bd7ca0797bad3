"""Straggler or not: one comparison with hysteresis, and how many samples in a row decide.

Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ingero.errors import ConfigError

EPSILON: Final = 1e-9
"""Equality is healthy, and rounding must not turn it around."""


@dataclass(frozen=True, slots=True)
class ClassifierSettings:
    """How a verdict is reached.

    Attributes:
        hysteresis: How far above the threshold a straggler must come back, in [0, 0.5).
        confirm: Samples in a row under the threshold that make a straggler; 1 is the wire's behaviour.

    Raises:
        ConfigError: A value is out of range.
    """

    hysteresis: float = 0.02
    confirm: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.hysteresis < 0.5:
            raise ConfigError(f"hysteresis must be in [0, 0.5), not {self.hysteresis:g}")
        if self.confirm < 1:
            raise ConfigError(f"confirm must be at least 1, not {self.confirm}")


class Classifier:
    """Remembers the last verdict of one node."""

    def __init__(self, settings: ClassifierSettings | None = None) -> None:
        self.settings = settings or ClassifierSettings()
        self.is_straggler = False
        self._n_under = 0

    def classify(self, score: float, threshold: float, *, may_accuse: bool = True) -> bool:
        """Compare once; whether that changed the verdict. A NaN changes nothing.

        Args:
            score: The node's.
            threshold: What it is compared with.
            may_accuse: Whether a node that was healthy may be found a straggler now, however long it was under.
        """
        if math.isnan(score) or math.isnan(threshold):
            return False
        if self.is_straggler:
            is_back = score + EPSILON >= threshold + self.settings.hysteresis
            return self._turn(to=not is_back)
        is_under = score + EPSILON < threshold
        self._n_under = self._n_under + 1 if is_under else 0
        return self._turn(to=may_accuse and self._n_under >= self.settings.confirm)

    @property
    def is_suspect(self) -> bool:
        """A straggler, or on the way to be found one: not fit to be learned from."""
        return self.is_straggler or self._n_under > 0

    def clear(self) -> None:
        """Forget the verdict: what was judged is no longer there."""
        self.is_straggler = False
        self._n_under = 0

    def _turn(self, *, to: bool) -> bool:
        is_changed = to != self.is_straggler
        self.is_straggler = to
        if is_changed:
            self._n_under = 0
        return is_changed
