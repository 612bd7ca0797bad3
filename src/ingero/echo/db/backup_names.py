"""Which files of a folder are scheduled backups, in which order they were made, and when by the clock of then.

A clock that was wrong spoils the time in a name, so a number is in it too, and the order goes by that.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ingero.errors import StoreError

_NAME: Final = re.compile(r"echo-(\d{8}T\d{6}Z)(?:-(\d{1,12}))?\.db")
_STAMP: Final = "%Y%m%dT%H%M%SZ"


def name_backup(folder: Path, made: datetime) -> Path:
    """A name in a folder for the backup after all that are there, made at a time, UTC."""
    number = 1 + max((number for _, number in _read_names(folder).values()), default=0)
    return folder / f"echo-{made.strftime(_STAMP)}-{number:06}.db"


def list_backups(folder: Path) -> list[Path]:
    """The backups of a folder that `BackupSchedule` made, oldest first.

    Those of an earlier release have no number. They are older than those that have one, and go by the time in their
    names. Of them a time after that of one with a number was a clock's that was ahead: they are the oldest.
    """
    names = _read_names(folder)
    first = min((made for made, number in names.values() if number), default=None)

    def find_place(backup: Path) -> tuple[int, bool, datetime]:
        made, number = names[backup]
        is_believed = number > 0 or first is None or made <= first
        return number, is_believed, made

    return sorted(names, key=find_place)


def stamp_of(backup: Path) -> datetime:
    """When a backup was made, by its name."""
    found = _read_name(backup)
    assert found is not None
    return found[0]


def choose_backup(folder: Path, until: datetime | None) -> Path:
    """The backup to restore: the newest, or the first that surely has all that arrived until a time.

    One that names a later time than a backup after it is of a clock that was ahead, and may have been made before.

    Raises:
        StoreError: There is none.
    """
    found = list_backups(folder)
    if not found:
        raise StoreError(f"{folder} has no backup, which is named echo-….db")
    chosen = found[-1]
    if until is not None:
        least = stamp_of(chosen)
        for backup in reversed(found):
            made = stamp_of(backup)
            if until < made <= least:
                chosen = backup
            least = min(made, least)
    return chosen


def _read_names(folder: Path) -> dict[Path, tuple[datetime, int]]:
    if not folder.is_dir():
        return {}
    read = ((one, _read_name(one)) for one in folder.iterdir())
    return {one: found for one, found in read if found is not None}


def _read_name(backup: Path) -> tuple[datetime, int] | None:
    """The time in a name and the number, 0 where there is none; None for what is no backup's."""
    found = _NAME.fullmatch(backup.name)
    if found is None:
        return None
    try:
        made = datetime.strptime(found[1], _STAMP).replace(tzinfo=UTC)
    except ValueError:
        return None
    return made, int(found[2] or 0)
