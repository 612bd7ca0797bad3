"""Copying one recording's rows into another database: first beside it, by its own keys, then in, by those of all."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ingero.errors import BadDataError
from ingero.recording.export.merge_plan import MergeGroup, MergeSource
from ingero.recording.store.files import table_columns
from ingero.recording.store.identity import Part
from ingero.recording.store.rows import BUCKET_NS
from ingero.recording.store.schema import BUCKETED_TABLES, FORKED, OCTAVES, TABLES, table_exists
from ingero.recording.store.typed import INT64, Kind, keep_typed

_STAGED: Final = tuple(
    name for name in TABLES if name not in {"events", "sources", "ops", "schema_info", "recordings"}
)
_EXTREMES: Final = {
    "min_dur": "CASE WHEN excluded.count = 0 THEN min_dur WHEN count = 0 THEN excluded.min_dur "
    "ELSE min(min_dur, excluded.min_dur) END",
    "max_dur": "max(max_dur, excluded.max_dur)",
}
_SAME: Final = ("timestamp", "pid", "tid", "source", "op", "duration", "arg0", "arg1", "node")
"""What makes two rows the same event: its time to the nanosecond, thread and arguments."""
_OF_PIDS: Final = frozenset(("process_names", "process_parents", "recording_names"))
"""Tables that differ where a pid was given to another process: no row of them is wrong."""
_BATCH_ROWS: Final = 10_000


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    kind: Kind
    default: str
    key: int


class Copier:
    """Fills an empty recording with the rows of others.

    Args:
        target: The empty recording.
    """

    def __init__(self, target: sqlite3.Connection) -> None:
        self._target = target
        self._columns = {name: _describe(target, name) for name in TABLES}
        self._conflicts: dict[str, int] = {}
        self._unlike: dict[str, int] = {}
        self.has_derived = False
        target.execute("PRAGMA temp_store = FILE")
        for name in _STAGED:
            target.execute(f"CREATE TEMP TABLE part_{name} ({TABLES[name]})")

    def copy(self, source: sqlite3.Connection, facts: MergeSource) -> tuple[int, int, int]:
        """Copy the events of a file, and put its other tables beside the target until `end_group`.

        Returns:
            Events added, events that were there already, and rows of all tables that could not be read.

        Raises:
            BadDataError: Another state of this recording has other rows under the same numbers.
        """
        with self._target:
            n_added, n_there, n_damaged = self._copy_events(source, facts)
            for table in _STAGED:
                n_damaged += self._stage(source, facts, table)
        return n_added, n_there, n_damaged

    def _copy_events(self, source: sqlite3.Connection, facts: MergeSource) -> tuple[int, int, int]:
        columns = self._columns["events"]
        names = [column.name for column in columns]
        kinds = [column.kind for column in columns]
        marks = ", ".join("?" * len(columns))
        insert = (
            f"INSERT INTO events ({', '.join(names)}) VALUES ({marks}) ON CONFLICT (id) DO NOTHING"  # noqa: S608
        )
        n_added = n_there = n_damaged = 0
        for batch in _batches(self._select_events(source, facts)):
            rows, n_bad = keep_typed(batch, kinds, has_nulls=True)
            n_damaged += n_bad
            before = self._target.total_changes
            self._target.executemany(insert, rows)
            added = self._target.total_changes - before
            if added < len(rows):
                self._check_same(rows, names, facts)
            n_added, n_there = n_added + added, n_there + len(rows) - added
        return n_added, n_there, n_damaged

    def _select_events(self, source: sqlite3.Connection, facts: MergeSource) -> sqlite3.Cursor:
        present = table_columns(source, "events")
        node = "ifnull(nullif(node, ''), :node)" if "node" in present else ":node"
        given = {"id": _event_id(facts, node, "id" if "id" in present else "rowid"), "node": node}
        values = [
            given.get(column.name) or _value(column, present) for column in self._columns["events"]
        ]
        sql = f"SELECT {', '.join(values)} FROM events ORDER BY rowid"  # noqa: S608 - own names
        return source.execute(sql, {"node": facts.given_node or facts.nodes[0]})

    def _check_same(
        self, rows: Sequence[tuple[Any, ...]], names: list[str], facts: MergeSource
    ) -> None:
        at = [names.index(name) for name in _SAME]
        select = f"SELECT {', '.join(_SAME)} FROM events WHERE id = ?"  # noqa: S608 - own names
        for row in rows:
            there = self._target.execute(select, (row[0],)).fetchone()
            if there != tuple(row[i] for i in at):
                raise BadDataError(
                    f"{facts.path}: began as a copy of another of these files and went on apart from it: "
                    "different events have the same number",
                    hint="merge one of the two",
                )

    def count_same(self, source: sqlite3.Connection, facts: MergeSource) -> tuple[int, int]:
        """How many of a file's events are in the target, whatever they are called there, and how many it has."""
        names = [column.name for column in self._columns["events"]]
        at = [names.index(name) for name in _SAME]
        where = " AND ".join(f"{name} = ?" for name in _SAME)
        find = f"SELECT 1 FROM events WHERE {where} LIMIT 1"  # noqa: S608 - own names
        n_same = n_rows = 0
        for row in self._select_events(source, facts):
            n_rows += 1
            n_same += self._target.execute(find, [row[i] for i in at]).fetchone() is not None
        return n_same, n_rows

    def _stage(self, source: sqlite3.Connection, facts: MergeSource, table: str) -> int:
        """Read one table of a file; returns how many of its rows could not be read."""
        present, origin = table_columns(source, table), table
        derived = _derive(source, table)
        if derived:
            present, origin = tuple(c.name for c in self._columns[table]), f"({derived})"
        if table == "recording_names" and not facts.is_merged:
            return self._stage_names(source, facts)
        columns = [c for c in self._columns[table] if c.name in present]
        missing = [
            c
            for c in self._columns[table]
            if c.key and c.name not in {*present, "node"} and (c.name, c.kind) != ("id", INT64)
        ]
        if not columns:
            return 0
        select = f"SELECT {', '.join(_value(c, present) for c in columns)} FROM {origin}"  # noqa: S608
        if missing:
            (n_rows,) = source.execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608
            self._unlike[table] = self._unlike.get(table, 0) + int(n_rows)
            return 0
        rows, n_damaged = keep_typed(
            source.execute(select), [c.kind for c in columns], has_nulls=True
        )
        names = [c.name for c in columns]
        if any(c.name == "node" for c in self._columns[table]):
            rows, names = _with_node(rows, names, _nodes_for(table, facts))
        if table == "causal_chains":
            rows = [_named_chain(row, names, facts) for row in rows]
        self._target.executemany(self._upsert(f"part_{table}", table, names, "max"), rows)
        return 0 if derived == FORKED else n_damaged  # a damaged event is counted with the events

    def _stage_names(self, source: sqlite3.Connection, facts: MergeSource) -> int:
        """Note which recording called its processes what: a pid may be another process in the next one."""
        present = table_columns(source, "process_names")
        if not {"pid", "name"} <= set(present):
            return 0
        columns = [c for c in self._columns["process_names"] if c.name in present]
        select = f"SELECT {', '.join(_value(c, present) for c in columns)} FROM process_names"  # noqa: S608
        rows, _ = keep_typed(source.execute(select), [c.kind for c in columns], has_nulls=True)
        names = [c.name for c in columns]
        rows, names = _with_node(rows, names, _nodes_for("process_names", facts))
        (part,) = facts.parts
        sql = self._upsert("part_recording_names", "recording_names", [*names, "recording"], "max")
        self._target.executemany(sql, [(*row, part.id) for row in rows])
        return 0

    def _upsert(self, into: str, table: str, names: list[str], how: str) -> str:
        """INSERT that joins a row with the one of the same key.

        Args:
            into: The table written.
            table: The table whose columns it has.
            names: The columns given.
            how: Of counts: ``max`` of two states of one recording, which only grow; ``sum`` of two recordings.
        """
        head = f"INTO {into} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
        if table not in BUCKETED_TABLES:
            return f"INSERT OR REPLACE {head}"
        keys = [c.name for c in self._columns[table] if c.key]
        return f"INSERT {head} {_on_conflict(keys, names, how)}"

    def end_group(self, group: MergeGroup) -> None:
        """Move what lies beside the target into it."""
        with self._target:
            if len(group.sources) > 1:
                self._count_stored(next(iter(group.sources[0].parts)))
            for table in _STAGED:
                self._move(table)
                self._target.execute(f"DELETE FROM part_{table}")  # noqa: S608 - own names
            for source in group.sources[-1:]:
                self._target.executemany(
                    "INSERT INTO recordings (id, node, events, calls) VALUES (?, ?, ?, ?)",
                    [(p.id, p.node, s.events, s.calls) for p, s in source.parts.items()],
                )
                self.has_derived |= any(part.is_derived for part in source.parts)

    def _count_stored(self, part: Part) -> None:
        """Count the rows of a recording whose states were joined: one may have lost rows that another one has."""
        rows = self._target.execute(
            f"SELECT timestamp / {BUCKET_NS} * {BUCKET_NS}, source, op, pid, node, count(*) FROM events "  # noqa: S608
            "WHERE instr(id, ?) GROUP BY 1, 2, 3, 4, 5",
            (f":{part.id}:",),
        ).fetchall()
        by_source: dict[tuple[int, int, str], int] = {}
        for bucket, source, op, pid, node, n_rows in rows:
            self._target.execute(
                "UPDATE part_event_aggregates SET stored = ? "
                "WHERE bucket = ? AND source = ? AND op = ? AND pid = ? AND node = ?",
                (n_rows, bucket, source, op, pid, node),
            )
            key = bucket, source, node
            by_source[key] = by_source.get(key, 0) + n_rows
        self._target.executemany(
            "UPDATE part_coverage SET stored = ?4, sampled_out = max(seen - lost - ?4, 0) "
            "WHERE bucket = ?1 AND source = ?2 AND node = ?3",
            [(*key, n_rows) for key, n_rows in by_source.items()],
        )

    def _move(self, table: str) -> None:
        columns = self._columns[table]
        names = [c.name for c in columns if not (c.name == "id" and c.kind == INT64)]
        keys = [c.name for c in columns if c.key]
        listed = ", ".join(names)
        taken = f"INTO {table} ({listed}) SELECT {listed} FROM part_{table} AS p"  # noqa: S608
        if table in BUCKETED_TABLES:
            self._target.execute(f"INSERT {taken} WHERE 1 {_on_conflict(keys, names, 'sum')}")
        elif table == "annotations":
            self._target.execute(f"INSERT {taken} ORDER BY p.id")
        elif table == "sessions":  # files set aside repeat the session that goes on in the next
            same = "p.started_at = main.sessions.started_at AND p.node = main.sessions.node"
            stopped = f"(SELECT max(p.stopped_at) FROM part_sessions AS p WHERE {same})"  # noqa: S608
            self._target.execute(
                f"UPDATE sessions SET stopped_at = max(stopped_at, ifnull({stopped}, 0))"  # noqa: S608
            )
            known = f"SELECT 1 FROM main.sessions WHERE {same}"  # noqa: S608
            self._target.execute(f"INSERT {taken} WHERE NOT EXISTS ({known}) ORDER BY p.id")
        else:
            self._move_distinct(table, names, keys)

    def _move_distinct(self, table: str, names: list[str], keys: list[str]) -> None:
        """Rows that are equal in every file that has them; of others the richer one stays, and they are counted."""
        keys = ["timestamp", "node"] if table == "system_snapshots" else keys
        same = " AND ".join(f"p.{key} = t.{key}" for key in keys)
        rest = [name for name in names if name not in keys]
        mine, theirs = (
            ", ".join([*([f"length({a}.frames)"] if table == "stack_traces" else []),
                       *([f"{a}.seen_at"] if "seen_at" in rest else []), *(f"{a}.{name}" for name in rest)])
            for a in ("p", "t")
        )  # fmt: skip
        is_richer = f"({mine}) > ({theirs})" if rest else "0"
        if rest and table not in _OF_PIDS:
            (n_conflicts,) = self._target.execute(
                f"SELECT count(*) FROM part_{table} AS p JOIN {table} AS t ON {same} WHERE ({mine}) <> ({theirs})"  # noqa: S608
            ).fetchone()
            self._conflicts[table] = self._conflicts.get(table, 0) + int(n_conflicts)
        listed = ", ".join(names)
        self._target.execute(
            f"INSERT OR REPLACE INTO {table} ({listed}) SELECT {listed} FROM part_{table} AS p "  # noqa: S608
            f"WHERE NOT EXISTS (SELECT 1 FROM main.{table} AS t WHERE {same} AND NOT {is_richer})"
        )

    def finish(self) -> None:
        """Write into its events what a process was called whose pid another recording calls differently."""
        with self._target:
            rows = self._target.execute(
                "SELECT node, pid, recording, name FROM recording_names WHERE (node, pid) IN "
                "(SELECT node, pid FROM recording_names GROUP BY node, pid HAVING count(DISTINCT name) > 1)"
            ).fetchall()
            self._target.executemany(
                "UPDATE events SET comm = ?4 WHERE comm = '' AND pid = ?2 "
                "AND id >= ?1 || ':' || ?3 || ':' AND id < ?1 || ':' || ?3 || ';'",
                rows,
            )
            self._conflicts["process_names"] = len({row[:2] for row in rows})

    def notes(self) -> list[str]:
        """What could not be kept as it was."""
        notes = {
            "stack_traces": "stacks are described in two ways; the longer one is kept",
            "process_names": "process numbers are of different processes in different files; each row is named "
            "by its own",
        }
        lines = [
            f"{n_rows} {notes.get(table, f'rows of {table} differ between files; one of each is kept')}"
            for table, n_rows in self._conflicts.items()
            if n_rows
        ]
        return lines + [
            f"{n_rows} rows of {table} are of another version and are not kept; `ingero migrate` the file first"
            for table, n_rows in self._unlike.items()
            if n_rows
        ]


