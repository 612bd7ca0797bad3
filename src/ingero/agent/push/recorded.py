"""Readings from the recording that `ingero trace` writes meanwhile, for an agent that may not probe itself.

The recording's exact counts grow by the minute's bucket while they are counted, so the difference of two reads is what
came between them. What it does not hold is absent: a recording without a writer is no reading, free GPU memory is not
in it, and neither is what hangs.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from ingero.agent.health.signals.reading import Reading, Signals
from ingero.agent.metrics.machine import Processors
from ingero.errors import StoreError
from ingero.model.events import Source
from ingero.model.operations import GPU_SOURCES, OpKind, find_codes
from ingero.recording.store.files import open_recording, table_columns
from ingero.recording.store.typed import INT64, check_typed
from ingero.units import NS_PER_S

ALIVE_NS: Final = 15 * NS_PER_S
"""A writer notes both clocks every ten seconds."""
_MINUTE_NS: Final = 60 * NS_PER_S
_WINDOW: Final = 3 * _MINUTE_NS
_ALIVE: Final = "SELECT mono_ns, wall_ns FROM clock_samples ORDER BY rowid DESC LIMIT 1"
# Buckets are of the wall clock as it was when their writer began; it may have been set since.
_NEWEST_BUCKET: Final = "SELECT bucket FROM event_aggregates ORDER BY rowid DESC LIMIT 1"
_LAUNCHES: Final = ", ".join(map(str, sorted(find_codes((OpKind.LAUNCH, OpKind.GRAPH_LAUNCH)))))
_COUNTS: Final = f"""
  SELECT bucket,
    sum(count * (source <> {Source.DRIVER:d} AND (source << 8 | op) IN ({_LAUNCHES}))),
    sum(count * (source = {Source.DRIVER:d} AND (source << 8 | op) IN ({_LAUNCHES}))),
    sum(sum_dur), count(DISTINCT pid)
  FROM {{table}} WHERE bucket >= ? AND source IN ({", ".join(f"{source:d}" for source in GPU_SOURCES)})
  GROUP BY bucket
"""  # noqa: S608 - own codes
_NEWEST: Final = """
  SELECT max(ifnull((SELECT max(timestamp) FROM system_snapshots), 0), ifnull((SELECT max(timestamp) FROM events), 0))
