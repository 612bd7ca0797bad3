"""Writing a recording: batches of arrays in, one thread that owns the file.

``put_*`` never blocks and never raises for a full queue or a full disk: tracing goes on, events that could not be kept
are counted as ``lost`` in the ``coverage`` table, and in ``unwritten`` by operation and cause. Counts and names are
small, so they wait until the disk takes them.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from typing_extensions import override

from ingero.closing import Closing
from ingero.model.arrays import Records
from ingero.model.events import Events
from ingero.model.gpu_view import GpuView
from ingero.model.recording import ProcessRank, Session, Unprobed
from ingero.recording.store.appending import RecordingAppender, Work, run_many
from ingero.recording.store.losses import Loss, LossCounts
from ingero.recording.store.rows import (
    ADD_AGGREGATE,
    ADD_COVERAGE,
    ADD_HISTOGRAM,
    INSERT_ANNOTATION,
    INSERT_PARENT,
    INSERT_SNAPSHOT,
    aggregate_rows,
    parent_rows,
    write_view,
)
from ingero.recording.store.settings import WriterCounters, WriterSettings

_STOP: Final = None
_SLOW: Final = "the disk was too slow"


class WriterThread(Closing):
    """The thread that owns a recording's file, and the queue in front of it.

    Args:
        path: The file; made when missing, appended to when this version wrote it.
        node: The node whose rows these are; stamped on all of them.
        settings: Limits.
        owner: User and group that new files are given to; None leaves the process's own.

    Raises:
        StoreError: The file cannot be opened for writing, somebody else writes to it, it is no recording, or another
            version of the schema wrote it.
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
        self._losses = LossCounts(self.counters)
        self._queue: queue.Queue[Events | Work | threading.Event | None] = queue.Queue()
        self._n_waiting = 0
        self._waiting_lock = threading.Lock()
        self._hurry = threading.Event()
        self._file = RecordingAppender(self.path, node, self._settings, self._losses, owner)
        self._thread = threading.Thread(target=self._run, name="ingero-store", daemon=True)
        self._thread.start()

    @property
    def warning(self) -> str:
        """What the user should know of where the recording lies; empty for nothing."""
        return self._file.warning

    def losses(self) -> list[Loss]:
        """Rows that are not in the recording, most first. Any thread."""
        return self._losses.list()

    def put_events(self, events: Events) -> bool:
        """Store rows of EVENT (`start_ns` in Unix time; `node` is ignored). False when they were dropped.

        The array is kept until it is written: give a copy of memory that will be reused.
        """
        with self._waiting_lock:
            is_taken = self._n_waiting + len(events) <= self._settings.queue_rows
            if is_taken:
                self._n_waiting += len(events)
        if is_taken:
            self._queue.put(events)
            if 2 * self._n_waiting > self._settings.queue_rows:
                self._hurry.set()
        else:
            self._losses.add(events, _SLOW)
        return is_taken

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
            self._queue.put(lambda _: self._file.update_session("stopped_at", stopped_wall_ns))
        self._queue.put(_STOP)
        self._hurry.set()
        self._thread.join()

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, node={self._node!r})"

    def _put_rows(self, sql: str, rows: Iterable[tuple[object, ...]]) -> None:
        """Run one statement for many rows in the next transaction."""
        self._queue.put(functools.partial(run_many, sql=sql, rows=rows))

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
            self._file.commit(batches, [item for item in waiting if callable(item)])
            with self._waiting_lock:
                self._n_waiting -= sum(map(len, batches))
            for item in waiting:
                if isinstance(item, threading.Event):
                    item.set()
        self._file.close()


