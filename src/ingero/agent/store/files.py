"""Opening a recording to read it: no write, no side file, no created file, and a plain word when it is not one."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

from ingero.agent.store.schema import USER_VERSION
from ingero.errors import StoreError

_MAGIC: Final = b"SQLite format 3\x00"
_HEADER_BYTES: Final = 100
NEEDED: Final = frozenset(("timestamp", "pid", "tid", "source", "op", "duration"))
_NOT_OURS: Final = (
    "give a file that `ingero trace` wrote; `ingero query` and `ingero explain` take it with --db"
)


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into `StoreError` with the file's name."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise StoreError(
            f"{path}: {error}", hint="the file may be damaged; try a copy, or record again"
        ) from error


def check_header(path: Path) -> None:
    """Refuse what is not a whole SQLite file, from its first 100 bytes and its size.

    Source: SQLite file format, "The Database Header" (page size at 16, page count at 28, change counters at 24 and 92).

    Raises:
        StoreError: No file, no access, empty, foreign or cut short.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except FileNotFoundError as error:
        raise StoreError(f"{path}: no such file", hint="check the path given with --db") from error
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error
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
    if is_count_valid and size_bytes < n_pages * page_bytes:
        raise StoreError(
            f"{path}: cut short ({size_bytes} of {n_pages * page_bytes} bytes)",
            hint="copy the file again",
        )


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _has_log(path: Path) -> bool:
    wal = _beside(path, "-wal")
    return wal.exists() and wal.stat().st_size > 0


@contextmanager
def _readable(path: Path) -> Iterator[str]:
    """The SQLite URI that reads a file and touches nothing.

    Without a write-ahead log the file is opened as immutable, which keeps SQLite from making ``-wal`` and ``-shm`` files.
    With the log of a living writer it is opened through that writer's ``-shm``. With a log that was left behind or copied
    along, SQLite would have to make one, so it reads copies of both in a folder of its own.
    """
    if not _has_log(path):
        yield _uri(path, "mode=ro&immutable=1")
    elif _beside(path, "-shm").exists():
        yield _uri(path, "mode=ro")
    else:
        with tempfile.TemporaryDirectory(prefix="ingero-read-") as folder:
            copy = Path(folder) / path.name
            shutil.copyfile(path, copy)
            shutil.copyfile(_beside(path, "-wal"), _beside(copy, "-wal"))
            yield _uri(copy, "mode=ro")


def _uri(path: Path, mode: str) -> str:
    return f"file:{quote(str(path.absolute()))}?{mode}"


@contextmanager
def open_recording(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a recording for reading.

    Raises:
        StoreError: The file is missing, empty, foreign, cut short, damaged or of a newer schema.
    """
    check_header(path)
    with (
        store_errors(path),
        _readable(path) as uri,
        closing(sqlite3.connect(uri, uri=True)) as connection,
    ):
        connection.execute("PRAGMA query_only = 1")
        check_recording(connection, path)
        yield connection


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
