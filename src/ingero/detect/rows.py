"""Small tools on sorted columns: runs, positions within runs, medians of rows. Shapes and order only, no meaning."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ingero.model.arrays import BoolArray, FloatArray, IntArray

ScalarT = TypeVar("ScalarT", bound=np.generic)


def run_starts(*keys: IntArray) -> BoolArray:
    """Where a run of equal keys begins, in columns of shape (n,) sorted so that equal rows are neighbours."""
    starts = np.ones(keys[0].size, bool)
    if starts.size:
        starts[1:] = False
        for key in keys:
            starts[1:] |= key[1:] != key[:-1]
    return starts


def index_of_start(starts: BoolArray) -> IntArray:
    """For each row, the index at which its run began."""
    return np.maximum.accumulate(np.where(starts, np.arange(starts.size), 0))


def running_max(values: IntArray, group: IntArray) -> IntArray:
    """Greatest value so far within each run of ``group``; ``group`` ascending and ≥ 0, ``values`` ≥ −1.

    Ranks stand in for the values, so that any 64-bit value is safe.
    """
    if not values.size:
        return values
    distinct, rank = np.unique(values, return_inverse=True)
    best = np.maximum.accumulate(group.astype(np.int64) * distinct.size + rank)
    return np.asarray(distinct[best % distinct.size], np.int64)


def count_within(*keys: IntArray) -> IntArray:
    """How many earlier rows have the same keys, shape (n,); rows in any order."""
    order = np.lexsort((np.arange(keys[0].size), *keys))
    starts = run_starts(*(key[order] for key in keys))
    counts = np.empty(order.size, np.int64)
    counts[order] = np.arange(order.size) - index_of_start(starts)
    return counts


def row_medians(values: FloatArray) -> FloatArray:
    """Median of each row without its NaNs, shape (n_rows,); NaN for a row of nothing else."""
    ordered = np.sort(values, axis=1)
    n = (~np.isnan(values)).sum(axis=1)
    at = np.arange(values.shape[0])
    low = ordered[at, np.maximum(n - 1, 0) // 2]
    high = ordered[at, np.minimum(n // 2, values.shape[1] - 1)]
    return np.where(n > 0, (low + high) / 2.0, np.nan)


def leave_one_out_median(
    ordered: FloatArray, n_refs: IntArray, position: IntArray, is_ref: BoolArray
) -> FloatArray:
    """Median of the reference without each worker itself.

    Args:
        ordered: Shape (n_rows, m), ascending, +inf for what is no reference.
        n_refs: References per row, shape (n_rows, 1).
        position: Where each worker stands in its row, shape (n_rows, m).
        is_ref: Whether it is itself a reference, shape (n_rows, m).

    Returns:
        Shape (n_rows, m); NaN where no other reference exists.
    """
    n_others = n_refs - is_ref
    low, high = np.maximum(n_others - 1, 0) // 2, n_others // 2
    low = low + (is_ref & (low >= position))
    high = high + (is_ref & (high >= position))
    last = ordered.shape[1] - 1
    values = np.take_along_axis(ordered, np.minimum(low, last), 1)
    values = (values + np.take_along_axis(ordered, np.minimum(high, last), 1)) / 2.0
    return np.where(n_others > 0, values, np.nan)


def accumulate(
    before: FloatArray, log_e: FloatArray, leaders: tuple[int, ...] = (0,)
) -> tuple[FloatArray, IntArray]:
    """Run ``S ← max(S, 1) · e`` over a block in log space.

    Args:
        before: Shape (r, …): values before the block.
        log_e: Shape (T, r, …).
        leaders: For each row the one whose run it follows: it starts anew whenever that one does.

    Returns:
        Values after each operation, shape (T, r, …), and the index at which the last row's current run above 1 began,
        shape (T, …), −1 when it began before the block. The same operations give the same bits however they are cut.
    """
    values = np.empty_like(log_e)
    starts = np.empty((log_e.shape[0], *log_e.shape[2:]), np.int64)
    last, start = before, np.full(log_e.shape[2:], -1)
    rows = list(leaders)
    for t, gains in enumerate(log_e):
        is_running = last > 0.0
        last = np.add(last * is_running[rows], gains, out=values[t])
        start = np.where(is_running[-1], start, t)
        starts[t] = start
    return values, starts


def as_slice(indices: IntArray) -> slice | IntArray:
    """Ascending neighbours as the slice that they are, which NumPy reads without a copy; others unchanged."""
    if not indices.size:
        return indices
    first, n = int(indices[0]), indices.size
    if int(indices[-1]) - first == n - 1 and (np.diff(indices) == 1).all():
        return slice(first, first + n)
    return indices


def is_uniform(values: IntArray) -> bool:
    """Whether all are equal; not for an empty array."""
    return bool(values.size) and bool((values == values[0]).all())


def pick_time(values: npt.NDArray[ScalarT], at: IntArray) -> npt.NDArray[ScalarT]:
    """One time per group out of shape (T, …, g, m): shape (…, g, m); may be a view."""
    if is_uniform(at):
        only: npt.NDArray[ScalarT] = values[at[0]]
        return only
    return np.moveaxis(values[at, ..., np.arange(at.size), :], 0, -2)


class Columns:
    """Named columns that grow with the number of things they describe.

    Args:
        columns: Name → (dtype, value of something never seen).
    """

    def __init__(self, **columns: tuple[type | str, float | bool]) -> None:
        self._fill = {name: fill for name, (_, fill) in columns.items()}
        self._data = {name: np.zeros(0, dtype) for name, (dtype, _) in columns.items()}
        self.n = 0

    def __getitem__(self, name: str) -> npt.NDArray[np.generic]:
        return self._data[name][: self.n]

    def add(self) -> int:
        """Add one thing; returns its index."""
        at, self.n = self.n, self.n + 1
        for name, values in self._data.items():
            if values.size < self.n:
                grown = np.full(max(2 * values.size, 64), self._fill[name], values.dtype)
                grown[: values.size] = values
                self._data[name] = grown
        return at
