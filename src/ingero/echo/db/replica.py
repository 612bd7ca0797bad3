"""`ReplicaBackend`: answers from the newest scheduled backup of another Echo, and follows to newer ones.

Any number of processes may open a backup to read, so dashboards can have a process of their own that takes nothing from
the one that writes. What it answers is as old as that backup.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

import numpy as np
from typing_extensions import override

from ingero.echo.db.backup_names import list_backups, stamp_of
from ingero.echo.db.deduplication import Keys
from ingero.echo.db.engine import DatabaseSettings
from ingero.echo.db.read_only import ReadOnlyBackend
from ingero.echo.db.retention import Retention
from ingero.echo.db.retention_clock import RetentionTime
from ingero.errors import IngeroError, StoreError

_LOG: Final = logging.getLogger("ingero.echo")


class ReplicaBackend(ReadOnlyBackend):
    """The newest backup of a folder, read only.

    Args:
        folder: The other Echo's ``backup_dir``.
        settings: What the instance may use.

    Attributes:
        made_wall_s: When the backup was made that is answered from; 0 while there is none.
    """

    def __init__(self, folder: Path, settings: DatabaseSettings) -> None:
        super().__init__(folder, settings)
        self.made_wall_s = 0.0
        self._shown: Path | None = None
        self._bad: Path | None = None

    @override
    def open(self, now: datetime, since: datetime, max_keys: int) -> Keys:
        del now, since, max_keys
        found = list_backups(self._path)
        if not found:
            raise StoreError(
                f"{self._path} has no backup yet",
                hint="It is the backup_dir of the Echo that writes; its first backup is made at its start.",
            )
        self._show_first(found[::-1])
        return np.zeros(0, dtype=np.uint64)

    @override
    def trim(self, now: RetentionTime, since: datetime, retention: Retention) -> tuple[int, int]:
        """Nothing is deleted; a newer backup is answered from, where there is one. A bad one is said once."""
        del now, since, retention
        newest = next(reversed(list_backups(self._path)), None)
        if newest is not None and newest not in {self._shown, self._bad}:
            try:
                self._show(newest)
            except IngeroError as error:
                self._bad = newest
                _LOG.error(
                    "%s is not answered from, %s still is: %s", newest, self._shown, error.message
                )
        return 0, 0

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

    @override
    def _show(self, path: Path) -> None:
        super()._show(path)
        self._shown, self.made_wall_s = path, stamp_of(path).timestamp()

    @override
    def _advise(self, path: Path, *, is_older: bool) -> str:
        return "Both Echoes must be of one release."
