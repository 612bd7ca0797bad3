"""How long the steps of one phase usually take, and which of them take far longer.

A step is an outlier against the 95th percentile of those before it that were none. When most of the newest steps are
outliers, the server does something else now: they become what is usual.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ingero.model.arrays import BoolArray, FloatArray, IntArray
from ingero.units import NS_PER_MS

BUCKETS: Final = ("", "1.5x", "2x", "3x")
"""Names of the buckets by number; the last is of steps at or above the ratio that is set, 3 unless it is another."""
MIN_EXTRA_NS: Final = NS_PER_MS
"""A step that takes less beyond the median is no outlier, however short the others are: a wake-up costs as much."""
_RATIOS: Final = (1.5, 2.0)
_WINDOW: Final = 512
_QUANTILE: Final = 0.95


@dataclass(slots=True)
class DurationBaseline:
    """The usual durations of one phase of one server.

    Args:
        warmup: Steps to see before any is an outlier.
        ratio: Times the 95th percentile, from which a step is in the last bucket.

    Attributes:
        n_steps: Steps so far.
        mean_ns: Mean of the usual durations; 0 before the first.
        median_ns: Their median.
        p95_ns: Their 95th percentile.
    """

    warmup: int
    ratio: float
    n_steps: int = 0
    mean_ns: float = 0.0
    median_ns: float = 0.0
    p95_ns: float = 0.0
    _usual: FloatArray = field(default_factory=lambda: np.zeros(0))
    _newest: FloatArray = field(default_factory=lambda: np.zeros(0))
    _was_outlier: BoolArray = field(default_factory=lambda: np.zeros(0, bool))

    def take(self, durations: FloatArray) -> IntArray:
        """Judge new steps by those before them, then learn from them.

        Args:
            durations: Nanoseconds, shape (n,), in order of time.

        Returns:
            Index into `BUCKETS`, shape (n,); 0 for a usual step.
        """
        n_learned = min(max(self.warmup - len(self._usual), 0), len(durations))
        buckets = np.zeros(len(durations), np.int64)
        if n_learned:
            self._learn(durations[:n_learned])
        rest = durations[n_learned:]
        if len(rest):
            buckets[n_learned:] = self._judge(rest)
            self._learn(rest[buckets[n_learned:] == 0])
        self.n_steps += len(durations)
        self._newest = np.concatenate([self._newest, durations])[-self.warmup :]
        self._was_outlier = np.concatenate([self._was_outlier, buckets > 0])[-self.warmup :]
        if len(self._newest) == self.warmup and 2 * self._was_outlier.sum() > self.warmup:
            self._usual = np.zeros(0)
            self._learn(self._newest)
            self._was_outlier = np.zeros(len(self._newest), bool)
        return buckets

    def _judge(self, durations: FloatArray) -> IntArray:
        found = np.searchsorted(
            np.array([*_RATIOS, self.ratio]) * self.p95_ns, durations, side="right"
        )
        is_worth = durations - self.median_ns >= MIN_EXTRA_NS
        judged: IntArray = np.where(is_worth, found, 0).astype(np.int64)
        return judged

    def _learn(self, durations: FloatArray) -> None:
        if not len(durations):
            return
        self._usual = np.concatenate([self._usual, durations])[-_WINDOW:]
        self.mean_ns = float(self._usual.mean())
        self.median_ns = float(np.median(self._usual))
        self.p95_ns = float(np.quantile(self._usual, _QUANTILE))
