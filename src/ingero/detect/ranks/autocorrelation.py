"""How many operations in a row share one cause: what a peer group's residuals say about counting them as evidence.

A heavy batch is heavy forward and backward, a heavy step for hundreds of operations. Each such stretch is one piece
of evidence, not many; its length is the effective block length. It is read from the residuals themselves, scale by
scale: over blocks of 2^k operations, the variance of the difference of consecutive blocks' means (Allan variance)
falls as 2^−k where operations are independent and stays where they are not. Half the squared difference's *lower
median* stands for its mean, so that one persistent change, such as the onset of a fault, is no dependence; nor is a
constant offset.

Blocks are counted in operations from the group's first, so how reports were cut changes nothing.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ingero.detect.medians import medians_of_others
from ingero.detect.ranks.settings import ALARM, NOTICE
from ingero.detect.stacking import append_groups, as_slice, is_uniform
from ingero.model.arrays import FloatArray, IntArray

BLOCK: Final = 8
_N_FINE: Final = 64
_N_COARSE: Final = 256
_FINE_LEVELS: Final = (0, 1, 2)
_COARSE_LEVELS: Final = (3, 4, 5, 6, 7, 8, 9)
_MIN_DIFFERENCES: Final = 6
"""A persistent change touches two differences of consecutive blocks: with six, the lower median is none of them."""
_LEVEL_BLOCKS: Final = 16
"""Blocks after which their median is a persistent bias."""
_CLIP: Final = 0.7
"""Residuals beyond a factor of two count as a factor of two."""
_REACH: Final = np.array([3.0, 2.0])
"""Standard deviations of a block's mean that a shared cause may reach, by tier: what pages needs more margin."""
_MEDIAN_OF_CHI2: Final = 0.4549
"""Median of the square of a standard normal."""


