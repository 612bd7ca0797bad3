"""Statistics of operations: from the exact tables wherever a recording has them, and said otherwise.

Counts and histograms are kept per minute, and a call is counted in the minute of the next totals, up to a second after
it ended. A window that cuts a minute takes that minute from its rows, each with its weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from ingero.model.arrays import BoolArray, FloatArray, IntArray, Records
from ingero.model.events import EventFlag, is_stored_at_end
from ingero.model.latency import HIST_BUCKETS, build_bucket_edges_ns, gather_histogram, quantiles_ns
from ingero.model.operations import find_failures
from ingero.model.recording import Recording
from ingero.units import NS_PER_S

_MINUTE_NS: Final = 60 * NS_PER_S
_QUANTILES: Final = (0.50, 0.95, 0.99)
_MIN_COUNTED: Final = 0.99  # of the calls are in the histogram, else it is not the answer


class Basis(StrEnum):
    """Where a statistic comes from."""

    COUNTED = "counted"  # every call, from the recorder's own counts
    ROWS = "rows"  # every call has a row
    ESTIMATE = "estimate"  # rows are a sample, or the window cuts a minute: weighted
    UNKNOWN = "unknown"  # from rows, in a recording that does not say how many calls have none


@dataclass(frozen=True, slots=True)
class Statistics:
    """One operation of one process.

    Attributes:
        node: Index into the recording's nodes.
        pid: Thread group.
        source: Code of the source.
        op: Code of the operation.
        basis: Where the numbers come from.
        rows: Calls with a row, without those that had not returned.
        in_flight: Rows of calls that had not returned; in no other number.
        count: Calls.
        exact: How many of `count` were counted one by one.
        errors: Calls that failed.
        total_ns: Time in all of them.
        quantiles: p50, p95 and p99, ns.
        max_ns: The longest.
    """

    node: int
    pid: int
    source: int
    op: int
    basis: Basis
    rows: int
    in_flight: int
    count: int
    exact: int
    errors: int
    total_ns: int
    quantiles: tuple[float, float, float]
    max_ns: int

    @property
    def row_share(self) -> float:
        """Part of the calls that has a row."""
        return min(self.rows / self.count, 1.0) if self.count else 1.0


def share_of_rows(statistics: Iterable[Statistics]) -> float | None:
    """Part of the calls of several operations that has a row; None where nobody counted the calls of one of them."""
    found = list(statistics)
    if any(one.basis is Basis.UNKNOWN for one in found):
        return None
    n_calls = sum(one.count for one in found)
    return min(sum(one.rows for one in found) / n_calls, 1.0) if n_calls else 1.0


def compute_statistics(recording: Recording) -> list[Statistics]:
    """Every operation of every process that the recording, or the asked part of it, holds; by node, pid, source, op."""
    return _Reader(recording).compute()


@dataclass(frozen=True, slots=True)
class _Sorted:
    """A table in groups of equal keys."""

    keys: IntArray
    rows: Records

    @classmethod
    def of(cls, rows: Records) -> _Sorted:
        keys = operation_keys(rows)
        order = np.argsort(keys, kind="stable")
        return cls(keys[order], rows[order])

    def get(self, key: int) -> Records:
        first, last = np.searchsorted(self.keys, [key, key + 1])
        return self.rows[first:last]


def operation_keys(rows: Records) -> IntArray:
    """One number for node, process, source and operation of each row; sorts in that order."""
    keys: IntArray = (
        rows["node"].astype(np.int64) << 48
        | rows["pid"].astype(np.int64) << 16
        | rows["source"].astype(np.int64) << 8
        | rows["op"]
    )
    return keys


class _Reader:
    """Puts each operation's exact minutes and the rows of the others together."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._events = _Sorted.of(recording.events)
        # The writer tallies rows by their minute, the calls of its last second are counted in the next one: a minute
        # without a count may be the one that says how many rows there are.
        self._tallies = _Sorted.of(recording.aggregates)
        self._counts = _Sorted.of(recording.aggregates[recording.aggregates["count"] > 0])
        self._bins = _Sorted.of(recording.histograms)

    def compute(self) -> list[Statistics]:
        keys = np.unique(np.concatenate((self._events.keys, self._counts.keys))).tolist()
        pids = set(self._recording.pids)
        found = (self._summarise(key) for key in keys if not pids or _pid(key) in pids)
        return [one for one in found if one is not None]

    def _summarise(self, key: int) -> Statistics | None:
        every = self._events.get(key)
        is_open = (every["flags"] & EventFlag.IN_FLIGHT) != 0
        rows, counts, bins = every[~is_open], self._counts.get(key), self._bins.get(key)
        is_whole = self._is_whole(counts)
        whole, whole_bins = counts[is_whole], bins[self._is_whole(bins)]
        if not len(every) and not len(whole):
            return None
        operation = (key, rows, int(is_open.sum()))
        tallies = self._tallies.get(key)
        touched = tallies[self._is_touched(tallies)]
        n_unstored = max(int((touched["count"] - touched["stored"]).sum()), 0)
        if self._recording.is_cut:
            if n_unstored:
                outside = rows[~np.isin(_minutes(rows), whole["bucket_ns"])]
                return _from_both(operation, whole, whole_bins, outside)
        elif int(whole["count"].sum()) >= len(rows) + n_unstored or not len(rows):
            return _from_counts(operation, whole, whole_bins)
        return _from_rows(operation, n_unstored, is_known=self._has_counts(key))

    def _has_counts(self, key: int) -> bool:
        """Whether anybody counted the calls of this kind that have no row."""
        if len(self._counts.get(key)):
            return True
        table = self._recording.coverage
        mine = table[(table["node"] == key >> 48) & (table["source"] == (key >> 8 & 0xFF))]
        return bool(len(mine)) and not int((mine["sampled_out"] + mine["lost"]).sum())

    def _is_whole(self, minutes: Records) -> BoolArray:
        buckets, last = minutes["bucket_ns"], self._recording.asked_ns[1]
        is_in: BoolArray = buckets >= self._recording.find_asked_from(minutes["node"])
        if last:
            is_in &= buckets + _MINUTE_NS <= last
        return is_in

    def _is_touched(self, minutes: Records) -> BoolArray:
        buckets, last = minutes["bucket_ns"], self._recording.asked_ns[1]
        is_in: BoolArray = buckets + _MINUTE_NS > self._recording.find_asked_from(minutes["node"])
        if last:
            is_in &= buckets <= last
        return is_in


