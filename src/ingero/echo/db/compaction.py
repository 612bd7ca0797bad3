"""`Compactor`: makes a file smaller whose rows are mostly gone, while it is served.

DuckDB gives blocks back to the file system at the end of a file only, so one that retention has emptied stays as large
as it ever was until new rows fill it. Here the rows of one snapshot are copied to a new file beside it, which takes as
long as it takes while ingest goes on; then the writer pauses, adds what arrived meanwhile, and puts the new file in the
old one's place. Until that rename the old file is whole and is the one that counts, whatever happens.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import duckdb

from ingero.echo.db.duckdb_backend import DuckDbBackend
from ingero.echo.db.engine import fetch_row, transaction, wal_path
from ingero.echo.db.errors import translate_errors
from ingero.echo.db.reader import Reader
from ingero.echo.db.store import Store
from ingero.echo.schema.tables import APPENDED, NODES
from ingero.errors import IngeroError, StoreError
from ingero.units import NS_PER_S, format_size
from ingero.whole_files import sync_folder

_LOG: Final = logging.getLogger("ingero.echo")
_TARGET: Final = "compacted"
_LOOK_S: Final = 600.0
_COPY_NS: Final = 6 * 3600 * NS_PER_S
_ARRIVING: Final = (*(table.name for table in APPENDED), "ingest_keys")
"""Tables that only grow, and lose the rows that arrived first."""
_REPLACED: Final = (NODES.name, "retention_clock")
_FIXED: Final = ("ingest_secret", "schema_migrations")


@dataclass(slots=True)
class CompactionCounters:
    """What the scrape shows.

    Attributes:
        done: Times that the file was made smaller.
        failed: Times that it was tried and the file stayed as it was.
        file_bytes: Size of the file when it was looked at last.
        free_bytes: Of these, those in no use.
    """

    done: int = 0
    failed: int = 0
    file_bytes: int = 0
    free_bytes: int = 0


class Compactor:
    """Looks at the file from time to time, on a thread of its own.

    Args:
        store: Open, a file that is not encrypted.
        backend: Its backend.
        above_bytes: Bytes in no use above which the file is made smaller, where they are half of it or more.

    Attributes:
        counters: For the scrape.
    """

    def __init__(self, store: Store, backend: DuckDbBackend, above_bytes: int) -> None:
        self.counters = CompactionCounters()
        self._store = store
        self._backend = backend
        self._above_bytes = above_bytes
        self._path = Path(store.path)
        self._target = Path(f"{store.path}.compacted")
        self._stopping = threading.Event()
        self._reader: Reader | None = None
        self._thread = threading.Thread(target=self._run, name="echo-compactor", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._remove_target()  # of a process that was killed
        self._thread.start()

    def close(self) -> None:
        """Let go of a copy that is being made."""
        self._stopping.set()
        while self._thread.is_alive():
            reader = self._reader
            if reader is not None:
                reader.stop()
            self._thread.join(0.05)

    def run_if_needed(self) -> None:
        """Make the file smaller where that is worth it. What fails is counted and said; the file is as it was."""
        try:
            if self._is_needed():
                self.compact()
        except (IngeroError, OSError) as error:
            if self._stopping.is_set():
                return
            self.counters.failed += 1
            reason = (
                error.message if isinstance(error, IngeroError) else error.strerror or str(error)
            )
            _LOG.warning("%s was not made smaller, and is as it was: %s", self._path, reason)

    def compact(self) -> None:
        """Write the file anew.

        Raises:
            StoreError: It is as it was.
            OSError: Likewise.
        """
        before = self._path.stat().st_size
        try:
            with self._backend.open_reader(_COPY_NS) as reader:
                self._reader = reader
                newest = copy_snapshot(reader, self._target)
            self._store.call(lambda connection: self._put_in_place(connection, newest)).result()
        finally:
            self._reader = None
            self._let_go()
        self.counters.done += 1
        after = self.counters.file_bytes = self._path.stat().st_size
        _LOG.info("%s: %s, was %s", self._path, format_size(after), format_size(before))

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            self.run_if_needed()

    def _is_needed(self) -> bool:
        with self._backend.open_reader(60 * NS_PER_S) as reader:
            (used,) = reader.row(
                "SELECT used_blocks * block_size FROM pragma_database_size() "
                "WHERE database_name = current_database()"
            )
        counters = self.counters
        counters.file_bytes = self._path.stat().st_size
        counters.free_bytes = max(0, counters.file_bytes - int(used))
        is_worth_it = counters.free_bytes >= max(self._above_bytes, counters.file_bytes // 2)
        if is_worth_it and shutil.disk_usage(self._path.parent).free < 2 * int(used):
            raise StoreError(f"that needs {format_size(2 * int(used))} free beside it")
        return is_worth_it

    def _put_in_place(self, connection: duckdb.DuckDBPyConnection, newest: datetime | None) -> None:
        """On the writer's thread: what arrived meanwhile, then the rename; the writer opens the file again after it."""
        add_arrivals(connection, newest)
        with translate_errors("finish the new file"):
            connection.execute(f"CHECKPOINT {_TARGET}")
            connection.execute(f"DETACH {_TARGET}")
        with self._target.open("rb") as written:
            os.fsync(written.fileno())
        trouble = self._backend.close()
        if trouble or wal_path(str(self._path)).exists():
            raise StoreError(trouble or "its log could not be folded in")
        self._target.replace(self._path)
        sync_folder(self._path.parent)

    def _let_go(self) -> None:
        """Have the writer open the file where it is closed, and forget what was not finished."""

        def detach(connection: duckdb.DuckDBPyConnection) -> None:
            with translate_errors("forget the new file"):
                connection.execute(f"DETACH DATABASE IF EXISTS {_TARGET}")

        self._store.call(detach).result()
        self._remove_target()

    def _remove_target(self) -> None:
        for part in (self._target, wal_path(str(self._target))):
            part.unlink(missing_ok=True)


