"""Binary search in many sorted rows at once.

Rows of a power of two of entries, each ending in +inf, are searched without a test for the row's end.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ingero.detect.stacking import append_groups
from ingero.model.arrays import FloatArray, IntArray

_MARK_EVERY: Final = 16
"""32-bit entries of one cache line of 64 bytes."""


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
        marks: Every 16th entry of each row, a cache line apart, of rows whose width `padded_width` made: rows that do
            not fit into the processor's cache are searched several times faster with them.

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
    """Binary search in the flat table over 2 × ``step`` entries from ``first`` on: the index of the first not below."""
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
        self.entries = append_groups(self.entries, n_rows, fill=np.inf)
        self._marks = append_groups(self._marks, n_rows, fill=np.inf)

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
