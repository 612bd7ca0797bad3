"""What persists in residuals: causes that operations share, and differences between healthy workers.

*Shared causes* make many operations one piece of evidence: the effective block length (`BlockMeans`).

*Persistent bias.* Workers of a healthy fleet differ persistently: by 3 % in one, by half a percent in another. A fixed
δ of 3 % reports the slower half of the first for ever. So δ of a worker's notice tier may be raised to a multiple of
the spread of its *peers'* persistent residuals:

- never below the configured δ, so that a worker that is like its peers up to that keeps its budget, and never above
  the alarm tier's;
- from the others only: how slow a worker is says nothing about its own δ. Its peers' residuals do not depend on how
  much slower than all of them it is, since they are taken against medians;
- by the median absolute deviation, so that fewer than half of the others, whatever they do, cannot move it beyond what
  the rest shows;
- from operations that are over, before those that it judges: bets against a δ that is known beforehand are as fair as
  against a fixed one, so the guarantee holds for "at most δ slower" with whatever δ stood then.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ingero.detect.medians import row_medians
from ingero.detect.ranks.autocorrelation import BLOCK, BlockMeans
from ingero.detect.ranks.settings import ALARM, N_TIERS, NOTICE, EDetectorSettings
from ingero.detect.stacking import append_groups
from ingero.model.arrays import BoolArray, FloatArray, IntArray

MIN_OTHERS: Final = 5
"""Peers with a persistent residual below which their spread says nothing."""
_NORMAL: Final = 1.4826
"""Standard deviation of a normal over its median absolute deviation."""
_ESTIMATE_EVERY: Final = 256


class Persistence:
    """Effective block lengths and limits of stacked peer groups.

    Args:
        n_peers: Workers per group.
        settings: See `EDetectorSettings`.

    Attributes:
        means: The residuals that it is estimated from.
        block_length: τ, how many operations count as one, shape (2 tiers, G).
        limits: δ of each worker now, shape (2 tiers, G, m).
        log_limits: log(1 + δ), same shape.
        log_far: Log of the slowdown beyond which shared causes do not reach, shape (G,); that of the alarm tier's δ at
            least. What is beyond it counts operation by operation.
    """

    def __init__(self, n_peers: int, settings: EDetectorSettings) -> None:
        self._settings = settings
        self.means = BlockMeans(n_peers)
        self.block_length: FloatArray = np.ones((N_TIERS, 0))
        self.limits: FloatArray = np.zeros((N_TIERS, 0, n_peers))
        self.log_limits: FloatArray = np.zeros((N_TIERS, 0, n_peers))
        self.log_far: FloatArray = np.zeros(0)
        self._estimated_at: IntArray = np.zeros(0, np.int64)

    def add_groups(self, n_groups: int) -> None:
        """Add groups without history."""
        first = self._estimated_at.size
        self.means.add_groups(n_groups)
        self.block_length = append_groups(self.block_length, n_groups, 1, 1.0)
        self.limits = append_groups(self.limits, n_groups, 1)
        self.log_limits = append_groups(self.log_limits, n_groups, 1)
        self._estimated_at = append_groups(self._estimated_at, n_groups)
        self.log_far = append_groups(self.log_far, n_groups, 0, self._settings.log_slowdowns[ALARM])
        self.limits[:, first:] = self._settings.slowdowns[:, None, None]
        self.log_limits[:, first:] = self._settings.log_slowdowns[:, None, None]

    def find_due(self, groups: IntArray, n_ops: IntArray) -> IntArray:
        """Those of some groups, of which so many operations were seen, whose estimate is too old."""
        since = n_ops - self._estimated_at[groups]
        is_due = since >= np.clip(self._estimated_at[groups] // 4, 1, _ESTIMATE_EVERY)
        return np.asarray(groups[is_due])

    def estimate(self, groups: IntArray, n_ops: IntArray, reach: FloatArray) -> BoolArray:
        """Estimate some groups anew; arguments of shape (g,), ``reach`` as in `BlockMeans.count_as_one`.

        Returns:
            Whose far limit is greater than before, shape (g,).
        """
        settings = self._settings
        length, log_far = self.means.count_as_one(groups, reach, settings.log_slowdowns)
        at_least = np.where(length > 0, np.maximum(length, settings.dependent_ops), 1.0)
        self.block_length[:, groups] = at_least
        self._estimated_at[groups] = n_ops
        is_farther = self._move_far(groups, n_ops, log_far)
        if settings.notice_spread:
            levels, bounds = self.means.levels(groups), settings.slowdowns
            raised = limits_from_peers(levels, settings.notice_spread, bounds[NOTICE], max(bounds))
            self.limits[NOTICE, groups] = raised
            self.log_limits[NOTICE, groups] = np.log1p(raised)
        return is_farther

    def _move_far(self, groups: IntArray, n_ops: IntArray, log_far: FloatArray) -> BoolArray:
        """Let the far limit follow its estimate, by more than the estimate's standard error; returns where it rose."""
        error = 1.0 + 1.0 / np.sqrt(2.0 * np.maximum(n_ops // BLOCK, 1))
        held = self.log_far[groups]
        is_farther = log_far > held * error
        self.log_far[groups] = np.where(is_farther | (log_far * error < held), log_far, held)
        return np.asarray(is_farther)


def limits_from_peers(levels: FloatArray, multiple: float, low: float, high: float) -> FloatArray:
    """δ of every worker from its peers' persistent residuals.

    Args:
        levels: Each worker's persistent residual (a log), NaN where it is not known yet, shape (g, m).
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
    spread = _NORMAL * row_medians(np.abs(others - row_medians(others)[:, :, None]))
    limits = np.clip(np.expm1(multiple * spread), low, high)
    return np.where(n >= MIN_OTHERS, limits, low)
