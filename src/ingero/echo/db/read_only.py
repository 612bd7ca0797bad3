"""`ReadOnlyBackend`: answers from one database file that nothing here changes, and that others may read meanwhile.

DuckDB reads a write-ahead log that a killed process left into memory and leaves it where it is, also where the process
was killed in a checkpoint (2.0.0, observed); a damaged log is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Final

import duckdb
import numpy as np
from typing_extensions import override

from ingero.echo.db.backend import DatabaseBackend, Kept
from ingero.echo.db.deduplication import Keys
from ingero.echo.db.encryption import CATALOG
from ingero.echo.db.engine import DatabaseSettings, fetch_row, find_tables, open_engine
from ingero.echo.db.errors import translate_errors
from ingero.echo.db.reader import Reader, ReaderPool
from ingero.echo.db.retention import Retention
from ingero.echo.db.retention_clock import ClockMark, RetentionTime
from ingero.echo.db.rows import Incoming, NodeReports
from ingero.echo.schema.migrations import MIGRATIONS
from ingero.errors import IngeroError, StoreError

NOT_WRITTEN: Final = "this Echo only reads and takes no rows"


class ReadOnlyBackend(DatabaseBackend):
    """One file, read only.

    Args:
        path: The file.
        settings: What the instance may use.
    """

    is_read_only = True

    def __init__(self, path: Path, settings: DatabaseSettings) -> None:
        self.readers = ReaderPool()
        self._path = path
        self._settings = replace(settings, is_read_only=True)
        self._connection: duckdb.DuckDBPyConnection | None = None

    @property
    @override
    def is_open(self) -> bool:
        return self._connection is not None

    @override
    def open(self, now: datetime, since: datetime, max_keys: int) -> Keys:
        """Open it as it is: its schema must be of this release. No key is given, for nothing is written."""
        del now, since, max_keys
        self._show(self._path)
        return np.zeros(0, dtype=np.uint64)

    @override
    def commit(
        self,
        group: Sequence[Incoming],
        nodes: NodeReports,
        now: datetime,
        kept: Kept,
    ) -> None:
        raise StoreError(NOT_WRITTEN)

    @override
    def trim(self, now: RetentionTime, since: datetime, retention: Retention) -> tuple[int, int]:
        """Nothing is deleted."""
        del now, since, retention
        return 0, 0

    @override
    def load_clock(self) -> ClockMark | None:
        return None

    @override
    def save_clock(self, mark: ClockMark) -> None:
        """Nothing is written."""

    @override
    def drop(self) -> None:
        self.readers.detach()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @override
    def open_reader(self, timeout_ns: int) -> AbstractContextManager[Reader]:
        return self.readers.open_reader(timeout_ns)

    def _show(self, path: Path) -> None:
        """Answer from a file; questions that run go on with the one before."""
        connection = open_engine(str(path), self._settings)
        try:
            find_tables(connection)
            with translate_errors("read the schema's version"):
                sql = "SELECT coalesce(max(number), 0) FROM schema_migrations"
                (number,) = fetch_row(connection, sql)
            latest = MIGRATIONS[-1].number
            if number != latest:
                raise StoreError(
                    f"{path} has schema {number} and this release has {latest}",
                    hint=self._advise(path, is_older=number < latest),
                )
        except IngeroError:
            connection.close()
            raise
        before, self._connection = self._connection, connection
        self.readers.attach(connection, CATALOG if self._settings.encryption else "")
        if before is not None:
            before.close()

    def _advise(self, path: Path, *, is_older: bool) -> str:
        """What helps where a file's schema is not of this release."""
        if is_older:
            return f"Run `ingero-echo migrate --db {path}`, on a copy where it must stay as it is."
        return "Install the release that wrote it."
