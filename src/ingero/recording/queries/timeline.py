"""What each thread was doing when: shares of time per kind in equal bins, and single rows when few are in view.

The work is proportional to the rows of the part that was loaded, the answer to tracks times bins, whatever the zoom.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from ingero.errors import BadDataError
from ingero.model.arrays import BoolArray, IntArray
from ingero.model.events import OffCpuReason, op_name
from ingero.model.operations import LAST_CALL, OpKind
from ingero.model.recording import Recording
from ingero.model.untrusted import clean
from ingero.recording.causal.evidence import EventRows, Evidence, Process, split_by

_MAX_TRACKS: Final = 32
BINS: Final = 240
"""Of a view that names no number."""
_MAX_BINS: Final = 1000
_MAX_SLICES: Final = 1500

CATEGORIES: Final = (
    "launch", "copy", "GPU wait", "allocation", "collective", "graph", "other call",
    "preempted", "waiting for a CPU", "disk wait", "sleep", "quota", "off CPU", "disk", "network", "memory stall",
)  # fmt: skip
"""What a moment of a thread can be; the page has a colour for each, in this order."""

_OF_KIND: Final = {
    OpKind.LAUNCH: 0, OpKind.COPY: 1, OpKind.SYNC: 2, OpKind.ALLOC: 3, OpKind.FREE: 3,
    OpKind.HOST_ALLOC: 3, OpKind.HOST_FREE: 3, OpKind.COLLECTIVE: 4,
    OpKind.GRAPH: 5, OpKind.GRAPH_LAUNCH: 5, OpKind.MODULE: 6, OpKind.FILL: 6, OpKind.MAP: 6,
    OpKind.UNMAP: 6, OpKind.OTHER_CALL: 6, OpKind.QUOTA: 11,
    OpKind.READ: 13, OpKind.WRITE: 13, OpKind.NETWORK: 14, OpKind.FAULT: 15, OpKind.RECLAIM: 15,
}  # fmt: skip
_OF_REASON: Final = {
    OffCpuReason.PREEMPTED: 7, OffCpuReason.BLOCKED_IO: 9, OffCpuReason.SLEEP: 10, OffCpuReason.THROTTLED: 11,
}  # fmt: skip
_OFF_CPU: Final = 12
_NONE: Final = 255


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """One row: start in s, duration in µs, index into the track's `ops`, category, depth of nesting."""

    start_s: float
    duration_us: float
    op: int
    category: int
    depth: int


class Track(msgspec.Struct, frozen=True):
    """One thread's calls, or its waits, or what it asked of disk and network.

    Attributes:
        what: ``calls``, ``waits`` or ``requests``.
        busy_pct: Part of the view in which at least one row is under way.
        row_share: Part of the process's calls of these operations, in the whole part, that has a row: what is drawn and
            `busy_pct` are of those; None where nobody counted the others.
        shares: Per category that occurs: its index, and the part of each bin in percent, whole numbers.
        ops: Names that `slices` index.
        slices: Single rows, when few are in view.
    """

    node: str
    process: str
    pid: int
    tid: int
    thread: str
    rank: int | None
    what: str
    rows: int
    busy_pct: float
    row_share: float | None
    shares: list[tuple[int, list[int]]]
    ops: list[str]
    slices: list[Slice]


class TimelineAnswer(msgspec.Struct, frozen=True):
    """Tracks, busiest processes first; times are seconds from the part's first event."""

    first_s: float
    last_s: float
    from_s: float
    to_s: float
    bins: int
    categories: tuple[str, ...]
    tracks: list[Track]
    tracks_left_out: int


@dataclass(frozen=True, slots=True)
class View:
    """What of the part is in view.

    Attributes:
        from_s: Seconds from the part's first event.
        to_s: End; None for the last.
        bins: How many equal bins.
    """

    from_s: float = 0.0
    to_s: float | None = None
    bins: int = BINS


def build_timeline(evidence: Evidence, view: View) -> TimelineAnswer:
    """Draw the part.

    Raises:
        BadDataError: The view ends before it starts, lies outside of the part or has too many bins.
    """
    if not 1 <= view.bins <= _MAX_BINS:
        raise BadDataError(f"bins: 1 to {_MAX_BINS}")
    if view.to_s is not None and view.to_s < max(view.from_s, 0.0):
        raise BadDataError("to_s: the view ends before it starts, or before the first event")
    start_ns, end_ns = evidence.recording.window_ns
    from_ns = start_ns + round(max(view.from_s, 0.0) * 1e9)
    to_ns = end_ns if view.to_s is None else min(start_ns + round(view.to_s * 1e9), end_ns)
    to_ns = max(to_ns, from_ns + 1)
    if from_ns > end_ns:
        raise BadDataError("the view lies behind the last event")
    edges = from_ns + np.linspace(0, to_ns - from_ns, view.bins + 1).astype(np.int64)
    categories = _categorise(evidence)
    rows = evidence.rows
    in_view = (rows.starts < to_ns) & (rows.ends > from_ns) & (categories != _NONE)
    n_in_view = int(in_view.sum())
    tracks = [
        (process, name, mine)
        for process in evidence.processes
        for name, mine in _iter_tracks(process, in_view)
    ]
    tracks.sort(key=lambda track: (-int(track[2].durations.sum()), track[0].pid, track[1]))
    chosen = sorted(
        tracks[:_MAX_TRACKS],
        key=lambda t: (t[0].node, t[0].pid, int(t[2].tids[0]), _ORDER.index(t[1])),
    )
    drawing = _Drawing(evidence, edges, categories, n_in_view <= _MAX_SLICES)
    return TimelineAnswer(
        first_s=0.0,
        last_s=(end_ns - start_ns) / 1e9,
        from_s=(from_ns - start_ns) / 1e9,
        to_s=(to_ns - start_ns) / 1e9,
        bins=view.bins,
        categories=CATEGORIES,
        tracks=[drawing.track(*track) for track in chosen],
        tracks_left_out=max(len(tracks) - _MAX_TRACKS, 0),
    )


