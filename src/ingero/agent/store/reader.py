"""A recording's rows as arrays, whatever generation wrote them.

Columns decide, never version numbers: the recordings that exist carry ``user_version`` 0. A column that a generation
does not have reads as its documented absent value.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ingero.agent.store.files import open_recording, store_errors, table_columns
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

_CHUNK_ROWS: Final = 1 << 16
_ALWAYS: Final[tuple[str, ...]] = ("timestamp", "arg0", "arg1")
_EXTRA: Final[tuple[str, ...]] = ("stack_hash", "cgroup_id")
_TASK: Final = {"pid": 32, "tid": 32}
_CODE: Final = {"source": 8, "op": 8}
_SMALL: Final = {"gpu_id": 16, "reason": 8, "flags": 8, "other_pid": 32}
_RESULT: Final = {"ret_code": 32, "weight": 31}
"""Small columns with their bits, read as one integer: each integer that crosses from SQLite costs as much as the next."""
_SHAPE: Final = ("arg2", "arg3")
_DURATION_BITS: Final = 47
"""What `_CODE` leaves of 63 bits: 39 hours."""
_FIELD: Final = {"timestamp": "start_ns", "duration": "duration_ns"}
_TWO_SIDED: Final = ("node", "cgroup_id", "duration", *_SHAPE)


@dataclass(frozen=True, slots=True)
class LoadFilter:
    """Which events to load.

    Attributes:
        from_ns: Earliest stored timestamp, Unix time; None for the first.
        to_ns: Latest stored timestamp; None for the last.
        pids: Only these processes; empty for all.
        max_rows: At most this many, the newest; keeps memory bounded on any file.
        has_extras: Also load ``stack_hash``, which no rule reads, and ``cgroup_id`` where it is the same in all rows.
    """

    from_ns: int | None = None
    to_ns: int | None = None
    pids: tuple[int, ...] = ()
    max_rows: int = 5_000_000
    has_extras: bool = False


def load_recording(path: Path, wanted: LoadFilter | None = None) -> Recording:
    """Load a recording into memory: about 112 bytes and 2 µs per event.

    Raises:
        StoreError: The file cannot be read as a recording (see `open_recording`).
        BadDataError: A column holds what is not a number.
    """
    with open_recording(path) as connection, store_errors(path):
        connection.execute("BEGIN")  # one state of the file, also while an agent writes to it
        return _Loader(connection, path, wanted or LoadFilter()).load()


@dataclass(frozen=True, slots=True)
class _Column:
    """One integer of the SELECT: its expression, and the fields in it as (name, shift, bits)."""

    sql: str
    fields: tuple[tuple[str, int, int], ...]


def _pack(bits_by_name: dict[str, int]) -> _Column:
    """Several columns in one integer, the first in the lowest bits."""
    parts, fields, shift = [], [], 0
    for name, bits in bits_by_name.items():
        parts.append(f"(({name} & {(1 << bits) - 1}) << {shift})")
        fields.append((_FIELD.get(name, name), shift, bits))
        shift += bits
    return _Column(" | ".join(parts), tuple(fields))


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
        self._extremes = self._find_extremes()
        self._nodes = self._find_nodes()
        self._node_idx = {node: i for i, node in enumerate(self._nodes)}

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

    def _find_extremes(self) -> dict[str, tuple[object, object]]:
        """Least and greatest value of the columns that are often constant, in one pass over the chosen rows.

        Of the small ones it only matters whether any holds anything, so they are looked at together, as 0 or 1.
        """
        singly = ("node", "comm", "rank", "cgroup_id", "duration", *_SHAPE)
        parts: dict[str, str] = {name: name for name in singly if name in self._columns}
        if small := " | ".join(name for name in _SMALL if name in self._columns):
            parts["small"] = f"({small}) <> 0"
        result = {"ret_code": "ret_code <> 0", "weight": "weight <> 1"}
        if said := " OR ".join(sql for name, sql in result.items() if name in self._columns):
            parts["result"] = said
        if "wait_ns" in self._columns:
            parts["wait_ns"] = "wait_ns <> 0"
        if not parts:
            return {}
        # Each side of a pair costs as much as the next: what is 0 or 1, and what may be NULL, needs one.
        select = ", ".join(
            f"min({sql}), max({sql})" if key in _TWO_SIDED else f"NULL, max({sql})"
            for key, sql in parts.items()
        )
        chosen = f"events{self._where}"
        if self._tail:
            chosen = f"(SELECT * FROM {chosen}{self._tail})"  # noqa: S608 - own column names
        values = self._rows(f"SELECT {select} FROM {chosen}", self._parameters).fetchone()  # noqa: S608
        return {key: (values[2 * i], values[2 * i + 1]) for i, key in enumerate(parts)}

    def _is_used(self, key: str) -> bool:
        return bool(set(self._extremes.get(key, ())) - {0, None})

    def _bits(self, key: str) -> int:
        """Bits that hold every value of a column; 64 where one is negative, or is no integer."""
        least, greatest = self._extremes.get(key, (None, None))
        is_plain = isinstance(least, int) and isinstance(greatest, int) and least >= 0
        return greatest.bit_length() if is_plain and isinstance(greatest, int) else 64

    def _choose_columns(self) -> list[_Column]:
        """What to read: each entry one integer of the SELECT and the fields it fills."""
        single = list(_ALWAYS)
        groups = [_TASK, _CODE]
        if self._bits("duration") <= _DURATION_BITS:
            groups[1] = _CODE | {"duration": _DURATION_BITS}
        else:
            single.append("duration")
        shape = {name: self._bits(name) for name in _SHAPE if self._is_used(name)}
        if sum(shape.values()) < 64:
            groups.append(shape)
        else:
            single += shape
        groups += [
            group
            for key, group in {"small": _SMALL, "result": _RESULT}.items()
            if self._is_used(key)
        ]
        if self._is_used("wait_ns"):
            single.append("wait_ns")
        least, greatest = self._extremes.get("cgroup_id", (0, 0))
        single += _EXTRA if self._wanted.has_extras else _EXTRA[1:] if least != greatest else ()
        chosen = [
            _Column(name, ((_FIELD.get(name, name), 0, 64),))
            for name in single
            if name in self._columns
        ]
        present = ({n: bits for n, bits in g.items() if n in self._columns} for g in groups)
        return chosen + [_pack(group) for group in present if group]

    def _find_nodes(self) -> tuple[str, ...]:
        """Every node that the chosen rows name, sorted; one nameless node when there is none."""
        least, greatest = self._extremes.get("node", (None, None))
        if least == greatest:
            return (str(least or ""),)
        names = self._rows(
            f"SELECT DISTINCT node FROM (SELECT node FROM events{self._where}{self._tail})",  # noqa: S608
            self._parameters,
        )
        return tuple(sorted(str(name) for (name,) in names))

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
        columns = self._choose_columns()
        select = ", ".join(column.sql for column in columns)
        node = ", node" if len(self._nodes) > 1 else ""
        cursor = self._rows(
            f"SELECT {select}{node} FROM events{self._where}{self._tail}",  # noqa: S608 - own column names
            self._parameters,
        )
        return _normalise(self._fill(cursor, columns, self._n_rows))

    def _fill(
        self, cursor: sqlite3.Cursor, columns: list[_Column], n_rows: int
    ) -> npt.NDArray[np.void]:
        events = np.zeros(n_rows, EVENT)
        events["weight"] = 1
        filled = 0
        for block, nodes in self._iter_blocks(cursor, len(columns)):
            here = slice(filled, filled + len(block))
            for i, column in enumerate(columns):
                for name, shift, bits in column.fields:
                    values = block[:, i] >> shift if shift else block[:, i]
                    events[name][here] = values if bits == 64 else values & ((1 << bits) - 1)
            if nodes:
                events["node"][here] = nodes
            filled += len(block)
        return events[:filled]

    def _iter_blocks(
        self, cursor: sqlite3.Cursor, n_columns: int
    ) -> Iterator[tuple[npt.NDArray[np.int64], list[int]]]:
        """Rows in blocks of integers, shape (rows, columns), with their node indexes when there are several nodes."""
        flat = chain.from_iterable(cursor)
        has_nodes = len(self._nodes) > 1
        while True:
            nodes: list[int] = []
            if has_nodes:
                rows = list(islice(cursor, _CHUNK_ROWS))
                nodes = [self._node_idx[row[-1]] for row in rows]
                flat = chain.from_iterable(row[:-1] for row in rows)
            try:
                block = np.fromiter(islice(flat, _CHUNK_ROWS * n_columns), np.int64)
            except (TypeError, ValueError, OverflowError) as error:
                raise BadDataError(
                    f"{self._path}: an event is not made of integers: {error}"
                ) from error
            if not len(block):
                return
            yield block.reshape(-1, n_columns), nodes

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
        if self._extremes.get("comm", ("", ""))[1]:
            for node_idx, pid, comm in self._iter_process_facts("comm", events):
                if comm:
                    names[node_idx, pid] = str(comm)
        return names

    def _load_ranks(self, events: npt.NDArray[np.void]) -> dict[tuple[int, int], ProcessRank]:
        if self._extremes.get("rank", (None, None))[1] is None:
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