def _describe(connection: sqlite3.Connection, table: str) -> list[_Column]:
    rows = connection.execute(
        'SELECT name, type, "notnull", dflt_value, pk FROM pragma_table_info(?)', (table,)
    )
    kinds: dict[str, Kind] = {"INTEGER": INT64, "TEXT": str, "REAL": float}
    empty = {"INTEGER": "0", "TEXT": "''", "REAL": "0"}
    return [
        _Column(name, kinds[kind], (default or empty[kind]) if is_needed else "NULL", int(key))
        for name, kind, is_needed, default, key in rows
    ]


def _value(column: _Column, present: Sequence[str]) -> str:
    """The SQL that gives a column where it is there, and what it is where it is absent or NULL."""
    if column.name not in present:
        return column.default
    return column.name if column.default == "NULL" else f"ifnull({column.name}, {column.default})"


def _derive(source: sqlite3.Connection, table: str) -> str:
    """The SELECT that gives a table's rows where an earlier version of this program kept them elsewhere; or empty."""
    if table == "latency_buckets" and table_exists(source, "latency_histograms"):
        return OCTAVES
    has_forks = {"node", "arg1"} <= set(table_columns(source, "events"))
    if table == "process_parents" and has_forks and not table_exists(source, table):
        return FORKED
    return ""