_ORDER: Final = ("calls", "waits", "requests")


def _categorise(evidence: Evidence) -> npt.NDArray[np.uint8]:
    """Category of every row; 255 for what is no span of a thread."""
    table = np.full(256, _NONE, np.uint8)
    for kind, category in _OF_KIND.items():
        table[kind] = category
    categories: npt.NDArray[np.uint8] = table[evidence.rows.kinds]
    is_off = evidence.rows.kinds == OpKind.OFF_CPU
    reasons = np.full(256, _OFF_CPU, np.uint8)
    for reason, category in _OF_REASON.items():
        reasons[reason] = category
    categories[is_off] = reasons[evidence.recording.events["reason"][is_off]]
    return categories


def _iter_tracks(process: Process, in_view: BoolArray) -> Iterator[tuple[str, EventRows]]:
    rows = process.rows.where(in_view[process.rows.idx])
    for mine in split_by(rows, [rows.tids.astype(np.int64)]):
        kinds = mine.kinds
        is_call = (kinds > OpKind.OTHER) & (kinds <= LAST_CALL)
        is_request = np.isin(kinds, (OpKind.READ, OpKind.WRITE, OpKind.NETWORK))
        for name, mask in (
            ("calls", is_call), ("waits", ~is_call & ~is_request), ("requests", is_request)
        ):  # fmt: skip
            if mask.any():
                yield name, mine.where(mask)


@dataclass(frozen=True, slots=True)
class _Drawing:
    evidence: Evidence
    edges: IntArray
    categories: npt.NDArray[np.uint8]
    has_slices: bool

    @property
    def recording(self) -> Recording:
        return self.evidence.recording

    def track(self, process: Process, what: str, rows: EventRows) -> Track:
        place = self.recording.ranks.get((process.node, process.pid))
        tid = int(rows.tids[0])
        view_ns = int(self.edges[-1] - self.edges[0])
        inside = rows.intervals.covered_ns(self.edges[:1], self.edges[-1:])
        codes, op_idx = np.unique(rows.codes, return_inverse=True)
        gap = self.evidence.counts.gap(process.node, process.pid, codes.tolist())
        is_counted = self.evidence.counts.has_counts and gap.is_known
        return Track(
            node=clean(self.recording.nodes[process.node]),
            process=clean(process.name),
            pid=process.pid,
            tid=tid,
            thread=clean(self.recording.process_name(process.node, tid)),
            rank=place.rank if place is not None and place.rank >= 0 else None,
            what=what,
            rows=len(rows),
            busy_pct=round(100 * int(inside[0]) / max(view_ns, 1), 2),
            row_share=round(1 - gap.share, 4) if is_counted else None,
            shares=self._shares(rows),
            ops=[op_name(int(code) >> 8, int(code) & 0xFF) for code in codes],
            slices=self._slices(rows, op_idx.reshape(-1)) if self.has_slices else [],
        )

    def _shares(self, rows: EventRows) -> list[tuple[int, list[int]]]:
        mine = self.categories[rows.idx]
        widths = np.maximum(np.diff(self.edges), 1)
        shares = []
        for category in np.unique(mine).tolist():
            covered = rows.where(mine == category).intervals.covered_ns(
                self.edges[:-1], self.edges[1:]
            )
            percent = np.ceil(100 * covered / widths).astype(np.int64)  # never 0 for what is there
            shares.append((category, percent.tolist()))
        return shares

    def _slices(self, rows: EventRows, op_idx: IntArray) -> list[Slice]:
        start_ns = self.recording.window_ns[0]
        order = np.lexsort((-rows.ends, rows.starts))
        ends: list[int] = []
        slices = []
        for i in order.tolist():
            begin, end = int(rows.starts[i]), int(rows.ends[i])
            while ends and ends[-1] <= begin:
                ends.pop()
            slices.append(
                Slice(
                    (begin - start_ns) / 1e9,
                    (end - begin) / 1e3,
                    int(op_idx[i]),
                    int(self.categories[rows.idx[i]]),
                    len(ends),
                )
            )
            ends.append(end)
        return slices
