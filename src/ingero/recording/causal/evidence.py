"""A recording arranged for questions: calls without double counting, and each thread's waits by kind.

Built once per explanation. Everything is an index into the recording's events or a column of them; per-row Python
appears nowhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from ingero.model.arrays import BoolArray, IntArray
from ingero.model.events import EventFlag, HostOp, Source, op_name
from ingero.model.operations import LAST_CALL, OpKind, find_kinds
from ingero.model.recording import Recording
from ingero.recording.causal.coverage import CallCounts, Gap
from ingero.recording.causal.exact import Statistics, compute_statistics
from ingero.recording.causal.intervals import Intervals, Times
from ingero.recording.causal.watching import NodeWatch, find_between_lives
from ingero.units import NS_PER_S

FoundT = TypeVar("FoundT")
SubjectP = ParamSpec("SubjectP")
Index = IntArray
_TID_BITS: Final = 32
_AGENT: Final = "ingero"
_JOURNAL: Final = "jbd2/"
_MAX_ROWS: Final = 100
_MAX_STACKS: Final = 3
_N_KINDS: Final = max(OpKind) + 1


@dataclass(frozen=True, slots=True)
class EventRows:
    """Some rows as columns, in time order. All arrays have the shape of `idx`.

    Attributes:
        idx: Position in the recording's events.
        starts: Unix ns.
        ends: Unix ns.
        kinds: `OpKind`.
        codes: source << 8 | op.
        tids: Thread.
    """

    idx: Index
    starts: Times
    ends: Times
    kinds: npt.NDArray[np.uint8]
    codes: IntArray
    tids: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.idx)

    def where(self, mask: BoolArray | Index) -> EventRows:
        """The rows that a mask or an index chooses."""
        return EventRows(
            self.idx[mask], self.starts[mask], self.ends[mask], self.kinds[mask], self.codes[mask],
            self.tids[mask],
        )  # fmt: skip

    def of(self, *kinds: OpKind) -> EventRows:
        """The rows of these kinds."""
        is_wanted = np.zeros(_N_KINDS, np.bool_)
        is_wanted[list(kinds)] = True
        return self.where(is_wanted[self.kinds])

    def by(self, tid: int) -> EventRows:
        """The rows of one thread."""
        return self.where(self.tids == tid)

    @property
    def span_ns(self) -> tuple[int, int]:
        """First start and last end; not of an empty set."""
        return int(self.starts[0]), int(self.ends.max())

    @property
    def durations(self) -> Times:
        """Length of each row, ns."""
        return self.ends - self.starts

    @property
    def intervals(self) -> Intervals:
        """When at least one of the rows was under way."""
        return Intervals.of(self.starts, self.ends)

    @property
    def op(self) -> str:
        """Name of the first row's operation."""
        return op_name(int(self.codes[0]) >> 8, int(self.codes[0]) & 0xFF)


