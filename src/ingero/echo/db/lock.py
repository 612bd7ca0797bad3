"""Who has a database file: one process that may write, or several that read, for as long as they hold its lock file.

DuckDB's own lock is a POSIX one, which the kernel drops when *any* descriptor of the file is closed in the process that
holds it. This one is on a file of its own that nothing else opens, and belongs to its descriptor: it ends when the
descriptor is closed or the process is gone, however it went, so nothing is left that blocks the next start.

Sources: flock(2); fcntl(2), "Advisory record locking".
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ingero.echo.db.errors import LockedError
from ingero.errors import StoreError


def lock_path(path: str) -> Path:
    """Where the lock of a database file is, whatever link it is reached by."""
    return Path(f"{os.path.realpath(path)}.lock")


class FileLock:
    """The right to open one database file; kept until `release` or the end of the process.

    Args:
        path: The database file, which need not exist.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def acquire(self) -> None:
        """Take it.

        Raises:
            LockedError: Another process has it, or another part of this one.
            StoreError: There can be no lock file.
        """
        place = lock_path(self._path)
        try:
            fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StoreError(f"cannot lock {place}: {error.strerror}") from error
        self._hold(fd, fcntl.LOCK_EX)

    def share(self) -> None:
        """Take it together with others who only read. Where no lock file can be read, none is made and nothing is held.

        Raises:
            LockedError: Another process has the file to write it.
        """
        try:
            fd = os.open(lock_path(self._path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return  # DuckDB's own lock is left
        self._hold(fd, fcntl.LOCK_SH)

    def _hold(self, fd: int, kind: int) -> None:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if not isinstance(error, BlockingIOError):
                raise StoreError(
                    f"cannot lock {lock_path(self._path)}: {error.strerror}"
                ) from error
            raise LockedError(
                f"{self._path} is in use by another process",
                hint="Stop the ingero-echo that serves it; `ingero-echo backup` works beside it.",
            ) from error
        self._fd = fd

    def release(self) -> None:
        """Give it back. The lock file stays: removing it would let two processes hold locks of one name."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold the lock of a database file.

    Raises:
        LockedError: Another process has it.
        StoreError: There can be no lock file.
    """
    lock = FileLock(path)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def find_open(path: Path) -> int | None:
    """A descriptor that this process has on a file already; None where it has none.

    Only the code that opened it closes it: closing any descriptor of a file drops the POSIX locks of the whole process.
    """
    try:
        wanted = path.stat()
    except OSError:
        return None
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found = os.fstat(int(entry.name))
        except OSError:
            continue  # the descriptor of the listing itself
        if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
            return int(entry.name)
    return None
