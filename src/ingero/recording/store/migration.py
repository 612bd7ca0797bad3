"""Bringing a recording of an older version to the tables that the writer appends to: all of it in one transaction."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingero.errors import StoreError
from ingero.model.events import OP_NAMES, Source
from ingero.recording.store.files import check_recording, open_database, store_errors, table_columns
from ingero.recording.store.identity import derive_identity
from ingero.recording.store.lock import WriterLock
from ingero.recording.store.schema import (
    FILL_PARENTS,
    SCHEMA_INFO,
    TABLES,
    create_tables,
    find_outdated,
)

_KEPT_AS: Final = "old_"


@dataclass(frozen=True, slots=True)
class SchemaChange:
    """What becomes of one table.

    Attributes:
        table: Its name.
        n_rows: Its rows.
        added: Columns that it gets.
        kept_as: Where the old one stays because it holds what the new one cannot; empty when nothing is left over.
        is_copied: Whether its rows go into the new one.
    """

    table: str
    n_rows: int
    added: tuple[str, ...]
    kept_as: str = ""
    is_copied: bool = True


@dataclass(frozen=True, slots=True)
class RecordingMigration:
    """What is to be done with a file.

    Attributes:
        version: What it says of its version; "?" when it does not.
        changes: Tables made anew.
        missing: Tables that it gets.
    """

    version: str
    changes: tuple[SchemaChange, ...]
    missing: tuple[str, ...]

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.changes or self.missing)


def plan_migration(path: Path) -> RecordingMigration:
    """What a file lacks; it is only read.

    Raises:
        StoreError: It is no recording, or cannot be read.
    """
    with open_database(path) as connection:
        check_recording(connection, path)
        return _plan(connection)


def _plan(connection: sqlite3.Connection) -> RecordingMigration:
    version = None
    if table_columns(connection, "schema_info"):
        sql = "SELECT value FROM schema_info WHERE key = 'version'"
        version = connection.execute(sql).fetchone()
    missing = tuple(name for name in TABLES if not table_columns(connection, name))
    changes = tuple(_plan_table(connection, table) for table in find_outdated(connection))
    return RecordingMigration(str(version[0]) if version else "?", changes, missing)


def _plan_table(connection: sqlite3.Connection, table: str) -> SchemaChange:
    there = table_columns(connection, table)
    ours = _describe(table)
    (n_rows,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608 - own names
    added = tuple(name for name in ours if name not in there)
    is_copied = not any(ours[name].is_key and name != "node" for name in added)
    has_more = bool(set(there) - ours.keys())
    kept_as = "" if is_copied and not has_more else _KEPT_AS + table
    return SchemaChange(table, int(n_rows), added, kept_as, is_copied)


@dataclass(frozen=True, slots=True)
class _Column:
    kind: str
    default: str
    is_key: bool


def _describe(table: str) -> dict[str, _Column]:
    """The columns that a table of this version has."""
    empty = {"INTEGER": "0", "TEXT": "''", "REAL": "0"}
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(f"CREATE TABLE {table} ({TABLES[table]})")
        rows = connection.execute(
            'SELECT name, type, "notnull", dflt_value, pk FROM pragma_table_info(?)', (table,)
        )
        return {
            name: _Column(kind, (default or empty[kind]) if needed else "NULL", bool(key))
            for name, kind, needed, default, key in rows
        }


def migrate(path: Path) -> RecordingMigration:
    """Bring a recording up to date in place; on any error it stays as it was.

    Returns:
        What was done.

    Raises:
        StoreError: It is no recording, somebody records into it, or it cannot be written or read whole.
    """
    plan = plan_migration(path)
    if not plan.is_needed:
        return plan
    lock = WriterLock(path.resolve())
    try:
        with store_errors(path), closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                _apply(connection, plan, path)
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
            create_tables(connection, {int(s): s.name for s in Source}, OP_NAMES)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        lock.release()
    return plan


def _apply(connection: sqlite3.Connection, plan: RecordingMigration, path: Path) -> None:
    identity = derive_identity(connection)
    node = _find_node(connection)
    for name in plan.missing:
        connection.execute(f"CREATE TABLE {name} ({TABLES[name]})")
    for change in plan.changes:
        old = _KEPT_AS + change.table
        connection.execute(f"ALTER TABLE {change.table} RENAME TO {old}")
        connection.execute(f"CREATE TABLE {change.table} ({TABLES[change.table]})")
        if change.is_copied:
            _copy(connection, change, identity, node)
            sql = f"SELECT count(*) FROM {change.table}"  # noqa: S608 - own names
            (n_rows,) = connection.execute(sql).fetchone()
            if n_rows != change.n_rows:
                raise StoreError(
                    f"{path}: only {n_rows} of {change.n_rows} rows of {change.table} can be brought over; "
                    f"nothing is changed",
                    hint="the file may be damaged; `ingero merge` it into a new one, which counts what it leaves out",
                )
        if not change.kept_as:
            connection.execute(f"DROP TABLE {old}")
    if "process_parents" in plan.missing:
        connection.execute(FILL_PARENTS)
    if not connection.execute("SELECT 1 FROM recordings").fetchone():
        connection.execute("INSERT INTO recordings (id, node) VALUES (?, ?)", (identity, node))
    sql = "INSERT OR REPLACE INTO schema_info VALUES ('version', ?)"
    connection.execute(sql, (SCHEMA_INFO["version"],))


def _copy(connection: sqlite3.Connection, change: SchemaChange, identity: str, node: str) -> None:
    """Fill a table from the old one, in the order of its rows."""
    old = _KEPT_AS + change.table
    there = table_columns(connection, old)
    values = {}
    for name, column in _describe(change.table).items():
        value = f"ifnull({name}, {column.default})" if column.default != "NULL" else name
        values[name] = value if name in there else column.default
        if name == "node" and name not in there:
            values[name] = ":node"
    if change.table == "events":  # the writer will count from 1 as the old one did
        begin = f"CASE {values['node']} WHEN '' THEN '' ELSE {values['node']} || ':' END"
        number = f"CASE instr(id, {begin}) WHEN 1 THEN substr(id, length({begin}) + 1) ELSE id END"
        values["id"] = f"{begin} || :identity || ':' || ({number})"
    connection.execute(
        f"INSERT INTO {change.table} ({', '.join(values)}) "  # noqa: S608 - own names
        f"SELECT {', '.join(values.values())} FROM {old} ORDER BY rowid",
        {"node": node, "identity": identity},
    )


def _find_node(connection: sqlite3.Connection) -> str:
    """The node of a file of one node; empty for several or none."""
    for table in ("events", "sessions"):
        if "node" in table_columns(connection, table):
            sql = f"SELECT DISTINCT node FROM {table} WHERE node <> '' LIMIT 2"  # noqa: S608 - own names
            names = connection.execute(sql).fetchall()
            if names:
                return str(names[0][0]) if len(names) == 1 else ""
    return ""