def _event_id(facts: MergeSource, node: str, id_: str) -> str:
    """SQL: ``node:recording:number``, which no other recording's event has."""
    if facts.is_merged:
        return id_
    (part,) = facts.parts
    number = _without(_without(id_, f"{node} || ':'"), f"'{part.id}:'")
    return f"{node} || ':{part.id}:' || ({number})"


def _without(text: str, prefix: str) -> str:
    """SQL: a text without a prefix; a migrated file has the recording in its ids already."""
    return f"(CASE WHEN instr({text}, {prefix}) = 1 THEN substr({text}, length({prefix}) + 1) ELSE {text} END)"


def _nodes_for(table: str, facts: MergeSource) -> tuple[str, ...]:
    """Nodes that a row without one belongs to; a count belongs to one only, or it would be counted twice."""
    if facts.given_node:
        return (facts.given_node,)
    return ("",) if table in BUCKETED_TABLES and len(facts.nodes) > 1 else facts.nodes


def _with_node(
    rows: list[tuple[Any, ...]], names: list[str], nodes: tuple[str, ...]
) -> tuple[list[tuple[Any, ...]], list[str]]:
    """Rows with their node; one that carries none belongs to every one of `nodes`."""
    if "node" not in names:
        return [(*row, node) for row in rows for node in nodes], [*names, "node"]
    at = names.index("node")
    return [
        (*row[:at], node, *row[at + 1 :])
        for row in rows
        for node in ((row[at],) if row[at] else nodes)
    ], names


def _named_chain(row: tuple[Any, ...], names: list[str], facts: MergeSource) -> tuple[Any, ...]:
    """A chain whose id says its node and recording."""
    at, node = names.index("id"), row[names.index("node")]
    if facts.is_merged:
        return row
    (part,) = facts.parts
    return (*row[:at], f"{node}:{part.id}:{str(row[at]).removeprefix(f'{node}:')}", *row[at + 1 :])


def _on_conflict(keys: Sequence[str], names: Sequence[str], how: str) -> str:
    rest = [name for name in names if name not in keys]
    if not rest:
        return f"ON CONFLICT ({', '.join(keys)}) DO NOTHING"
    sums = [
        f"{name} = {_EXTREMES[name]}"
        if name in _EXTREMES
        else f"{name} = {name} + excluded.{name}"
        if how == "sum"
        else f"{name} = max({name}, excluded.{name})"
        for name in rest
    ]
    return f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {', '.join(sums)}"


def _batches(cursor: sqlite3.Cursor) -> Iterator[list[tuple[Any, ...]]]:
    while rows := cursor.fetchmany(_BATCH_ROWS):
        yield rows
