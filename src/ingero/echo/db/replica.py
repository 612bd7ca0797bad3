"""`ReplicaBackend`: answers from the newest scheduled backup of another Echo, and follows to newer ones.

Any number of processes may open a backup to read, so dashboards can have a process of their own that takes nothing from
the one that writes. What it answers is as old as that backup.
"""

from __future__ import annotations

import logging
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
from ingero.echo.db.backup_names import list_backups, stamp_of
from ingero.echo.db.deduplication import Keys
from ingero.echo.db.engine import DatabaseSettings, fetch_row, open_engine
from ingero.echo.db.errors import translate_errors
from ingero.echo.db.reader import Reader, ReaderPool
from ingero.echo.db.retention import Retention
from ingero.echo.db.retention_clock import ClockMark, RetentionTime
from ingero.echo.db.rows import Incoming, NodeKey, NodeRow
from ingero.echo.schema.migrations import MIGRATIONS
from ingero.errors import IngeroError, StoreError

_LOG: Final = logging.getLogger("ingero.echo")
NOT_WRITTEN: Final = "this Echo answers from backups and takes no rows"


class ReplicaBackend(DatabaseBackend):
    """The newest backup of a folder, read only.

    Args:
        folder: The other Echo's ``backup_dir``.
        settings: What the instance may use.

    Attributes:
        made_wall_s: When the backup was made that is answered from; 0 while there is none.
    """

    is_read_only = True

    def __init__(self, folder: Path, settings: DatabaseSettings) -> None:
        self.readers = ReaderPool()
        self.made_wall_s = 0.0
        self._folder = folder
        self._settings = replace(settings, is_read_only=True)
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._shown: Path | None = None
        self._bad: Path | None = None

    @property
    @override
    def is_open(self) -> bool:
        return self._connection is not None

    @override
    def open(self, now: datetime, since: datetime, max_keys: int) -> Keys:
        del now, since, max_keys
        found = list_backups(self._folder)
        if not found:
            raise StoreError(
                f"{self._folder} has no backup yet",
                hint="It is the backup_dir of the Echo that writes; its first backup is made at its start.",
            )
        self._show_first(found[::-1])
        return np.zeros(0, dtype=np.uint64)

    @override
    def commit(
        self,
        group: Sequence[Incoming],
        nodes: dict[NodeKey, NodeRow],
        now: datetime,
        kept: Kept,
    ) -> None:
        raise StoreError(NOT_WRITTEN)

    @override
    def trim(self, now: RetentionTime, since: datetime, retention: Retention) -> tuple[int, int]:
        """Nothing is deleted; a newer backup is answered from, where there is one. A bad one is said once."""
        del now, since, retention
        newest = next(reversed(list_backups(self._folder)), None)
        if newest is not None and newest not in {self._shown, self._bad}:
            try:
                self._show(newest)
            except IngeroError as error:
                self._bad = newest
                _LOG.error(
                    "%s is not answered from, %s still is: %s", newest, self._shown, error.message
                )
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

    def _show_first(self, backups: Sequence[Path]) -> None:
        """Answer from the first that can be opened; raises what is wrong with the very first where none can."""
        errors: list[IngeroError] = []
        for backup in backups:
            try:
                self._show(backup)
            except IngeroError as error:
                errors.append(error)
                _LOG.error("%s is not answered from: %s", backup, error.message)
            else:
                self._bad = backups[0] if errors else None
                return
        raise errors[0]

    def _show(self, backup: Path) -> None:
        """Answer from a backup; questions that run go on with the one before."""
        connection = open_engine(str(backup), self._settings)
        try:
            with translate_errors("read the schema's version"):
                (number,) = fetch_row(connection, "SELECT max(number) FROM schema_migrations")
            if number != MIGRATIONS[-1].number:
                raise StoreError(
                    f"{backup} has schema {number} and this release has {MIGRATIONS[-1].number}",
                    hint="Both Echoes must be of one release.",
                )
        except IngeroError:
            connection.close()
            raise
        before, self._connection = self._connection, connection
        self.readers.attach(connection)
        self._shown, self.made_wall_s = backup, stamp_of(backup).timestamp()
        if before is not None:
            before.close()
