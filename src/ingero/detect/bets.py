"""Bets against "this worker is like its peers": e-values from a position on a grid, exact and vectorised.

A position k of N, each equally likely when the worker is like its peers, is a p-value k/N. A *power calibrator*
κ·p^(κ−1), normalised to mean 1 over the grid, turns it into an e-value; the mean over several κ is one too
(Vovk and Wang 2021, "E-values: calibration, combination and applications"). Positions that tie share the mean of their
weights, so the mean stays exactly 1 with ties. Both bets of the e-detector are this one function.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

RANK_KAPPAS: Final = (0.1, 0.2, 0.3, 0.5, 0.7)
POOLED_KAPPAS: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)


@lru_cache(maxsize=16)
def _prefix_sums(kappas: tuple[float, ...], size: int) -> FloatArray:
    """Σ_{j ≤ k} j^(κ−1) for k = 0…size, shape (len(kappas), size + 1). Read-only: shared."""
    steps = np.arange(1, size + 1, dtype=np.float64)
    table = np.zeros((len(kappas), size + 1))
    for row, kappa in enumerate(kappas):
        np.cumsum(steps ** (kappa - 1.0), out=table[row, 1:])
    table.setflags(write=False)
    return table


def grid_bet(
    above: IntArray, tied: IntArray, n_grid: IntArray, kappas: tuple[float, ...]
) -> FloatArray:
    """The e-value of standing at position ``above + 1`` of ``n_grid``, tied with ``tied`` others.

    Args:
        above: How many of the others stand before it (are slower); any shape.
        tied: How many of the others stand level with it; same shape.
        n_grid: Positions in all, the worker's own included; same shape. 1 gives an e-value of 1.
        kappas: Exponents of the mixture.

    Returns:
        E-values, same shape; their mean over the equally likely positions is 1.
    """
    largest = int(n_grid.max(initial=1))
    table = _prefix_sums(kappas, 1 << max(largest - 1, 1).bit_length())
    bets = np.zeros(above.shape)
    last = above + tied + 1
    for row in table:
        bets += (row[last] - row[above]) / row[n_grid]
    bets *= n_grid / (last - above) / len(kappas)
    return bets


def count_below(
    ordered: npt.NDArray[np.floating], row_idx: IntArray, queries: FloatArray
) -> IntArray:
    """How many entries of a sorted row lie below each query: `numpy.searchsorted` for many rows at once.

    Args:
        ordered: Shape (n_rows, width), each row ascending, padded with +inf. Quickest when `padded_width` made the
            width: every probe then lies inside the row.
        row_idx: Row for each query; broadcasts against ``queries``.
        queries: Any shape, no NaN and no +inf.

    Returns:
        Counts, shape of ``queries``.
    """
    n_rows, width = ordered.shape
    if width & (width - 1) or not np.isinf(ordered[:, -1]).all():
        wider = np.full((n_rows, padded_width(width)), np.inf, ordered.dtype)
        wider[:, :width] = ordered
        ordered, width = wider, wider.shape[1]
    flat, wanted = ordered.ravel(), queries.astype(ordered.dtype)
    first = np.broadcast_to(row_idx * np.int64(width) - 1, queries.shape)
    found = first.copy()
    step = width >> 1
    while step:
        found += (flat[found + step] < wanted) * np.int64(step)
        step >>= 1
    found -= first
    return found


def padded_width(n_entries: int) -> int:
    """The least power of two that holds so many entries and one +inf behind them."""
    return 1 << n_entries.bit_length()


def count_level(
    ordered: npt.NDArray[np.floating], row_idx: IntArray, queries: FloatArray, below: IntArray
) -> IntArray:
    """How many entries of the row equal each query, given how many lie below it; arguments as in `count_below`."""
    wanted = queries.astype(ordered.dtype)
    at = np.minimum(below, ordered.shape[1] - 1)
    if not (ordered[row_idx, at] == wanted).any():
        return np.zeros(below.shape, np.int64)
    next_up = np.nextafter(wanted, np.asarray(np.inf, ordered.dtype))
    return count_below(ordered, row_idx, next_up) - below
