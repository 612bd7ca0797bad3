"""Several recordings in one file, each row with its node.

Every table is copied; counts of the same node and minute are added. A recording that is already there (all of its
events are) is left out whole, so merging twice changes nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ingero.agent.store.files import check_header, open_recording, store_errors, table_columns
from ingero.agent.store.schema import TABLES, create_tables
from ingero.errors import BadDataError, StoreError
from ingero.model.events import OP_NAMES, Source

_LOOKUPS: Final = frozenset(("sources", "ops", "schema_info"))
_NUMBERED: Final = frozenset(("system_snapshots", "sessions", "annotations"))
_KEYS: Final = {  # tables of counts → their keys; their other columns are added
    "event_aggregates": ("bucket", "source", "op", "pid", "node"),
    "event_aggregates_5s": ("bucket", "source", "op", "pid", "node"),
    "coverage": ("bucket", "node", "source"),
    "latency_histograms": ("bucket", "source", "op", "pid", "node", "log2_ns"),
}
_EXTREMES: Final = {"min_dur": "min", "max_dur": "max"}
_BATCH_ROWS: Final = 10_000


@dataclass(frozen=True, slots=True)
class MergedFile:
    """What came from one source.

    Attributes:
        path: The source.
        nodes: Nodes its rows carry.
        n_events: Events added.
        n_repeated: Events that were there already.
    """

    path: Path
    nodes: tuple[str, ...]
    n_events: int
    n_repeated: int


def merge_recordings(
    sources: Sequence[Path], output: Path, *, force_node: str = "", is_replaced: bool = False
) -> list[MergedFile]:
    """Merge recordings into a new file, whole or not at all.

    Args:
        sources: Recordings, read only.
        output: The new file.
        force_node: Node for rows that carry none.
        is_replaced: Whether `output` may exist; it is replaced when all is merged.

    Raises:
        StoreError: A source cannot be read, or the output exists or cannot be written.
        BadDataError: A source's rows carry no node and `force_node` is empty.
    """
    if output.exists() and not is_replaced:
        raise StoreError(f"{output}: exists already", hint="choose a new file with -o")
    for source in sources:
        check_header(source)
        if output.exists() and output.samefile(source):
            raise BadDataError(f"{output} is one of the sources", hint="choose a new file with -o")
    part = output.with_name(output.name + ".part")
    try:
        with store_errors(output), closing(_create(part)) as target:
            merged = [_add(target, source, force_node) for source in sources]
            target.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            target.execute("PRAGMA journal_mode = DELETE")
        part.replace(output)
    finally:
        for leftover in (
            part,
            part.with_name(part.name + "-wal"),
            part.with_name(part.name + "-shm"),
        ):
            leftover.unlink(missing_ok=True)
    return merged


def _create(path: Path) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(path)
    except sqlite3.OperationalError as error:
        raise StoreError(f"{path.parent}: {error}", hint="choose a writable folder") from error
    create_tables(connection, {int(source): source.name for source in Source}, OP_NAMES)
    connection.execute("PRAGMA synchronous = OFF")  # a file that appears only when it is whole
    return connection


def _add(target: sqlite3.Connection, path: Path, force_node: str) -> MergedFile:
    with open_recording(path) as source, store_errors(path), target:
        nodes = _find_nodes(source, path, force_node)
        n_rows, n_added = _copy_events(target, source, nodes)
        if n_added or not n_rows:
            for table in TABLES:
                if table not in _LOOKUPS and table != "events":
                    _copy_table(target, source, table, nodes)
    return MergedFile(path, nodes, n_added, n_rows - n_added)


def _find_nodes(source: sqlite3.Connection, path: Path, force_node: str) -> tuple[str, ...]:
    """Nodes of a source's rows; the forced one stands for rows without."""
    names: set[str] = set()
    for table in ("events", "sessions"):
        if not names and "node" in table_columns(source, table):
            found = source.execute(f"SELECT DISTINCT node FROM {table}")  # noqa: S608 - own table names
            names = {str(node) for (node,) in found}
    named = {name or force_node for name in names or {""}}
    if "" in named:
        raise BadDataError(
            f"{path}: its rows carry no node", hint="name it with --force-node, one file at a time"
        )
    return tuple(sorted(named))


