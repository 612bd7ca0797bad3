"""Sets of time: union, intersection by measure, and how much of each query interval a set covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from ingero.model.arrays import IntArray

Times = IntArray


@dataclass(frozen=True, slots=True)
class Intervals:
    """Disjoint half-open intervals in ascending order. Make one with `of`.

    Attributes:
        starts: Shape (n,), ascending.
        ends: Shape (n,), each greater than its start and not greater than the next start.
    """

    starts: Times
    ends: Times

    @classmethod
    def of(cls, starts: Times, ends: Times) -> Self:
        """The union of any intervals, in any order; empty ones vanish."""
        is_real = ends > starts
        starts, ends = starts[is_real], ends[is_real]
        if not len(starts):
            return cls(np.empty(0, np.int64), np.empty(0, np.int64))
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], np.maximum.accumulate(ends[order])
        is_first = np.ones(len(starts), bool)
        is_first[1:] = starts[1:] > ends[:-1]
        is_last = np.append(is_first[1:], True)
        return cls(
            starts[is_first].astype(np.int64, copy=False),
            ends[is_last].astype(np.int64, copy=False),
        )

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def total_ns(self) -> int:
        """Length of the whole set."""
        return int((self.ends - self.starts).sum())

    def covered_ns(self, starts: Times, ends: Times) -> Times:
        """How much of each query interval the set covers; shape of `starts`."""
        if not len(self.starts):
            return np.zeros(len(starts), np.int64)
        before = np.concatenate(([0], np.cumsum(self.ends - self.starts)))
        return self._measure_to(ends, before) - self._measure_to(starts, before)

    def union(self, other: Intervals) -> Intervals:
        """Both sets together."""
        return Intervals.of(
            np.concatenate((self.starts, other.starts)), np.concatenate((self.ends, other.ends))
        )

    def within(self, other: Intervals) -> int:
        """Length of the intersection with another set."""
        return int(other.covered_ns(self.starts, self.ends).sum())

    def gaps(self, start_ns: int, end_ns: int) -> Intervals:
        """What of one span the set does not cover."""
        starts = np.concatenate(([start_ns], np.clip(self.ends, start_ns, end_ns)))
        ends = np.concatenate((np.clip(self.starts, start_ns, end_ns), [end_ns]))
        return Intervals.of(starts, ends)

    def without(self, other: Intervals) -> Intervals:
        """What of the set lies outside of another one."""
        if not len(self) or not len(other):
            return self
        span = int(self.starts[0]), int(self.ends[-1])
        return self.gaps(*span).union(other).gaps(*span)

    def _measure_to(self, times: Times, before: Times) -> Times:
        """Length of the set left of each time."""
        i = np.searchsorted(self.starts, times, side="right") - 1
        inside = np.clip(times - self.starts[i], 0, self.ends[i] - self.starts[i])
        measure: Times = np.where(i < 0, 0, before[i] + inside)
        return measure


NO_TIME: Final = Intervals(np.empty(0, np.int64), np.empty(0, np.int64))
"""The empty set."""
