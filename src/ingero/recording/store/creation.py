"""Opening a recording to write to it: a new one, or one that this version can append to. Nothing else is touched."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from ingero.errors import StoreError
from ingero.model.events import OP_NAMES, Source
from ingero.recording.store.files import check_recording, open_database, store_errors
from ingero.recording.store.identity import derive_identity, new_identity, read_parts
from ingero.recording.store.limit import SizeLimits
from ingero.recording.store.rollover import create_private
from ingero.recording.store.schema import create_tables, find_outdated


def open_for_writing(
    path: Path, node: str, limits: SizeLimits, owner: tuple[int, int] | None = None
) -> sqlite3.Connection:
    """Open or make a recording of this version's schema.

    Raises:
        StoreError: It cannot be written, it is a database of something else, or another version of the schema wrote it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            check_appendable(path)
        create_private(path, owner)
    except OSError as error:
        raise StoreError(
            f"{path}: {error.strerror or error}", hint="choose another file with --db"
        ) from error
    with store_errors(path):
        try:
            connection = sqlite3.connect(path, check_same_thread=False, timeout=5.0)
            create_tables(connection, {int(s): s.name for s in Source}, OP_NAMES)
        except sqlite3.OperationalError as error:
            raise StoreError(f"{path}: {error}", hint="choose another file with --db") from error
        connection.execute("PRAGMA synchronous = NORMAL")
        page_bytes = int(connection.execute("PRAGMA page_size").fetchone()[0])
        connection.execute(f"PRAGMA wal_autocheckpoint = {limits.log_bytes // page_bytes}")
        connection.execute(f"PRAGMA journal_size_limit = {limits.log_bytes}")
        name_recording(connection, node)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # an empty recording needs no log
        return connection


def check_appendable(path: Path) -> None:
    """Refuse a file that this version cannot append to, without changing it.

    Raises:
        StoreError: It is no recording, or another version of the schema wrote it.
    """
    with open_database(path) as connection:
        (n_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not n_tables:
            return  # its writer was killed before the first table
        check_recording(connection, path)
        if any(state is not None for state in read_parts(connection).values()):
            raise StoreError(
                f"{path}: merged from several recordings; it can be read, not added to",
                hint="record into a new file with --db",
            )
        if find_outdated(connection):
            raise StoreError(
                f"{path}: written by another version of the schema; it can be read, not added to",
                hint=f"ingero migrate --db-path {path}, or record into a new file with --db",
            )


def name_recording(connection: sqlite3.Connection, node: str) -> None:
    """Give a recording an identity of its own unless it has one; copies of the file keep it."""
    with connection:
        if connection.execute("SELECT 1 FROM recordings").fetchone():
            return
        has_rows = connection.execute("SELECT 1 FROM events").fetchone()
        identity = derive_identity(connection) if has_rows else new_identity()
        connection.execute("INSERT INTO recordings (id, node) VALUES (?, ?)", (identity, node))


def open_new(path: Path) -> closing[sqlite3.Connection]:
    """An empty recording for rows of others, such as a merged one; it gets no identity.

    Raises:
        StoreError: It cannot be written.
    """
    try:
        create_private(path)
        connection = sqlite3.connect(path)
        create_tables(connection, {int(source): source.name for source in Source}, OP_NAMES)
    except (OSError, sqlite3.OperationalError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreError(f"{path.parent}: {reason}", hint="choose a writable folder") from error
    connection.execute("PRAGMA synchronous = OFF")  # a file that appears only when it is whole
    return closing(connection)
