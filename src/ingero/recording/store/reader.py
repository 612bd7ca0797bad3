"""A recording's rows as arrays, whatever generation wrote them.

Columns decide, never version numbers: the recordings that exist carry ``user_version`` 0. A column that a generation
does not have reads as its documented absent value.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from ingero.errors import BadDataError
from ingero.model.arrays import IntArray, Records
from ingero.model.events import EVENT, is_stored_at_end
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
from ingero.recording.store.files import NEEDED, open_recording, store_errors, table_columns
from ingero.recording.store.pages import SCRATCH, iter_integers, open_scratch
from ingero.recording.store.schema import OCTAVES
from ingero.recording.store.typed import INT64, Kind, int_range, select_typed

_FIELDS: Final = {
    "timestamp": "start_ns", "duration": "duration_ns", "pid": "pid", "tid": "tid",
    "source": "source", "op": "op", "gpu_id": "gpu_id", "arg0": "arg0", "arg1": "arg1",
    "arg2": "arg2", "arg3": "arg3", "ret_code": "ret_code", "reason": "reason", "flags": "flags",
    "other_pid": "other_pid", "wait_ns": "wait_ns", "cgroup_id": "cgroup_id", "weight": "weight",
}  # fmt: skip
"""Columns of events that are always read, and the fields of EVENT that they fill."""
_LAST_NS: Final = 1 << 62
"""No time is beyond it, in 2116, and the end of no row overflows."""
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
        found = list(_select_unprobed(connection))
    has_nodes = len({one.node for one in found}) > 1
    return tuple(one if has_nodes else replace(one, node="") for one in found)


def _select_unprobed(connection: sqlite3.Connection) -> Iterator[Unprobed]:
    if not table_columns(connection, "unprobed"):
        return
    rows = connection.execute(
        "SELECT pid, path, reason, until, node FROM unprobed ORDER BY since, pid"
    )
    for pid, path, reason, until, node in rows:
        told = f"{reason}; probed later" if until else str(reason)
        yield Unprobed(int(pid), str(path), told, str(node))


def _select_unwritten(connection: sqlite3.Connection) -> tuple[list[tuple[Any, ...]], int]:
    columns: dict[str, Kind] = {"node": str, "source": INT64, "cause": str, "count": INT64}
    if not columns.keys() <= set(table_columns(connection, "unwritten")):
        return [], 0
    return select_typed(connection, "unwritten", columns)


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
        self._n_damaged = 0

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
            histograms=self._load_histograms(),
            sessions=tuple(self._iter_sessions()),
            unwritten=self._load_unwritten(),
            unprobed=tuple(self._iter_unprobed()),
            stacks=self._load_stacks(events),
            n_events_stored=self._n_stored,
            is_truncated=self._is_truncated,
            asked_ns=self._asked_ns(events),
            pids=self._wanted.pids,
            has_gpu_ids="weight"
            in self._columns,  # this version's recorder, which reads the device
            n_damaged=self._n_damaged,  # after everything else was read
        )

    def _asked_ns(self, events: Records) -> tuple[int, int]:
        """The part of the file's time that the rows are from; (0, 0) for all of it."""
        first = self._wanted.from_ns or 0
        if self._is_truncated and len(events):
            first = max(first, int(events["start_ns"].min()))
        return first, self._wanted.to_ns or 0

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

    def _load_events(self) -> Records:
        sql_by_field = self._choose_fields()
        try:
            events = self._fill_events(sql_by_field, self._where)
        except TypeError:  # somewhere stands what is no integer: leave such rows out
            where = self._where_whole(sql_by_field)
            events = self._fill_events(sql_by_field, where)
            if not len(events):
                raise BadDataError(f"{self._path}: its events are not made of integers") from None
        is_sane = (events["duration_ns"] >= 0) & (events["start_ns"] <= _LAST_NS)
        is_sane &= events["start_ns"] >= -_LAST_NS
        events = events if is_sane.all() else events[is_sane]
        self._n_damaged += self._n_rows - len(events)
        return _normalise(events)

    def _where_whole(self, sql_by_field: dict[str, str]) -> str:
        """A condition that only rows made of integers meet."""
        terms = [
            f"typeof({name}) IN ('integer', '{'integer' if name in NEEDED else 'null'}')"
            for name in (*_FIELDS, *(("stack_hash",) if "stack_hash" in sql_by_field else ()))
            if name in self._columns
        ]
        if "node" in sql_by_field:
            terms.append(f"{sql_by_field['node']} IS NOT NULL")
        return f"{self._where or ' WHERE 1'} AND {' AND '.join(terms)}"

    def _fill_events(self, sql_by_field: dict[str, str], where: str) -> Records:
        """The rows whose values fit the fields of EVENT; fewer than expected where the file is damaged."""
        events = np.zeros(self._n_rows, EVENT)
        for name, value in _ABSENT.items():
            events[name] = value
        select = f"SELECT {', '.join(sql_by_field.values())} FROM events{where}{self._tail}"  # noqa: S608
        filled = 0
        for block in iter_integers(self._connection, select, self._parameters, len(sql_by_field)):
            fitting = _fitting(block, list(sql_by_field))[:, : self._n_rows - filled]
            here = slice(filled, filled + fitting.shape[1])
            for field, values in zip(sql_by_field, fitting, strict=True):
                if field not in _SAID:
                    events[field][here] = values
                elif values.any():
                    self._seen.add(field)
            filled = here.stop
        return events[:filled]

    def _choose_fields(self) -> dict[str, str]:
        """What to read, as SQL by field of EVENT or key of `_SAID`; what has no SQL is absent."""
        has_stacks = self._wanted.has_extras or bool(
            table_columns(self._connection, "stack_traces")
            and self._rows("SELECT 1 FROM stack_traces LIMIT 1").fetchone()
        )
        fields = _FIELDS | ({"stack_hash": "stack_hash"} if has_stacks else {})
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
        rows, n_damaged = select_typed(self._connection, table, kinds)
        self._n_damaged += n_damaged
        if "node" in names:
            at = names.index("node")
            rows = [row for row in rows if self._is_chosen(row[at])]
        table_rows = np.zeros(len(rows), dtype)
        for i, name in enumerate(names):
            values = [row[i] for row in rows]
            if name == "node":
                values = [self._node_idx.get(str(value), 0) for value in values]
            table_rows[columns[name]] = [0 if value is None else value for value in values]
        return table_rows

    def _load_names(self, events: Records) -> dict[tuple[int, int], str]:
        names: dict[tuple[int, int], str] = {}
        columns = table_columns(self._connection, "process_names")
        if {"pid", "name"} <= set(columns):
            node = "node" if "node" in columns else "''"
            kinds: dict[str, Kind] = {node: str, "pid": INT64, "name": str}
            rows, n_damaged = select_typed(self._connection, "process_names", kinds)
            self._n_damaged += n_damaged
            for node_name, pid, name in rows:
                if not self._is_chosen(node_name):
                    continue
                targets = (
                    [self._node_idx[node_name]]
                    if node_name in self._node_idx
                    else range(len(self._nodes))
                )
                names.update({(i, pid): name for i in targets if name and pid is not None})
        if "comm" in self._seen:
            for node_idx, pid, comm in self._iter_process_facts("comm", events):
                if isinstance(comm, str) and comm:
                    names[node_idx, pid] = comm
        return names | self._load_ambiguous()

    def _load_ambiguous(self) -> dict[tuple[int, int], str]:
        """Names of pids that are different processes in the recordings that were merged: all, the earliest first."""
        if "recording" not in table_columns(self._connection, "recording_names"):
            return {}
        by_pid: dict[tuple[int, int], dict[str, None]] = {}
        for node, pid, name in self._rows(
            "SELECT node, pid, name FROM recording_names WHERE typeof(pid) = 'integer' ORDER BY seen_at, name"
        ):
            if node in self._node_idx:
                by_pid.setdefault((self._node_idx[node], pid), {})[str(name)] = None
        return {key: " / ".join(names) for key, names in by_pid.items() if len(names) > 1}

    def _load_unwritten(self) -> tuple[Unwritten, ...]:
        counts: Counter[tuple[str, int, str]] = Counter()
        rows, n_damaged = _select_unwritten(self._connection)
        self._n_damaged += n_damaged
        for node, source, cause, count in rows:
            if self._is_chosen(node):
                counts[node, source, cause] += count
        return tuple(Unwritten(*key, n_rows) for key, n_rows in counts.most_common())

    def _load_ranks(self, events: Records) -> dict[tuple[int, int], ProcessRank]:
        if "rank" not in self._seen:
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
            node = "AND node = ?" if "node" in self._columns else ""
            last = self._rows(
                f"SELECT {columns} FROM events WHERE pid = ? {node} ORDER BY rowid DESC LIMIT 1",  # noqa: S608
                [pid, self._nodes[node_idx]] if node else [pid],
            ).fetchone()
            if last is not None:
                yield node_idx, pid, *last

    def _load_stacks(self, events: Records) -> dict[int, str]:
        if "frames" not in table_columns(self._connection, "stack_traces"):
            return {}
        wanted = set(np.unique(events["stack_hash"]).tolist())
        rows = self._rows("SELECT hash, frames FROM stack_traces WHERE frames <> ''")
        return {int(key): str(frames) for key, frames in rows if key in wanted}

    def _iter_sessions(self) -> Iterator[Session]:
        present = table_columns(self._connection, "sessions")
        names = [name for name in _SESSION_COLUMNS if name in present]
        if not names:
            return
        kinds: dict[str, Kind] = {
            name: INT64 if name in _SESSION_NUMBERS else str for name in names
        }
        rows, n_damaged = select_typed(self._connection, "sessions", kinds, order="started_at")
        self._n_damaged += n_damaged
        for row in rows:
            if None in row:
                continue
            fields = {_SESSION_COLUMNS[name]: value for name, value in zip(names, row, strict=True)}
            yield Session(**{"node": "", **fields})

    def _iter_unprobed(self) -> Iterator[Unprobed]:
        for one in _select_unprobed(self._connection):
            if self._is_chosen(one.node) and (
                not self._wanted.pids or one.pid in {0, *self._wanted.pids}
            ):
                yield one if len(self._nodes) > 1 else replace(one, node="")


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


def _fitting(block: IntArray, fields: list[str]) -> IntArray:
    """The columns of a block whose every value fits its field of EVENT."""
    is_fit = np.ones(block.shape[1], bool)
    for field, values in zip(fields, block, strict=True):
        if field in _SAID or EVENT[field].itemsize == 8:
            continue
        facts = np.iinfo(EVENT[field])
        is_fit &= (values >= facts.min) & (values <= facts.max)
    return block if is_fit.all() else block[:, is_fit]


def _normalise(events: Records) -> Records:
    """Turn stored completion times into starts, and sort by it; equal starts keep the file's order."""
    at_end = is_stored_at_end(events["source"])
    events["start_ns"][at_end] -= events["duration_ns"][at_end]
    starts = np.ascontiguousarray(events["start_ns"])
    if (starts[1:] >= starts[:-1]).all():
        return events
    return events[np.argsort(starts, kind="stable")]
