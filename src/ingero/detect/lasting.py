"""How far healthy workers of one peer group differ for good, and what that makes of the notice tier's δ.

Healthy fleets show lasting differences: of 3 % in one, of half a percent in another. A fixed δ of 3 % reports the slower half of the
first for ever. So δ of a worker may be raised to a multiple of the spread of its *peers'* lasting residuals:

- never below the configured δ, so that whoever is like its peers up to that keeps its budget, and never above the alarm tier's;
- from the others only: how slow a worker is says nothing about its own δ. Its peers' residuals do not notice either how
  much slower than all of them it is, since they are taken against medians;
- by the median absolute deviation, so that fewer than half of the others, whatever they do, cannot move it beyond what
  the rest shows;
- from operations that are over, before those that it judges: bets against a δ that is known beforehand are as fair as against a
  fixed one, so the guarantee holds for "at most δ slower" with whatever δ stood then.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ingero.model.arrays import FloatArray, IntArray

MIN_OTHERS: Final = 5
"""Peers with a lasting level below which their spread says nothing."""
_NORMAL: Final = 1.4826
"""Standard deviation of a normal over its median absolute deviation."""


def limits_from_peers(levels: FloatArray, multiple: float, low: float, high: float) -> FloatArray:
    """δ of every worker from its peers' lasting levels.

    Args:
        levels: Each worker's lasting residual (a log), NaN where it is not known yet, shape (g, m).
        multiple: Standard deviations of the peers that are still ordinary.
        low: δ at least; also where too little is known.
        high: δ at most.

    Returns:
        Shape (g, m).
    """
    m = levels.shape[1]
    others = np.broadcast_to(levels[:, None, :], (levels.shape[0], m, m)).copy()
    others[:, np.arange(m), np.arange(m)] = np.nan
    n = np.count_nonzero(~np.isnan(others), axis=2)
    middle = _median(others, n)
    spread = _NORMAL * _median(np.abs(others - middle[:, :, None]), n)
    limits = np.clip(np.expm1(multiple * spread), low, high)
    return np.where(n >= MIN_OTHERS, limits, low)


def _median(values: FloatArray, n: IntArray) -> FloatArray:
    """Median of the last axis' n numbers that are not NaN; 0 of none."""
    ordered = np.sort(values, axis=2)
    low, high = np.maximum(n - 1, 0) // 2, np.minimum(n // 2, values.shape[2] - 1)
    pair = [np.take_along_axis(ordered, at[:, :, None], axis=2)[:, :, 0] for at in (low, high)]
    return np.nan_to_num((pair[0] + pair[1]) / 2.0)
