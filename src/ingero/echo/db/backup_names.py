"""Which files of a folder are scheduled backups, and when each was made."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ingero.errors import StoreError

_NAME: Final = re.compile(r"echo-(\d{8}T\d{6}Z)\.db")
_STAMP: Final = "%Y%m%dT%H%M%SZ"


def name_backup(made: datetime) -> str:
    """The name of a backup that was made then, UTC."""
    return f"echo-{made.strftime(_STAMP)}.db"


def list_backups(folder: Path) -> list[Path]:
    """The backups of a folder that `BackupSchedule` made, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(one for one in folder.iterdir() if _NAME.fullmatch(one.name))


def stamp_of(backup: Path) -> datetime:
    """When a backup was made, by its name."""
    found = _NAME.fullmatch(backup.name)
    assert found is not None
    return datetime.strptime(found[1], _STAMP).replace(tzinfo=UTC)


def choose_backup(folder: Path, until: datetime | None) -> Path:
    """The backup to restore: the newest, or the first that has all that arrived until a time.

    Raises:
        StoreError: There is none.
    """
    found = list_backups(folder)
    if not found:
        raise StoreError(f"{folder} has no backup, which is named echo-….db")
    later = [one for one in found if until is not None and stamp_of(one) > until]
    return later[0] if later else found[-1]