_OperationRows = tuple[int, Records, int]
"""Key of the operation, its rows that ended, and how many had not returned."""


def _pid(key: int) -> int:
    return key >> 16 & 0xFFFF_FFFF


def _minutes(rows: Records) -> IntArray:
    ends = rows["start_ns"] + np.where(is_stored_at_end(rows["source"]), rows["duration_ns"], 0)
    minutes: IntArray = ends // _MINUTE_NS * _MINUTE_NS
    return minutes


def _from_counts(operation: _OperationRows, counts: Records, bins: Records) -> Statistics:
    """Everything from the tables; quantiles from rows only where there is no histogram."""
    _key, rows, _ = operation
    count = int(counts["count"].sum())
    histogram = gather_histogram(bins["from_ns"], bins["to_ns"], bins["count"])
    is_timed = histogram.sum() >= _MIN_COUNTED * count
    is_all = len(rows) == count
    if is_timed or not len(rows):
        quantiles = _quantiles(histogram, _shortest(counts), _longest(counts))
    else:
        quantiles = _row_quantiles(rows)
    basis = Basis.COUNTED if is_timed or is_all or not _total(counts) else Basis.ESTIMATE
    numbers = (_total(counts), _longest(counts), quantiles)
    return _make(operation, basis, (count, count), int(counts["errors"].sum()), numbers)


