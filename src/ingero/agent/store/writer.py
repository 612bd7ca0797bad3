"""Writing a recording: batches of arrays in, one thread that owns the file.

``put_*`` never blocks and never raises for a full queue or a full disk: tracing goes on, events that could not be kept
are counted as ``lost`` in the ``coverage`` table, by source and minute. Counts and names are small, so they wait until
the disk takes them. What ``coverage`` and the aggregates call *stored* is counted here from rows that were committed,
so the numbers cannot drift from the rows.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from ingero.agent.store.files import check_recording, store_errors, table_columns
from ingero.agent.store.rollover import create_private, set_aside, size_of
from ingero.agent.store.rows import (
    ADD_AGGREGATE,
    ADD_COVERAGE,
    ADD_HISTOGRAM,
    INSERT_ANNOTATION,
    INSERT_EVENT,
    INSERT_SESSION,
    INSERT_SNAPSHOT,
    aggregate_rows,
    count_by_source,
    count_stored,
    event_rows,
)
from ingero.agent.store.schema import CARRIED_OVER, TABLES, TIMED_TABLES, create_tables
from ingero.errors import StoreError
from ingero.model.events import OP_NAMES, Events, Source
from ingero.model.recording import ProcessRank, Session

Work = Callable[[sqlite3.Connection], None]

_STOP: Final = None


@dataclass(frozen=True, slots=True)
class WriterSettings:
    """How much the writer may hold.

    Attributes:
        queue_rows: Events waiting for the disk before further ones are dropped and counted.
        commit_batches: Batches in one transaction at most.
        linger_s: How long a batch waits for company: a transaction costs as much as hundreds of rows.
        max_bytes: Size above which the oldest tenth of the time range is deleted; 0 for no limit.
        rollover_bytes: Size above which the file is set aside and a new one begun; 0 never does.
        rollover_keep: Files set aside that are kept.
    """

    queue_rows: int = 500_000
    commit_batches: int = 256
    linger_s: float = 0.2
    max_bytes: int = 0
    rollover_bytes: int = 0
    rollover_keep: int = 6


@dataclass(slots=True)
class WriterCounters:
    """What became of the rows given to the writer."""

    events_stored: int = 0
    events_lost: int = 0
    events_pruned: int = 0
    batches_failed: int = 0
    last_error: str = ""


class RecordingWriter:
    """The one writer of a recording.

    Every ``put_*`` may be called from any thread. Rows become visible to readers within ``linger_s`` (`flush` waits for less).

    Args:
        path: The file; made when missing, appended to when this version wrote it.
        node: The node whose rows these are; stamped on all of them.
        settings: Limits.

    Raises:
        StoreError: The file cannot be opened for writing, or another version of the schema wrote it.
    """

    def __init__(self, path: Path, node: str, settings: WriterSettings | None = None) -> None:
        self.counters = WriterCounters()
        self.path = path
        self._node = node
        self._settings = settings or WriterSettings()
        self._ranks: dict[int, ProcessRank] = {}
        self._lost: dict[tuple[int, int], int] = {}
        self._lost_lock = threading.Lock()
        self._queue: queue.Queue[Events | Work | threading.Event | None] = queue.Queue()
        self._n_waiting = 0
        self._hurry = threading.Event()
        self._unwritten: list[Work] = []
        self._connection = _open_for_writing(path)
        (last,) = self._connection.execute("SELECT ifnull(max(rowid), 0) FROM events").fetchone()
        self._next_id = int(last) + 1
        self._session_id = 0
        self._thread = threading.Thread(target=self._run, name="ingero-store", daemon=True)
        self._thread.start()

    def put_events(self, events: Events) -> bool:
        """Store rows of EVENT (`start_ns` in Unix time; `node` is ignored). False when they were dropped.

        The array is kept until it is written: give a copy of memory that will be reused.
        """
        with self._lost_lock:
            is_taken = self._n_waiting + len(events) <= self._settings.queue_rows
            if is_taken:
                self._n_waiting += len(events)
        if is_taken:
            self._queue.put(events)
            if 2 * self._n_waiting > self._settings.queue_rows:
                self._hurry.set()
        else:
            self._count_lost(events)
        return is_taken

    def put_aggregates(self, aggregates: npt.NDArray[np.void]) -> None:
        """Add exact counts (rows of AGGREGATE; `node` and `stored` are ignored) to their buckets."""
        self._queue.put(
            lambda connection: _run_many(
                connection, ADD_AGGREGATE, aggregate_rows(aggregates, self._node)
            )
        )

    def put_histograms(self, histograms: npt.NDArray[np.void]) -> None:
        """Add exact latency counts (rows of HISTOGRAM; `node` is ignored) to their buckets."""
        names = ("bucket_ns", "source", "op", "pid", "log2_ns", "count")
        columns = [histograms[name].tolist() for name in names]
        rows = [(b, s, o, p, self._node, g, n) for b, s, o, p, g, n in zip(*columns, strict=True)]
        self._queue.put(lambda connection: _run_many(connection, ADD_HISTOGRAM, rows))

    def put_coverage(self, coverage: npt.NDArray[np.void]) -> None:
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

    def put_snapshots(self, snapshots: npt.NDArray[np.void]) -> None:
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

    def _count_lost(self, events: Events) -> None:
        self.counters.events_lost += len(events)
        with self._lost_lock:
            for key, n_rows in count_by_source(events).items():
                self._lost[key] = self._lost.get(key, 0) + n_rows

    def _run(self) -> None:
        """Body of the writing thread: take what waits, commit it as one transaction, answer those who wait."""
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
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.close()

    def _commit(self, batches: list[Events], works: list[Work]) -> None:
        n_rows = sum(map(len, batches))
        works = self._unwritten + works
        next_id = self._next_id
        try:
            with self._connection:
                for work in works:
                    work(self._connection)
                if batches:
                    self._write_events(np.concatenate(batches))
                self._write_lost()
        except sqlite3.Error as error:
            self.counters.batches_failed += len(batches)
            self.counters.last_error = str(error)
            self._next_id = next_id
            for events in batches:
                self._count_lost(events)
            self._unwritten = works if isinstance(error, sqlite3.OperationalError) else []
        else:
            self._unwritten = []
            self.counters.events_stored += n_rows
        with self._lost_lock:
            self._n_waiting -= n_rows
        if self._settings.max_bytes:
            self._shrink()
        if 0 < self._settings.rollover_bytes <= size_of(self.path):
            self._roll()

    def _write_events(self, events: Events) -> None:
        self._connection.executemany(
            INSERT_EVENT, event_rows(events, self._node, self._next_id, self._ranks)
        )
        self._next_id += len(events)
        self._connection.executemany(ADD_AGGREGATE, count_stored(events, self._node))
        by_source = count_by_source(events)
        self._connection.executemany(
            ADD_COVERAGE,
            [(bucket, self._node, source, 0, n, 0, 0) for (bucket, source), n in by_source.items()],
        )

    def _write_lost(self) -> None:
        with self._lost_lock:
            lost = dict(self._lost)
        rows = [(bucket, self._node, source, 0, 0, 0, n) for (bucket, source), n in lost.items()]
        self._connection.executemany(ADD_COVERAGE, rows)
        self._connection.commit()
        with self._lost_lock:
            for key, n_rows in lost.items():
                self._lost[key] -= n_rows
            self._lost = {key: n_rows for key, n_rows in self._lost.items() if n_rows}

    def _roll(self) -> None:
        """Set the file aside and go on in a new one, which begins with the session and the names known so far."""
        kept = [(sql, self._connection.execute(query).fetchall()) for query, sql in CARRIED_OVER]
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.close()
        aside = None
        try:
            aside = set_aside(self.path, self._settings.rollover_keep)
            self._connection = _open_for_writing(self.path)
        except (OSError, sqlite3.Error, StoreError) as error:
            self.counters.last_error = str(error)
            if aside is not None:
                aside.replace(self.path)
            self._connection = _open_for_writing(self.path)  # goes on there and tries again
            return
        with self._connection:
            for sql, rows in kept:
                self._connection.executemany(sql, rows)
        self._next_id = 1

    def _shrink(self) -> None:
        """Delete the oldest tenth of the time range while the file is over its limit."""
        (n_pages,) = self._connection.execute("PRAGMA page_count").fetchone()
        (n_free,) = self._connection.execute("PRAGMA freelist_count").fetchone()
        (page_bytes,) = self._connection.execute("PRAGMA page_size").fetchone()
        if (n_pages - n_free) * page_bytes <= self._settings.max_bytes:
            return
        with self._connection:
            first, last = self._connection.execute(
                "SELECT min(timestamp), max(timestamp) FROM "
                "(SELECT timestamp FROM events UNION ALL SELECT timestamp FROM annotations)"
            ).fetchone()
            if first is None:
                return
            until = first + (last - first) // 10
            for table, column in TIMED_TABLES:
                n_rows = self._connection.execute(
                    f"DELETE FROM {table} WHERE {column} <= ?",  # noqa: S608 - names of ours
                    (until,),
                ).rowcount
                self.counters.events_pruned += n_rows if table == "events" else 0
        self._connection.execute("PRAGMA incremental_vacuum")


def _run_many(connection: sqlite3.Connection, sql: str, rows: Iterable[tuple[object, ...]]) -> None:
    connection.executemany(sql, rows)


def _open_for_writing(path: Path) -> sqlite3.Connection:
    """Open or make a recording of this version's schema."""
    with store_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            create_private(path)
            connection = sqlite3.connect(path, check_same_thread=False, timeout=5.0)
        except (OSError, sqlite3.OperationalError) as error:
            raise StoreError(f"{path}: {error}", hint="choose another file with --db") from error
        columns = table_columns(connection, "events")
        if columns:
            check_recording(connection, path)
            if len(columns) < TABLES["events"].count(",") + 1:
                connection.close()
                raise StoreError(
                    f"{path}: written by another version of the schema; it can be read, not added to",
                    hint="record into a new file with --db",
                )
        create_tables(connection, {int(s): s.name for s in Source}, OP_NAMES)
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection
