"""Opening a recording to read it: no write, no side file, no created file, and a plain word when it is not one."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

from ingero.errors import StoreError
from ingero.recording.store.schema import USER_VERSION
from ingero.recording.store.sql_program import ALONE, connect

_MAGIC: Final = b"SQLite format 3\x00"
_HEADER_BYTES: Final = 100
NEEDED: Final = frozenset(("timestamp", "pid", "tid", "source", "op", "duration"))
_NOT_OURS: Final = (
    "give a file that `ingero trace` wrote; `ingero query` and `ingero explain` take it with --db"
)


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into `StoreError` with the file's name; those of a damaged schema may not be text."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise StoreError(
            f"{path}: its tables cannot be read", hint="the file is damaged; try a copy"
        ) from error
    except sqlite3.DatabaseError as error:
        raise StoreError(
            f"{path}: {error}", hint="the file may be damaged; try a copy, or record again"
        ) from error


def check_header(path: Path) -> None:
    """Refuse what is not a whole SQLite file, from its first 100 bytes and its size.

    Pages that are missing at the end may be in a write-ahead log, where a full disk kept them from being folded in:
    with one, the size says nothing.

    Source: SQLite file format, "The Database Header" (page size at 16, page count at 28, change counters at 24 and 92).

    Raises:
        StoreError: No file, a pipe, no access, empty, foreign or cut short.
    """
    try:
        status = path.stat()
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise StoreError(
                f"{path}: a pipe or a device, and a recording is read from a file only",
                hint="write what comes out of it to a file, and give that",
            )
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except FileNotFoundError as error:
        raise StoreError(f"{path}: no such file", hint="check the path given with --db") from error
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error
    size_bytes = status.st_size
    if not size_bytes:
        raise StoreError(
            f"{path}: the file is empty (0 bytes), so it holds no recording", hint=_NOT_OURS
        )
    if not header.startswith(_MAGIC[: len(header)]):
        raise StoreError(f"{path}: not an SQLite database, so not a recording", hint=_NOT_OURS)
    if len(header) < _HEADER_BYTES:
        raise StoreError(f"{path}: cut short ({size_bytes} bytes)", hint="copy the file again")
    page_bytes = int.from_bytes(header[16:18], "big")
    page_bytes = 65_536 if page_bytes == 1 else page_bytes
    n_pages = int.from_bytes(header[28:32], "big")
    is_count_valid = header[24:28] == header[92:96]
    if is_count_valid and not _has_log(path) and size_bytes < n_pages * page_bytes:
        raise StoreError(
            f"{path}: cut short ({size_bytes} of {n_pages * page_bytes} bytes)",
            hint="copy the file again",
        )


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _has_log(path: Path) -> bool:
    try:
        return _beside(path, "-wal").stat().st_size > 0
    except OSError:
        return False


def _choose_uri(path: Path) -> str:
    """The SQLite URI that reads a file and touches nothing.

    Without a write-ahead log the file is opened as immutable, which keeps SQLite from making ``-wal`` and ``-shm``
    files. With the log of a living writer it is opened through that writer's ``-shm``. A log that was left behind or
    copied along has none: SQLite would have to make one, unless it may hold that index in memory, which it does
    without locks (`connect`).
    """
    if not _has_log(path):
        return _uri(path, "mode=ro&immutable=1")
    return _uri(path, "mode=ro" if _beside(path, "-shm").exists() else ALONE)


def _uri(path: Path, mode: str) -> str:
    return f"file:{quote(os.fsencode(path.absolute()))}?{mode}"


@contextmanager
def open_database(path: Path) -> Iterator[sqlite3.Connection]:
    """Open any SQLite file for reading.

    Raises:
        StoreError: The file is missing, empty, no SQLite database, cut short or damaged.
    """
    check_header(path)
    with store_errors(path), closing(connect(_choose_uri(path))) as connection:
        yield connection


@contextmanager
def open_recording(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a recording for reading.

    Raises:
        StoreError: The file is missing, empty, foreign, cut short, damaged or of a newer schema.
    """
    with open_database(path) as connection:
        check_recording(connection, path)
        yield connection


def find_recording(path: Path) -> str:
    """The SQLite URI that another process reads a recording through.

    Raises:
        StoreError: As of `open_recording`.
    """
    with open_recording(path):
        return _choose_uri(path)


def check_recording(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a database that is not a recording this version can read.

    Raises:
        StoreError: Newer schema, or no events table with the columns that every generation has.
    """
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > USER_VERSION:
        raise StoreError(
            f"{path}: schema {version} is newer than this version reads ({USER_VERSION})",
            hint="upgrade ingero: pip install -U ingero",
        )
    missing = NEEDED - set(table_columns(connection, "events"))
    if missing == NEEDED:
        raise StoreError(f"{path}: an SQLite database without an events table", hint=_NOT_OURS)
    if missing:
        raise StoreError(
            f"{path}: events has no column {', '.join(sorted(missing))}", hint=_NOT_OURS
        )


def table_columns(connection: sqlite3.Connection, table: str) -> tuple[str, ...]:
    """Column names of a table in order; empty when there is no such table."""
    rows = connection.execute("SELECT name FROM pragma_table_info(?)", (table,))
    return tuple(name for (name,) in rows)
