"""One writer per recording: a lock for the writer's life, and room kept on the disk for its last words.

The lock is on a file of its own beside the recording (``<name>.lock``), because the recording is renamed when it is set
aside. The kernel drops it when the process ends in any way. The file also occupies `RESERVE_BYTES`, which are given
back when the disk is full, so that what was lost can still be written down.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

from ingero.errors import StoreError

RESERVE_BYTES: Final = 512 << 10
_MIN_RESERVE_BYTES: Final = 128 << 10
_NO_LOCKS: Final = frozenset((errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL))
"""What ``flock`` says on a file system without locks (flock(2); EOPNOTSUPP and ENOSYS from network file systems)."""


class WriterLock:
    """Held from construction to `release`.

    Args:
        path: The recording, without symbolic links.
        owner: User and group that a new lock file is given to; None leaves the process's own.
        limit_bytes: Size that the recording may have, 0 for no limit; a small one gets a small reserve.

    Attributes:
        warning: Why nothing is locked here; empty when it is.

    Raises:
        StoreError: Another writer holds it, or the file cannot be made.
    """

    def __init__(
        self, path: Path, owner: tuple[int, int] | None = None, limit_bytes: int = 0
    ) -> None:
        self.warning = ""
        self._path = path.with_name(path.name + ".lock")
        self._recording = path
        self._full_bytes = RESERVE_BYTES
        if limit_bytes:
            self._full_bytes = min(max(limit_bytes // 16, _MIN_RESERVE_BYTES), RESERVE_BYTES)
        self._reserved_bytes = 0
        self._fd = self._acquire()
        if owner is not None:
            os.fchown(self._fd, *owner)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        self.has_room()

    def _acquire(self) -> int:
        while True:
            try:
                fd = os.open(
                    self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
                )
            except OSError as error:
                raise StoreError(
                    f"{self._path}: {error.strerror}", hint="choose another file with --db"
                ) from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    holder = _read_holder(fd)
                    os.close(fd)
                    raise StoreError(
                        f"{self._recording}: {holder} records into it",
                        hint="end that one, or choose another file with --db, or --no-record",
                    ) from error
                self.warning = (
                    f"{self._recording}: its file system has no locks ({error.strerror}); "
                    "make sure that nobody else records into it"
                )
                return fd
            if self._is_in_place(fd):
                return fd
            os.close(fd)  # its last holder removed it meanwhile

    def _is_in_place(self, fd: int) -> bool:
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        here = os.fstat(fd)
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def has_room(self) -> bool:
        """Whether the whole reserve is on the disk; takes what is missing of it. False means that the disk is full."""
        if self._reserved_bytes < self._full_bytes:
            try:
                os.posix_fallocate(self._fd, 0, self._full_bytes)
            except OSError as error:
                if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                    return True  # a file system that cannot reserve
                os.ftruncate(self._fd, max(self._reserved_bytes, 4096))
                return False
            self._reserved_bytes = self._full_bytes
        return True

    def give_back(self, *, everything: bool = False) -> None:
        """Free half of the reserve for what has to be written on a full disk; all of it at the end."""
        self._reserved_bytes = 0 if everything else min(self._reserved_bytes, self._full_bytes // 2)
        os.ftruncate(self._fd, max(self._reserved_bytes, 4096))

    def release(self) -> None:
        """Remove the file and let go; a process that opened it meanwhile sees that it is gone."""
        if self._fd < 0:
            return
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1


def _read_holder(fd: int) -> str:
    pid = os.pread(fd, 32, 0).split(b"\n")[0]
    return f"process {int(pid)}" if pid.isdigit() else "another process"
