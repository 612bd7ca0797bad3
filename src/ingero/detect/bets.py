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
import numpy.typing as npt

from ingero.model.arrays import FloatArray, IntArray

RANK_KAPPAS: Final = (0.1, 0.2, 0.3, 0.5, 0.7)
POOLED_KAPPAS: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
MAJORITY_SURE: Final = 0.95
"""Share of the stake that the majority bet puts on the upper half."""
_MARK_EVERY: Final = 16


@lru_cache(maxsize=4096)
def _prefix_weights(kappas: tuple[float, ...], n_grid: int) -> FloatArray:
    """Sums of the mixture's weights over the first k = 0…n positions, shape (n + 1,). Read-only: shared."""
    positions = np.arange(1, n_grid + 1, dtype=np.float64)
    sums = np.zeros(n_grid + 1)
    for kappa in kappas:
        weights = np.cumsum(positions ** (kappa - 1.0))
        sums[1:] += weights * (n_grid / weights[-1] / len(kappas))
    sums[-1] = n_grid  # exactly: a bet without an opponent must be worth 1 to the bit
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


def majority_bet(above: IntArray, tied: IntArray, n_grid: IntArray) -> FloatArray:
    """The e-value of a bet that the worker stands in the upper half; arguments as in `grid_bet`.

    It wins less than the power calibrators on one slow worker, and it alone wins on each of several: whoever is second
    of four every time is never first.
    """
    return _from_tables(above, tied, n_grid, _prefix_majority)


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
    return _from_tables(above, tied, n_grid, partial(_prefix_weights, kappas))


def _from_tables(
    above: IntArray, tied: IntArray, n_grid: IntArray, table_for: Callable[[int], FloatArray]
) -> FloatArray:
    last = above + tied + 1
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


def count_below(
    ordered: npt.NDArray[np.floating],
    row_idx: IntArray,
    queries: FloatArray,
    marks: npt.NDArray[np.floating] | None = None,
) -> IntArray:
    """How many entries of a sorted row lie below each query: `numpy.searchsorted` for many rows at once.

    Args:
        ordered: Shape (n_rows, width), each row ascending, padded with +inf. Quickest when `padded_width` made the
            width: every probe then lies inside the row.
        row_idx: Row for each query; broadcasts against ``queries``.
        queries: Any shape, no NaN and no +inf.
        marks: Every 16th entry of each row, a cache line apart, of rows whose width `padded_width` made: what does
            not fit into the processor's cache is searched several times faster with them.

    Returns:
        Counts, shape of ``queries``.
    """
    width = ordered.shape[1]
    if marks is None and (width & (width - 1) or not np.isinf(ordered[:, -1]).all()):
        wider = np.full((ordered.shape[0], padded_width(width)), np.inf, ordered.dtype)
        wider[:, :width] = ordered
        ordered, width = wider, wider.shape[1]
    wanted = queries.astype(ordered.dtype)
    row = np.broadcast_to(row_idx, queries.shape)
    if marks is None or not marks.shape[1]:
        first = row * np.int64(width)
        at: IntArray = _descend(ordered, first, wanted, width >> 1)
        at -= first
        return at
    n_marks = marks.shape[1]
    line = _descend(marks, row * np.int64(n_marks), wanted, n_marks >> 1)
    lines = ordered.reshape(-1, _MARK_EVERY).take(line, axis=0, mode="clip")
    is_below = np.less(lines, wanted[..., None]).view(np.uint64)  # eight to a word
    found: IntArray = line * _MARK_EVERY - row * np.int64(width)
    for word in range(_MARK_EVERY // 8):
        found += np.bitwise_count(is_below[..., word])
    return found


def _descend(
    table: npt.NDArray[np.floating], first: IntArray, wanted: npt.NDArray[np.floating], step: int
) -> IntArray:
    """Binary search in the flat table over the 2 × ``step`` entries from ``first`` on; the index of the first not below."""
    flat, found = table.reshape(-1), first - 1
    probe, entry = np.empty_like(found), np.empty(found.shape, table.dtype)
    is_below = np.empty(found.shape, bool)
    while step:
        np.add(found, step, out=probe)
        flat.take(probe, out=entry, mode="clip")  # never clips; unlike "raise" it needs no buffer
        np.less(entry, wanted, out=is_below)
        np.multiply(is_below, step, out=probe)  # a masked copy would branch on every entry
        np.add(found, probe, out=found)
        step >>= 1
    return np.add(found, 1, out=found)


class SortedRows:
    """Rows of 32-bit numbers that are looked up far more often than they change.

    Args:
        n_entries: Most entries of a row.

    Attributes:
        entries: Shape (n_rows, padded width), each row ascending, +inf behind its last.
    """

    def __init__(self, n_entries: int) -> None:
        width = padded_width(n_entries)
        self.entries = np.full((0, width), np.inf, np.float32)
        self._marks = np.full((0, width // _MARK_EVERY), np.inf, np.float32)

    def add(self, n_rows: int) -> None:
        """Add empty rows."""
        for name in ("entries", "_marks"):
            values = getattr(self, name)
            fresh = np.full((n_rows, values.shape[1]), np.inf, np.float32)
            setattr(self, name, np.concatenate([values, fresh]))

    def put(self, row_idx: slice | IntArray, ordered: npt.NDArray[np.float32]) -> None:
        """Replace rows: shape (n, n_entries), ascending, +inf behind what is known."""
        self.entries[row_idx, : ordered.shape[1]] = ordered
        last = self._marks.shape[1] * _MARK_EVERY
        self._marks[row_idx] = self.entries[row_idx, _MARK_EVERY - 1 : last : _MARK_EVERY]

    def count_below(self, row_idx: IntArray, queries: FloatArray) -> IntArray:
        """How many entries lie below each query; see the function of this name."""
        return count_below(self.entries, row_idx, queries, self._marks)

    def count_level(self, row_idx: IntArray, queries: FloatArray, below: IntArray) -> IntArray:
        """How many entries equal each query; see the function of this name."""
        return count_level(self.entries, row_idx, queries, below, self._marks)


def padded_width(n_entries: int) -> int:
    """The least power of two that holds so many entries and one +inf behind them."""
    return 1 << n_entries.bit_length()


def count_level(
    ordered: npt.NDArray[np.floating],
    row_idx: IntArray,
    queries: FloatArray,
    below: IntArray,
    marks: npt.NDArray[np.floating] | None = None,
) -> IntArray:
    """How many entries of the row equal each query, given how many lie below it; arguments as in `count_below`."""
    wanted = queries.astype(ordered.dtype)
    at = np.minimum(below, ordered.shape[1] - 1)
    if not (ordered[row_idx, at] == wanted).any():
        return np.zeros(below.shape, np.int64)
    next_up = np.nextafter(wanted, np.asarray(np.inf, ordered.dtype))
    return count_below(ordered, row_idx, next_up, marks) - below
