"""``file``: one OTLP/JSON request per line, with rotation. A rotation that fails leaves the lines in the old file.

Source: opentelemetry-collector-contrib ``exporter/fileexporter`` (key names; its JSON encoding is one request a line).
Left out: protobuf, compression and routing by attribute.
"""

from __future__ import annotations

import glob
import io
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pydantic import Field

from ingero.config import Duration, StrictModel
from ingero.errors import IngeroError, RetryableError
from ingero.fleet.component import ComponentId, Host, Stability
from ingero.fleet.consumer import Batch
from ingero.fleet.factory import ExporterFactory
from ingero.otlp.codec import encode_json
from ingero.telemetry.declare import counter
from ingero.telemetry.limited import RateLimitedLog
from ingero.units import NS_PER_S, parse_duration

WRITTEN: Final = counter(
    "ingero_fleet_file_written_bytes_total", "Bytes written to the file.", "exporter"
)
ROTATIONS: Final = counter(
    "ingero_fleet_file_rotations_total", "Times the file was set aside for a new one.", "exporter"
)

UNFLUSHED: Final = counter(
    "ingero_fleet_file_flush_failures_total",
    "Times the disk did not take waiting lines; those that wait at the end are lost.",
    "exporter",
)

_log = logging.getLogger("ingero.fleet.exporters.file")
_LOG_FLUSH_NS: Final = 10 * NS_PER_S
_MB: Final = 1_000_000
_OPENED: Final = ("", "files that exporters opened")
"""Of no component, so it outlives every reload: what this process wrote is not emptied by its next configuration."""
_BUFFER_BYTES: Final = 8192
"""From so much on, waiting lines are written at once."""


class RotationConfig(StrictModel):
    """When a file is set aside, and how many are kept."""

    max_megabytes: int = Field(100, ge=1, description="Size in MB at which a file is set aside.")
    max_backups: int = Field(100, ge=0, description="Files set aside that are kept; 0 keeps all.")


class FileConfig(StrictModel):
    """Where the lines go."""

    path: str = Field(min_length=1, description="The file.")
    append: bool = Field(
        default=False,
        description="Add to an existing file instead of emptying it when Fleet starts. A file with rotation is never"
        " emptied, and none is when the configuration is read again.",
    )
    rotation: RotationConfig | None = Field(
        None, description="When a file is set aside; empty is never."
    )
    flush_interval: Duration = Field(
        parse_duration("1s"), gt=0, description="How often written lines reach the disk."
    )


