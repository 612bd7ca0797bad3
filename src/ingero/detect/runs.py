"""Runs of equal keys in sorted columns: where they begin, how far along one a row is, the greatest value so far."""

from __future__ import annotations

import numpy as np

from ingero.model.arrays import BoolArray, IntArray


def run_starts(*keys: IntArray) -> BoolArray:
    """Where a run of equal keys begins, in columns of shape (n,) sorted so that equal rows follow each other."""
    starts = np.ones(keys[0].size, bool)
    if starts.size:
        starts[1:] = False
        for key in keys:
            starts[1:] |= key[1:] != key[:-1]
    return starts


def index_of_start(starts: BoolArray) -> IntArray:
    """For each row, the index at which its run began."""
    return np.maximum.accumulate(np.where(starts, np.arange(starts.size), 0))


def index_of_last(starts: BoolArray) -> IntArray:
    """The last row of each run, shape (n_runs,)."""
    return np.flatnonzero(np.append(starts[1:], True))


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
