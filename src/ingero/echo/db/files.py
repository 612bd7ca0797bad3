"""What is done to a database file: migrate, restore, repair while nobody serves it; back up at any time.

Files made here are their owner's alone (0600): they hold every tenant's rows.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import duckdb

from ingero.echo.db.backup_socket import request_backup
from ingero.echo.db.encryption import Encryption
from ingero.echo.db.engine import (
    DatabaseSettings,
    check_there,
    checkpoint,
    count_tables,
    fetch_row,
    find_tables,
    migrate,
    open_engine,
    wal_path,
)
from ingero.echo.db.errors import ForeignDatabaseError, LockedError, translate_errors
from ingero.echo.db.lock import FileLock, locked
from ingero.echo.schema.migrations import MIGRATIONS
from ingero.echo.schema.tables import NODES, TABLES
from ingero.errors import StoreError
from ingero.units import format_size
from ingero.whole_files import sync_folder

_DAMAGE: Final = re.compile(r"entry at byte position (\d+)")
_SETTINGS: Final = DatabaseSettings()
_ATTEMPTS: Final = 64


@dataclass(frozen=True, slots=True)
class Repair:
    """What a repair did.

    Attributes:
        kept_copy: The damaged log, untouched; None when nothing was damaged.
        n_cut_bytes: Bytes of the log that could not be read.
    """

    kept_copy: Path | None
    n_cut_bytes: int


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore did.

    Attributes:
        aside: Where the database went that was there; None where none was.
        n_rows: Rows of the restored one.
        newest: When the newest of them arrived, UTC; None where there is none.
        n_left_out: Rows of the backup that arrived after the time that was given.
        damage: Why the database that was there cannot be opened; empty where it can.
    """

    aside: Path | None
    n_rows: int
    newest: datetime | None
    n_left_out: int
    damage: str = ""


def migrate_file(
    path: Path, now: datetime, encryption: Encryption | None = None
) -> tuple[int, int]:
    """Bring a file's schema up to date; returns the versions before and after."""
    check_there(path)
    with locked(str(path)):
        connection = open_engine(str(path), DatabaseSettings(encryption=encryption))
        try:
            return migrate(connection, now)
        finally:
            connection.close()


def back_up(path: Path, to: Path, encryption: Encryption | None = None) -> tuple[int, int]:
    """Copy a database, served or not, its log folded in; returns the bytes and the rows.

    The copy appears under its name only when it was opened once and every table has as many rows there as here. That
    of an encrypted file has its key.

    Raises:
        ConfigError: The key is not that of the file.
        StoreError: It is damaged, its server refuses, the place has no room, or the copy exists already.
    """
    check_there(path)
    if to.exists():
        raise StoreError(f"{to} exists already", hint="Choose another name.")
    _check_room(path, to)
    lock = FileLock(str(path))
    try:
        lock.acquire()
    except LockedError:
        return make_copy(to, encryption, lambda copy: request_backup(path, copy))
    try:
        connection = open_engine(str(path), DatabaseSettings(encryption=encryption))
        try:
            checkpoint(connection)
            expected = count_tables(connection)
        finally:
            connection.close()
        return _copy(path, to, encryption, expected), sum(expected.values())
    finally:
        lock.release()


def restore(
    backup: Path, path: Path, encryption: Encryption | None = None, until: datetime | None = None
) -> Restored:
    """Put a backup in a database's place; what was there is kept beside it, also where it is damaged.

    Args:
        backup: The backup, which is left as it is and may be read by others meanwhile.
        path: The database file.
        encryption: How both are encrypted.
        until: Leave out what arrived later; what a node said of itself is one row, and that stays as the backup has it.

    Raises:
        ConfigError: The key is not that of both.
        StoreError: The backup is no Echo database, the place is in use, or either is of a newer release than this.
            The database that was there is in its place.
    """
    check_there(backup)
    _check_echo(backup, encryption, is_read_only=True)
    with locked(str(path)):
        return _put_in_place(backup, path, encryption, until)


def _put_in_place(
    backup: Path, path: Path, encryption: Encryption | None, until: datetime | None
) -> Restored:
    damage = _find_damage(path, encryption) if path.exists() else ""
    _check_room(backup, path)
    found: list[tuple[int, datetime | None, int]] = []
    asides: list[Path | None] = []
    _copy(
        backup,
        path,
        encryption,
        settle=lambda copy: found.append(_settle(copy, encryption, until)),
        place=lambda copy, to: asides.append(_swap(copy, to)),
    )
    return Restored(asides[0], *found[0], damage)


