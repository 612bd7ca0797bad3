"""One DuckDB instance: open it, bring its schema up to date, hand out cursors, close it.

A second process cannot open the file while one has it, not even to read. Nothing here runs a tenant's SQL.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import duckdb

from ingero.echo.db.encryption import Encryption, attach
from ingero.echo.db.errors import ForeignDatabaseError, LockedError, translate_errors
from ingero.echo.schema.migrations import MIGRATIONS
from ingero.echo.schema.tables import TABLES, Table
from ingero.errors import ConfigError, IngeroError, StoreError

MEMORY: Final = ":memory:"


@dataclass(frozen=True, slots=True)
class DatabaseSettings:
    """What one instance may use.

    Attributes:
        memory_limit_bytes: DuckDB's own bound on operators; the process needs about 150 MiB beside it.
        threads: Worker threads for queries and checkpoints.
        wal_limit_bytes: Size of the write-ahead log that starts a checkpoint.
        encryption: How the file is encrypted; None when it is not.
        is_read_only: The file is not changed, and other processes may have it open in the same way.
    """

    memory_limit_bytes: int = 1 << 30
    threads: int = 2
    wal_limit_bytes: int = 64 << 20
    encryption: Encryption | None = None
    is_read_only: bool = False


def check_there(path: Path) -> None:
    """Refuse a path where no file is, for what is not to make one.

    Raises:
        StoreError: Nothing is there, or what is no file.
    """
    if not path.exists():
        raise StoreError(f"{path} does not exist")
    if not path.is_file():
        raise StoreError(f"{path} is not a file")


def open_engine(path: str, settings: DatabaseSettings) -> duckdb.DuckDBPyConnection:
    """Open or create a database and harden the instance.

    Args:
        path: A file, or `MEMORY`.
        settings: What it may use.

    Raises:
        LockedError: Another process has it.
        ConfigError: Its key is missing, wrong or one too many; nothing was changed.
        StoreError: It is damaged, no database, or cannot be created; the hint says what repairs it.
    """
    config: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": f"{settings.memory_limit_bytes >> 20}MiB",
        "threads": settings.threads,
        "wal_autocheckpoint": f"{settings.wal_limit_bytes >> 10}KiB",
        "preserve_insertion_order": True,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "allow_community_extensions": False,
        "python_enable_replacements": False,
    }
    try:
        connection = _connect(path, config, settings)
    except duckdb.Error as error:
        raise _explain(path, str(error), is_encrypted=settings.encryption is not None) from error
    with translate_errors("set up the database"):
        connection.execute("SET TimeZone = 'UTC'")
    return connection


def _connect(
    path: str,
    config: dict[str, str | bool | int | float | list[str]],
    settings: DatabaseSettings,
) -> duckdb.DuckDBPyConnection:
    if settings.encryption is None:
        return duckdb.connect(path, read_only=settings.is_read_only, config=config)
    if path == MEMORY:
        raise ConfigError("a database in memory has no file to encrypt")
    config["temp_directory"] = f"{path}.tmp"  # beside the file, as DuckDB does it for a plain one
    connection = duckdb.connect(MEMORY, config=config)
    try:
        attach(connection, path, settings.encryption, is_read_only=settings.is_read_only)
    except (duckdb.Error, IngeroError):
        connection.close()
        raise
    return connection


def _explain(path: str, text: str, *, is_encrypted: bool) -> IngeroError:
    head = text.strip().partition("\n")[0]
    if "Could not set lock" in text or "Conflicting lock" in text:
        return LockedError(
            f"{path} is in use by another process",
            hint="Stop the ingero-echo that serves it; `ingero-echo backup` works beside it.",
        )
    if "Cannot open encrypted database" in text:
        return ConfigError(
            f"{path} is encrypted and no key was given",
            hint="Give --db-key-file and --httpfs-extension; the file is as it was.",
        )
    if "Corrupt WAL" in text or "WAL file" in text:
        repair = (
            f"Run `ingero-echo repair --db {path}`: it keeps a copy and saves every earlier batch."
        )
        if is_encrypted:
            repair = "An encrypted log cannot be repaired: keep both files and restore a backup."
        return StoreError(f"{path}: damaged write-ahead log: {head}", hint=repair)
    if "orrupt" in text:
        return StoreError(f"{path}: damaged: {head}", hint="Restore it from a backup.")
    if "sqlite_scanner" in text:
        head = "it is an SQLite file, as recordings of `ingero trace` are"
    if any(part in text for part in ("sqlite_scanner", "not a valid DuckDB", "is not a DuckDB")):
        return StoreError(f"{path} is not an Echo database: {head}")
    return StoreError(f"cannot open {path}: {head}")


def migrate(connection: duckdb.DuckDBPyConnection, now: datetime) -> tuple[int, int]:
    """Bring the schema up to date, one transaction per step.

    Args:
        connection: An open instance.
        now: When, for the record.

    Returns:
        Version before and after.

    Raises:
        StoreError: The database is from a newer release.
    """
    with translate_errors("read the schema's version"):
        connection.execute(
            "CREATE TABLE IF NOT EXISTS schema_migrations "
            "(number INTEGER PRIMARY KEY, title VARCHAR, applied_at TIMESTAMP)"
        )
        before = int(
            fetch_row(connection, "SELECT coalesce(max(number), 0) FROM schema_migrations")[0]
        )
    latest = MIGRATIONS[-1].number
    if before > latest:
        raise StoreError(
            f"the database has schema {before} and this release knows {latest}",
            hint="Install the release that wrote it, or restore an older backup.",
        )
    for step in MIGRATIONS[before:]:
        with translate_errors(f"apply migration {step.number}"), transaction(connection):
            for statement in step.statements:
                connection.execute(statement)
            connection.execute(
                "INSERT INTO schema_migrations VALUES (?, ?, ?)", [step.number, step.title, now]
            )
    return before, latest


@contextmanager
def transaction(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Commit at the end, roll back on any error."""
    connection.execute("BEGIN")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        _roll_back(connection)
        raise


