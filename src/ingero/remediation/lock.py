"""Who may act: one process per journal."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from ingero.closing import Closing
from ingero.errors import StoreError


class JournalLock(Closing):
    """A lock on the file beside a journal; the kernel lets go of it when its holder ends in any way.

    Args:
        journal: The journal's file.

    Raises:
        StoreError: The file cannot be made.
    """

    def __init__(self, journal: Path) -> None:
        path = journal.with_name(journal.name + ".lock")
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"cannot make {path}: {error.strerror}", hint="does its folder exist?"
            ) from error

    def take(self) -> bool:
        """Take it if it is free; whether it is ours now."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Let go of it."""
        os.close(self._fd)