class RecordingWriter(WriterThread):
    """The one writer of a recording: what can be put into it.

    Every ``put_*`` may be called from any thread. Rows become visible to readers within ``linger_s`` (`flush` waits for
    less).
    """

    def put_aggregates(self, aggregates: Records) -> None:
        """Add exact counts (rows of AGGREGATE; `node` and `stored` are ignored) to their buckets."""
        self._put_rows(ADD_AGGREGATE, aggregate_rows(aggregates, self._node))

    def put_histograms(self, histograms: Records) -> None:
        """Add exact latency counts (rows of HISTOGRAM; `node` is ignored) to their buckets."""
        names = ("bucket_ns", "source", "op", "pid", "from_ns", "to_ns", "count")
        columns = [histograms[name].tolist() for name in names]
        rows = [
            (bucket, source, op, pid, self._node, *rest)
            for bucket, source, op, pid, *rest in zip(*columns, strict=True)
        ]
        self._put_rows(ADD_HISTOGRAM, rows)

    def put_coverage(self, coverage: Records) -> None:
        """Add what the probes saw, sampled out and lost (rows of COVERAGE; `node` and `stored` are ignored)."""
        names = ("bucket_ns", "source", "seen", "sampled_out", "lost")
        columns = [coverage[name].tolist() for name in names]
        rows = [
            (bucket, self._node, source, seen, 0, sampled, lost)
            for bucket, source, seen, sampled, lost in zip(*columns, strict=True)
        ]
        self._put_rows(ADD_COVERAGE, rows)

    def put_process_names(self, names: Mapping[int, str], seen_wall_ns: int) -> None:
        """Name processes and threads; a later name replaces an earlier one."""
        rows = [(pid, name, seen_wall_ns, self._node) for pid, name in names.items()]
        self._put_rows("INSERT OR REPLACE INTO process_names VALUES (?, ?, ?, ?)", rows)

    def put_parents(self, parents: Mapping[int, int]) -> None:
        """Note the parents of processes, which are no forks that were seen; those are noted with their rows."""
        self._put_rows(INSERT_PARENT, parent_rows(parents, self._node))

    def put_gpu_views(self, views: Mapping[int, GpuView]) -> None:
        """Note which GPUs processes are shown; all that is said of a process stays."""
        rows = [(pid, *write_view(view), self._node) for pid, view in views.items()]
        self._put_rows("INSERT OR IGNORE INTO process_gpus VALUES (?, ?, ?, ?, ?)", rows)

    def put_ranks(self, ranks: Mapping[int, ProcessRank]) -> None:
        """Stamp every later row of these processes with its place in the job."""
        placed = dict(ranks)
        self._queue.put(lambda _: self._file.ranks.update(placed))

    def put_stacks(self, frames_by_hash: Mapping[int, str]) -> None:
        """Store stacks: signed 64-bit hash to compact JSON frames, leaf first."""
        rows = [(key, frames) for key, frames in frames_by_hash.items()]
        self._put_rows(
            "INSERT OR REPLACE INTO stack_traces (hash, ips, frames) VALUES (?, '', ?)",
            rows,
        )

    def put_snapshots(self, snapshots: Records) -> None:
        """Store rows of SNAPSHOT (`node` is ignored)."""
        names = ("wall_ns", "cpu_pct", "mem_pct", "mem_available_mib", "swap_mib", "load1")
        columns = [snapshots[name].tolist() for name in names]
        rows = [(*row, self._node) for row in zip(*columns, strict=True)]
        self._put_rows(INSERT_SNAPSHOT, rows)

    def put_annotations(
        self, rows: Iterable[tuple[int, str, int, int, int, int, int, int, int]]
    ) -> None:
        """Store what workloads said, in the order of INSERT_ANNOTATION without the node."""
        placed = [(*row, self._node) for row in rows]
        self._put_rows(INSERT_ANNOTATION, placed)

    def put_session(self, session: Session) -> None:
        """Note the start of a run; `close` notes its end. The session's node is the writer's."""
        row = (
            session.started_wall_ns, session.stopped_wall_ns, session.gpu_model, session.n_cpus,
            session.mem_total_mib, session.kernel, session.agent_version, session.flags, self._node,
        )  # fmt: skip

        self._queue.put(lambda _: self._file.start_session(row))

    def put_gpu_model(self, model: str) -> None:
        """Note which GPUs this run sees."""
        self._queue.put(lambda _: self._file.update_session("gpu_model", model))

    def put_cgroup(self, cgroup_id: int, container: str, path: str, pod: tuple[str, str]) -> None:
        """Name a cgroup: its container, and its pod's name and namespace."""
        row = (cgroup_id, container, path, *pod, self._node)
        self._put_rows(
            "INSERT OR REPLACE INTO cgroup_metadata VALUES (?, ?, ?, ?, ?, ?)",
            [row],
        )

    def put_unprobed(self, new: Iterable[Unprobed], over: Iterable[Unprobed], wall_ns: int) -> None:
        """Note libraries that could not be probed, and those of them that can be from now on."""
        begun = [(one.pid, one.path, one.reason, wall_ns, self._node) for one in new]
        ended = [(wall_ns, one.pid, one.path, self._node) for one in over]

        self._put_rows(
            "INSERT OR IGNORE INTO unprobed (pid, path, reason, since, node) VALUES (?, ?, ?, ?, ?)",
            begun,
        )
        self._put_rows(
            "UPDATE unprobed SET until = ? WHERE pid = ? AND path = ? AND node = ? AND until = 0",
            ended,
        )

    def put_clock_sample(self, mono_ns: int, wall_ns: int) -> None:
        """Note one reading of both clocks, so that drift can be seen afterwards."""
        row = (self._node, mono_ns, wall_ns)
        self._put_rows("INSERT OR IGNORE INTO clock_samples VALUES (?, ?, ?)", [row])