def _copy_events(
    target: sqlite3.Connection, source: sqlite3.Connection, nodes: tuple[str, ...]
) -> tuple[int, int]:
    """Copy events; returns (rows read, rows added)."""
    present = table_columns(source, "events")
    columns = [name for name in table_columns(target, "events") if name in present]
    if "node" not in columns:
        columns.append("node")
    fallback = nodes[0]
    select = ", ".join(_event_value(name, present) for name in columns)
    marks = ", ".join("?" * len(columns))
    before = target.total_changes
    n_rows = 0
    cursor = source.execute(f"SELECT {select} FROM events ORDER BY rowid", {"node": fallback})  # noqa: S608
    insert = f"INSERT OR IGNORE INTO events ({', '.join(columns)}) VALUES ({marks})"  # noqa: S608
    for rows in _batches(cursor):
        target.executemany(insert, rows)
        n_rows += len(rows)
    return n_rows, target.total_changes - before


def _event_value(name: str, present: tuple[str, ...]) -> str:
    """The SQL that gives one column of an event, with ids and nodes that every generation can have."""
    node = "coalesce(nullif(node, ''), :node)" if "node" in present else ":node"
    if name == "node":
        return node
    if name == "id":
        return f"CASE WHEN instr(id, ':') THEN id ELSE {node} || ':' || id END"
    return name


def _copy_table(
    target: sqlite3.Connection, source: sqlite3.Connection, table: str, nodes: tuple[str, ...]
) -> None:
    present = table_columns(source, table)
    wanted = [n for n in table_columns(target, table) if not (n == "id" and table in _NUMBERED)]
    columns = [name for name in wanted if name in present]
    if not columns:
        return
    rows = source.execute(f"SELECT {', '.join(columns)} FROM {table}").fetchall()  # noqa: S608
    if "node" in wanted:
        rows, columns = _with_node(rows, columns, nodes)
    if table == "causal_chains":
        rows = [_named_chain(row, columns) for row in rows]
    target.executemany(_insert(table, columns), rows)


def _with_node(
    rows: list[tuple[Any, ...]], columns: list[str], nodes: tuple[str, ...]
) -> tuple[list[tuple[Any, ...]], list[str]]:
    """Rows with their node; one that carries none belongs to every node of its file."""
    if "node" not in columns:
        return [(*row, node) for row in rows for node in nodes], [*columns, "node"]
    at = columns.index("node")
    return [
        (*row[:at], node, *row[at + 1 :])
        for row in rows
        for node in ((row[at],) if row[at] else nodes)
    ], columns


def _named_chain(row: tuple[Any, ...], columns: list[str]) -> tuple[Any, ...]:
    """A chain whose id says its node, so that two nodes' chains do not collide."""
    at, node = columns.index("id"), row[columns.index("node")]
    name = str(row[at])
    return (*row[:at], name if ":" in name else f"{node}:{name}", *row[at + 1 :])


def _insert(table: str, columns: list[str]) -> str:
    head = f"INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
    keys = _KEYS.get(table)
    if keys is None:
        return f"INSERT OR IGNORE {head}"
    sums = ", ".join(
        f"{name} = {_EXTREMES[name]}({name}, excluded.{name})"
        if name in _EXTREMES
        else f"{name} = {name} + excluded.{name}"
        for name in columns
        if name not in keys
    )
    return f"INSERT {head} ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {sums}"


def _batches(cursor: sqlite3.Cursor) -> Iterator[list[tuple[Any, ...]]]:
    while rows := cursor.fetchmany(_BATCH_ROWS):
        yield rows