def _from_both(
    operation: _OperationRows,
    counts: Records,
    bins: Records,
    outside: Records,
) -> Statistics:
    """Whole minutes from the tables, the cut ones from their weighted rows."""
    weights = _weights(outside)
    exact = int(counts["count"].sum())
    histogram = gather_histogram(bins["from_ns"], bins["to_ns"], bins["count"])
    edges = build_bucket_edges_ns()
    at = np.clip(np.searchsorted(edges, outside["duration_ns"], "right") - 1, 0, HIST_BUCKETS - 1)
    np.add.at(histogram, at, weights)
    total_ns = _total(counts) + int((outside["duration_ns"] * weights).sum())
    longest = max(_longest(counts), int(outside["duration_ns"].max(initial=0)))
    count = exact + int(weights.sum())
    shortest = int(outside["duration_ns"].min(initial=longest))
    if len(counts):
        shortest = min(shortest, _shortest(counts))
    numbers = (total_ns, longest, _quantiles(histogram, shortest, longest))
    basis = Basis.ESTIMATE if len(outside) or not exact else Basis.COUNTED
    errors = int(counts["errors"].sum()) + _count_errors(outside)
    return _make(operation, basis, (count, exact), errors, numbers)


def _from_rows(operation: _OperationRows, n_unstored: int, *, is_known: bool) -> Statistics:
    """Everything from rows, each with its weight."""
    _, rows, _ = operation
    weights = _weights(rows)
    count = max(int(weights.sum()), len(rows) + n_unstored)
    basis = Basis.ROWS if is_known else Basis.UNKNOWN
    if count > len(rows):
        basis = Basis.ESTIMATE
    numbers = (
        int((rows["duration_ns"] * weights).sum()),
        int(rows["duration_ns"].max(initial=0)),
        _row_quantiles(rows),
    )
    exact = len(rows) if basis is Basis.ROWS else 0
    return _make(operation, basis, (count, exact), _count_errors(rows), numbers)


def _make(
    operation: _OperationRows,
    basis: Basis,
    counts: tuple[int, int],
    errors: int,
    numbers: tuple[int, int, tuple[float, float, float]],
) -> Statistics:
    key, rows, n_open = operation
    total_ns, longest, quantiles = numbers
    return Statistics(
        key >> 48, _pid(key), key >> 8 & 0xFF, key & 0xFF, basis, len(rows), n_open, *counts,
        errors, total_ns, quantiles, longest,
    )  # fmt: skip


def _weights(rows: Records) -> IntArray:
    """Calls that each row stands for."""
    weights: IntArray = np.maximum(rows["weight"], 1).astype(np.int64)
    return weights


def _count_errors(rows: Records) -> int:
    is_failure = find_failures(rows["source"], rows["op"], rows["ret_code"])
    return int(_weights(rows)[is_failure].sum())


def _total(counts: Records) -> int:
    return int(counts["sum_duration_ns"].sum())


def _longest(counts: Records) -> int:
    return int(counts["max_duration_ns"].max(initial=0))


def _shortest(counts: Records) -> int:
    return int(counts["min_duration_ns"].min()) if len(counts) else 0


def _quantiles(histogram: FloatArray, shortest: int, longest: int) -> tuple[float, float, float]:
    """Quantiles of a histogram; no call was shorter, or longer, than these."""
    found = np.clip(np.nan_to_num(quantiles_ns(histogram, _QUANTILES)), shortest, longest)
    values = found.tolist()
    return values[0], values[1], values[2]


def _row_quantiles(rows: Records) -> tuple[float, float, float]:
    """Smallest durations that so many of the weighted calls do not exceed; 0 without rows."""
    if not len(rows):
        return 0.0, 0.0, 0.0
    order = np.argsort(rows["duration_ns"], kind="stable")
    reached = np.cumsum(_weights(rows)[order])
    at = np.searchsorted(reached, np.asarray(_QUANTILES) * float(reached[-1]), side="left")
    values = rows["duration_ns"][order][np.minimum(at, len(rows) - 1)].astype(float).tolist()
    return values[0], values[1], values[2]
