"""A recording's rows as arrays, whatever generation wrote them.

Columns decide, never version numbers: the recordings that exist carry ``user_version`` 0. A column that a generation
does not have reads as its documented absent value.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from ingero.model.arrays import Records
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
    Unwritten,
)
from ingero.recording.store.event_loader import EventLoader, LoadFilter, RowSelection
from ingero.recording.store.files import open_recording, store_errors, table_columns
from ingero.recording.store.pages import open_scratch
from ingero.recording.store.rows import read_view
from ingero.recording.store.schema import FORKED, OCTAVES
from ingero.recording.store.typed import INT64, Kind, int_range, select_typed


@dataclass(slots=True)
class ForkMemory:
    """What the forks of a file without a table of parents say: to find them, all of its events are gone through.

    Attributes:
        parents: Parent by node and pid; None while nobody looked.
    """

    parents: dict[tuple[str, int], int] | None = None


def load_recording(
    path: Path, wanted: LoadFilter | None = None, forks: ForkMemory | None = None
) -> Recording:
    """Load a recording into memory: about 1 µs and 112 bytes per event, 250 bytes while it loads.

    Args:
        path: The file.
        wanted: Which events; None for all that memory is meant to hold.
        forks: What an earlier load of the same state of the file found; what this one finds is put there.

    Raises:
        StoreError: The file cannot be read as a recording (see `open_recording`).
        BadDataError: A column holds what is not a number.
    """
    with open_recording(path) as connection, store_errors(path):
        connection.execute("PRAGMA query_only = 0")  # for what is in memory; the file is mode=ro
        open_scratch(connection)
        connection.execute("BEGIN")  # one state of the file, also while an agent writes to it
        return _Loader(connection, path, wanted or LoadFilter(), forks or ForkMemory()).load()


def read_unwritten(path: Path) -> tuple[Unwritten, ...]:
    """Rows that the recorder could not store, by operation; quick on any size.

    Raises:
        StoreError: The file cannot be read as a recording.
    """
    with open_recording(path) as connection:
        return tuple(Unwritten(*row) for row in _select_unwritten(connection)[0])


def read_unprobed(path: Path) -> tuple[Unprobed, ...]:
    """Libraries whose calls are missing, each with its node where the file has several; quick on any size.

    Raises:
        StoreError: The file cannot be read as a recording.
    """
    with open_recording(path) as connection, store_errors(path):
        found, _ = _select_unprobed(connection)
    has_nodes = len({one.node for one in found}) > 1
    return tuple(one if has_nodes else replace(one, node="") for one in found)


def _select_unprobed(connection: sqlite3.Connection) -> tuple[list[Unprobed], int]:
    """Libraries, and how many rows could not be read."""
    if not table_columns(connection, "unprobed"):
        return [], 0
    columns: dict[str, Kind] = {
        "pid": INT64, "path": str, "reason": str, "until": INT64, "node": str,
    }  # fmt: skip
    rows, n_damaged = select_typed(connection, "unprobed", columns, order="since, pid")
    return [
        Unprobed(pid, path, f"{reason}; probed later" if until else reason, node)
        for pid, path, reason, until, node in rows
    ], n_damaged


def _select_unwritten(connection: sqlite3.Connection) -> tuple[list[tuple[Any, ...]], int]:
    columns: dict[str, Kind] = {"node": str, "source": INT64, "cause": str, "count": INT64}
    if not columns.keys() <= set(table_columns(connection, "unwritten")):
        return [], 0
    return select_typed(connection, "unwritten", columns)


class _Loader:
    """One pass over one open recording."""

    def __init__(
        self, connection: sqlite3.Connection, path: Path, wanted: LoadFilter, forks: ForkMemory
    ) -> None:
        self._connection = connection
        self._forks = forks
        self._selection = RowSelection(connection, wanted)
        self._events = EventLoader(self._selection, path)
        self._n_damaged = 0

    def load(self) -> Recording:
        selection = self._selection
        events = self._events.load()
        self._n_damaged = self._events.n_damaged
        return Recording(
            events=events,
            nodes=selection.nodes,
            process_names=self._load_names(events),
            ranks=self._load_ranks(events),
            parents=self._load_parents(),
            gpu_views=self._load_gpu_views(),
            aggregates=self._load_table("event_aggregates", AGGREGATE, _AGGREGATE_COLUMNS),
            coverage=self._load_table("coverage", COVERAGE, _COVERAGE_COLUMNS),
            snapshots=np.sort(
                self._load_table("system_snapshots", SNAPSHOT, _SNAPSHOT_COLUMNS), order="wall_ns"
            ),
            histograms=self._load_histograms(),
            sessions=tuple(self._iter_sessions()),
            unwritten=self._load_unwritten(),
            unprobed=tuple(self._iter_unprobed()),
            stacks=self._load_stacks(events),
            n_events_stored=selection.n_stored,
            is_truncated=selection.is_truncated,
            asked_ns=selection.asked_ns(events),
            pids=selection.wanted.pids,
            has_gpu_ids="weight"
            in selection.columns,  # this version's recorder, which reads the device
            n_damaged=self._n_damaged,  # after everything else was read
        )

    def _load_table(self, table: str, dtype: np.dtype[np.void], columns: dict[str, str]) -> Records:
        """Read a small table into `dtype`; columns it lacks stay 0, the node becomes its index."""
        present = set(table_columns(self._connection, table))
        names = [name for name in columns if name in present]
        if not names:
            return np.empty(0, dtype)
        return self._fill_table(table, dtype, {name: columns[name] for name in names})

    def _load_histograms(self) -> Records:
        """Latency counts, also where an earlier version of this program wrote them as whole octaves."""
        found = self._load_table("latency_buckets", HISTOGRAM, _HISTOGRAM_COLUMNS)
        if not table_columns(self._connection, "latency_histograms"):
            return found
        octaves = self._fill_table(f"({OCTAVES})", HISTOGRAM, _HISTOGRAM_COLUMNS)
        return np.concatenate((found, octaves))

    def _fill_table(self, table: str, dtype: np.dtype[np.void], columns: dict[str, str]) -> Records:
        """Rows of a table, or of a SELECT in parentheses, that has all of these columns."""
        names = list(columns)
        kinds = {
            name: str if name == "node" else int_range(dtype.fields[columns[name]][0])
            for name in names
            if dtype.fields is not None
        }
        rows, n_damaged = select_typed(self._connection, table, kinds, has_nulls=True)
        self._n_damaged += n_damaged
        if "node" in names:
            at = names.index("node")
            rows = [row for row in rows if self._selection.is_chosen(row[at])]
        table_rows = np.zeros(len(rows), dtype)
        for i, name in enumerate(names):
            values = [row[i] for row in rows]
            if name == "node":
                values = [self._selection.node_idx.get(str(value), 0) for value in values]
            table_rows[columns[name]] = [0 if value is None else value for value in values]
        return table_rows

    def _load_names(self, events: Records) -> dict[tuple[int, int], str]:
        names: dict[tuple[int, int], str] = {}
        columns = table_columns(self._connection, "process_names")
        if {"pid", "name"} <= set(columns):
            node = "node" if "node" in columns else "''"
            kinds: dict[str, Kind] = {node: str, "pid": INT64, "name": str}
            rows, n_damaged = select_typed(self._connection, "process_names", kinds, has_nulls=True)
            self._n_damaged += n_damaged
            for node_name, pid, name in rows:
                if not self._selection.is_chosen(node_name):
                    continue
                targets = (
                    [self._selection.node_idx[node_name]]
                    if node_name in self._selection.node_idx
                    else range(len(self._selection.nodes))
                )
                names.update({(i, pid): name for i in targets if name and pid is not None})
        if "comm" in self._events.present:
            for node_idx, pid, comm in self._iter_process_facts("comm", events):
                if isinstance(comm, str) and comm:
                    names[node_idx, pid] = comm
        return names | self._load_ambiguous()

    def _load_parents(self) -> dict[tuple[int, int], int]:
        """Parents of processes, whatever part was asked for: a child may have been forked before it began."""
        if table_columns(self._connection, "process_parents"):
            found, n_damaged = self._select_parents("process_parents")
            self._n_damaged += n_damaged
        else:
            is_whole = not self._selection.where and not self._selection.is_truncated
            if is_whole or not {"arg1", "node"} <= self._selection.columns:
                return {}
            if self._forks.parents is None:  # a damaged event is counted with the events
                self._forks.parents, _ = self._select_parents(f"({FORKED})")
            found = self._forks.parents
        nodes = self._selection.node_idx
        return {
            (nodes[node], pid): parent for (node, pid), parent in found.items() if node in nodes
        }

    def _select_parents(self, origin: str) -> tuple[dict[tuple[str, int], int], int]:
        """Parent by node and pid, and how many rows could not be read."""
        kinds: dict[str, Kind] = {"node": str, "pid": INT64, "parent": INT64}
        rows, n_damaged = select_typed(self._connection, origin, kinds)
        return {(node, pid): parent for node, pid, parent in rows}, n_damaged

    def _load_gpu_views(self) -> dict[tuple[int, int], GpuView]:
        if not table_columns(self._connection, "process_gpus"):
            return {}
        kinds: dict[str, Kind] = {"node": str, "pid": INT64, "nodes": str, "visible": str}
        kinds["device_order"] = str
        rows, n_damaged = select_typed(self._connection, "process_gpus", kinds)
        self._n_damaged += n_damaged
        views: dict[tuple[int, int], GpuView] = {}
        for node, pid, *view in rows:
            node_idx = self._selection.node_idx.get(node)
            if node_idx is not None and self._selection.is_chosen(node):
                merge_views(views, {(node_idx, pid): read_view(*view)})
        return views

    def _load_ambiguous(self) -> dict[tuple[int, int], str]:
        """Names of pids that are different processes in the recordings that were merged: all, the earliest first."""
        if "recording" not in table_columns(self._connection, "recording_names"):
            return {}
        by_pid: dict[tuple[int, int], dict[str, None]] = {}
        for node, pid, name in self._connection.execute(
            "SELECT node, pid, name FROM recording_names WHERE typeof(pid) = 'integer' ORDER BY seen_at, name"
        ):
            if node in self._selection.node_idx:
                by_pid.setdefault((self._selection.node_idx[node], pid), {})[str(name)] = None
        return {key: " / ".join(names) for key, names in by_pid.items() if len(names) > 1}

    def _load_unwritten(self) -> tuple[Unwritten, ...]:
        counts: Counter[tuple[str, int, str]] = Counter()
        rows, n_damaged = _select_unwritten(self._connection)
        self._n_damaged += n_damaged
        for node, source, cause, count in rows:
            if self._selection.is_chosen(node):
                counts[node, source, cause] += count
        return tuple(Unwritten(*key, n_rows) for key, n_rows in counts.most_common())

    def _load_ranks(self, events: Records) -> dict[tuple[int, int], ProcessRank]:
        if "rank" not in self._events.present:
            return {}
        facts = "rank, ifnull(local_rank, -1), ifnull(world_size, -1)"
        return {
            (node_idx, pid): ProcessRank(int(rank), int(local), int(world))
            for node_idx, pid, rank, local, world in self._iter_process_facts(facts, events)
            if all(isinstance(one, int) for one in (rank, local, world))
        }

    def _iter_process_facts(self, columns: str, events: Records) -> Iterator[tuple[Any, ...]]:
        """(node index, pid, columns…) from the last row of each process: names and ranks are per process."""
        keys = events["node"].astype(np.int64) << 32 | events["pid"]
        for key in np.unique(keys).tolist():
            node_idx, pid = key >> 32, key & 0xFFFF_FFFF
            node = "AND node = ?" if "node" in self._selection.columns else ""
            last = self._connection.execute(
                f"SELECT {columns} FROM events WHERE pid = ? {node} ORDER BY rowid DESC LIMIT 1",  # noqa: S608
                [pid, self._selection.nodes[node_idx]] if node else [pid],
            ).fetchone()
            if last is not None:
                yield node_idx, pid, *last

    def _load_stacks(self, events: Records) -> dict[int, str]:
        if "frames" not in table_columns(self._connection, "stack_traces"):
            return {}
        wanted = set(np.unique(events["stack_hash"]).tolist())
        rows = self._connection.execute("SELECT hash, frames FROM stack_traces WHERE frames <> ''")
        return {int(key): str(frames) for key, frames in rows if key in wanted}

    def _iter_sessions(self) -> Iterator[Session]:
        present = table_columns(self._connection, "sessions")
        names = [name for name in _SESSION_COLUMNS if name in present]
        if not names:
            return
        if "started_at" not in names:  # SQL would also take a name in other letters
            raise sqlite3.DatabaseError("sessions has no column started_at")
        kinds: dict[str, Kind] = {
            name: INT64 if name in _SESSION_NUMBERS else str for name in names
        }
        rows, n_damaged = select_typed(self._connection, "sessions", kinds, order="started_at")
        self._n_damaged += n_damaged
        for row in rows:
            fields = {_SESSION_COLUMNS[name]: value for name, value in zip(names, row, strict=True)}
            yield Session(**{"node": "", **fields})

    def _iter_unprobed(self) -> Iterator[Unprobed]:
        found, n_damaged = _select_unprobed(self._connection)
        self._n_damaged += n_damaged
        for one in found:
            if self._selection.is_chosen(one.node) and (
                not self._selection.wanted.pids or one.pid in {0, *self._selection.wanted.pids}
            ):
                yield one if len(self._selection.nodes) > 1 else replace(one, node="")


_AGGREGATE_COLUMNS: Final = {
    "bucket": "bucket_ns", "node": "node", "source": "source", "op": "op", "pid": "pid",
    "count": "count", "stored": "stored", "sum_dur": "sum_duration_ns", "min_dur": "min_duration_ns",
    "max_dur": "max_duration_ns", "sum_arg0": "sum_arg0", "errors": "errors", "lost": "lost",
}  # fmt: skip
_COVERAGE_COLUMNS: Final = {
    "bucket": "bucket_ns", "node": "node", "source": "source", "seen": "seen", "stored": "stored",
    "sampled_out": "sampled_out", "lost": "lost",
}  # fmt: skip
_SNAPSHOT_COLUMNS: Final = {
    "timestamp": "wall_ns", "node": "node", "cpu_pct": "cpu_pct", "mem_pct": "mem_pct",
    "mem_avail": "mem_available_mib", "swap_mb": "swap_mib", "load_avg": "load1",
}  # fmt: skip
_HISTOGRAM_COLUMNS: Final = {
    "bucket": "bucket_ns", "node": "node", "source": "source", "op": "op", "pid": "pid",
    "from_ns": "from_ns", "to_ns": "to_ns", "count": "count",
}  # fmt: skip
_SESSION_COLUMNS: Final = {
    "node": "node", "started_at": "started_wall_ns", "stopped_at": "stopped_wall_ns",
    "gpu_model": "gpu_model", "cpu_cores": "n_cpus", "mem_total": "mem_total_mib",
    "kernel": "kernel", "ingero_ver": "agent_version", "flags": "flags",
}  # fmt: skip


_SESSION_NUMBERS: Final = frozenset(("started_at", "stopped_at", "cpu_cores", "mem_total"))
