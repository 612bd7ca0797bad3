"""How much of what happened the recording holds, from its own books.

Old recordings overwrite finished buckets, so neither their ``count`` nor their ``stored`` is taken alone: the rows that
are there plus the calls that were counted without a row are the least there can have been.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ingero.model.events import HostOp, Source, is_stored_at_end
from ingero.model.incidents import Coverage
from ingero.model.recording import Recording
from ingero.units import NS_PER_S

_MINUTE_NS: Final = 60 * NS_PER_S
_GPU_SOURCES: Final = (Source.CUDA, Source.DRIVER, Source.CUDA_GRAPH, Source.NCCL)


@dataclass(frozen=True, slots=True)
class Count:
    """Calls of one kind: how many there are rows for, and how many there were at least."""

    stored: int
    seen: int

    @property
    def unstored(self) -> int:
        """Calls without a row."""
        return self.seen - self.stored


class Books:
    """The counts of a recording.

    Args:
        recording: Rows, aggregates and coverage.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        events = recording.events
        stamps = events["start_ns"] + np.where(
            is_stored_at_end(events["source"]), events["duration_ns"], 0
        )
        self._row_keys = _keys(events["node"], events["pid"], events["source"], events["op"])
        self._row_minutes = stamps // _MINUTE_NS
        tallies = recording.aggregates
        keys = _keys(tallies["node"], tallies["pid"], tallies["source"], tallies["op"])
        # The writer tallies rows by their minute, and the calls of both minutes may be counted in the later one: a tally
        # without a count says that nobody counted only where no other minute of the same calls has one.
        is_kept = np.isin(keys, keys[tallies["count"] > 0])
        self._aggregates, self._keys = tallies[is_kept], keys[is_kept]

    @property
    def has_counts(self) -> bool:
        """Whether anybody counted the calls that have no row."""
        return bool(len(self._aggregates)) or bool(len(self._recording.coverage))

    def count(
        self, node: int, pid: int, ops: tuple[tuple[int, int], ...], span_ns: tuple[int, int]
    ) -> Count:
        """Calls of a process in the minutes that a span touches."""
        first, last = span_ns[0] // _MINUTE_NS, span_ns[1] // _MINUTE_NS
        wanted = [_key(node, pid, source, op) for source, op in ops]
        is_row = (
            np.isin(self._row_keys, wanted)
            & (self._row_minutes >= first)
            & (self._row_minutes <= last)
        )
        minutes = self._aggregates["bucket_ns"] // _MINUTE_NS
        is_kept = np.isin(self._keys, wanted) & (minutes >= first) & (minutes <= last)
        kept = self._aggregates[is_kept]
        stored = int(is_row.sum())
        counted, noted = int(kept["count"].sum()), int(kept["stored"].sum())
        seen = max(stored, counted, stored + max(counted - noted, 0))
        return Count(stored, seen)

    def unstored_off_cpu_ns(self, node: int, pid: int, span_ns: tuple[int, int]) -> int:
        """Off-CPU time of a process that was measured and has no row, in the minutes that a span touches."""
        first, last = span_ns[0] // _MINUTE_NS, span_ns[1] // _MINUTE_NS
        wanted = _key(node, pid, Source.HOST, HostOp.SCHED_SWITCH)
        minutes = self._aggregates["bucket_ns"] // _MINUTE_NS
        kept = self._aggregates[(self._keys == wanted) & (minutes >= first) & (minutes <= last)]
        is_row = (
            (self._row_keys == wanted) & (self._row_minutes >= first) & (self._row_minutes <= last)
        )
        in_rows = int(self._recording.events["duration_ns"][is_row].sum())
        return max(int(kept["sum_duration_ns"].sum()) - in_rows, 0)

    def is_off_cpu_overwritten(self, node: int, pid: int) -> bool:
        """Whether a finished minute of a process's thread switches was written over: it has more rows than it says."""
        wanted = _key(node, pid, Source.HOST, HostOp.SCHED_SWITCH)
        mine = self._aggregates[self._keys == wanted]
        rows = self._row_minutes[self._row_keys == wanted]
        return any(
            int((rows == minute).sum()) > int(stored)
            for minute, stored in zip(mine["bucket_ns"] // _MINUTE_NS, mine["stored"], strict=True)
        )

    def gpu_calls(self, node: int, pid: int, span_ns: tuple[int, int]) -> Count:
        """Runtime, driver and graph calls of a process in the minutes that a span touches."""
        ops = {
            (int(a["source"]), int(a["op"]))
            for a in self._aggregates
            if a["source"] in _GPU_SOURCES
        }
        total = [self.count(node, pid, (op,), span_ns) for op in sorted(ops)]
        stored, seen = sum(c.stored for c in total), sum(c.seen for c in total)
        # Both books count the same calls: one by process, the other by source.
        return Count(stored, max(seen, stored + self._sampled_out(node, _GPU_SOURCES)[0]))

    def coverage(self, node: int, pid: int, span_ns: tuple[int, int], n_rows: int) -> Coverage:
        """Coverage of an incident of one process."""
        if not self.has_counts:
            return Coverage("unknown", n_rows, None, None)
        calls = self.gpu_calls(node, pid, span_ns)
        missing, lost = self._sampled_out(node, tuple(Source))
        missing = max(missing, calls.unstored)
        state = "sampled" if missing or self._recording.is_truncated else "exact"
        lost_known = lost if len(self._recording.coverage) else None
        return Coverage(state, n_rows, n_rows + missing, lost_known)

    def _sampled_out(self, node: int, sources: tuple[Source, ...]) -> tuple[int, int]:
        """(records seen without a row, of which lost) of a node, from the coverage table."""
        table = self._recording.coverage
        mine = table[(table["node"] == node) & np.isin(table["source"], sources)]
        lost = int(mine["lost"].sum())
        return int(mine["sampled_out"].sum()) + lost, lost


def _keys(
    nodes: npt.NDArray[np.uint16],
    pids: npt.NDArray[np.int32],
    sources: npt.NDArray[np.uint8],
    ops: npt.NDArray[np.uint8],
) -> npt.NDArray[np.int64]:
    return (
        nodes.astype(np.int64) << 48
        | pids.astype(np.int64) << 16
        | sources.astype(np.int64) << 8
        | ops
    )


def _key(node: int, pid: int, source: int, op: int) -> int:
    return node << 48 | pid << 16 | source << 8 | op