class BlockMeans:
    """Residuals of stacked peer groups at two resolutions.

    Args:
        n_peers: Workers per group.
    """

    def __init__(self, n_peers: int) -> None:
        self.n_peers = n_peers
        self._n_ops: IntArray = np.zeros(0, np.int64)
        self._sum: FloatArray = np.zeros((0, n_peers))
        # Rings by time first: an operation of many groups is one stretch of memory.
        self._fine = np.full((_N_FINE, 0, n_peers), np.nan, np.float32)
        self._coarse = np.full((_N_COARSE, 0, n_peers), np.nan, np.float32)

    def add_groups(self, n_groups: int) -> None:
        """Add groups without history."""
        self._n_ops = append_groups(self._n_ops, n_groups)
        self._sum = append_groups(self._sum, n_groups)
        self._fine = append_groups(self._fine, n_groups, 1, np.nan)
        self._coarse = append_groups(self._coarse, n_groups, 1, np.nan)

    def add(self, groups: IntArray, residuals: FloatArray, taken: IntArray) -> None:
        """Add the leading ``taken`` operations of each of these distinct groups.

        Args:
            groups: Shape (g,).
            residuals: Shape (T, g, m), NaN where missing.
            taken: How many of the T operations each group has, shape (g,).
        """
        values = np.clip(residuals[: int(taken.max())], -_CLIP, _CLIP)
        if is_uniform(taken) and is_uniform(self._n_ops[groups]):
            self._add_stretch(groups, values)
            return
        for offset, value in enumerate(values):
            rows = np.flatnonzero(offset < taken)
            self._add_one(groups[rows], value[rows])

    def _add_stretch(self, groups: IntArray, values: FloatArray) -> None:
        """Add operations to groups that saw equally many; the sums have the bits of adding them one by one."""
        n_before, here = int(self._n_ops[groups[0]]), as_slice(groups)
        newest = values[-_N_FINE:]
        n_after = n_before + len(values)
        slots = np.arange(n_after - len(newest), n_after) % _N_FINE
        self._fine[slots if isinstance(here, slice) else slots[:, None], here] = newest
        at = 0
        while at < len(values):
            part = values[at : at + BLOCK - (n_before + at) % BLOCK]
            at += len(part)
            total = np.add.accumulate(np.concatenate([self._sum[None, here], part]), axis=0)[-1]
            is_full = (n_before + at) % BLOCK == 0
            if is_full:
                self._coarse[((n_before + at) // BLOCK - 1) % _N_COARSE, here] = total / BLOCK
            self._sum[here] = 0.0 if is_full else total
        self._n_ops[here] = n_after

    def _add_one(self, groups: IntArray, values: FloatArray) -> None:
        """Add one operation of each group, values of shape (g, m)."""
        n_ops, here = self._n_ops[groups], as_slice(groups)
        self._fine[n_ops % _N_FINE, groups] = values
        self._sum[here] += values
        self._n_ops[here] += 1
        full = np.flatnonzero((n_ops + 1) % BLOCK == 0)
        if full.size:
            whole = groups[full]
            self._coarse[n_ops[full] // BLOCK % _N_COARSE, whole] = self._sum[whole] / BLOCK
            self._sum[whole] = 0.0

    def count_as_one(
        self, groups: IntArray, reach: FloatArray, limits: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """How many operations share one cause wherever causes reach beyond a limit, and how far they reach.

        Args:
            groups: Which groups, shape (g,).
            reach: How far the typical worker's single residuals reach, shape (g,); at the notice tier only until there
                are enough blocks.
            limits: Log slowdown of each tier, shape (2,).

        Returns:
            Shape (2, g): 0 where no shared cause reaches beyond the limit, so that every operation counts. And, shape
            (g,), the log slowdown that neither single operations nor shared causes reach; the alarm tier's limit at
            least.
        """
        length, steady = np.ones(groups.size), np.zeros(groups.size)
        quick = np.sort(self.spread(groups), axis=1)[:, (self.n_peers - 1) // 2]
        maybe = np.flatnonzero((reach > limits.min()) | (_REACH.max() * quick > limits.min()))
        if maybe.size:
            length[maybe], steady[maybe] = self.estimate(groups[maybe])
        is_wide = (reach > limits[:, None]) | (_REACH[:, None] * steady > limits[:, None])
        # The tier that pages is as careful about single operations as about shared causes.
        is_wide[NOTICE] &= (steady == 0.0) | (_REACH[NOTICE] * steady > limits[NOTICE])
        far = np.maximum(
            np.maximum(reach, _REACH[ALARM] * np.maximum(steady, quick)), limits[ALARM]
        )
        far[is_wide[ALARM] & (steady == 0.0)] = np.inf  # how far they reach is not known yet
        return np.where(is_wide, np.ceil(length), 0.0), far

    def spread(self, groups: IntArray) -> FloatArray:
        """Standard deviation of each worker's block means, shape (g, m): a quick bound; 0 without blocks."""
        n_seen = int(self._n_ops[groups].max(initial=0)) // BLOCK
        blocks = self._coarse[:n_seen, as_slice(groups)]
        is_known = ~np.isnan(blocks)
        n = np.maximum(np.count_nonzero(is_known, axis=0), 1)
        filled = np.where(is_known, blocks, 0.0).astype(np.float64)
        mean = filled.sum(axis=0) / n
        squares = (filled * filled).sum(axis=0) / n
        return np.asarray(np.sqrt(np.maximum(squares - mean**2, 0.0)))

    def levels(self, groups: IntArray) -> FloatArray:
        """Persistent residuals, the median of each worker's block means, shape (g, m); NaN before there are enough."""
        n_seen = min(int(self._n_ops[groups].max(initial=0)) // BLOCK, _N_COARSE)
        blocks = np.sort(self._coarse[:n_seen, as_slice(groups)], axis=0).astype(np.float64)
        n_known = n_seen - np.count_nonzero(np.isnan(blocks), axis=0)
        if n_seen < _LEVEL_BLOCKS:
            return np.full(n_known.shape, np.nan)
        at = np.maximum(n_known - 1, 0)[None] // 2
        middle = np.take_along_axis(blocks, at, axis=0)[0]
        return np.where(n_known >= _LEVEL_BLOCKS, middle, np.nan)

    def estimate(self, groups: IntArray) -> tuple[FloatArray, FloatArray]:
        """How long causes last, and how far they reach.

        Returns:
            For the typical worker of each group, shape (g,): operations that share one cause (at least 1), and the
            greatest standard deviation of block means at any scale of a block or more. 1 and 0 before there is
            enough to tell. Typical is the lower median, so that a faulty minority does not count.
        """
        length, reach = np.ones((groups.size, self.n_peers)), np.zeros((groups.size, self.n_peers))
        greatest = np.zeros(length.shape)
        means = _in_order(self._fine, groups, self._n_ops[groups])
        for level in (*_FINE_LEVELS, *_COARSE_LEVELS):
            if level == _COARSE_LEVELS[0]:
                means = _in_order(self._coarse, groups, self._n_ops[groups] // BLOCK)
            elif level:
                means = (means[::2] + means[1::2]) / 2.0
            variance = _allan_variance(means)
            is_known = variance > 0.0
            greatest = np.where(is_known, np.maximum(greatest, variance), greatest)
            ratio = np.where(is_known, 2.0**level * variance / np.maximum(greatest, 1e-300), 0.0)
            length = np.maximum(length, ratio)
            if level >= len(_FINE_LEVELS):
                reach = np.maximum(reach, np.where(is_known, np.sqrt(np.maximum(variance, 0)), 0.0))
        middle = (self.n_peers - 1) // 2
        return np.sort(length, axis=1)[:, middle], np.sort(reach, axis=1)[:, middle]


def residuals_among_all(costs: FloatArray) -> FloatArray:
    """Log of each cost over the median of all others of its operation, shape (T, g, m); NaN where missing.

    Workers in alarm stay in the reference here.
    """
    x = np.maximum(costs, 1.0).reshape(-1, costs.shape[2])
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.log(x / medians_of_others(x)).reshape(costs.shape))


def _in_order(ring: npt.NDArray[np.float32], groups: IntArray, n_seen: IntArray) -> FloatArray:
    """The newest entries of some groups' rings, oldest first, NaN where there are none, shape (n, g, m).

    A power of two of them that holds all that were seen, so that they can be halved down to one.
    """
    n = ring.shape[0]
    width = min(n, max(1 << (int(n_seen.max(initial=0)) - 1).bit_length(), 2))
    at = (n_seen + np.arange(n - width, n)[:, None]) % n
    return np.asarray(ring[at, groups], np.float64)


def _allan_variance(means: FloatArray) -> FloatArray:
    """Of block means along the first axis, shape (n, g, m): shape (g, m); 0 where too few are known."""
    n, n_groups, m = means.shape
    if n <= _MIN_DIFFERENCES:
        return np.zeros((n_groups, m))
    squares = np.diff(means, axis=0).reshape(n - 1, -1)
    squares *= squares
    n_known = n - 1 - np.count_nonzero(np.isnan(squares), axis=0)
    at = np.maximum(n_known - 1, 0) // 2
    by_worker = np.ascontiguousarray(squares.T)
    if is_uniform(at):
        by_worker.partition(at[0], axis=1)  # NaN stands last
    else:
        by_worker.sort(axis=1)
    middle = by_worker[np.arange(at.size), at]
    found = np.where(n_known >= _MIN_DIFFERENCES, middle, 0.0) / (2.0 * _MEDIAN_OF_CHI2)
    return np.asarray(found.reshape(n_groups, m))
