"""Counts of processes that ended: their place in the kernel's map is given to others, their calls stay counted."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np

from ingero.agent.capture.kernel.abi import get_dtype
from ingero.model.arrays import Records

MAX_ROWS: Final = 4096
NOBODY: Final = 0
"""The pid under which processes are added up when there are too many to keep apart."""
_LOWEST: Final = frozenset({"min_ns"})
_HIGHEST: Final = frozenset({"max_ns"})


class EndedCounts:
    """Exact counts of ended processes, apart as long as they are few.

    Args:
        most_rows: Rows kept apart; beyond that all so far are added up by operation under pid 0.
    """

    def __init__(self, most_rows: int = MAX_ROWS) -> None:
        self._most_rows = most_rows
        self.keys: Records = np.empty(0, get_dtype("count_key"))
        self.counts: Records = np.empty(0, get_dtype("count"))

    def add(self, pids: Collection[int], keys: Records, counts: Records) -> None:
        """Keep the rows of these processes."""
        is_theirs = np.isin(keys["pid"], np.fromiter(pids, np.uint32))
        self.keys = np.concatenate([self.keys, keys[is_theirs]])
        self.counts = np.concatenate([self.counts, counts[is_theirs]])
        if len(self.keys) > self._most_rows:
            self._fold()

    def _fold(self) -> None:
        operations = self.keys["source"].astype(np.int64) << 16 | self.keys["op"]
        _, first, row = np.unique(operations, return_index=True, return_inverse=True)
        counts = np.zeros(len(first), self.counts.dtype)
        for name in self.counts.dtype.names or ():
            values = self.counts[name]
            if name in _LOWEST:
                never = np.iinfo(np.uint64).max
                lowest = np.full(len(first), never)
                np.minimum.at(lowest, row, np.where(values == 0, never, values))
                counts[name] = np.where(lowest == never, 0, lowest)
            else:
                combine = np.maximum if name in _HIGHEST else np.add
                total = np.zeros_like(counts[name])
                combine.at(total, row, values)
                counts[name] = total
        self.keys, self.counts = self.keys[first].copy(), counts
        self.keys["pid"] = NOBODY
