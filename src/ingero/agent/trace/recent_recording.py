"""The newest part of a trace in memory, as a recording: what `explain --since` would load of the file."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np

from ingero.agent.capture.stacks.resolver import Stack
from ingero.model.arrays import Records
from ingero.model.events import EVENT, EventFlag, Events
from ingero.model.gpu_view import GpuView, merge_views
from ingero.model.recording import (
    AGGREGATE,
    COVERAGE,
    HISTOGRAM,
    SNAPSHOT,
    ProcessRank,
    Recording,
    Session,
    Unprobed,
)
from ingero.recording.store.rows import (
    count_by_kind,
    count_by_source,
    find_parents,
    stored_timestamps,
)
from ingero.units import NS_PER_S

MAX_ROWS: Final = 100_000
"""11 MB."""
_SLACK: Final = 1.25
"""Rows are dropped when there are so many times as many as asked for."""
_MAX_OPEN: Final = 1000
"""Calls that never returned are kept when they are older than the rest, so many."""
_MAX_PARTS: Final = 64
_MAX_NAMES: Final = 65_536
_MAX_STACKS: Final = 16_384
_MAX_SNAPSHOTS: Final = 3600
_MINUTE_NS: Final = 60 * NS_PER_S
_NEVER_NS: Final = np.iinfo(np.int64).max
_OPERATION: Final = ("bucket_ns", "node", "source", "op", "pid")
_ValueT = TypeVar("_ValueT")


class _Table:
    """Rows that add up by key.

    Args:
        dtype: AGGREGATE, HISTOGRAM or COVERAGE.
        keys: Fields that name a row; all others are sums, but ``min_…`` and ``max_…``.
    """

    def __init__(self, dtype: np.dtype[np.void], keys: Sequence[str]) -> None:
        self._keys = tuple(keys)
        self._values = [name for name in dtype.names or () if name not in keys]
        self._parts: list[Records] = [np.zeros(0, dtype)]

    def add(self, rows: Records) -> None:
        """Add rows; they are not changed."""
        self._parts.append(rows)
        if len(self._parts) > _MAX_PARTS:
            self._parts = [self.read()]

    def forget(self, before_ns: int) -> None:
        """Drop older minutes."""
        rows = self.read()
        self._parts = [rows[rows["bucket_ns"] >= before_ns]]

    def read(self) -> Records:
        """A row per key."""
        rows = np.concatenate(self._parts)
        if not len(rows):
            return rows
        rows = rows[np.lexsort([rows[name] for name in reversed(self._keys)])]
        is_new = np.ones(len(rows), bool)
        is_new[1:] = np.logical_or.reduce([
            rows[name][1:] != rows[name][:-1] for name in self._keys
        ])
        firsts = np.flatnonzero(is_new)
        merged = rows[firsts]
        for name in self._values:
            add = {"min": np.minimum, "max": np.maximum}.get(name[:3], np.add)
            merged[name] = add.reduceat(rows[name], firsts)
        return merged


@dataclass(frozen=True, slots=True)
class RecentSnapshot:
    """What was kept at one moment; `build` may be called in any thread.

    Attributes:
        parts: Rows of EVENT.
        stacks: Stacks by hash.
        rest: The recording without its rows and stacks.
    """

    parts: tuple[Events, ...]
    stacks: Mapping[int, Stack]
    rest: Recording

    @property
    def n_rows(self) -> int:
        """Rows of EVENT."""
        return sum(map(len, self.parts))

    def build(self, max_rows: int = MAX_ROWS) -> Recording:
        """A recording of at most so many rows, the newest."""
        events, cut_ns = _newest(self.parts, max_rows)
        cut_ns = max(cut_ns, self.rest.asked_ns[0])
        events = events[np.argsort(events["start_ns"], kind="stable")]
        hashes = np.unique(events["stack_hash"]).tolist()
        rest = self.rest
        return Recording(
            events=events,
            nodes=rest.nodes,
            process_names=rest.process_names,
            ranks=rest.ranks,
            parents=rest.parents,
            gpu_views=rest.gpu_views,
            aggregates=rest.aggregates,
            coverage=rest.coverage,
            snapshots=rest.snapshots,
            histograms=rest.histograms,
            sessions=rest.sessions,
            unprobed=rest.unprobed,
            stacks={key: self.stacks[key].to_json() for key in hashes if key in self.stacks},
            n_events_stored=rest.n_events_stored,
            is_truncated=bool(cut_ns),
            asked_ns=(cut_ns, 0),
        )


def _newest(parts: Sequence[Events], max_rows: int) -> tuple[Events, int]:
    """The newest rows and the moment from which all are there; 0 where none was left out."""
    events = np.concatenate([np.zeros(0, EVENT), *parts])
    if len(events) <= max_rows:
        return events, 0
    stamps = stored_timestamps(events)
    cut_ns = int(np.partition(stamps, len(stamps) - max_rows)[len(stamps) - max_rows])
    is_kept = stamps >= cut_ns
    is_open = ~is_kept & ((events["flags"] & EventFlag.IN_FLIGHT) != 0)
    is_kept[np.flatnonzero(is_open)[-_MAX_OPEN:]] = True
    return events[is_kept], cut_ns


class _NewestRows:
    """Rows of EVENT, of which the oldest are dropped.

    Args:
        max_rows: How many are kept, about.

    Attributes:
        parts: What is kept.
        n_added: All rows so far, dropped ones too.
        cut_ns: From this moment on every row is kept; 0 while none was dropped.
    """

    def __init__(self, max_rows: int) -> None:
        self.parts: list[Events] = []
        self.n_added = 0
        self.cut_ns = 0
        self._max_rows = max_rows
        self._n_rows = 0

    def add(self, events: Events) -> bool:
        """Add rows; True when older ones were dropped."""
        self.parts.append(events)
        self._n_rows += len(events)
        self.n_added += len(events)
        if self._n_rows <= _SLACK * self._max_rows:
            return False
        kept, cut_ns = _newest(self.parts, self._max_rows)
        self.parts, self._n_rows = [kept], len(kept)
        self.cut_ns = max(self.cut_ns, cut_ns)
        return True


class RecentRecording:
    """Keeps what a `Selection` chooses, and of older time nothing: a `Sink`.

    Rows that are dropped leave the recording's asked time, so that no rule takes them for missing or for never made.

    Args:
        session: This run of the agent.
        max_rows: How many rows are kept, about.
    """

    def __init__(self, session: Session, max_rows: int = MAX_ROWS) -> None:
        self.unprobed: tuple[Unprobed, ...] = ()
        self._session = session
        self._rows = _NewestRows(max_rows)
        self._aggregates = _Table(AGGREGATE, _OPERATION)
        self._histograms = _Table(HISTOGRAM, (*_OPERATION, "from_ns", "to_ns"))
        self._coverage = _Table(COVERAGE, ("bucket_ns", "node", "source"))
        self._snapshots: deque[Records] = deque(maxlen=_MAX_SNAPSHOTS)
        self._names: dict[int, str] = {}
        self._ranks: dict[int, ProcessRank] = {}
        self._parents: dict[int, int] = {}
        self._gpu_views: dict[int, GpuView] = {}
        self._stacks: dict[int, Stack] = {}

    def put_events(self, events: Events) -> None:
        """Keep rows, and note that they are there."""
        noted = np.zeros(0, AGGREGATE)
        if by_kind := count_by_kind(events):
            noted = np.zeros(len(by_kind), AGGREGATE)
            for row, ((bucket_ns, source, op, pid), n) in zip(noted, by_kind.items(), strict=True):
                row["bucket_ns"], row["source"], row["op"] = bucket_ns, source, op
                row["pid"], row["stored"] = pid, n
        noted["min_duration_ns"] = _NEVER_NS
        self._aggregates.add(noted)
        self.put_parents(find_parents(events))
        by_source = count_by_source(events)
        covered = np.zeros(len(by_source), COVERAGE)
        for row, ((bucket_ns, source), n) in zip(covered, by_source.items(), strict=True):
            row["bucket_ns"], row["source"], row["stored"] = bucket_ns, source, n
        self._coverage.add(covered)
        if self._rows.add(events):
            first_ns = self._rows.cut_ns // _MINUTE_NS * _MINUTE_NS
            for table in (self._aggregates, self._histograms, self._coverage):
                table.forget(first_ns)

    def put_aggregates(self, rows: Records) -> None:
        """Add exact counts."""
        self._aggregates.add(rows)

    def put_histograms(self, rows: Records) -> None:
        """Add latency counts."""
        self._histograms.add(rows)

    def put_coverage(self, rows: Records) -> None:
        """Add what became of every call."""
        self._coverage.add(rows)

    def put_snapshots(self, snapshots: Records) -> None:
        """Keep samples of the machine."""
        self._snapshots.append(snapshots)

    def put_gpu_model(self, model: str) -> None:
        """Note which GPUs this run sees."""
        self._session = replace(self._session, gpu_model=model)

    def put_process_names(self, names: Mapping[int, str], _seen_wall_ns: int) -> None:
        """Keep names; a later one replaces an earlier one."""
        self._names |= names
        _drop_oldest(self._names, _MAX_NAMES)

    def put_parents(self, parents: Mapping[int, int]) -> None:
        """Keep the parents of processes; a child's fork may be among the rows that are dropped."""
        self._parents |= parents
        _drop_oldest(self._parents, _MAX_NAMES)

    def put_gpu_views(self, views: Mapping[int, GpuView]) -> None:
        """Keep which GPUs processes are shown."""
        merge_views(self._gpu_views, views)
        _drop_oldest(self._gpu_views, _MAX_NAMES)

    def put_ranks(self, ranks: Mapping[int, ProcessRank]) -> None:
        """Keep places in the job."""
        self._ranks |= ranks
        _drop_oldest(self._ranks, _MAX_NAMES)

    def put_stacks(self, stacks: Mapping[int, Stack]) -> None:
        """Keep stacks of rows that follow."""
        self._stacks |= stacks
        _drop_oldest(self._stacks, _MAX_STACKS)

    def freeze(self, stopped_wall_ns: int = 0) -> RecentSnapshot:
        """What is kept now.

        Args:
            stopped_wall_ns: When tracing ended, Unix time; 0 while it goes on.
        """
        aggregates = self._aggregates.read()
        aggregates["min_duration_ns"][aggregates["min_duration_ns"] == _NEVER_NS] = 0
        rest = Recording(
            nodes=(self._session.node,),
            process_names={(0, pid): name for pid, name in self._names.items()},
            ranks={(0, pid): place for pid, place in self._ranks.items()},
            parents={(0, pid): parent for pid, parent in self._parents.items()},
            gpu_views={(0, pid): view for pid, view in self._gpu_views.items()},
            aggregates=aggregates,
            coverage=self._coverage.read(),
            histograms=self._histograms.read(),
            snapshots=np.concatenate([np.zeros(0, SNAPSHOT), *self._snapshots]),
            sessions=(replace(self._session, stopped_wall_ns=stopped_wall_ns),),
            unprobed=self.unprobed,
            n_events_stored=self._rows.n_added,
            asked_ns=(self._rows.cut_ns, 0),
        )
        return RecentSnapshot(tuple(self._rows.parts), dict(self._stacks), rest)


def _drop_oldest(kept: dict[int, _ValueT], max_rows: int) -> None:
    for key in list(kept)[: max(len(kept) - max_rows, 0)]:
        del kept[key]
