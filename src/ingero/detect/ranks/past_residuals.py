"""The residuals of the last operations, sorted for the pooled bet: where does a residual stand among the other peers'?

They are sorted anew on a schedule that counts operations, so how operations are cut into blocks changes nothing.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ingero.detect.sorted_rows import SortedRows
from ingero.detect.stacking import append_groups, as_slice, is_uniform
from ingero.model.arrays import BoolArray, FloatArray, IntArray

_SORT_EVERY: Final = 32
_WIDE_QUANTILE: Final = 0.9
_WIDE_AFTER: Final = 8
"""Residuals of a worker before its spread is judged."""


class PastResiduals:
    """Residuals of stacked peer groups.

    Args:
        n_peers: Workers per group.
        window: Operations that are kept.
    """

    def __init__(self, n_peers: int, window: int) -> None:
        self._n_peers = n_peers
        self._window = window
        self._ring = np.full((window, 0, n_peers), np.nan, np.float32)
        self._own = SortedRows(window)  # a row for each worker, group by group
        self._pool = SortedRows(n_peers * window)
        self._n_own: IntArray = np.zeros((0, n_peers), np.int64)
        self._n_others: IntArray = np.zeros((0, n_peers), np.int64)
        self._sorted_at: IntArray = np.zeros(0, np.int64)

    def add_groups(self, n_groups: int) -> None:
        """Add groups without history."""
        self._ring = append_groups(self._ring, n_groups, 1, np.nan)
        self._own.add(n_groups * self._n_peers)
        self._pool.add(n_groups)
        self._n_own = append_groups(self._n_own, n_groups)
        self._n_others = append_groups(self._n_others, n_groups)
        self._sorted_at = append_groups(self._sorted_at, n_groups)

    def ops_to_sort(self, groups: IntArray, n_ops: IntArray) -> IntArray:
        """How many operations may still use the order as it is, shape (g,), when so many were seen."""
        gap = np.clip(self._sorted_at[groups] // 8, 1, min(_SORT_EVERY, self._window))
        return self._sorted_at[groups] + gap - n_ops

    def sort(self, groups: IntArray, n_ops: IntArray, is_peeled: BoolArray) -> None:
        """Sort the windows of some groups; peeled workers, a mask of shape (g, m), are no reference."""
        own = np.ascontiguousarray(self._ring[:, as_slice(groups)].transpose(1, 2, 0))
        own.sort(axis=2)
        own[is_peeled] = np.nan
        is_missing = np.isnan(own)  # at each row's end
        own[is_missing] = np.inf
        n_own = self._window - np.count_nonzero(is_missing, axis=2)
        self._own.put(as_slice(self._own_rows(groups).ravel()), own.reshape(-1, self._window))
        self._pool.put(as_slice(groups), np.sort(own.reshape(groups.size, -1), axis=1))
        self._n_own[groups] = n_own
        self._n_others[groups] = n_own.sum(axis=1, keepdims=True) - n_own
        self._sorted_at[groups] = n_ops

    def store(
        self, groups: IntArray, n_ops: IntArray, residuals: FloatArray, taken: IntArray
    ) -> None:
        """Add each group's leading ``taken`` operations, residuals of shape (T, g, m), after the first ``n_ops``."""
        here = as_slice(groups)
        if isinstance(here, slice) and is_uniform(n_ops) and is_uniform(taken):
            n = int(taken[0])
            self._ring[(n_ops[0] + np.arange(n)) % self._window, here] = residuals[:n]
            return
        offset, row = np.nonzero(np.arange(int(taken.max()))[:, None] < taken)
        slots = (n_ops[row] + offset) % self._window
        self._ring[slots, groups[row]] = residuals[offset, row]

    def read(self, group: int, worker: int, since_op: int, n_ops: int) -> FloatArray:
        """A worker's known residuals since an operation that the window still holds, oldest first."""
        ops = np.arange(max(since_op, n_ops - self._window, 0), n_ops)
        values = self._ring[ops % self._window, group, worker].astype(np.float64)
        return np.asarray(values[~np.isnan(values)])

    def read_all(self, group: int, n_ops: int) -> FloatArray:
        """Every worker's residuals that the window still holds, shape (T, m), oldest first, NaN where missing."""
        ops = np.arange(max(n_ops - self._window, 0), n_ops)
        return np.asarray(self._ring[ops % self._window, group], np.float64)

    def typical_reach(self, groups: IntArray) -> FloatArray:
        """A high quantile of the typical worker's residuals, shape (g,); −inf before there are enough.

        Typical is the lower median over workers: a slow minority does not make its group wide.
        """
        n_own = self._n_own[groups]
        at = np.maximum((n_own * _WIDE_QUANTILE).astype(np.int64) - 1, 0)
        reach = self._own.entries[self._own_rows(groups), at].astype(np.float64)
        is_known = n_own >= _WIDE_AFTER
        ordered = np.sort(np.where(is_known, reach, np.inf), axis=1)
        middle = np.maximum(is_known.sum(axis=1) - 1, 0) // 2
        typical = ordered[np.arange(middle.size), middle]
        return np.where(np.isfinite(typical), typical, -np.inf)

    def count_beyond(
        self, groups: IntArray, queries: FloatArray, *, both_sides: bool
    ) -> tuple[list[IntArray], IntArray]:
        """How many of the other peers' residuals are at least a query, and if wanted how many are at most it.

        Args:
            groups: Shape (g,).
            queries: Shape (T, 2 tiers, g, m), no NaN.
            both_sides: Count those at most a query too.

        Returns:
            The counts, each of the shape of the queries; and of how many residuals, shape (g, m).
        """
        pool_row, own_row = groups[:, None], self._own_rows(groups)
        in_pool = self._pool.count_below(pool_row, queries)
        in_own = self._own.count_below(own_row, queries)
        counts = [self._n_others[groups] - in_pool + in_own]
        if both_sides:
            level = self._pool.count_level(pool_row, queries, in_pool)
            level -= self._own.count_level(own_row, queries, in_own)
            counts.append(in_pool - in_own + level)
        return counts, self._n_others[groups]

    def _own_rows(self, groups: IntArray) -> IntArray:
        """Rows of each group's workers in the sorted windows, shape (g, m)."""
        return groups[:, None] * np.int64(self._n_peers) + np.arange(self._n_peers)
