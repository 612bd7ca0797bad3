"""Writing a recording: batches of arrays in, one thread that owns the file.

``put_*`` never blocks and never raises for a full queue or a full disk: tracing goes on, events that could not be kept
are counted as ``lost`` in the ``coverage`` table, and in ``unwritten`` by operation and cause. Counts and names are small,
so they wait until the disk takes them. What ``coverage`` and the aggregates call *stored* is counted here from rows that
were committed, so the numbers cannot drift from the rows.
"""

from __future__ import annotations

import functools
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, Self

import numpy as np
from typing_extensions import override

from ingero.errors import StoreError
from ingero.model.arrays import Records
from ingero.model.events import EVENT, Events
from ingero.model.recording import ProcessRank, Session, Unprobed
from ingero.recording.store.creation import open_for_writing
from ingero.recording.store.limit import SizeLimits, shrink
from ingero.recording.store.lock import WriterLock
from ingero.recording.store.losses import Loss, LossBook
from ingero.recording.store.rollover import set_aside, size_of
from ingero.recording.store.rows import (
    ADD_AGGREGATE,
    ADD_COVERAGE,
    ADD_HISTOGRAM,
    INSERT_ANNOTATION,
    INSERT_EVENT,
    INSERT_SESSION,
    INSERT_SNAPSHOT,
    aggregate_rows,
    count_by_kind,
    count_by_source,
    event_rows,
    stored_rows,
)
from ingero.recording.store.schema import CARRIED_OVER
from ingero.recording.store.settings import WriterCounters, WriterSettings

Work = Callable[[sqlite3.Connection], None]

_STOP: Final = None
_MOST_WAITING: Final = 100_000
"""Writes that wait for a full disk, a few of them each second."""
_FULL: Final = "the disk is full"
_SLOW: Final = "the disk was too slow"


