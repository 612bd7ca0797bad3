"""The node's own past: a fast and a slow average per signal, frozen while the node is a straggler.

Pure. Three averages are kept:

- *fast* (α 0.1) is what throughput is divided by; it stands still while frozen, so a permanent slowdown never becomes
  normal;
- *floor* (α 0.001) is the long memory; it stands still with it;
- *recent* (α 0.1) never stands still; recent ÷ floor is the drift that raises the degradation warning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ingero.agent.health.signals.reading import SIGNAL_NAMES, Signals
from ingero.agent.health.signals.score import clamp_share
from ingero.errors import ConfigError, ConfigProblem
from ingero.wire.names import DominantSignal

N_SIGNALS: Final = len(SIGNAL_NAMES)
LOSS_TOLERANCE: Final = 1e-9
"""A share lost that is no more than rounding."""


@dataclass(frozen=True, slots=True)
class BaselineSettings:
    """How the past is averaged.

    Attributes:
        fast_alpha: Weight of one interval in the fast average.
        floor_alpha: The same in the slow one; smaller.
        warning_ratio: recent ÷ floor under this is a degradation.
        warmup: Intervals before a warning may be raised.
        floor_warmth_min: A floor under this is too cold to compare with.

    Raises:
        ConfigError: The constants contradict each other; lists every problem.
    """

    fast_alpha: float = 0.1
    floor_alpha: float = 0.001
    warning_ratio: float = 0.5
    warmup: int = 30
    floor_warmth_min: float = 0.01

    def __post_init__(self) -> None:
        rules = (
            ("fast_alpha", 0 < self.fast_alpha < 1, "must be between 0 and 1"),
            ("floor_alpha", 0 < self.floor_alpha < 1, "must be between 0 and 1"),
            ("floor_alpha", self.floor_alpha < self.fast_alpha, "must be below fast_alpha"),
            ("warning_ratio", 0 < self.warning_ratio <= 1, "must be above 0 and at most 1"),
            ("warmup", self.warmup >= 0, "must not be negative"),
            ("floor_warmth_min", 0 <= self.floor_warmth_min <= 1, "must be between 0 and 1"),
        )
        problems = [
            ConfigProblem(name, description) for name, holds, description in rules if not holds
        ]
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True, slots=True)
class SavedBaseline:
    """What outlives a restart: raw averages, before bias correction.

    Attributes:
        n_samples: Intervals folded in.
        fast: Raw fast average per signal, in the order of `Signals`.
        floor: Raw slow average per signal.
        workload: Identity of what they were learned from; empty when it is not known.
    """

    n_samples: int
    fast: tuple[float, ...]
    floor: tuple[float, ...]
    workload: str = ""


class _Average:
    """Exponential averages that start at 0 and are read with bias correction, one per signal."""

    __slots__ = ("alpha", "raw", "seen")

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.raw = [0.0] * N_SIGNALS
        self.seen = [False] * N_SIGNALS

    def weight(self, n_samples: int) -> float:
        return -math.expm1(n_samples * math.log1p(-self.alpha))

    def fold(self, signals: Signals, n_samples: int) -> None:
        """Fold one interval in; ``n_samples`` counts it already.

        An absent value repeats the corrected average, which leaves it where it was; the first value of a signal that
        was absent so far becomes its average at once.
        """
        before, after = self.weight(n_samples - 1), self.weight(n_samples)
        for i, value in enumerate(signals):
            if value is None:
                if self.seen[i]:
                    self.raw[i] *= after / before
            elif self.seen[i] or n_samples == 1:
                self.raw[i] = self.alpha * value + (1 - self.alpha) * self.raw[i]
                self.seen[i] = True
            else:
                self.raw[i] = value * after
                self.seen[i] = True

    def read(self, i: int, n_samples: int) -> float | None:
        return self.raw[i] / self.weight(n_samples) if self.seen[i] and n_samples else None

    def restore(self, raw: tuple[float, ...]) -> None:
        self.raw = list(raw)
        self.seen = [value > 0 for value in raw]


class Baseline:
    """The averages of one node. One `fold` is one push interval."""

    def __init__(self, settings: BaselineSettings | None = None) -> None:
        self.settings = settings or BaselineSettings()
        self.reset()

    def reset(self) -> None:
        """Forget the past."""
        self.n_samples = 0
        self._n_recent = 0
        self._fast = _Average(self.settings.fast_alpha)
        self._floor = _Average(self.settings.floor_alpha)
        self._recent = _Average(self.settings.fast_alpha)

    def fold(self, signals: Signals, *, frozen: bool = False) -> None:
        """Take one interval's signals (throughput raw) into the averages.

        Args:
            signals: None and non-finite values leave their average where it is.
            frozen: The node is a straggler: only the *recent* average moves.
        """
        finite = Signals(*(v if v is not None and math.isfinite(v) else None for v in signals))
        self._n_recent += 1
        self._recent.fold(finite, self._n_recent)
        if frozen:
            return
        self.n_samples += 1
        self._fast.fold(finite, self.n_samples)
        self._floor.fold(finite, self.n_samples)

    @property
    def fast(self) -> Signals:
        """The fast averages, corrected for their start; None where nothing is known."""
        return Signals(*(self._fast.read(i, self.n_samples) for i in range(N_SIGNALS)))

    @property
    def floor(self) -> Signals:
        """The slow averages, corrected for their start."""
        return Signals(*(self._floor.read(i, self.n_samples) for i in range(N_SIGNALS)))

    def throughput_ratio(self, throughput: float | None) -> float | None:
        """A raw rate as a share of the fast average, 0..1; 0 while there is no past; None when absent."""
        if throughput is None:
            return None
        past = self._fast.read(0, self.n_samples)
        return clamp_share(throughput / past) if past is not None and past > 0 else 0.0

    def is_degraded(self) -> bool:
        """True when a warm signal has lost more than half of its long-term level."""
        if self.n_samples < self.settings.warmup or not self.n_samples:
            return False
        for i in range(N_SIGNALS):
            floor = self._floor.read(i, self.n_samples)
            recent = self._recent.read(i, self._n_recent)
            if floor is None or recent is None or floor < self.settings.floor_warmth_min:
                continue
            if recent / floor < self.settings.warning_ratio:
                return True
        return False

    def dominant_signal(self, signals: Signals) -> DominantSignal:
        """The signal that lost the largest share of its own baseline; the first of equals.

        Args:
            signals: As read: throughput raw, compared with its raw baseline.
        """
        worst, name = LOSS_TOLERANCE, DominantSignal.UNKNOWN
        for signal, value, past in zip(SIGNAL_NAMES, signals, self.fast, strict=True):
            if value is None or past is None or past <= 0:
                continue
            lost = (past - value) / past
            if lost > worst:
                worst, name = lost, signal
        return name

    def save(self) -> SavedBaseline:
        """What a restart needs."""
        return SavedBaseline(self.n_samples, tuple(self._fast.raw), tuple(self._floor.raw))

    def restore(self, saved: SavedBaseline) -> None:
        """Continue from a saved past."""
        self.n_samples = self._n_recent = saved.n_samples
        self._fast.restore(saved.fast)
        self._recent.restore(saved.fast)
        self._floor.restore(saved.floor)