def copy_snapshot(reader: Reader, target: Path) -> datetime | None:
    """Copy what a file has at this moment to a new one, which stays attached; the arrival of the newest row.

    Raises:
        StoreError: It was not possible, or was stopped.
    """
    place = str(target).replace("'", "''")
    reader.rows(f"ATTACH '{place}' AS {_TARGET}")
    (source,) = reader.row("SELECT current_database()")
    reader.rows(f'COPY FROM DATABASE "{source}" TO {_TARGET} (SCHEMA)')
    reader.rows("BEGIN TRANSACTION")
    newest = [
        reader.row(f"SELECT max(ingested_at) FROM {name}")[0]  # noqa: S608 - our names
        for name in _ARRIVING
    ]
    for name in (*_ARRIVING, *_FIXED):
        reader.rows(f"INSERT INTO {_TARGET}.{name} SELECT * FROM {name}")  # noqa: S608 - our names
    reader.rows("COMMIT")
    return max((one for one in newest if one is not None), default=None)


def add_arrivals(connection: duckdb.DuckDBPyConnection, newest: datetime | None) -> None:
    """Bring the new file to what the old one has now; nothing is written to that one meanwhile.

    Rows are added by their arrival, and those that retention has deleted, which are always the first to have arrived,
    are deleted there, too.

    Raises:
        StoreError: The two do not have the same rows; a clock that was set back can do that.
    """
    with translate_errors("copy what arrived meanwhile"), transaction(connection):
        for name in _ARRIVING:
            connection.execute(
                f"INSERT INTO {_TARGET}.{name} SELECT * FROM {name} WHERE ? IS NULL OR ingested_at > ?",  # noqa: S608
                [newest, newest],
            )
            connection.execute(
                f"DELETE FROM {_TARGET}.{name} WHERE ingested_at < "  # noqa: S608 - our names
                f"(SELECT coalesce(min(ingested_at), 'infinity'::TIMESTAMP) FROM {name})"
            )
        for name in _REPLACED:
            connection.execute(f"INSERT INTO {_TARGET}.{name} SELECT * FROM {name}")  # noqa: S608
    _compare(connection, (*_ARRIVING, *_REPLACED, *_FIXED))


def _compare(connection: duckdb.DuckDBPyConnection, names: Iterable[str]) -> None:
    for name in names:
        with translate_errors("compare the new file with the old one"):
            sql = f"SELECT (SELECT count(*) FROM {name}), (SELECT count(*) FROM {_TARGET}.{name})"  # noqa: S608
            old, new = fetch_row(connection, sql)
        if old != new:
            raise StoreError(f"{name} has {old} rows and {new} in the new file")
