"""``file_storage``: keeps what waits in exporters' queues on disk, so that it outlives a killed process.

How a batch is kept is `ingero.otlp.client.batch_folder`'s. Without ``fsync`` a killed process loses nothing and a
machine that loses power may lose the last batches, which are found damaged then.

Lossy: batches found damaged are set aside as ``*.damaged`` and counted in
``ingero_fleet_storage_damaged_batches_total``.

Source: opentelemetry-collector-contrib ``extension/storage/filestorage`` (key names, defaults of ``timeout``, ``fsync``
and ``directory_permissions``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final
from urllib.parse import quote

from pydantic import Field

from ingero.config import Duration, StrictModel
from ingero.errors import IngeroError
from ingero.fleet.component import BatchStorage, BatchStore, ComponentId, Host, Stability
from ingero.fleet.factory import ExtensionFactory
from ingero.otlp.client.batch_folder import BatchFolder, BatchFolderSettings
from ingero.telemetry.declare import counter
from ingero.telemetry.limited import RateLimitedLog
from ingero.units import NS_PER_S, parse_duration

WRITE_FAILURES: Final = counter(
    "ingero_fleet_storage_write_failures_total",
    "Batches that the disk did not take; their pushers keep them.",
    "extension",
)
READ_FAILURES: Final = counter(
    "ingero_fleet_storage_read_failures_total",
    "Times a stored batch could not be read for now, as with too many open files; it stays and is read again.",
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
    read_failed: Callable[[float], None]
    remove_failed: Callable[[float], None]
    damaged: Callable[[float], None]
    log: RateLimitedLog

    def note_write_failure(self, reason: str) -> None:
        """See `FolderLosses`."""
        self.write_failed(1)
        self.log.write("write", logging.WARNING, reason)

    def note_read_failure(self, reason: str) -> None:
        """See `FolderLosses`."""
        self.read_failed(1)
        self.log.write("read", logging.WARNING, reason)

    def note_remove_failure(self, reason: str) -> None:
        """See `FolderLosses`."""
        self.remove_failed(1)
        self.log.write("remove", logging.WARNING, reason)

    def note_damaged(self, place: Path, reason: str) -> None:
        """See `FolderLosses`."""
        self.damaged(1)
        message = "stored batch is damaged and set aside"
        self.log.write("damaged", logging.ERROR, message, file=str(place), reason=reason)


class FileStorage:
    """Opens a folder for each queue."""

    def __init__(self, component: ComponentId, config: FileStorageConfig) -> None:
        self._name = str(component)
        self._config = config
        self._stores: list[BatchFolder] = []

    async def start(self, host: Host) -> None:
        """Make the folder and offer it. Raises IngeroError where nothing can be written there."""
        labels = {"extension": self._name}
        self._clock = host.clock
        self._losses = _Losses(
            host.meter.counter(WRITE_FAILURES).bound(**labels),
            host.meter.counter(READ_FAILURES).bound(**labels),
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

    def find_place(self, owner: str) -> str:
        """The folder of one component's queue, as an absolute path."""
        return str(self._find_folder(owner).resolve())

    def open_store(self, owner: str) -> BatchStore:
        """The queue of one component. Raises IngeroError when it cannot be used."""
        config = self._config
        mode = int(config.directory_permissions, 8)
        settings = BatchFolderSettings(self._find_folder(owner), mode, config.timeout, config.fsync)
        store = BatchFolder(settings, self._losses, self._clock)
        self._stores.append(store)
        return store

    def _find_folder(self, owner: str) -> Path:
        return Path(self._config.directory, quote(owner, safe=""))

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
    description="Keeps exporters' queues on disk, so that a killed process loses nothing.",
    stability=Stability.BETA,
    metrics=(WRITE_FAILURES, READ_FAILURES, REMOVE_FAILURES, DAMAGED),
    create=FileStorage,
    check_files=_check_files,
)
