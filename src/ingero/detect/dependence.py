"""How many operations in a row share one cause: what a peer group's residuals say about counting them as evidence.

A heavy batch is heavy forward and backward, a heavy step for hundreds of operations. Each such stretch is one piece of
evidence, not many. The length is read from the residuals themselves, scale by scale: over blocks of 2^k operations, the
variance of the difference of neighbouring blocks' means (Allan variance) falls as 2^−k where operations are independent
and stays where they are not. Half the squared difference's *lower median* stands for its mean, so that one lasting change,
such as the onset of a fault, is no dependence; nor is a constant offset.

Blocks are counted in operations from the group's first, so how reports were cut changes nothing.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

BLOCK: Final = 8
_N_FINE: Final = 64
_N_COARSE: Final = 256
_FINE_LEVELS: Final = (0, 1, 2)
_COARSE_LEVELS: Final = (3, 4, 5, 6, 7, 8, 9)
_MIN_DIFFERENCES: Final = 6
"""A lasting change touches two differences of neighbours: with six, the lower median is none of them."""
_CLIP: Final = 0.7
"""Residuals beyond a factor of two count as a factor of two."""
_REACH: Final = np.array([3.0, 2.0])
"""Standard deviations of a block's mean that a lasting cause may reach, by tier: what pages needs more margin."""
_MEDIAN_OF_CHI2: Final = 0.4549
"""Median of the square of a standard normal."""


class Dependence:
    """Residuals of a bank of peer groups at two resolutions.

    Args:
        n_peers: Workers per group.
    """

    def __init__(self, n_peers: int) -> None:
        self.n_peers = n_peers
        self._n_ops: IntArray = np.zeros(0, np.int64)
        self._sum: FloatArray = np.zeros((0, n_peers))
        self._fine = np.full((0, n_peers, _N_FINE), np.nan, np.float32)
        self._coarse = np.full((0, n_peers, _N_COARSE), np.nan, np.float32)

    def add_groups(self, n_groups: int) -> None:
        """Add groups without history."""
        for name, fill in (("_n_ops", 0), ("_sum", 0.0), ("_fine", np.nan), ("_coarse", np.nan)):
            values = getattr(self, name)
            fresh = np.full((n_groups, *values.shape[1:]), fill, values.dtype)
            setattr(self, name, np.concatenate([values, fresh]))

    def add(self, groups: IntArray, residuals: FloatArray) -> None:
        """Take one operation of each of these distinct groups, residuals of shape (g, m), NaN where missing."""
        values = np.clip(residuals, -_CLIP, _CLIP)
        n_ops = self._n_ops[groups]
        self._fine[groups, :, n_ops % _N_FINE] = values
        self._sum[groups] += values
        self._n_ops[groups] = n_ops + 1
        full = np.flatnonzero((n_ops + 1) % BLOCK == 0)
        if full.size:
            whole = groups[full]
            self._coarse[whole, :, n_ops[full] // BLOCK % _N_COARSE] = self._sum[whole] / BLOCK
            self._sum[whole] = 0.0

    def count_as_one(self, groups: IntArray, reach: FloatArray, limits: FloatArray) -> FloatArray:
        """How many operations share one cause wherever causes reach beyond a limit.

        Args:
            groups: Which groups, shape (g,).
            reach: How far the typical worker's single residuals reach, shape (g,).
            limits: Log slowdown of each tier, shape (2,).

        Returns:
            Shape (2, g): 0 where nothing reaches beyond the limit, so that every operation counts.
        """
        length, steady = np.ones(groups.size), np.zeros(groups.size)
        quick = np.sort(self.spread(groups), axis=1)[:, (self.n_peers - 1) // 2]
        maybe = np.flatnonzero((reach > limits.min()) | (_REACH.max() * quick > limits.min()))
        if maybe.size:
            length[maybe], steady[maybe] = self.estimate(groups[maybe])
        is_wide = (reach > limits[:, None]) | (_REACH[:, None] * steady > limits[:, None])
        return np.where(is_wide, np.ceil(length), 0.0)

    def spread(self, groups: IntArray) -> FloatArray:
        """Standard deviation of each worker's block means, shape (g, m): a quick bound; 0 without blocks."""
        blocks = self._coarse[groups]
        is_known = ~np.isnan(blocks)
        n = np.maximum(is_known.sum(axis=2), 1)
        filled = np.where(is_known, blocks, 0.0).astype(np.float64)
        mean = filled.sum(axis=2) / n
        squares = np.einsum("gmb,gmb->gm", filled, filled) / n
        return np.asarray(np.sqrt(np.maximum(squares - mean**2, 0.0)))

    def estimate(self, groups: IntArray) -> tuple[FloatArray, FloatArray]:
        """How long causes last, and how far they reach.

        Returns:
            For the typical worker of each group, shape (g,): operations that share one cause (at least 1), and the
            greatest standard deviation of block means at any scale of a block or more. 1 and 0 before there is
            enough to tell. Typical is the lower median, so that a faulty minority does not count.
        """
        length, reach = np.ones((groups.size, self.n_peers)), np.zeros((groups.size, self.n_peers))
        greatest = np.zeros(length.shape)
        fine = _in_order(self._fine[groups], self._n_ops[groups])
        coarse = _in_order(self._coarse[groups], self._n_ops[groups] // BLOCK)
        for level in (*_FINE_LEVELS, *_COARSE_LEVELS):
            values = fine if level < len(_FINE_LEVELS) else coarse
            width = 1 << (level if level < len(_FINE_LEVELS) else level - len(_FINE_LEVELS))
            variance = _allan_variance(values, width)
            is_known = variance > 0.0
            greatest = np.where(is_known, np.maximum(greatest, variance), greatest)
            ratio = np.where(is_known, 2.0**level * variance / np.maximum(greatest, 1e-300), 0.0)
            length = np.maximum(length, ratio)
            if level >= len(_FINE_LEVELS):
                reach = np.maximum(reach, np.where(is_known, np.sqrt(np.maximum(variance, 0)), 0.0))
        middle = (self.n_peers - 1) // 2
        return np.sort(length, axis=1)[:, middle], np.sort(reach, axis=1)[:, middle]


def _in_order(ring: npt.NDArray[np.float32], n_seen: IntArray) -> FloatArray:
    """A ring's entries, oldest first."""
    n = ring.shape[2]
    at = (n_seen[:, None] + np.arange(n)) % n
    ordered = np.take_along_axis(ring, at[:, None, :], axis=2)
    return ordered.astype(np.float64)


def _allan_variance(values: FloatArray, width: int) -> FloatArray:
    """Of means over ``width`` entries of the last axis, shape (g, m); 0 where too few are known."""
    n_groups, m, n = values.shape
    means = values.reshape(n_groups, m, n // width, width).mean(axis=3)
    squares = (np.diff(means, axis=2) ** 2).reshape(n_groups * m, -1)
    n_known = (~np.isnan(squares)).sum(axis=1)
    at = np.maximum(n_known - 1, 0) // 2
    middle = np.sort(squares, axis=1)[np.arange(at.size), at]
    found = np.where(n_known >= _MIN_DIFFERENCES, middle, 0.0) / (2.0 * _MEDIAN_OF_CHI2)
    return np.asarray(found.reshape(n_groups, m))