def _find_damage(path: Path, encryption: Encryption | None) -> str:
    """Why a database cannot be opened; empty where it can.

    Raises:
        ConfigError: The key is not its own.
        StoreError: It is in use, or it opens and is another's or of a newer release.
    """
    try:
        _check_echo(path, encryption, is_read_only=True)
    except (LockedError, ForeignDatabaseError):
        raise
    except StoreError as error:
        return error.message
    return ""


def _swap(new: Path, path: Path) -> Path | None:
    """Put a file in a database's place, where there is one at each moment; where the old one is now, if there was one.

    Its log goes last: DuckDB refuses a log beside a file that it is not of, and would miss no log that is gone.

    Raises:
        StoreError: It was not possible.
    """
    aside, wal = _free_name(path, "before-restore"), wal_path(str(path))
    kept = {path: aside, wal: wal_path(str(aside))}
    try:
        for part, other in kept.items():
            if part.exists():
                other.hardlink_to(part)
        new.replace(path)
    except OSError as error:
        raise StoreError(f"cannot put {new} in the place of {path}: {error.strerror}") from error
    finally:
        if new.exists():
            for other in kept.values():
                other.unlink(missing_ok=True)
        else:
            wal.unlink(missing_ok=True)
    sync_folder(path.parent)
    return aside if aside.exists() else None


def _settle(
    path: Path, encryption: Encryption | None, until: datetime | None
) -> tuple[int, datetime | None, int]:
    """Delete what arrived after a time; the rows that are left, the arrival of the newest, and the rows deleted."""
    connection = open_engine(str(path), DatabaseSettings(encryption=encryption))
    try:
        n_deleted, tables = 0, find_tables(connection)
        if until is not None:
            for name in (*(table.name for table in tables if table is not NODES), "ingest_keys"):
                with translate_errors(f"delete what arrived later from {name}"):
                    sql = f"DELETE FROM {name} WHERE ingested_at > ?"  # noqa: S608 - our names
                    n_rows = int(fetch_row(connection, sql, [until])[0])
                n_deleted += n_rows if name in TABLES else 0
        checkpoint(connection)
        arrivals = " UNION ALL ".join(
            f"SELECT max(ingested_at) AS arrival FROM {table.name}"  # noqa: S608 - our names
            for table in tables
        )
        with translate_errors("find the newest row"):
            (newest,) = fetch_row(connection, f"SELECT max(arrival) FROM ({arrivals})")  # noqa: S608
        return sum(count_tables(connection).values()), newest, n_deleted
    finally:
        connection.close()


def repair(path: Path) -> Repair:
    """Cut a damaged write-ahead log where it stops making sense; every batch before that is kept.

    The damaged log is copied first and never deleted.

    Source: DuckDB's ``Corrupt WAL file: entry at byte position N``; truncating there and reopening loses only what
    follows (tried on 1.5.6 and 2.0.0).

    Raises:
        StoreError: The damage is not in the log.
    """
    check_there(path)
    with locked(str(path)):
        return _repair(path)


def _repair(path: Path) -> Repair:
    wal = wal_path(str(path))
    kept: Path | None = None
    whole_bytes = wal.stat().st_size if wal.exists() else 0
    for _ in range(_ATTEMPTS):
        position = _find_bad_entry(path)
        if position is None:
            left = wal.stat().st_size if kept is not None and wal.exists() else 0
            return Repair(kept, whole_bytes - left if kept is not None else 0)
        if kept is None:
            kept = _free_name(wal, "damaged")
            shutil.copy2(wal, kept)
        if wal.stat().st_size <= position:
            break
        os.truncate(wal, position)
    raise StoreError(
        f"{path}: cannot be repaired", hint=f"Restore a backup; the log is kept at {kept}."
    )


def _find_bad_entry(path: Path) -> int | None:
    try:
        connection = duckdb.connect(str(path))
    except duckdb.Error as error:
        text = str(error)
        found = _DAMAGE.search(text)
        if "Cannot open encrypted database" in text:
            raise StoreError(
                f"{path} is encrypted: its log cannot be repaired", hint="Restore a backup."
            ) from error
        if found is None:
            open_engine(str(path), _SETTINGS).close()  # raises the right error for everything else
            raise StoreError(f"{path}: {text.partition(chr(10))[0]}") from error
        return int(found[1])
    connection.close()
    return None


