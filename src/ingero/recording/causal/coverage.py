"""How much of what happened the recording holds, operation by operation, from its own counts.

Old recordings overwrite finished buckets, so neither their ``count`` nor their ``stored`` is taken alone: the rows that
are there plus the calls that were counted without a row are the least there can have been.

Counts are kept per minute. Of a window that cuts one they say only how many calls there can have been at most: what is
missing in it is taken from the weights of its rows, and what was lost in its minutes may all have been in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.model.arrays import IntArray, Records
from ingero.model.events import EventFlag, HostOp, Source, is_stored_at_end
from ingero.model.incidents import Coverage, GroupCounts
from ingero.model.operations import GPU_SOURCES, code_of
from ingero.model.recording import Recording
from ingero.model.sampling import is_never_sampled
from ingero.recording.causal.exact import operation_keys
from ingero.units import NS_PER_S

_MINUTE_NS: Final = 60 * NS_PER_S
_LATE_NS: Final = NS_PER_S
"""A call is counted in the minute of the next totals, up to so long after it ended."""
_SWITCH: Final = code_of(HostOp.SCHED_SWITCH)


_GROUPS: Final[dict[int, str]] = {
    Source.CUDA: "GPU calls",
    Source.DRIVER: "GPU calls",
    Source.CUDA_GRAPH: "GPU calls",
    Source.NCCL: "collectives",
    Source.HOST: "host",
    Source.IO: "disk and network",
    Source.NET: "disk and network",
    Source.TCP: "disk and network",
}


@dataclass(frozen=True, slots=True)
class Count:
    """Calls of one kind: how many there are rows for, and how many there were at least."""

    stored: int
    seen: int

    @property
    def unstored(self) -> int:
        """Calls without a row."""
        return self.seen - self.stored


@dataclass(frozen=True, slots=True)
class Gap:
    """What of some operations of one process has no row, in all of the recording or in the window that was asked for.

    Attributes:
        stored: Calls with a row.
        seen: Calls, at least; in a window as its rows' weights say.
        most: Calls, at most, where a window cuts a minute; else the same as `seen`.
        total_ns: Time in all of the calls that were counted; 0 where nobody counted.
        missing_ns: Time in the calls without a row.
        is_known: Whether anybody counted the calls that have no row.
    """

    stored: int
    seen: int
    most: int
    total_ns: int
    missing_ns: int
    is_known: bool

    @property
    def unstored(self) -> int:
        """Calls without a row."""
        return self.seen - self.stored

    @property
    def share(self) -> float:
        """Part of the calls that has no row."""
        return self.unstored / max(self.seen, 1)


@dataclass(frozen=True, slots=True)
class _Tally:
    """One operation of one process in all of the recording."""

    rows: int = 0
    row_ns: int = 0
    counted: int = 0
    noted: int = 0
    counted_ns: int = 0
    lost: int = 0
    weight: int = 0

    @property
    def by_books(self) -> int:
        """Calls of all of its minutes without a row."""
        return max(self.counted - self.noted, 0)

    @property
    def usual_ns(self) -> float:
        """How long one of its calls took."""
        if self.counted:
            return self.counted_ns / self.counted
        return self.row_ns / max(self.rows, 1)


class CallCounts:
    """The counts of a recording.

    Args:
        recording: Rows, aggregates and coverage.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        is_done = (recording.events["flags"] & EventFlag.IN_FLIGHT) == 0
        # A copy of every row would be the largest thing in memory.
        events = recording.events if is_done.all() else recording.events[is_done]
        stamps = events["start_ns"] + np.where(
            is_stored_at_end(events["source"]), events["duration_ns"], 0
        )
        self._row_keys = operation_keys(events)
        self._row_minutes = stamps // _MINUTE_NS
        self._row_ns = events["duration_ns"]
        self._row_weights = np.maximum(events["weight"], 1)
        tallies = _touched(recording)
        keys = operation_keys(tallies)
        # The writer tallies rows by their minute, and the calls of both minutes may be counted in the later one: a
        # tally without a count says that nobody counted only where no other minute of the same calls has one.
        is_kept = np.isin(keys, keys[tallies["count"] > 0])
        self._aggregates, self._keys = tallies[is_kept], keys[is_kept]
        self._counted_sources = {
            (key >> 48, key >> 8 & 0xFF) for key in np.unique(self._keys).tolist()
        }
        self._tallies = self._sum_up()
        self._of_process: dict[int, dict[int, _Tally]] = {}
        for key, tally in self._tallies.items():
            self._of_process.setdefault(key >> 16, {})[key & 0xFFFF] = tally

    def _sum_up(self) -> dict[int, _Tally]:
        keys = np.union1d(self._row_keys, self._keys)
        at_row, at_count = (np.searchsorted(keys, k) for k in (self._row_keys, self._keys))
        columns = [
            np.bincount(at_row, minlength=len(keys)),
            np.bincount(at_row, self._row_ns, len(keys)),
            *(
                np.bincount(at_count, self._aggregates[name], len(keys))
                for name in ("count", "stored", "sum_duration_ns", "lost")
            ),
            np.bincount(at_row, self._row_weights, len(keys)),
        ]
        rows = zip(*(column.astype(np.int64).tolist() for column in columns), strict=True)
        return {key: _Tally(*row) for key, row in zip(keys.tolist(), rows, strict=True)}

    def _unstored(self, code: int, tally: _Tally) -> tuple[int, int]:
        """(calls without a row, such calls at most) of one operation; rows that were not asked for are not missing."""
        if not self._recording.is_cut:
            unstored = max(tally.by_books, tally.counted - tally.rows)
            return unstored, unstored
        if not self._recording.has_weights:
            return tally.by_books, tally.by_books
        unstored = tally.weight - tally.rows + tally.lost
        return unstored, unstored if _is_always_kept(code) else max(unstored, tally.by_books)

    @property
    def has_counts(self) -> bool:
        """Whether anybody counted the calls that have no row."""
        return bool(len(self._aggregates)) or bool(len(self._recording.coverage))

    def gap(self, node: int, pid: int, codes: Iterable[int]) -> Gap:
        """What of these operations of a process has no row.

        Args:
            node: Index of the node.
            pid: Thread group.
            codes: Operations as source << 8 | op.
        """
        stored = seen = most = total_ns = missing_ns = 0
        sources: set[int] = set()
        is_cut = self._recording.is_cut
        for code, tally in self._find(node, pid, codes):
            unstored, at_most = self._unstored(code, tally)
            stored, seen = stored + tally.rows, seen + tally.rows + unstored
            most += tally.rows + at_most
            total_ns += max(tally.counted_ns, tally.row_ns)
            if unstored:
                left_ns = max(tally.counted_ns - tally.row_ns, 0)
                missing_ns += int(tally.usual_ns * unstored) if is_cut else left_ns
            if not tally.counted and (node, code >> 8) not in self._counted_sources:
                sources.add(code >> 8)
        if sources and len(self._recording.coverage):
            n_left_out = self._sampled_out(node, tuple(sources))[0]
            seen, most = seen + n_left_out, most + n_left_out
        is_known = not sources or self._is_covered(node, sources)
        return Gap(stored, seen, most, total_ns, missing_ns, is_known)

    def _find(self, node: int, pid: int, codes: Iterable[int]) -> Iterator[tuple[int, _Tally]]:
        """Those of some operations that a process has: a few of the many that a rule asks for."""
        of_process = self._of_process.get(node << 32 | pid, {})
        for code in of_process.keys() & codes:
            yield code, of_process[code]

    def _is_covered(self, node: int, sources: set[int]) -> bool:
        table = self._recording.coverage
        return sources <= set(table["source"][table["node"] == node].tolist())

    def total(self, node: int, pid: int, codes: Iterable[int]) -> tuple[int, int]:
        """(calls, ns in them) of some operations of a process: counted where they were, else of their rows."""
        calls = total_ns = 0
        for _, tally in self._find(node, pid, codes):
            is_short = self._recording.is_cut or tally.counted < tally.rows
            calls += tally.rows if is_short else tally.counted
            total_ns += tally.row_ns if is_short else tally.counted_ns
        return calls, total_ns

    def _within(self, wanted: list[int], span_ns: tuple[int, int]) -> tuple[IntArray, Records]:
        """(durations of rows, counts) of some operations in the minutes that a span touches."""
        first, last = (at // _MINUTE_NS for at in span_ns)
        minutes = self._aggregates["bucket_ns"] // _MINUTE_NS
        is_count = np.isin(self._keys, wanted) & (minutes >= first) & (minutes <= last)
        is_row = np.isin(self._row_keys, wanted)
        is_row &= (self._row_minutes >= first) & (self._row_minutes <= last)
        return self._row_ns[is_row], self._aggregates[is_count]

    def _count(self, key: int, span_ns: tuple[int, int]) -> Count:
        """Calls of one operation of a process in the minutes that a span touches; at most where a window cuts one."""
        rows, counts = self._within([key], span_ns)
        stored = len(rows)
        counted, noted = int(counts["count"].sum()), int(counts["stored"].sum())
        if self._recording.is_cut:  # rows outside of what was asked for are not missing
            lost = int(counts["lost"].sum())
            is_kept = self._recording.has_weights and _is_always_kept(key & 0xFFFF)
            return Count(stored, stored + (lost if is_kept else max(counted - noted, 0)))
        return Count(stored, max(stored, counted, stored + max(counted - noted, 0)))

    def unstored_off_cpu_ns(self, node: int, pid: int, span_ns: tuple[int, int]) -> int:
        """Off-CPU time of a process that was measured and has no row, in the minutes that a span touches."""
        if self._recording.is_cut:
            return self.gap(node, pid, (_SWITCH,)).missing_ns
        rows, counts = self._within([_key(node, pid, _SWITCH)], span_ns)
        return max(int(counts["sum_duration_ns"].sum()) - int(rows.sum()), 0)

    def is_off_cpu_overwritten(self, node: int, pid: int) -> bool:
        """Whether a finished minute of a process's thread switches was written over: it has more rows than it says."""
        wanted = _key(node, pid, _SWITCH)
        mine = self._aggregates[self._keys == wanted]
        rows = self._row_minutes[self._row_keys == wanted]
        return any(
            int((rows == minute).sum()) > int(stored)
            for minute, stored in zip(mine["bucket_ns"] // _MINUTE_NS, mine["stored"], strict=True)
        )

    def gpu_calls(self, node: int, pid: int, span_ns: tuple[int, int]) -> Count:
        """Runtime, driver and graph calls of a process in the minutes that a span touches."""
        keys = [
            key
            for key in self._tallies
            if key >> 16 == node << 32 | pid and key >> 8 & 0xFF in GPU_SOURCES
        ]
        total = [self._count(key, span_ns) for key in keys]
        stored, seen = sum(c.stored for c in total), sum(c.seen for c in total)
        if len(self._aggregates):
            return Count(stored, seen)
        return Count(stored, seen + self._sampled_out(node, GPU_SOURCES)[0])

    def coverage(self, node: int, pid: int, codes: Iterable[int]) -> Coverage:
        """Coverage of the operations that an incident of one process speaks of."""
        codes = tuple(codes)
        gap = self.gap(node, pid, codes)
        if not gap.is_known or not self.has_counts:
            return Coverage("unknown", gap.stored, None, None)
        is_short = gap.most > gap.stored or self._recording.is_truncated
        lost = self._sampled_out(node, tuple({code >> 8 for code in codes}))[1]
        return Coverage(
            "sampled" if is_short else "exact",
            gap.stored,
            gap.seen,
            lost if len(self._recording.coverage) else None,
            gap.most if gap.most > gap.seen else None,
        )

    def groups(self) -> tuple[GroupCounts, ...]:
        """Each group of sources that has any call; page allocations are only counted."""
        sums: dict[str, list[int]] = {}
        for key, tally in self._tallies.items():
            source, op = key >> 8 & 0xFF, key & 0xFF
            group = _GROUPS.get(source)
            node = key >> 48
            is_known = (node, source) in self._counted_sources or self._is_covered(node, {source})
            if group and is_known and (source, op) != (Source.HOST, HostOp.PAGE_ALLOC):
                into = sums.setdefault(group, [0, 0, 0])
                for i, unstored in enumerate((0, *self._unstored(key & 0xFFFF, tally))):
                    into[i] += tally.rows + unstored
        return tuple(
            GroupCounts(name, stored, seen, most if most > seen else None)
            for name in dict.fromkeys(_GROUPS.values())
            if name in sums
            for stored, seen, most in (sums[name],)
            if most
        )

    def _sampled_out(self, node: int, sources: tuple[int, ...]) -> tuple[int, int]:
        """(records seen without a row, of which lost) of a node, from the coverage table."""
        table = self._recording.coverage
        mine = table[(table["node"] == node) & np.isin(table["source"], sources)]
        lost = int(mine["lost"].sum())
        return int(mine["sampled_out"].sum()) + lost, lost


def _touched(recording: Recording) -> Records:
    """Counts of the minutes that the asked part of a recording touches, and in which its last calls may be counted."""
    asked_to_ns = recording.asked_ns[1]
    last = (asked_to_ns + _LATE_NS) // _MINUTE_NS if asked_to_ns else 0
    minutes = recording.aggregates["bucket_ns"] // _MINUTE_NS
    firsts = recording.find_asked_from(recording.aggregates["node"])
    is_in = minutes >= firsts // _MINUTE_NS
    if last:
        is_in &= minutes <= last
    touched: Records = recording.aggregates[is_in]
    return touched


def _is_always_kept(code: int) -> bool:
    """Whether every call of an operation has a row or is counted as lost, in a recording of this version."""
    source, op = np.array([code >> 8], np.uint8), np.array([code & 0xFF], np.uint8)
    return bool(is_never_sampled(source, op)[0])


def _key(node: int, pid: int, code: int) -> int:
    return node << 48 | pid << 16 | code
