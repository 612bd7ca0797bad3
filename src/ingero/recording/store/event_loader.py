"""The chosen events of a recording as one array.

Columns decide, never version numbers: the recordings that exist carry ``user_version`` 0. A column that a generation
does not have reads as its documented absent value.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from ingero.errors import BadDataError
from ingero.model.arrays import IntArray, Records
from ingero.model.events import EVENT, is_stored_at_end
from ingero.recording.store.files import NEEDED, table_columns
from ingero.recording.store.pages import SCRATCH, iter_integers

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


class RowSelection:
    """Which events of an open recording are loaded.

    Args:
        connection: The recording.
        wanted: The filter.

    Attributes:
        connection: As given.
        wanted: As given.
        columns: Columns of its table of events.
        n_stored: Events in the file.
        where: SQL that the chosen events meet, with the word; empty for all.
        tail: SQL that keeps the newest when there are too many.
        parameters: What both bind.
        n_rows: Events chosen.
        is_truncated: There were more.
        nodes: Names of their nodes.
        node_idx: Index of each name.
    """

    def __init__(self, connection: sqlite3.Connection, wanted: LoadFilter) -> None:
        self.connection = connection
        self.wanted = wanted
        self.columns = set(table_columns(connection, "events"))
        (n_stored,) = connection.execute("SELECT count(*) FROM events").fetchone()
        self.n_stored = int(n_stored)
        self.where, self.parameters = self._build_where()
        self.n_rows = self._count_rows()
        self.is_truncated = self.n_rows > wanted.max_rows
        self.tail = ""
        if self.is_truncated:
            self.tail = " ORDER BY timestamp DESC LIMIT ?"
            self.parameters.append(wanted.max_rows)
            self.n_rows = wanted.max_rows
        self.nodes = self._find_nodes()
        self.node_idx = {node: i for i, node in enumerate(self.nodes)}

    def asked_ns(self, events: Records) -> tuple[int, int]:
        """The part of the file's time that the rows are from; (0, 0) for all of it."""
        first = self.wanted.from_ns or 0
        if self.is_truncated and len(events):
            first = max(first, int(events["start_ns"].min()))
        return first, self.wanted.to_ns or 0

    def execute(self, sql: str, parameters: Iterable[object] = ()) -> sqlite3.Cursor:
        """Run a statement."""
        return self.connection.execute(sql, tuple(parameters))

    def is_chosen(self, node: object) -> bool:
        """Whether chosen rows name a node; what carries no node belongs to all of them."""
        return not node or not self.n_rows or str(node) in self.node_idx

    def _find_nodes(self) -> tuple[str, ...]:
        """Every node that the chosen rows name, sorted; one nameless node when there is none."""
        if "node" not in self.columns:
            return ("",)
        names = self.execute(
            f"SELECT DISTINCT ifnull(node, '') FROM (SELECT node FROM events{self.where}{self.tail})",  # noqa: S608
            self.parameters,
        )
        return tuple(sorted(str(name) for (name,) in names)) or ("",)

    def _build_where(self) -> tuple[str, list[object]]:
        terms: list[str] = []
        parameters: list[object] = []
        if self.wanted.from_ns is not None:
            terms.append("timestamp >= ?")
            parameters.append(self.wanted.from_ns)
        if self.wanted.to_ns is not None:
            terms.append("timestamp <= ?")
            parameters.append(self.wanted.to_ns)
        if self.wanted.pids:
            terms.append(f"pid IN ({', '.join('?' * len(self.wanted.pids))})")
            parameters += self.wanted.pids
        return (" WHERE " + " AND ".join(terms) if terms else ""), parameters

    def _count_rows(self) -> int:
        if not self.where:
            return self.n_stored
        (n_rows,) = self.execute(
            f"SELECT count(*) FROM events{self.where}",  # noqa: S608 - own column names
            self.parameters,
        ).fetchone()
        return int(n_rows)