@dataclass(frozen=True, slots=True)
class Process:
    """One process of one node.

    Attributes:
        node: Index into the recording's nodes.
        pid: Thread group.
        name: Its name, or ``pid N``.
        rows: Everything it did or suffered, in time order.
        calls: Calls towards the GPU that returned; a driver call inside a runtime call is left out.
        open: Calls towards the GPU that had not returned when recording ended, likewise.
        unwatched: When nobody watched it, or its pid was nobody's: of that time the lack of rows says nothing.
    """

    node: int
    pid: int
    name: str
    rows: EventRows = field(repr=False)
    calls: EventRows = field(repr=False)
    open: EventRows = field(repr=False)
    unwatched: Intervals = field(repr=False)

    @property
    def window_ns(self) -> tuple[int, int]:
        """First start and last end of its rows."""
        return self.rows.span_ns

    @property
    def watched_ns(self) -> int:
        """How long it was watched from its first row to its last; at least 1."""
        return max(self.watched_within(*self.window_ns), 1)

    def watched_within(self, start_ns: int, end_ns: int) -> int:
        """How much of a span it was watched."""
        return self.unwatched.gaps(start_ns, end_ns).total_ns

    def to_watched(self, moments: Times) -> Times:
        """Moments by a clock that stands still while nobody watches it."""
        return moments - self.unwatched.covered_ns(np.zeros_like(moments), moments)

    @property
    def worth_ns(self) -> int:
        """Lost time below which a slowdown is no incident: a twentieth of what was watched, at most a second."""
        return min(self.watched_ns // 20, NS_PER_S)

    @property
    def active_ns(self) -> tuple[int, int]:
        """First start and last end of its GPU calls."""
        return self.calls.span_ns

    @property
    def active_length_ns(self) -> int:
        """How long it was watched from its first GPU call to its last; at least 1."""
        return max(self.watched_within(*self.active_ns), 1)

    def thread(self, tid: int) -> EventRows:
        """The rows of one of its threads."""
        return self.rows.by(tid)

    @property
    def busiest_calls(self) -> EventRows:
        """GPU calls of the thread that makes most."""
        return self.calls.by(self.busiest_tid)

    @property
    def busiest_tid(self) -> int:
        """The thread that makes most GPU calls; the main thread when there are none."""
        if not len(self.calls):
            return self.pid
        tids, counts = np.unique(self.calls.tids, return_counts=True)
        return int(tids[counts.argmax()])


class Evidence:
    """A recording, arranged.

    Args:
        recording: What was seen. Not changed.

    Attributes:
        watches: When each node was watched.
        answers: What `remembered` functions found, by question.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        events = recording.events
        self._rows = EventRows(
            np.arange(len(events)),
            np.ascontiguousarray(events["start_ns"]),
            events["start_ns"] + events["duration_ns"],
            find_kinds(events["source"], events["op"]),
            events["source"].astype(np.int64) << 8 | events["op"],
            np.ascontiguousarray(events["tid"]),
        )
        self.watches = tuple(NodeWatch(recording, i) for i in range(len(recording.nodes)))
        self.processes = tuple(self._iter_processes())
        self.gpu_processes = tuple(p for p in self.processes if len(p.calls))
        self.counts = CallCounts(recording)
        self.answers: dict[tuple[object, ...], Any] = {}

    @property
    def rows(self) -> EventRows:
        """Every row of the recording."""
        return self._rows

    def join(self, *parts: EventRows) -> EventRows:
        """Rows of several sets together, in time order."""
        return self._rows.where(np.sort(np.concatenate([part.idx for part in parts])))

    def column(self, name: str, rows: EventRows) -> IntArray:
        """One field of EVENT for these rows."""
        values: IntArray = self.recording.events[name][rows.idx]
        return values

    def stacks_of(self, *rows: EventRows) -> tuple[int, ...]:
        """Hashes of the stacks of rows that had not returned, then of the longest; at most a few, each once."""
        every = np.concatenate([part.idx for part in rows]) if rows else np.empty(0, np.int64)
        events = self.recording.events[every]
        events = events[events["stack_hash"] != 0]
        is_open = (events["flags"] & EventFlag.IN_FLIGHT) != 0
        order = np.lexsort((-events["duration_ns"], ~is_open))[:_MAX_ROWS]
        return tuple(dict.fromkeys(events["stack_hash"][order].tolist()))[:_MAX_STACKS]

    def gap(self, process: Process, codes: Iterable[int]) -> Gap:
        """What of these operations (source << 8 | op) of a process has no row."""
        return self.counts.gap(process.node, process.pid, codes)

    def process_name(self, node: int, pid: int) -> str:
        """Name of a process or thread, or ``pid N``."""
        return self.recording.process_name(node, pid)

    @cached_property
    def statistics(self) -> dict[tuple[int, int, int], Statistics]:
        """Exact statistics by (node, pid, source << 8 | op)."""
        return {
            (one.node, one.pid, one.source << 8 | one.op): one
            for one in compute_statistics(self.recording)
        }

    @cached_property
    def children(self) -> dict[tuple[int, int], frozenset[int]]:
        """Pids of the children of each process, by (node, parent)."""
        events = self.recording.events
        forks = events[(events["source"] == Source.HOST) & (events["op"] == HostOp.FORK)]
        born: dict[tuple[int, int], set[int]] = {}
        for (node, child), pid in self.recording.parents.items():
            born.setdefault((node, pid), set()).add(child)
        for node, pid, child in zip(
            forks["node"].tolist(), forks["pid"].tolist(), forks["arg1"].tolist(), strict=True
        ):
            born.setdefault((node, pid), set()).add(child)
        return {key: frozenset(pids) for key, pids in born.items()}

    @cached_property
    def cgroups(self) -> dict[tuple[int, int], int]:
        """Cgroup of each process by (node, pid), from its last row that says one; 1 is the root and says nothing."""
        events = self.recording.events
        known = events[events["cgroup_id"] > 1]
        keys = known["node"].astype(np.int64) << _TID_BITS | known["pid"]
        last, at = np.unique(keys[::-1], return_index=True)
        cgroups = known["cgroup_id"][::-1][at]
        mask = (1 << _TID_BITS) - 1
        return {
            (key >> _TID_BITS, key & mask): cgroup
            for key, cgroup in zip(last.tolist(), cgroups.tolist(), strict=True)
        }

    def is_observer(self, node: int, pid: int) -> bool:
        """Whether a process is the agent itself or the journal that its writes wake: their I/O never counts."""
        name = self.process_name(node, pid)
        return name == _AGENT or name.startswith((_AGENT + "-", _JOURNAL))

    def _iter_processes(self) -> Iterator[Process]:
        events = self.recording.events
        if not len(events):
            return
        keys = events["node"].astype(np.int64) << _TID_BITS | events["pid"]
        order = np.argsort(keys, kind="stable")
        for here in _split(keys[order]):
            idx = order[here]
            rows = self._rows if len(idx) == len(events) else self._rows.where(idx)
            node, pid = int(events["node"][idx[0]]), int(events["pid"][idx[0]])
            if self.is_observer(node, pid):
                continue
            name = self.process_name(node, pid)
            is_open = (self.column("flags", rows) & EventFlag.IN_FLIGHT) != 0
            calls, open_ = (self._outermost_calls(rows.where(m)) for m in (~is_open, is_open))
            between_lives = find_between_lives(rows.starts, rows.ends, rows.codes)
            unwatched = self.watches[node].unwatched.union(between_lives)
            yield Process(node, pid, name, rows, calls, open_, unwatched)

    def _outermost_calls(self, rows: EventRows) -> EventRows:
        """Calls that no earlier call of the same thread contains.

        A runtime call makes driver calls, and a collective makes launches: each is counted once, with its parent.
        """
        calls = rows.where((rows.kinds > OpKind.OTHER) & (rows.kinds <= LAST_CALL))
        if not len(calls):
            return calls
        is_inner = (self.column("flags", calls) & EventFlag.NESTED) != 0
        by_thread = np.lexsort((-calls.ends, calls.starts, calls.tids))
        for here in _split(calls.tids[by_thread]):
            mine = by_thread[here]
            latest = np.maximum.accumulate(calls.ends[mine])
            is_inner[mine[1:]] |= calls.ends[mine][1:] <= latest[:-1]
        return calls.where(~is_inner)


def remembered(
    find: Callable[Concatenate[Evidence, SubjectP], FoundT],
) -> Callable[Concatenate[Evidence, SubjectP], FoundT]:
    """Answer a question that several rules ask once for each evidence, process and thread."""

    @functools.wraps(find)
    def ask(evidence: Evidence, /, *args: SubjectP.args, **kwargs: SubjectP.kwargs) -> FoundT:
        subjects = ((a.node, a.pid) if isinstance(a, Process) else a for a in args)
        key = (find, *subjects)
        if key not in evidence.answers:
            evidence.answers[key] = find(evidence, *args, **kwargs)
        found: FoundT = evidence.answers[key]
        return found

    return ask


def _split(sorted_keys: IntArray | npt.NDArray[np.int32]) -> Iterator[slice]:
    """The runs of equal keys."""
    if not len(sorted_keys):
        return
    edges = np.flatnonzero(sorted_keys[1:] != sorted_keys[:-1]) + 1
    for first, last in zip([0, *edges.tolist()], [*edges.tolist(), len(sorted_keys)], strict=True):
        yield slice(first, last)


def split_by(rows: EventRows, keys: Sequence[IntArray]) -> Iterator[EventRows]:
    """The rows in groups of equal keys, each in time order."""
    order = np.lexsort((rows.idx, *reversed(keys)))
    changes = np.zeros(max(len(order) - 1, 0), bool)
    for key in keys:
        changes |= key[order][1:] != key[order][:-1]
    groups = np.concatenate(([0], np.cumsum(changes)))[: len(order)]
    for here in _split(groups):
        yield rows.where(order[here])
