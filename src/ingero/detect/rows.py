"""Small tools on sorted columns: runs, positions within runs, medians of rows. Shapes and order only, no meaning."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


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
