"""Bets against "this worker is like its peers": e-values from a position on a grid, exact and vectorised.

A position k of N, each equally likely when the worker is like its peers, is a p-value k/N. A *power calibrator*
κ·p^(κ−1), normalised to mean 1 over the grid, turns it into an e-value; the mean over several κ is one too
(Vovk and Wang 2021, "E-values: calibration, combination and applications"). Positions that tie share the mean of their
weights, so the mean stays exactly 1 with ties. All bets of the e-detector are looked up this way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Final

import numpy as np

from ingero.model.arrays import FloatArray, IntArray

RANK_KAPPAS: Final = (0.1, 0.2, 0.3, 0.5, 0.7)
POOLED_KAPPAS: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
MAJORITY_SURE: Final = 0.95
"""Share of the wealth that the majority bet puts on the upper half."""


@lru_cache(maxsize=4096)
def _prefix_weights(kappas: tuple[float, ...], n_grid: int) -> FloatArray:
    """Sums of the mixture's weights over the first k = 0…n positions, shape (n + 1,). Read-only: shared."""
    positions = np.arange(1, n_grid + 1, dtype=np.float64)
    sums = np.zeros(n_grid + 1)
    for kappa in kappas:
        weights = np.cumsum(positions ** (kappa - 1.0))
        sums[1:] += weights * (n_grid / weights[-1] / len(kappas))
    sums[-1] = n_grid  # exactly: a bet without an opponent must be worth exactly 1
    sums.setflags(write=False)
    return sums


@lru_cache(maxsize=4096)
def _prefix_majority(n_grid: int) -> FloatArray:
    """Sums of the majority bet's weights over the first k = 0…n positions, shape (n + 1,). Read-only: shared."""
    half = n_grid // 2
    weights = np.full(n_grid, n_grid * (1.0 - MAJORITY_SURE) / max(n_grid - half, 1))
    weights[:half] = n_grid * MAJORITY_SURE / max(half, 1)
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    sums[-1] = n_grid
    sums.setflags(write=False)
    return sums


def majority_bet(above: IntArray, level: IntArray, n_grid: IntArray) -> FloatArray:
    """The e-value of a bet that the worker stands in the upper half; arguments as in `grid_bet`.

    It grows more slowly than the power calibrators on one slow worker, and it alone grows on each of several: a worker
    that is second of four every time is never first.
    """
    return _from_tables(above, level, n_grid, _prefix_majority)


def grid_bet(
    above: IntArray, level: IntArray, n_grid: IntArray, kappas: tuple[float, ...]
) -> FloatArray:
    """The e-value of standing at position ``above + 1`` of ``n_grid``, level with ``level`` others.

    Args:
        above: How many of the others stand before it (are slower); any shape.
        level: How many of the others are level with it; same shape.
        n_grid: Positions in all, the worker's own included; same shape. 1 gives an e-value of 1.
        kappas: Exponents of the mixture.

    Returns:
        E-values, same shape; their mean over the equally likely positions is 1.
    """
    return _from_tables(above, level, n_grid, partial(_prefix_weights, kappas))


def _from_tables(
    above: IntArray, level: IntArray, n_grid: IntArray, table_for: Callable[[int], FloatArray]
) -> FloatArray:
    last = above + level + 1
    largest = int(n_grid.max(initial=1))
    if int(n_grid.min(initial=largest)) == largest:
        sums = table_for(largest)
        return np.asarray((sums[last] - sums[above]) / (last - above))
    sizes = np.unique(n_grid).tolist()
    tables = [table_for(size) for size in sizes]
    starts = np.cumsum([0] + [table.size for table in tables[:-1]])
    flat = np.concatenate(tables)
    base = starts[np.searchsorted(sizes, n_grid)]
    return np.asarray((flat[base + last] - flat[base + above]) / (last - above))