class EventLoader:
    """Reads the chosen events.

    Args:
        selection: Which ones.
        path: The recording, for messages.

    Attributes:
        present: Those of the columns `_SAID` that say anything, once the events are loaded.
        n_damaged: Chosen rows that could not be read, once the events are loaded.
    """

    def __init__(self, selection: RowSelection, path: Path) -> None:
        self._selection = selection
        self._path = path
        self.present: set[str] = set()
        self.n_damaged = 0

    def load(self) -> Records:
        """The chosen rows that can be read, sorted by start; once.

        Raises:
            BadDataError: None of them can.
        """
        sql_by_field = self._choose_fields()
        try:
            events = self._fill(sql_by_field, self._selection.where)
        except TypeError:  # somewhere stands what is no integer: leave such rows out
            where = self._where_whole(sql_by_field)
            events = self._fill(sql_by_field, where)
            if not len(events):
                raise BadDataError(f"{self._path}: its events are not made of integers") from None
        is_sane = (events["duration_ns"] >= 0) & (events["start_ns"] <= _LAST_NS)
        is_sane &= events["start_ns"] >= -_LAST_NS
        events = events if is_sane.all() else events[is_sane]
        self.n_damaged += self._selection.n_rows - len(events)
        return _normalise(events)

    def _where_whole(self, sql_by_field: dict[str, str]) -> str:
        """A condition that only rows made of integers meet; where the schema admits no NULL, a damaged row has one."""
        terms = [
            f"typeof({name}) IN ('integer', '{'integer' if sql == name else 'null'}')"
            for name, field in {**_FIELDS, "stack_hash": "stack_hash"}.items()
            if (sql := sql_by_field.get(field))
        ]
        if "node" in sql_by_field:
            terms.append(f"{sql_by_field['node']} IS NOT NULL")
        return f"{self._selection.where or ' WHERE 1'} AND {' AND '.join(terms)}"

    def _fill(self, sql_by_field: dict[str, str], where: str) -> Records:
        """The rows whose values fit the fields of EVENT; fewer than expected where the file is damaged."""
        events = np.zeros(self._selection.n_rows, EVENT)
        for name, value in _ABSENT.items():
            events[name] = value
        select = (
            f"SELECT {', '.join(sql_by_field.values())} FROM events{where}{self._selection.tail}"  # noqa: S608
        )
        filled = 0
        for block in iter_integers(
            self._selection.connection, select, self._selection.parameters, len(sql_by_field)
        ):
            fitting = _fitting(block, list(sql_by_field))[:, : self._selection.n_rows - filled]
            here = slice(filled, filled + fitting.shape[1])
            for field, values in zip(sql_by_field, fitting, strict=True):
                if field not in _SAID:
                    events[field][here] = values
                elif values.any():
                    self.present.add(field)
            filled = here.stop
        return events[:filled]

    def _choose_fields(self) -> dict[str, str]:
        """What to read, as SQL by field of EVENT or key of `_SAID`; what has no SQL is absent."""
        has_stacks = self._selection.wanted.has_extras or bool(
            table_columns(self._selection.connection, "stack_traces")
            and self._selection.execute("SELECT 1 FROM stack_traces LIMIT 1").fetchone()
        )
        fields = _FIELDS | ({"stack_hash": "stack_hash"} if has_stacks else {})
        never_null = {
            name
            for (name,) in self._selection.execute(
                "SELECT name FROM pragma_table_info('events') WHERE \"notnull\""
            )
        } | NEEDED
        sql_by_field = {
            field: name if name in never_null else f"ifnull({name}, {_ABSENT.get(field, 0)})"
            for name, field in fields.items()
            if name in self._selection.columns
        }
        if len(self._selection.nodes) > 1:
            self._selection.connection.execute(
                f"CREATE TABLE {SCRATCH}.nodes (name TEXT PRIMARY KEY, idx)"
            )
            self._selection.connection.executemany(
                f"INSERT INTO {SCRATCH}.nodes VALUES (?, ?)",  # noqa: S608 - ours
                self._selection.node_idx.items(),
            )
            sql_by_field["node"] = (
                f"(SELECT idx FROM {SCRATCH}.nodes WHERE name = ifnull(node, ''))"  # noqa: S608
            )
        return sql_by_field | {n: sql for n, sql in _SAID.items() if n in self._selection.columns}


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
