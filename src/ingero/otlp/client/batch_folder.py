"""Batches that wait on disk until they are delivered: a folder in which each is a file of its own.

A batch is written beside its place and renamed into it. Removing one therefore needs no space on a full disk, a damaged
one harms no other, and there is nothing to compact. Without ``is_synced`` a killed process loses nothing and a machine
that loses power may lose the last batches, which are found damaged then. See ``docs/decisions/0067``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Protocol

from ingero.errors import BadDataError, IngeroError, RetryableError
from ingero.telemetry.clock import Clock
from ingero.whole_files import sync_folder

_MAGIC: Final = b"IGS1"
HEAD_BYTES: Final = len(_MAGIC) + 4
"""What a file has before its batch."""
_NAME: Final = re.compile(r"\d{20}")
_LOCK_POLL_S: Final = 0.05
_GONE: Final = frozenset({errno.ENOENT, errno.EIO})
"""Why one file cannot be read, now or later: it is missing, or a sector of it is bad. Any other reason is one of the
process or of the machine, such as too many open files, and passes."""


class FolderLosses(Protocol):
    """Counts what goes wrong, for a reader whom a user meets."""

    def note_write_failure(self, reason: str) -> None:
        """A batch was not stored; who wrote it keeps it."""
        ...

    def note_remove_failure(self, reason: str) -> None:
        """A settled batch stays, and the next process sends it again."""
        ...

    def note_read_failure(self, reason: str) -> None:
        """A batch could not be read for now; it stays where it is."""
        ...

    def note_damaged(self, place: Path, reason: str) -> None:
        """A batch cannot be read and was set aside."""
        ...


@dataclass(frozen=True, slots=True)
class BatchFolderSettings:
    """How a folder is kept.

    Attributes:
        folder: Made if it is missing; its parent must be there.
        mode: Of a folder that is made.
        lock_timeout_ns: Longest wait for another process that holds it.
        is_synced: Wait for the disk at each batch.
    """

    folder: Path
    mode: int = 0o750
    lock_timeout_ns: int = 0
    is_synced: bool = False


class BatchFolder:
    """The batches of one queue, for one process at a time.

    Args:
        settings: How it is kept.
        losses: Counts what goes wrong.
        clock: For the wait for another process.

    Raises:
        IngeroError: The folder cannot be used, or another process uses it.
    """

    def __init__(self, settings: BatchFolderSettings, losses: FolderLosses, clock: Clock) -> None:
        self._folder = folder = settings.folder
        self._is_synced = settings.is_synced
        self._losses = losses
        try:
            folder.mkdir(settings.mode, exist_ok=True)
            self._lock = _lock(folder / "lock", settings.lock_timeout_ns, clock)
            for rest in folder.glob("*.tmp"):
                rest.unlink()  # none of these was acknowledged
            self._keys = sorted(
                int(one.name) for one in folder.iterdir() if _NAME.fullmatch(one.name)
            )
        except OSError as error:
            raise IngeroError(f"cannot use {folder}: {error.strerror or error}") from error
        self._next = self._keys[-1] + 1 if self._keys else 1

    def list_keys(self) -> list[int]:
        """Those that an earlier process left, oldest first."""
        return list(self._keys)

    def measure(self, key: int) -> int:
        """Bytes of one batch's file; 0 when it is not there."""
        try:
            return self._place(key).stat().st_size
        except OSError:
            return 0

    def write(self, stored: bytes) -> int:
        """Store one batch; its key. Raises RetryableError when the disk does not take it."""
        place = self._place(self._next)
        aside = place.with_suffix(".tmp")
        try:
            with aside.open("wb") as file:
                file.write(_MAGIC + zlib.crc32(stored).to_bytes(4, "little") + stored)
                if self._is_synced:
                    file.flush()
                    os.fsync(file.fileno())
            aside.rename(place)
            if self._is_synced:
                sync_folder(self._folder)
        except OSError as error:
            for rest in (aside, place):
                with contextlib.suppress(OSError):
                    rest.unlink()
            reason = f"cannot write {place}: {error.strerror or error}"
            self._losses.note_write_failure(reason)
            raise RetryableError(reason) from error
        self._next += 1
        return self._next - 1

    def read(self, key: int) -> bytes:
        """One batch.

        Raises:
            BadDataError: It is damaged or gone.
            RetryableError: It cannot be read for now, which says nothing of the batch.
        """
        place = self._place(key)
        try:
            found = place.read_bytes()
        except OSError as error:
            if error.errno in _GONE:
                raise BadDataError(error.strerror or str(error)) from error
            reason = f"cannot read {place}: {error.strerror or error}"
            self._losses.note_read_failure(reason)
            raise RetryableError(reason) from error
        stored = found[HEAD_BYTES:]
        head = _MAGIC + zlib.crc32(stored).to_bytes(4, "little")
        if found[:HEAD_BYTES] != head:
            raise BadDataError(f"{len(found)} bytes whose checksum is wrong")
        return stored

    def remove(self, key: int) -> None:
        """Forget one batch."""
        try:
            self._place(key).unlink(missing_ok=True)
        except OSError as error:
            reason = f"cannot remove {self._place(key)}: {error.strerror or error}"
            self._losses.note_remove_failure(reason)

    def set_aside(self, key: int, reason: str) -> None:
        """Keep a damaged batch out of the way, for a person to look at."""
        place = self._place(key)
        self._losses.note_damaged(place, reason)
        with contextlib.suppress(OSError):
            place.rename(place.with_suffix(".damaged"))

    def close(self) -> None:
        """Let another process have the queue."""
        self._lock.close()

    def _place(self, key: int) -> Path:
        return self._folder / f"{key:020d}"


def _lock(file: Path, timeout_ns: int, clock: Clock) -> IO[bytes]:
    """Hold a file for this process alone, until what is returned is closed."""
    held = file.open("wb")
    until_ns = clock.mono_ns() + timeout_ns
    pause = threading.Event()
    while True:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if clock.mono_ns() >= until_ns:
                held.close()
                raise OSError(errno.EBUSY, "another process holds this queue") from error
            pause.wait(_LOCK_POLL_S)
        except OSError:
            held.close()
            raise
        else:
            return held