class FileExporter:
    """Writes batches to one file."""

    def __init__(self, component: ComponentId, config: FileConfig) -> None:
        self._name = str(component)
        self._config = config
        self._path = Path(config.path)
        self._lock = threading.Lock()
        self._file: io.FileIO | None = None
        self._waiting = bytearray()
        self._size = 0

    async def start(self, host: Host) -> None:
        """Open the file. Raises IngeroError when that fails."""
        self._clock = host.clock
        self._written = host.meter.counter(WRITTEN).bound(exporter=self._name)
        self._rotated = host.meter.counter(ROTATIONS).bound(exporter=self._name)
        self._unflushed = host.meter.counter(UNFLUSHED).bound(exporter=self._name)
        opened = host.shared(_OPENED, set[Path])
        is_kept = self._config.append or self._config.rotation is not None or self._path in opened
        try:
            self._open("ab" if is_kept else "wb")
        except OSError as error:
            raise IngeroError(f"cannot write {self._path}: {error.strerror or error}") from error
        opened.add(self._path)
        host.every(self._config.flush_interval, self._flush)
        self._log = RateLimitedLog(_log, host.clock)
        host.every(_LOG_FLUSH_NS, self._log.flush)

    async def stop(self) -> None:
        """Write everything out and close."""
        with self._lock:
            if self._file is not None:
                try:
                    with self._file:
                        self._write_waiting(self._file)
                except OSError as error:
                    self._unflushed(1)
                    _log.warning("exporters.%s lost its last lines: %s", self._name, error)
                self._file = None

    def consume(self, batch: Batch) -> None:
        """Write one line.

        Raises:
            RetryableError: The disk did not take it.
        """
        line = encode_json(batch.export) + b"\n"
        with self._lock, _disk(self._path):
            if self._file is None:
                raise RetryableError(f"exporters.{self._name} is not open")
            if len(self._waiting) >= _BUFFER_BYTES:  # the disk was full
                self._write_waiting(self._file)
            rotation = self._config.rotation
            if rotation and self._size and self._size + len(line) > rotation.max_megabytes * _MB:
                self._try_to_rotate(rotation)
            self._add(self._file, line)
        self._written(len(line))

    def _add(self, file: io.FileIO, line: bytes) -> None:
        """Take a line. Raises OSError without it; one that the disk took in part is taken, and its rest waits."""
        self._waiting += line
        self._size += len(line)
        if len(self._waiting) < _BUFFER_BYTES:
            return
        try:
            self._write_waiting(file)
        except OSError:
            if len(self._waiting) < len(line):
                return
            del self._waiting[-len(line) :]
            self._size -= len(line)
            raise

    def _write_waiting(self, file: io.FileIO) -> None:
        """Raises OSError; what the disk did not take goes on waiting."""
        while self._waiting:
            n_written = file.write(self._waiting)
            del self._waiting[:n_written]

    def _flush(self) -> None:
        with self._lock:
            if self._file is not None:
                try:
                    self._write_waiting(self._file)
                except OSError as error:
                    self._unflushed(1)
                    _log.warning("exporters.%s cannot write %s: %s", self._name, self._path, error)

    def _open(self, mode: str) -> None:
        self._file = io.FileIO(self._path, mode)
        self._size = os.fstat(self._file.fileno()).st_size
        if self._size and self._path.is_file() and not _ends_with_line(self._path):
            self._waiting += b"\n"  # its writer was killed, or its disk was full

    def _try_to_rotate(self, rotation: RotationConfig) -> None:
        """Begin a new file; where that fails the old one goes on, until the next line tries again."""
        try:
            self._rotate()
            self._rotated(1)
            self._remove_oldest(rotation)
        except OSError as error:
            message = "rotation failed; lines go on, and it is tried again"
            path, why = str(self._path), str(error)
            self._log.write(
                "rotation", logging.WARNING, message, exporter=self._name, file=path, error=why
            )

    def _rotate(self) -> None:
        """Set the file aside and open a new one. Raises OSError, with the old one open and in its place."""
        old = self._file
        assert old is not None
        self._write_waiting(old)
        stamp = datetime.fromtimestamp(self._clock.wall_ns() / NS_PER_S, UTC)
        name = f"{self._path.stem}-{stamp:%Y-%m-%dT%H-%M-%S.%f}{self._path.suffix}"
        aside = self._path.with_name(name)
        with suppress(FileNotFoundError):  # somebody else set it aside already
            self._path.rename(aside)
        try:
            self._open("wb")
        except OSError:
            with suppress(OSError):
                aside.rename(self._path)
            raise
        old.close()

    def _remove_oldest(self, rotation: RotationConfig) -> None:
        if rotation.max_backups:
            stem, suffix = glob.escape(self._path.stem), glob.escape(self._path.suffix)
            kept = sorted(self._path.parent.glob(f"{stem}-????-??-??T*{suffix}"))
            for old in kept[: -rotation.max_backups]:
                old.unlink()


def _ends_with_line(path: Path) -> bool:
    """Whether the last line of a file that is not empty is whole; taken for so where it may not be read."""
    with suppress(PermissionError), path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
    return True


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RetryableError(f"cannot write {path}: {error.strerror or error}") from error


def _check_files(config: FileConfig) -> None:
    path = Path(config.path)
    if path.exists() and not os.access(path, os.W_OK):
        raise IngeroError(f"{path}: may not be written")
    if path.exists() and config.rotation is None:
        return
    if not path.parent.exists():
        raise IngeroError(f"{path.parent}: no such folder")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        hint = "rotation makes a new file there" if path.exists() else ""
        raise IngeroError(f"{path.parent}: may not be written", hint=hint)


FACTORY: Final = ExporterFactory(
    type="file",
    config=FileConfig,
    description="Writes one OTLP/JSON request per line.",
    stability=Stability.BETA,
    metrics=(WRITTEN, ROTATIONS, UNFLUSHED),
    create=FileExporter,
    check_files=_check_files,
    example={"path": "/var/lib/ingero-fleet/otlp.jsonl"},
)
