"""By how much peers could be faster as far as their CPU limits go.

A rank whose host has used up its CPU limit works also while it seems to wait: a loader prepares the next batches, as
far as the limit lets it. Where all peers are so, the one that comes last never waits, its loader has no such time, and
so it stays the last, for minutes: by own times alone 1.2 to 1.5 times as slow as the others, who would be hardly
faster without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ingero.detect.groups import PairedOps
from ingero.detect.medians import row_medians
from ingero.model.arrays import BoolArray, IntArray
from ingero.model.collectives import FULL_LIMIT


def find_slack(
    ops: PairedOps, own_ns: IntArray, counts: BoolArray, last_ns: Sequence[int]
) -> tuple[IntArray, IntArray]:
    """The time up to each operation that the median peer's limit leaves unused, and the time of which that is a part.

    Where no limit is known both are the own time: no bound on what a worker takes beyond its peers.

    Args:
        ops: The operations.
        own_ns: Own time before each, 0 where it does not count, shape (T, m).
        counts: Whether it does, shape (T, m).
        last_ns: By worker, when it entered the one before them; 0 where there was none.

    Returns:
        Both of shape (T, m).
    """
    if not (ops.limit_use > 0).any():
        return own_ns, own_ns
    used = row_medians(np.where(ops.limit_use >= 0, ops.limit_use, np.nan).astype(np.float64))
    entered = np.concatenate([np.array([last_ns], np.int64), np.where(counts, ops.entry_ns, 0)])
    before = np.maximum.accumulate(entered, axis=0)[:-1]
    since = np.where(counts & (before > 0), ops.entry_ns - before, 0)
    is_limited = used[:, None] > 0.0
    span = np.where(is_limited, np.maximum(since, own_ns), own_ns)
    unused = np.round(span * (1.0 - used[:, None] / FULL_LIMIT)).astype(np.int64)
    return np.where(is_limited, unused, own_ns), span