"""
_FIVE: Final = 5 * NS_PER_S
_FLUSH_NS: Final = 2 * NS_PER_S
"""The existing agent writes a bucket when it is over, which it looks for once a second."""


class _Counts(NamedTuple):
    """Of one bucket, or of all time."""

    launches: int = 0
    driver_launches: int = 0
    spent_ns: int = 0
    n_pids: int = 0


class _CountsAt(NamedTuple):
    mono_ns: int
    total: _Counts


@dataclass(slots=True)
class RecordedSource:
    """A `SignalSource`.

    Attributes:
        path: The recording.
        window_ns: Rates are over this long.
        n_gpus: Streams of work at once; 0 takes the number of processes.
        note: Called once for each reason why the recording cannot be read.
    """

    path: Path
    window_ns: int
    n_gpus: int = 0
    note: Callable[[str], None] = lambda _text: None
    _processors: Processors = field(default_factory=Processors)
    _buckets: dict[int, _Counts] = field(default_factory=dict)
    _total: _Counts = field(default_factory=_Counts)
    _history: deque[_CountsAt] = field(default_factory=deque)
    _reported: str = ""

    @property
    def is_over(self) -> bool:
        """Never: a recording may be continued."""
        return False

    def read(self, wall_ns: int, mono_ns: int) -> Reading | None:
        """What came in the window; None without two reads in it, and without a writer."""
        cpu = self._processors.read_idle()
        finished: _Finished | None = None
        try:
            with open_recording(self.path) as connection:
                if table_columns(connection, "clock_samples"):
                    is_alive = self._update(connection, mono_ns)
                else:  # the existing agent's
                    finished = _read_finished(connection, wall_ns, self.window_ns)
                    is_alive = finished is not None
        except (StoreError, sqlite3.Error) as error:
            self._report(str(error))
            return None
        if not is_alive:
            self._report(f"{self.path}: nobody writes to it; is `ingero trace` running?")
            return None
        self._reported = ""
        if finished is not None:
            return self._build_reading(finished.counts, finished.elapsed_ns, cpu, wall_ns)
        self._history.append(_CountsAt(mono_ns, self._total))
        while len(self._history) > 2 and mono_ns - self._history[1].mono_ns >= self.window_ns:
            self._history.popleft()
        first = self._history[0]
        elapsed_ns = mono_ns - first.mono_ns
        if elapsed_ns <= 0:
            return None
        counts = _Counts(
            self._total.launches - first.total.launches,
            self._total.driver_launches - first.total.driver_launches,
            self._total.spent_ns - first.total.spent_ns,
            self._total.n_pids,
        )
        return self._build_reading(counts, elapsed_ns, cpu, wall_ns)

    def _build_reading(
        self, counts: _Counts, elapsed_ns: int, cpu: float | None, wall_ns: int
    ) -> Reading:
        # A launch through the runtime is a driver launch too, counted by both.
        launches = counts.launches or counts.driver_launches
        n_streams = self.n_gpus or counts.n_pids
        spent_ns = counts.spent_ns
        compute = min(spent_ns / (elapsed_ns * n_streams), 1.0) if n_streams else None
        return Reading(
            signals=Signals(launches * NS_PER_S / elapsed_ns, compute, None, cpu),
            launches=launches,
            wall_ns=wall_ns,
        )

    def _report(self, why: str) -> None:
        """Start over, and report a reason that was not the last one reported."""
        self._history.clear()
        if why != self._reported:
            self._reported = why
            self.note(why)

    def _update(self, connection: sqlite3.Connection, mono_ns: int) -> bool:
        """Add what came since the last read; False when the writer is gone."""
        newest = connection.execute(_ALIVE).fetchall()
        check_typed(newest, (INT64, INT64), "the time of its writer")
        if not newest or not 0 <= mono_ns - newest[0][0] <= ALIVE_NS:
            return False
        buckets = connection.execute(_NEWEST_BUCKET).fetchall()
        check_typed(buckets, (INT64,), "event_aggregates")
        since_ns = buckets[0][0] - _WINDOW if buckets else 0
        rows = _read_counts(connection, "event_aggregates", since_ns)
        n_pids = max((row[-1] for row in rows), default=0)
        launches, driver_launches, spent_ns, _ = self._total
        for bucket, *now in rows:
            known = self._buckets.get(bucket, _Counts())
            launches += now[0] - known.launches
            driver_launches += now[1] - known.driver_launches
            spent_ns += now[2] - known.spent_ns
        self._buckets = {bucket: _Counts(*now) for bucket, *now in rows}
        self._total = _Counts(launches, driver_launches, spent_ns, n_pids)
        return True


def _read_counts(
    connection: sqlite3.Connection, table: str, since_ns: int
) -> list[tuple[int, ...]]:
    """(bucket, *`_Counts`) of each bucket from a time on."""
    rows = connection.execute(_COUNTS.format(table=table), (since_ns,)).fetchall()
    check_typed(rows, [INT64] * 5, table)
    return rows


class _Finished(NamedTuple):
    """Counts of buckets that are over, and how long these were."""

    counts: _Counts
    elapsed_ns: int


def _read_finished(
    connection: sqlite3.Connection, wall_ns: int, window_ns: int
) -> _Finished | None:
    """What the existing agent counted in its last whole buckets; None when the writer is gone.

    It notes no clock but takes a snapshot each second, and writes a bucket, of five seconds or else of a minute, once
    it is over.
    """
    if not table_columns(connection, "system_snapshots"):
        return None
    newest = connection.execute(_NEWEST).fetchall()
    check_typed(newest, (INT64,), "the time of its writer")
    newest_ns = int(newest[0][0])
    if abs(wall_ns - newest_ns) > ALIVE_NS:
        return None
    table, width_ns = "event_aggregates", _MINUTE_NS
    if table_columns(connection, "event_aggregates_5s"):
        table, width_ns = "event_aggregates_5s", _FIVE
    elapsed_ns = -(-window_ns // width_ns) * width_ns
    end_ns = (newest_ns - _FLUSH_NS) // width_ns * width_ns
    rows = _read_counts(connection, table, end_ns - elapsed_ns)
    over = [_Counts(*counts) for bucket, *counts in rows if bucket < end_ns]
    return _Finished(
        _Counts(
            sum(one.launches for one in over),
            sum(one.driver_launches for one in over),
            sum(one.spent_ns for one in over),
            max((one.n_pids for one in over), default=0),
        ),
        elapsed_ns,
    )
