"""``file_storage``: keeps what waits in exporters' queues on disk, so that it outlives a killed process.

A batch is a file of its own, written beside its place and renamed into it. Removing one therefore needs no space on a
full disk, a damaged one harms no other, and there is nothing to compact. Without ``fsync`` a killed process loses
nothing and a machine that loses power may lose the last batches, which are found damaged then.

Lossy: batches found damaged are set aside as ``*.damaged`` and counted in
``ingero_fleet_storage_damaged_batches_total``.

Source: opentelemetry-collector-contrib ``extension/storage/filestorage`` (key names, defaults of ``timeout``, ``fsync``
and ``directory_permissions``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar, Final
from urllib.parse import quote

from pydantic import Field

from ingero.config import Duration, StrictModel
from ingero.errors import BadDataError, IngeroError, RetryableError
from ingero.fleet.component import BatchStorage, BatchStore, ComponentId, Host, Stability
from ingero.fleet.factory import ExtensionFactory
from ingero.telemetry.clock import Clock
from ingero.telemetry.declare import counter
from ingero.telemetry.limited import RateLimitedLog
from ingero.units import NS_PER_S, parse_duration

WRITE_FAILURES: Final = counter(
    "ingero_fleet_storage_write_failures_total",
    "Batches that the disk did not take; their pushers keep them.",
    "extension",
)
REMOVE_FAILURES: Final = counter(
    "ingero_fleet_storage_remove_failures_total",
    "Settled batches that the disk did not remove; the next start sends them again.",
    "extension",
)
DAMAGED: Final = counter(
    "ingero_fleet_storage_damaged_batches_total",
    "Stored batches that could not be read and were set aside.",
    "extension",
)
_log = logging.getLogger("ingero.fleet.extensions.file_storage")

_MAGIC: Final = b"IGS1"
_HEAD_BYTES: Final = len(_MAGIC) + 4
_NAME: Final = re.compile(r"\d{20}")
_LOCK_POLL_S: Final = 0.05
_COMPACTION: Final = "a batch is a file of its own, so there is nothing to compact"


class FileStorageConfig(StrictModel):
    """Where it is kept, and how safely."""

    absent_keys: ClassVar[Mapping[str, str]] = {
        "compaction": _COMPACTION,
        "recreate": "a damaged batch is set aside and the others are kept, always",
    }

    directory: str = Field(
        "/var/lib/ingero-fleet/storage", min_length=1, description="Folder of all stored batches."
    )
    create_directory: bool = Field(
        default=True, description="Make the folder where it is missing, else refuse to start."
    )
    directory_permissions: str = Field(
        "0750", pattern="^0?[0-7]{3}$", description="Mode of a folder that is made, in octal."
    )
    timeout: Duration = Field(
        parse_duration("1s"),
        description="Longest wait for another process that holds the same queue.",
    )
    fsync: bool = Field(
        default=False,
        description="Wait for the disk at each batch: nothing is lost when the machine loses power.",
    )


@dataclass(slots=True)
class _Losses:
    """What the stores of one extension count, and their log."""

    write_failed: Callable[[float], None]
    remove_failed: Callable[[float], None]
    damaged: Callable[[float], None]
    log: RateLimitedLog


class FolderStore:
    """The batches of one queue, in one folder.

    Args:
        folder: Made if it is missing.
        config: Of the extension.
        losses: Counts what goes wrong.
        clock: For the wait for another process.

    Raises:
        IngeroError: The folder cannot be used, or another process uses it.
    """

    def __init__(
        self, folder: Path, config: FileStorageConfig, losses: _Losses, clock: Clock
    ) -> None:
        self._folder = folder
        self._is_synced = config.fsync
        self._losses = losses
        try:
            folder.mkdir(int(config.directory_permissions, 8), exist_ok=True)
            self._lock = _lock(folder / "lock", config.timeout, clock)
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
                self._sync_folder()
        except OSError as error:
            for rest in (aside, place):
                with contextlib.suppress(OSError):
                    rest.unlink()
            reason = f"cannot write {place}: {error.strerror or error}"
            self._losses.write_failed(1)
            self._losses.log.write("write", logging.WARNING, reason)
            raise RetryableError(reason) from error
        self._next += 1
        return self._next - 1

    def read(self, key: int) -> bytes:
        """One batch. Raises BadDataError when it is damaged or cannot be read."""
        place = self._place(key)
        try:
            found = place.read_bytes()
        except OSError as error:
            raise BadDataError(error.strerror or str(error)) from error
        stored = found[_HEAD_BYTES:]
        head = _MAGIC + zlib.crc32(stored).to_bytes(4, "little")
        if found[:_HEAD_BYTES] != head:
            raise BadDataError(f"{len(found)} bytes whose checksum is wrong")
        return stored

    def remove(self, key: int) -> None:
        """Forget one batch."""
        try:
            self._place(key).unlink(missing_ok=True)
        except OSError as error:
            self._losses.remove_failed(1)
            reason = f"cannot remove {self._place(key)}: {error.strerror or error}"
            self._losses.log.write("remove", logging.WARNING, reason)

    def set_aside(self, key: int, reason: str) -> None:
        """Keep a damaged batch out of the way, for a person to look at."""
        place = self._place(key)
        self._losses.damaged(1)
        message = "stored batch is damaged and set aside"
        self._losses.log.write("damaged", logging.ERROR, message, file=str(place), reason=reason)
        with contextlib.suppress(OSError):
            place.rename(place.with_suffix(".damaged"))

    def close(self) -> None:
        """Let another process have the queue."""
        self._lock.close()

    def _place(self, key: int) -> Path:
        return self._folder / f"{key:020d}"

    def _sync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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


class FileStorage:
    """Opens a folder for each queue."""

    def __init__(self, component: ComponentId, config: FileStorageConfig) -> None:
        self._name = str(component)
        self._config = config
        self._stores: list[FolderStore] = []

    async def start(self, host: Host) -> None:
        """Make the folder and offer it. Raises IngeroError where nothing can be written there."""
        labels = {"extension": self._name}
        self._clock = host.clock
        self._losses = _Losses(
            host.meter.counter(WRITE_FAILURES).bound(**labels),
            host.meter.counter(REMOVE_FAILURES).bound(**labels),
            host.meter.counter(DAMAGED).bound(**labels),
            RateLimitedLog(_log, host.clock, burst=5),
        )
        host.every(10 * NS_PER_S, self._losses.log.flush)
        self._make_folder()
        _check_files(self._config)
        host.offer(BatchStorage, self)

    async def stop(self) -> None:
        """Let other processes have the queues."""
        while self._stores:
            self._stores.pop().close()

    def open_store(self, owner: str) -> BatchStore:
        """The queue of one component. Raises IngeroError when it cannot be used."""
        folder = Path(self._config.directory, quote(owner, safe=""))
        store = FolderStore(folder, self._config, self._losses, self._clock)
        self._stores.append(store)
        return store

    def _make_folder(self) -> None:
        if not self._config.create_directory:
            return
        try:
            mode = int(self._config.directory_permissions, 8)
            Path(self._config.directory).mkdir(mode, parents=True, exist_ok=True)
        except OSError as error:
            message = f"cannot make {self._config.directory}: {error.strerror or error}"
            raise IngeroError(message) from error


def _check_files(config: FileStorageConfig) -> None:
    """Whether batches can be stored, as far as that is known without writing."""
    folder = Path(config.directory)
    if not folder.exists() and not config.create_directory:
        raise IngeroError(f"{folder}: no such folder", hint="set create_directory: true")
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise IngeroError(f"{folder}: not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise IngeroError(f"{folder}: may not be written")


FACTORY: Final = ExtensionFactory(
    type="file_storage",
    config=FileStorageConfig,
    says="Keeps exporters' queues on disk, so that a killed process loses nothing.",
    stability=Stability.BETA,
    metrics=(WRITE_FAILURES, REMOVE_FAILURES, DAMAGED),
    create=FileStorage,
    check_files=_check_files,
)