class RecordingWriter:
    """The one writer of a recording.

    Every ``put_*`` may be called from any thread. Rows become visible to readers within ``linger_s`` (`flush` waits for less).

    Args:
        path: The file; made when missing, appended to when this version wrote it.
        node: The node whose rows these are; stamped on all of them.
        settings: Limits.
        owner: User and group that new files are given to; None leaves the process's own.

    Raises:
        StoreError: The file cannot be opened for writing, somebody else writes to it, it is no recording, or another version of
            the schema wrote it.
    """

    def __init__(
        self,
        path: Path,
        node: str,
        settings: WriterSettings | None = None,
        owner: tuple[int, int] | None = None,
    ) -> None:
        self.counters = WriterCounters()
        self.path = path.resolve()
        self._node = node
        self._settings = settings or WriterSettings()
        self._ranks: dict[int, ProcessRank] = {}
        self._losses = LossBook()
        self._count_lock = threading.Lock()
        self._limits = SizeLimits.divide(self._settings.max_bytes, self._settings.rollover_bytes)
        self._queue: queue.Queue[Events | Work | threading.Event | None] = queue.Queue()
        self._n_waiting = 0
        self._hurry = threading.Event()
        self._unwritten: list[Work] = []
        limit_bytes = self._settings.max_bytes or self._settings.rollover_bytes
        self._lock = WriterLock(self.path, owner, limit_bytes)
        try:
            self._connection = open_for_writing(self.path, node, self._limits, owner)
        except StoreError:
            self._lock.release()
            raise
        (last,) = self._connection.execute("SELECT ifnull(max(rowid), 0) FROM events").fetchone()
        self._next_id = int(last) + 1
        self._session_id = 0
        self._thread = threading.Thread(target=self._run, name="ingero-store", daemon=True)
        self._thread.start()

    @property
    def warning(self) -> str:
        """What the user should know of where the recording lies; empty for nothing."""
        return self._lock.warning

    def losses(self) -> list[Loss]:
        """Rows that are not in the recording, most first. Any thread."""
        return self._losses.list()

    def put_events(self, events: Events) -> bool:
        """Store rows of EVENT (`start_ns` in Unix time; `node` is ignored). False when they were dropped.

        The array is kept until it is written: give a copy of memory that will be reused.
        """
        with self._count_lock:
            is_taken = self._n_waiting + len(events) <= self._settings.queue_rows
            if is_taken:
                self._n_waiting += len(events)
        if is_taken:
            self._queue.put(events)
            if 2 * self._n_waiting > self._settings.queue_rows:
                self._hurry.set()
        else:
            self._count_lost(events, _SLOW)
        return is_taken

    def put_aggregates(self, aggregates: Records) -> None:
        """Add exact counts (rows of AGGREGATE; `node` and `stored` are ignored) to their buckets."""
        self._queue.put(
            lambda connection: _run_many(
                connection, ADD_AGGREGATE, aggregate_rows(aggregates, self._node)
            )
        )

    def put_histograms(self, histograms: Records) -> None:
        """Add exact latency counts (rows of HISTOGRAM; `node` is ignored) to their buckets."""
        names = ("bucket_ns", "source", "op", "pid", "from_ns", "to_ns", "count")
        columns = [histograms[name].tolist() for name in names]
        rows = [
            (bucket, source, op, pid, self._node, *rest)
            for bucket, source, op, pid, *rest in zip(*columns, strict=True)
        ]
        self._queue.put(lambda connection: _run_many(connection, ADD_HISTOGRAM, rows))

    def put_coverage(self, coverage: Records) -> None:
        """Add what the probes saw, sampled out and lost (rows of COVERAGE; `node` and `stored` are ignored)."""
        names = ("bucket_ns", "source", "seen", "sampled_out", "lost")
        columns = [coverage[name].tolist() for name in names]
        rows = [
            (bucket, self._node, source, seen, 0, sampled, lost)
            for bucket, source, seen, sampled, lost in zip(*columns, strict=True)
        ]
        self._queue.put(lambda connection: _run_many(connection, ADD_COVERAGE, rows))

    def put_process_names(self, names: Mapping[int, str], seen_wall_ns: int) -> None:
        """Name processes and threads; a later name replaces an earlier one."""
        rows = [(pid, name, seen_wall_ns, self._node) for pid, name in names.items()]
        self._queue.put(
            lambda connection: _run_many(
                connection, "INSERT OR REPLACE INTO process_names VALUES (?, ?, ?, ?)", rows
            )
        )

    def put_ranks(self, ranks: Mapping[int, ProcessRank]) -> None:
        """Stamp every later row of these processes with its place in the job."""
        placed = dict(ranks)
        self._queue.put(lambda _: self._ranks.update(placed))

    def put_stacks(self, frames_by_hash: Mapping[int, str]) -> None:
        """Store stacks: signed 64-bit hash to compact JSON frames, leaf first."""
        rows = [(key, frames) for key, frames in frames_by_hash.items()]
        self._queue.put(
            lambda connection: _run_many(
                connection,
                "INSERT OR REPLACE INTO stack_traces (hash, ips, frames) VALUES (?, '', ?)",
                rows,
            )
        )

    def put_snapshots(self, snapshots: Records) -> None:
        """Store rows of SNAPSHOT (`node` is ignored)."""
        names = ("wall_ns", "cpu_pct", "mem_pct", "mem_available_mib", "swap_mib", "load1")
        columns = [snapshots[name].tolist() for name in names]
        rows = [(*row, self._node) for row in zip(*columns, strict=True)]
        self._queue.put(lambda connection: _run_many(connection, INSERT_SNAPSHOT, rows))

    def put_annotations(
        self, rows: Iterable[tuple[int, str, int, int, int, int, int, int, int]]
    ) -> None:
        """Store what workloads said, in the order of INSERT_ANNOTATION without the node."""
        placed = [(*row, self._node) for row in rows]
        self._queue.put(lambda connection: _run_many(connection, INSERT_ANNOTATION, placed))

    def put_session(self, session: Session) -> None:
        """Note the start of a run; `close` notes its end. The session's node is the writer's."""
        row = (
            session.started_wall_ns, session.stopped_wall_ns, session.gpu_model, session.n_cpus,
            session.mem_total_mib, session.kernel, session.agent_version, session.flags, self._node,
        )  # fmt: skip

        def write(connection: sqlite3.Connection) -> None:
            self._session_id = connection.execute(INSERT_SESSION, row).lastrowid or 0

        self._queue.put(write)

    def put_gpu_model(self, model: str) -> None:
        """Note which GPUs this run sees."""
        self._queue.put(
            lambda connection: _run_many(
                connection,
                "UPDATE sessions SET gpu_model = ? WHERE id = ?",
                [(model, self._session_id)],
            )
        )

    def put_cgroup(self, cgroup_id: int, container: str, path: str, pod: tuple[str, str]) -> None:
        """Name a cgroup: its container, and its pod's name and namespace."""
        row = (cgroup_id, container, path, *pod, self._node)
        self._queue.put(
            lambda connection: _run_many(
                connection,
                "INSERT OR REPLACE INTO cgroup_metadata VALUES (?, ?, ?, ?, ?, ?)",
                [row],
            )
        )

    def put_unprobed(self, new: Iterable[Unprobed], over: Iterable[Unprobed], wall_ns: int) -> None:
        """Note libraries that could not be probed, and those of them that can be from now on."""
        begun = [(one.pid, one.path, one.reason, wall_ns, self._node) for one in new]
        ended = [(wall_ns, one.pid, one.path, self._node) for one in over]

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany(
                "INSERT OR IGNORE INTO unprobed (pid, path, reason, since, node) VALUES (?, ?, ?, ?, ?)",
                begun,
            )
            connection.executemany(
                "UPDATE unprobed SET until = ? WHERE pid = ? AND path = ? AND node = ? AND until = 0",
                ended,
            )

        self._queue.put(write)

    def put_clock_sample(self, mono_ns: int, wall_ns: int) -> None:
        """Note one reading of both clocks, so that drift can be seen afterwards."""
        row = (self._node, mono_ns, wall_ns)
        self._queue.put(
            lambda connection: _run_many(
                connection, "INSERT OR IGNORE INTO clock_samples VALUES (?, ?, ?)", [row]
            )
        )

    def flush(self) -> None:
        """Wait until everything put before this call is committed or counted as lost."""
        done = threading.Event()
        self._queue.put(done)
        self._hurry.set()
        done.wait()

    def close(self, stopped_wall_ns: int = 0) -> None:
        """Write what waits, note the session's end, fold the log into the file and close it.

        Args:
            stopped_wall_ns: When the run ended; 0 leaves the session open.
        """
        if not self._thread.is_alive():
            return
        if stopped_wall_ns:
            self._queue.put(lambda connection: self._stop_session(connection, stopped_wall_ns))
        self._queue.put(_STOP)
        self._hurry.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @override
    def __repr__(self) -> str:
        return f"RecordingWriter({str(self.path)!r}, node={self._node!r})"

    def _stop_session(self, connection: sqlite3.Connection, stopped_wall_ns: int) -> None:
        connection.execute(
            "UPDATE sessions SET stopped_at = ? WHERE id = ?", (stopped_wall_ns, self._session_id)
        )

    def _count_lost(self, events: Events, cause: str) -> None:
        with self._count_lock:
            self.counters.events_lost += len(events)
        self._losses.add(events, cause)

    def _run(self) -> None:
        """Body of the writing thread: take what waits, commit it, answer those who wait."""
        is_open, is_behind = True, False
        while is_open:
            waiting = [self._queue.get()]
            if not is_behind:
                self._hurry.wait(self._settings.linger_s)
            self._hurry.clear()
            while len(waiting) < self._settings.commit_batches and not self._queue.empty():
                waiting.append(self._queue.get())
            is_behind = not self._queue.empty()
            is_open = not any(item is _STOP for item in waiting)
            batches = [item for item in waiting if isinstance(item, np.ndarray)]
            self._commit(batches, [item for item in waiting if callable(item)])
            for item in waiting:
                if isinstance(item, threading.Event):
                    item.set()
        self._end()

    def _end(self) -> None:
        """Write what still waits, fold the log into the file where there is room, and let go of the recording."""
        if self._unwritten or self._losses.unsaid().by_operation:
            self._lock.give_back(everything=True)
            self._try(self._write_lost)
            self._write_works([])
        self.counters.counts_lost += len(self._unwritten)
        self._lock.give_back(everything=True)
        self._try(lambda: self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)"))
        self._try(self._connection.close)
        self._lock.release()

    def _try(self, write: Callable[[], object]) -> bool:
        """Whether the disk took it; why not is in the counters."""
        try:
            write()
        except sqlite3.Error as error:
            self.counters.last_error = str(error)
            return False
        return True

    def _commit(self, batches: list[Events], works: list[Work]) -> None:
        """Names, counts and losses first, then rows, a bounded number in each transaction."""
        n_rows = sum(map(len, batches))
        has_room = self._lock.has_room()
        if has_room:
            if self._write_works(works):
                self._try(self._write_lost)
        else:
            self._keep_waiting(works)
        for events in self._iter_chunks(batches):
            if has_room:
                has_room = self._write_chunk(events)
                self._keep_to_size()
            else:
                self._count_lost(events, _FULL)
        if has_room and n_rows:
            self._try(self._write_lost)
        if not batches:
            self._keep_to_size()
        with self._count_lock:
            self._n_waiting -= n_rows

    def _keep_to_size(self) -> None:
        """Delete the oldest rows, or set the file aside."""
        if self._limits.database_bytes:
            try:
                self.counters.events_pruned += shrink(self._connection, self._limits)
            except sqlite3.Error as error:
                self.counters.last_error = str(error)
        if 0 < self._settings.rollover_bytes <= size_of(self.path) and self._next_id > 1:
            self._roll()

    def _iter_chunks(self, batches: list[Events]) -> Iterator[Events]:
        events = np.concatenate(batches) if batches else np.empty(0, EVENT)
        for first in range(0, len(events), self._limits.chunk_rows):
            yield events[first : first + self._limits.chunk_rows]

    def _write_chunk(self, events: Events) -> bool:
        """Store rows in one transaction; False when the disk is full, which is noted on it at once."""
        next_id = self._next_id
        try:
            with self._connection:
                self._write_events(events)
        except sqlite3.Error as error:
            self._next_id = next_id
            self.counters.last_error = str(error)
            is_full = error.sqlite_errorcode == sqlite3.SQLITE_FULL
            self._count_lost(events, _FULL if is_full else str(error))
            if is_full:
                self._lock.give_back()
            self._try(self._write_lost)
            return not is_full
        self.counters.events_stored += len(events)
        return True

    def _write_works(self, works: list[Work]) -> bool:
        """Write names and counts, with those that waited; they wait on when the disk does not take them."""
        works = self._unwritten + works
        self._unwritten = []
        try:
            with self._connection:
                for work in works:
                    work(self._connection)
        except sqlite3.OperationalError as error:
            self.counters.last_error = str(error)
            self._keep_waiting(works)
            return False
        except sqlite3.Error as error:
            self.counters.last_error = str(error)
            self.counters.counts_lost += len(works)
        return True

    def _keep_waiting(self, works: list[Work]) -> None:
        self._unwritten += works
        self.counters.counts_lost += max(len(self._unwritten) - _MOST_WAITING, 0)
        del self._unwritten[_MOST_WAITING:]

    def _write_events(self, events: Events) -> None:
        self._connection.executemany(
            INSERT_EVENT, event_rows(events, self._node, self._next_id, self._ranks)
        )
        self._next_id += len(events)
        self._connection.executemany(ADD_AGGREGATE, stored_rows(count_by_kind(events), self._node))
        by_source = count_by_source(events)
        self._connection.executemany(
            ADD_COVERAGE,
            [(bucket, self._node, source, 0, n, 0, 0) for (bucket, source), n in by_source.items()],
        )

    def _write_lost(self) -> None:
        unsaid = self._losses.unsaid()
        if not unsaid.by_operation:
            return
        with self._connection:
            unsaid.write(self._connection, self._node)
        self._losses.settle(unsaid)

    def _roll(self) -> None:
        """Set the file aside and go on in a new one, which begins with the session and the names known so far."""
        try:
            kept = [
                (sql, self._connection.execute(query).fetchall()) for query, sql in CARRIED_OVER
            ]
            busy, *_ = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.Error as error:
            self.counters.last_error = str(error)
            return
        if busy:  # somebody reads an old state; its log must not be left behind
            return
        self._connection.close()
        aside = None
        try:
            aside = set_aside(self.path, self._settings.rollover_keep)
            self._connection = open_for_writing(self.path, self._node, self._limits)
        except (OSError, StoreError) as error:
            self.counters.last_error = str(error)
            if aside is not None:
                aside.replace(self.path)
            self._connection = open_for_writing(self.path, self._node, self._limits)
            return
        self._next_id = 1
        self._write_works([functools.partial(_run_many, sql=sql, rows=rows) for sql, rows in kept])


def _run_many(connection: sqlite3.Connection, sql: str, rows: Iterable[tuple[object, ...]]) -> None:
    connection.executemany(sql, rows)