def _check_echo(
    path: Path,
    encryption: Encryption | None,
    expected: Mapping[str, int] | None = None,
    *,
    is_read_only: bool = False,
) -> None:
    """Hold a file to be a database that this release can serve, with the rows that it must have.

    Opening it folds its log in, unless it is only read.
    """
    settings = DatabaseSettings(encryption=encryption, is_read_only=is_read_only)
    connection = open_engine(str(path), settings)
    try:
        with translate_errors("read the schema"):
            sql = "SELECT count(*) FROM duckdb_tables() WHERE table_name IN ('events', 'schema_migrations')"
            if fetch_row(connection, sql)[0] != 2:
                raise ForeignDatabaseError(f"{path} is no Echo database")
            sql = "SELECT coalesce(max(number), 0) FROM schema_migrations"
            version = fetch_row(connection, sql)[0]
        found = count_tables(connection) if expected else {}
    finally:
        connection.close()
    if version > MIGRATIONS[-1].number:
        raise ForeignDatabaseError(
            f"{path} has schema {version} and this release knows {MIGRATIONS[-1].number}",
            hint="Use the release that wrote it.",
        )
    for name, n_rows in (expected or {}).items():
        if found[name] != n_rows:
            raise StoreError(f"the copy has {found[name]} rows of {name} and not {n_rows}")


def _copy(
    source: Path,
    to: Path,
    encryption: Encryption | None,
    expected: Mapping[str, int] | None = None,
    settle: Callable[[Path], object] = lambda _: None,
    place: Callable[[Path, Path], object] = Path.rename,
) -> int:
    def fill(copy: Path) -> Mapping[str, int] | None:
        wal = wal_path(str(source))
        try:
            _copy_file(source, copy)
            if wal.exists():
                _copy_file(wal, wal_path(str(copy)))
        except OSError as error:
            raise StoreError(f"cannot copy {source} to {to}: {error.strerror}") from error
        return expected

    return make_copy(to, encryption, fill, settle, place)[0]


def _copy_file(source: Path, copy: Path) -> None:
    fd = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as writing, source.open("rb") as reading:
        shutil.copyfileobj(reading, writing, 8 << 20)
        writing.flush()
        os.fsync(fd)


def make_copy(
    to: Path,
    encryption: Encryption | None,
    fill: Callable[[Path], Mapping[str, int] | None],
    check: Callable[[Path], object] = lambda _: None,
    place: Callable[[Path, Path], object] = Path.rename,
) -> tuple[int, int]:
    """A copy that appears under its name once it was opened; nothing is left of one that failed.

    Args:
        to: Its name.
        encryption: How it is encrypted.
        fill: Writes it under another name, and returns the rows that it must have.
        check: A further one; what it raises ends the copy.
        place: Gives it its name.

    Returns:
        Its bytes, and those rows.
    """
    partial = to.with_name(f"{to.name}.partial")
    parts = (partial, wal_path(str(partial)))
    for part in parts:
        part.unlink(missing_ok=True)
    try:
        expected = fill(partial)
        _check_echo(partial, encryption, expected)
        check(partial)
        place(partial, to)
    except BaseException:
        for part in parts:
            part.unlink(missing_ok=True)
        raise
    return to.stat().st_size, sum((expected or {}).values())


def _check_room(source: Path, to: Path) -> None:
    try:
        free = shutil.disk_usage(to.parent).free
    except OSError as error:
        raise StoreError(f"cannot write to {to.parent}: {error.strerror}") from error
    needed = sum(part.stat().st_size for part in (source, wal_path(str(source))) if part.exists())
    if free < needed:
        raise StoreError(
            f"{to.parent} has {format_size(free)} free and the copy needs {format_size(needed)}",
            hint="Choose another place.",
        )


def _free_name(path: Path, word: str) -> Path:
    for number in range(1, 1000):
        name = path.with_name(f"{path.name}.{word}-{number}")
        if not name.exists() and not wal_path(str(name)).exists():
            return name
    raise StoreError(f"{path}: too many files named {word}")
