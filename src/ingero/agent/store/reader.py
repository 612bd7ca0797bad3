"""A recording's rows as arrays, whatever generation wrote them.

Columns decide, never version numbers: the recordings that exist carry ``user_version`` 0. A column that a generation
does not have reads as its documented absent value.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ingero.agent.store.files import NEEDED, open_recording, store_errors, table_columns
from ingero.agent.store.pages import SCRATCH, iter_integers, open_scratch
from ingero.errors import BadDataError
from ingero.model.events import EVENT, is_stored_at_end
from ingero.model.recording import (
    AGGREGATE,
    COVERAGE,
    HISTOGRAM,
    SNAPSHOT,
    ProcessRank,
    Recording,
    Session,
)

_FIELDS: Final = {
    "timestamp": "start_ns", "duration": "duration_ns", "pid": "pid", "tid": "tid",
    "source": "source", "op": "op", "gpu_id": "gpu_id", "arg0": "arg0", "arg1": "arg1",
    "arg2": "arg2", "arg3": "arg3", "ret_code": "ret_code", "reason": "reason", "flags": "flags",
    "other_pid": "other_pid", "wait_ns": "wait_ns", "cgroup_id": "cgroup_id", "weight": "weight",
}  # fmt: skip
"""Columns of events that are always read, and the fields of EVENT that they fill."""
_ABSENT: Final = {"weight": 1}
"""What a field holds where the recording says nothing; 0 where it does not stand here."""
_SAID: Final = {"comm": "ifnull(comm, '') <> ''", "rank": "rank IS NOT NULL"}
"""Columns of which only matters, row by row, whether they say anything, and how to ask."""


@dataclass(frozen=True, slots=True)
class LoadFilter:
    """Which events to load.

    Attributes:
        from_ns: Earliest stored timestamp, Unix time; None for the first.
        to_ns: Latest stored timestamp; None for the last.
        pids: Only these processes; empty for all.
        max_rows: At most this many, the newest; keeps memory bounded on any file.
        has_extras: Also load ``stack_hash``, which no rule reads.
    """

    from_ns: int | None = None
    to_ns: int | None = None
    pids: tuple[int, ...] = ()
    max_rows: int = 5_000_000
    has_extras: bool = False


def load_recording(path: Path, wanted: LoadFilter | None = None) -> Recording:
    """Load a recording into memory: about 1 µs and 112 bytes per event, 250 bytes while it loads.

    Raises:
        StoreError: The file cannot be read as a recording (see `open_recording`).
        BadDataError: A column holds what is not a number.
    """
    with open_recording(path) as connection, store_errors(path):
        connection.execute("PRAGMA query_only = 0")  # for what is in memory; the file is mode=ro
        open_scratch(connection)
        connection.execute("BEGIN")  # one state of the file, also while an agent writes to it
        return _Loader(connection, path, wanted or LoadFilter()).load()


class _Loader:
    """One pass over one open recording."""

    def __init__(self, connection: sqlite3.Connection, path: Path, wanted: LoadFilter) -> None:
        self._connection = connection
        self._path = path
        self._wanted = wanted
        self._columns = set(table_columns(connection, "events"))
        (n_stored,) = connection.execute("SELECT count(*) FROM events").fetchone()
        self._n_stored = int(n_stored)
        self._where, self._parameters = self._build_where()
        self._n_rows = self._count_rows()
        self._is_truncated = self._n_rows > wanted.max_rows
        self._tail = ""
        if self._is_truncated:
            self._tail = " ORDER BY timestamp DESC LIMIT ?"
            self._parameters.append(wanted.max_rows)
            self._n_rows = wanted.max_rows
        self._nodes = self._find_nodes()
        self._node_idx = {node: i for i, node in enumerate(self._nodes)}
        self._seen: set[str] = set()  # keys of _SAID, once the events are loaded

    def load(self) -> Recording:
        events = self._load_events()
        return Recording(
            events=events,
            nodes=self._nodes,
            process_names=self._load_names(events),
            ranks=self._load_ranks(events),
            aggregates=self._load_table("event_aggregates", AGGREGATE, _AGGREGATE_COLUMNS),
            coverage=self._load_table("coverage", COVERAGE, _COVERAGE_COLUMNS),
            snapshots=np.sort(
                self._load_table("system_snapshots", SNAPSHOT, _SNAPSHOT_COLUMNS), order="wall_ns"
            ),
            histograms=self._load_table("latency_histograms", HISTOGRAM, _HISTOGRAM_COLUMNS),
            sessions=tuple(self._iter_sessions()),
            n_events_stored=self._n_stored,
            is_truncated=self._is_truncated,
            has_gpu_ids="weight"
            in self._columns,  # this version's recorder, which reads the device
        )

    def _rows(self, sql: str, parameters: Iterable[object] = ()) -> sqlite3.Cursor:
        return self._connection.execute(sql, tuple(parameters))

    def _find_nodes(self) -> tuple[str, ...]:
        """Every node that the chosen rows name, sorted; one nameless node when there is none."""
        if "node" not in self._columns:
            return ("",)
        names = self._rows(
            f"SELECT DISTINCT ifnull(node, '') FROM (SELECT node FROM events{self._where}{self._tail})",  # noqa: S608
            self._parameters,
        )
        return tuple(sorted(str(name) for (name,) in names)) or ("",)

    def _build_where(self) -> tuple[str, list[object]]:
        terms: list[str] = []
        parameters: list[object] = []
        if self._wanted.from_ns is not None:
            terms.append("timestamp >= ?")
            parameters.append(self._wanted.from_ns)
        if self._wanted.to_ns is not None:
            terms.append("timestamp <= ?")
            parameters.append(self._wanted.to_ns)
        if self._wanted.pids:
            terms.append(f"pid IN ({', '.join('?' * len(self._wanted.pids))})")
            parameters += self._wanted.pids
        return (" WHERE " + " AND ".join(terms) if terms else ""), parameters

    def _count_rows(self) -> int:
        if not self._where:
            return self._n_stored
        (n_rows,) = self._rows(
            f"SELECT count(*) FROM events{self._where}",  # noqa: S608 - own column names
            self._parameters,
        ).fetchone()
        return int(n_rows)

    def _load_events(self) -> npt.NDArray[np.void]:
        events = np.zeros(self._n_rows, EVENT)
        for name, value in _ABSENT.items():
            events[name] = value
        sql_by_field = self._choose_fields()
        select = f"SELECT {', '.join(sql_by_field.values())} FROM events{self._where}{self._tail}"  # noqa: S608
        filled = 0
        try:
            for block in iter_integers(
                self._connection, select, self._parameters, len(sql_by_field)
            ):
                here = slice(filled, filled + block.shape[1])
                for field, values in zip(sql_by_field, block, strict=True):
                    if field not in _SAID:
                        events[field][here] = values
                    elif values.any():
                        self._seen.add(field)
                filled = here.stop
        except TypeError as error:
            raise BadDataError(
                f"{self._path}: an event is not made of integers: {error}"
            ) from error
        return _normalise(events)

    def _choose_fields(self) -> dict[str, str]:
        """What to read, as SQL by field of EVENT or key of `_SAID`; what has no SQL is absent."""
        fields = _FIELDS | ({"stack_hash": "stack_hash"} if self._wanted.has_extras else {})
        never_null = {
            name
            for (name,) in self._rows(
                "SELECT name FROM pragma_table_info('events') WHERE \"notnull\""
            )
        } | NEEDED
        sql_by_field = {
            field: name if name in never_null else f"ifnull({name}, {_ABSENT.get(field, 0)})"
            for name, field in fields.items()
            if name in self._columns
        }
        if len(self._nodes) > 1:
            self._connection.execute(f"CREATE TABLE {SCRATCH}.nodes (name TEXT PRIMARY KEY, idx)")
            self._connection.executemany(
                f"INSERT INTO {SCRATCH}.nodes VALUES (?, ?)",  # noqa: S608 - ours
                self._node_idx.items(),
            )
            sql_by_field["node"] = (
                f"(SELECT idx FROM {SCRATCH}.nodes WHERE name = ifnull(node, ''))"  # noqa: S608
            )
        return sql_by_field | {n: sql for n, sql in _SAID.items() if n in self._columns}

    def _is_chosen(self, node: object) -> bool:
        """Whether chosen rows name a node; what carries no node belongs to all of them."""
        return not node or not self._n_rows or str(node) in self._node_idx

    def _load_table(
        self, table: str, dtype: np.dtype[np.void], columns: dict[str, str]
    ) -> npt.NDArray[np.void]:
        """Read a small table into `dtype`; columns it lacks stay 0, the node becomes its index."""
        present = set(table_columns(self._connection, table))
        names = [name for name in columns if name in present]
        if not names:
            return np.empty(0, dtype)
        rows = self._rows(f"SELECT {', '.join(names)} FROM {table}").fetchall()  # noqa: S608
        if "node" in names:
            at = names.index("node")
            rows = [row for row in rows if self._is_chosen(row[at])]
        table_rows = np.zeros(len(rows), dtype)
        for i, name in enumerate(names):
            values = [row[i] for row in rows]
            if name == "node":
                values = [self._node_idx.get(str(value), 0) for value in values]
            try:
                table_rows[columns[name]] = [0 if value is None else value for value in values]
            except (TypeError, ValueError, OverflowError) as error:
                raise BadDataError(
                    f"{self._path}: {table}.{name} is not a number: {error}"
                ) from error
        return table_rows

    def _load_names(self, events: npt.NDArray[np.void]) -> dict[tuple[int, int], str]:
        names: dict[tuple[int, int], str] = {}
        columns = table_columns(self._connection, "process_names")
        if columns:
            node = "node" if "node" in columns else "''"
            for node_name, pid, name in self._rows(f"SELECT {node}, pid, name FROM process_names"):  # noqa: S608
                if not self._is_chosen(node_name):
                    continue
                targets = (
                    [self._node_idx[node_name]]
                    if node_name in self._node_idx
                    else range(len(self._nodes))
                )
                names.update({(i, int(pid)): str(name) for i in targets if name})
        if "comm" in self._seen:
            for node_idx, pid, comm in self._iter_process_facts("comm", events):
                if comm:
                    names[node_idx, pid] = str(comm)
        return names

    def _load_ranks(self, events: npt.NDArray[np.void]) -> dict[tuple[int, int], ProcessRank]:
        if "rank" not in self._seen:
            return {}
        facts = "rank, ifnull(local_rank, -1), ifnull(world_size, -1)"
        return {
            (node_idx, pid): ProcessRank(int(rank), int(local), int(world))
            for node_idx, pid, rank, local, world in self._iter_process_facts(facts, events)
            if rank is not None
        }

    def _iter_process_facts(
        self, columns: str, events: npt.NDArray[np.void]
    ) -> Iterator[tuple[Any, ...]]:
        """(node index, pid, columns…) from the last row of each process: names and ranks are per process."""
        keys = events["node"].astype(np.int64) << 32 | events["pid"]
        for key in np.unique(keys).tolist():
            node_idx, pid = key >> 32, key & 0xFFFF_FFFF
            node = "AND node = ?" if "node" in self._columns else ""
            last = self._rows(
                f"SELECT {columns} FROM events WHERE pid = ? {node} ORDER BY rowid DESC LIMIT 1",  # noqa: S608
                [pid, self._nodes[node_idx]] if node else [pid],
            ).fetchone()
            if last is not None:
                yield node_idx, pid, *last

    def _iter_sessions(self) -> Iterator[Session]:
        present = table_columns(self._connection, "sessions")
        names = [name for name in _SESSION_COLUMNS if name in present]
        if not names:
            return
        for row in self._rows(f"SELECT {', '.join(names)} FROM sessions ORDER BY started_at"):  # noqa: S608
            fields = {_SESSION_COLUMNS[name]: value for name, value in zip(names, row, strict=True)}
            yield Session(**{"node": "", **fields})


_AGGREGATE_COLUMNS: Final = {
    "bucket": "bucket_ns", "node": "node", "source": "source", "op": "op", "pid": "pid",
    "count": "count", "stored": "stored", "sum_dur": "sum_duration_ns", "min_dur": "min_duration_ns",
    "max_dur": "max_duration_ns", "sum_arg0": "sum_arg0", "errors": "errors",
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
    "log2_ns": "log2_ns", "count": "count",
}  # fmt: skip
_SESSION_COLUMNS: Final = {
    "node": "node", "started_at": "started_wall_ns", "stopped_at": "stopped_wall_ns",
    "gpu_model": "gpu_model", "cpu_cores": "n_cpus", "mem_total": "mem_total_mib",
    "kernel": "kernel", "ingero_ver": "agent_version", "flags": "flags",
}  # fmt: skip


def _normalise(events: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Turn stored completion times into starts, and sort by it; equal starts keep the file's order."""
    at_end = is_stored_at_end(events["source"])
    events["start_ns"][at_end] -= events["duration_ns"][at_end]
    starts = np.ascontiguousarray(events["start_ns"])
    if (starts[1:] >= starts[:-1]).all():
        return events
    return events[np.argsort(starts, kind="stable")]
