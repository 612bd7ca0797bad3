"""How much peers usually work before an operation, so that operations before which there is next to none stay apart.

A step of data-parallel training may reduce its gradients in several buckets: a rank works before the first, and enters
the others at once. What it works before these, a hundredth of the rest, is noise of a factor of two to three, and tells
nothing of how long a step takes.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ingero.model.arrays import FloatArray

SHARE: Final = 0.01
"""Of the usual. What is left out holds less than a tenth of all own time: below it lie nine operations for each long
one at most, as the usual is a `_QUANTILE`."""
_QUANTILE: Final = 0.9
"""Of the last operations: one that took very long, as the first of a job, does not count."""
_WINDOW: Final = 64
_EVERY: Final = 32
"""Operations between two estimates. Counted from the group's first, so how reports were cut changes nothing."""


class UsualWork:
    """The typical peer's own time before the last operations of a group."""

    def __init__(self) -> None:
        self._n_ops = 0
        self._last = np.full(_WINDOW, np.nan)
        self._least = 0.0

    def find_least(self, typical_ns: FloatArray) -> FloatArray:
        """Add operations, and say how much work counts before each of them.

        Args:
            typical_ns: Median of own times, NaN where nobody has one, shape (T,).

        Returns:
            Nanoseconds, shape (T,), from operations before it; 0 for the first ones.
        """
        least = np.empty(len(typical_ns))
        at = 0
        while at < len(typical_ns):
            if self._n_ops % _EVERY == 0:
                self._estimate()
            part = typical_ns[at : at + _EVERY - self._n_ops % _EVERY]
            least[at : at + len(part)] = self._least
            self._last[(self._n_ops + np.arange(len(part))) % _WINDOW] = part
            self._n_ops += len(part)
            at += len(part)
        return least

    def _estimate(self) -> None:
        ordered = np.sort(self._last)  # NaN stands last
        n_known = _WINDOW - int(np.count_nonzero(np.isnan(ordered)))
        if n_known:
            at = _QUANTILE * (n_known - 1)
            low, high = ordered[int(at)], ordered[min(int(at) + 1, n_known - 1)]
            self._least = SHARE * float(low + (high - low) * (at - int(at)))