def _roll_back(connection: duckdb.DuckDBPyConnection) -> None:
    try:
        connection.execute("ROLLBACK")
    except duckdb.Error:
        return  # the failed statement has ended the transaction, or the instance is dead


def fetch_row(
    connection: duckdb.DuckDBPyConnection, sql: str, params: Sequence[Any] = ()
) -> tuple[Any, ...]:
    """The only row of a statement, with nothing left open: DuckDB 2 refuses other work on a half-read result."""
    return connection.execute(sql, list(params)).fetchall()[0]


def find_tables(connection: duckdb.DuckDBPyConnection) -> tuple[Table, ...]:
    """Those of our tables that a database has; one of an older release lacks the later ones.

    Raises:
        ForeignDatabaseError: It has none.
    """
    sql = "SELECT table_name FROM duckdb_tables() WHERE database_name = current_database()"
    with translate_errors("read the schema"):
        there = {name for (name,) in connection.execute(sql).fetchall()}
    found = tuple(table for table in TABLES.values() if table.name in there)
    if not found:
        raise ForeignDatabaseError("it is no Echo database: it has none of the tables")
    return found


def count_tables(connection: duckdb.DuckDBPyConnection) -> dict[str, int]:
    """Rows of each of our tables that it has."""
    tables = find_tables(connection)
    with translate_errors("count rows"):
        return {
            table.name: int(fetch_row(connection, f"SELECT count(*) FROM {table.name}")[0])  # noqa: S608 - our names
            for table in tables
        }


def read_whole(connection: duckdb.DuckDBPyConnection) -> int:
    """Read every value of every table that it has, so that a damaged block is met; the rows.

    Raises:
        StoreError: Something cannot be read.
    """
    n_rows = 0
    for table in find_tables(connection):
        with translate_errors(f"read {table.name}"):
            # The row as a whole: a file of an older release lacks some of the columns.
            sql = f"SELECT count(*), bit_xor(hash(one)) FROM {table.name} AS one"  # noqa: S608 - our names
            n_rows += int(fetch_row(connection, sql)[0])
    return n_rows


def checkpoint(connection: duckdb.DuckDBPyConnection) -> None:
    """Fold the write-ahead log into the file and give free blocks back.

    Raises:
        StoreError: It was not possible; the log is as it was.
    """
    with translate_errors("checkpoint"):
        connection.execute("CHECKPOINT")


def used_bytes(connection: duckdb.DuckDBPyConnection) -> int:
    """Bytes of blocks that hold data, free blocks of the file not counted."""
    with translate_errors("read the database's size"):
        sql = (
            "SELECT used_blocks * block_size FROM pragma_database_size() "
            "WHERE database_name = current_database()"
        )
        return int(fetch_row(connection, sql)[0])


def wal_path(path: str) -> Path:
    """Where DuckDB keeps the write-ahead log of a database file."""
    return Path(f"{path}.wal")
