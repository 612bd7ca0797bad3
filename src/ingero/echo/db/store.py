"""`Store`: the face of the database for everyone above: put rows, read with a deadline, know how it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ingero.echo.db.backend import DatabaseBackend
from ingero.echo.db.clickhouse.settings import ClickHouseSettings
from ingero.echo.db.duckdb_backend import DuckDbBackend
from ingero.echo.db.engine import MEMORY, DatabaseSettings
from ingero.echo.db.lock import FileLock
from ingero.echo.db.read_only import NOT_WRITTEN, ReadOnlyBackend
from ingero.echo.db.reader import Reader
from ingero.echo.db.replica import ReplicaBackend
from ingero.echo.db.rows import Rows
from ingero.echo.db.usage import UsageLedger
from ingero.echo.db.write_queue import Done
from ingero.echo.db.writer import Writer
from ingero.echo.db.writer_settings import DatabaseWriterSettings
from ingero.errors import IngeroError, RetryableError, StoreError, UnsupportedError
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S, format_size

_FULL_RETRY_NS: Final = NS_PER_S
_DISK_RETRY_NS: Final = 30 * NS_PER_S


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The store's limits.

    Attributes:
        engine: The resources of a DuckDB instance, and whether the file is only read.
        clickhouse: The server to use instead of a file; its disk and memory are its own business.
        replica_of: A folder of backups to answer from, instead of a file that is written.
        writer: Grouping and retention.
        max_waiting_rows: Rows in memory above which new ones are refused with "send again".
        max_waiting_bytes: The same for the bytes of the requests that they came in.
        min_free_bytes: Free space below which new rows are refused and reads go on.
        free_space_every_ns: How old a reading of the free space may be.
    """

    engine: DatabaseSettings = field(default_factory=DatabaseSettings)
    clickhouse: ClickHouseSettings | None = None
    replica_of: Path | None = None
    writer: DatabaseWriterSettings = field(default_factory=DatabaseWriterSettings)
    max_waiting_rows: int = 500_000
    max_waiting_bytes: int = 256 << 20
    min_free_bytes: int = 512 << 20
    free_space_every_ns: int = NS_PER_S


class Store:
    """One database, its writer and its readers.

    Args:
        path: The file, or ``:memory:``; with ClickHouse what messages say of the server.
        settings: Limits.
        clock: Time.
        read_free_bytes: Free space where the file is; for tests, None asks the file system.
    """

    def __init__(
        self,
        path: str,
        settings: StoreSettings,
        clock: Clock,
        read_free_bytes: Callable[[], int] | None = None,
    ) -> None:
        self.path = path
        self._settings = settings
        self._clock = clock
        self._read_free_bytes = read_free_bytes or self._statvfs
        self.backend: DatabaseBackend
        if settings.replica_of is not None:
            self.backend = ReplicaBackend(settings.replica_of, settings.engine)
        elif settings.clickhouse is not None:
            self.backend = _build_clickhouse(settings.clickhouse, clock)
        elif settings.engine.is_read_only:
            self.backend = ReadOnlyBackend(Path(path), settings.engine)
        else:
            self.backend = DuckDbBackend(path, settings.engine)
        self._writer = Writer(self.backend, settings.writer, clock)
        self.counters = self._writer.counters
        self._lock = FileLock(path)
        self._free_bytes = -1
        self._free_read_ns = -settings.free_space_every_ns
        self.refused_full = 0
        self.refused_disk = 0

    @property
    def is_file(self) -> bool:
        """Whether `path` is a file of ours, to be written."""
        return self.path != MEMORY and isinstance(self.backend, DuckDbBackend)

    @property
    def usage(self) -> UsageLedger:
        """Who had how much kept."""
        return self._writer.usage

    @property
    def n_waiting(self) -> int:
        """Rows taken and not yet on disk."""
        return self._writer.queue.n_rows

    @property
    def clock_ahead_s(self) -> float:
        """How far the clock is ahead of the time that is known to have passed; 0 where retention goes by it."""
        return self._writer.upkeep.time.ahead_s

    @property
    def is_dead(self) -> bool:
        """Nothing will be written any more, until the process is started again."""
        return self._writer.is_dead

    def on_death(self, action: Callable[[], object]) -> None:
        """Have ``action`` called, on another thread, when nothing will be written any more."""
        self._writer.on_death = action

    @property
    def trouble(self) -> str:
        """Why the store cannot write now, or empty."""
        if self._writer.broken:
            return self._writer.broken
        free = self._free()
        if free < self._settings.min_free_bytes:
            return (
                f"only {format_size(free)} free where the database is; "
                f"ingest stops below {format_size(self._settings.min_free_bytes)}"
            )
        return ""

    def open(self) -> None:
        """Open the file, creating it and its directory unless it is only read.

        Raises:
            StoreError: The hint says what would help.
        """
        if self.is_file:
            try:
                Path(self.path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(
                    f"cannot create {Path(self.path).parent}: {error.strerror}"
                ) from error
            self._lock.acquire()
        elif self._settings.engine.is_read_only:
            self._lock.share()
        try:
            self._writer.open()
        except IngeroError:
            self._lock.release()
            raise

    def close(self) -> None:
        """Commit what waits and close the file."""
        self._writer.close()
        self._lock.release()

    def put(self, rows: Rows, done: Done) -> None:
        """Take rows; ``done`` is called on another thread with None once they are durable, or with the error.

        Raises:
            RetryableError: Too much waits already, or the disk is nearly full; nothing was taken.
            StoreError: Nothing is ever taken here.
        """
        if self.backend.is_read_only:
            raise StoreError(NOT_WRITTEN)
        queue, settings = self._writer.queue, self._settings
        waiting = queue.n_rows
        is_full = waiting + rows.n_rows > settings.max_waiting_rows
        if waiting and (is_full or queue.n_bytes + rows.n_bytes > settings.max_waiting_bytes):
            self.refused_full += rows.n_rows
            raise RetryableError(f"{waiting} rows wait for the disk", retry_after_ns=_FULL_RETRY_NS)
        if self._free() < self._settings.min_free_bytes:
            self.refused_disk += rows.n_rows
            raise RetryableError("the disk is nearly full", retry_after_ns=_DISK_RETRY_NS)
        queue.put(rows, done)

    def write(self, rows: Rows) -> None:
        """Put rows and wait until they are durable. For tools and tests.

        Raises:
            IngeroError: They were not taken or not written.
        """
        future: Future[IngeroError | None] = Future()
        self.put(rows, future.set_result)
        if (error := future.result()) is not None:
            raise error

    def open_reader(self, timeout_ns: int) -> AbstractContextManager[Reader]:
        """A reader with a deadline."""
        return self.backend.open_reader(timeout_ns)

    def call(self, job: Callable[[Any], Any]) -> Future[Any]:
        """Run a job of ``echo.db`` on the writer's connection; only a file has such jobs."""
        return self._writer.queue.call(job)

    def _free(self) -> int:
        now_ns = self._clock.mono_ns()
        if now_ns - self._free_read_ns >= self._settings.free_space_every_ns:
            self._free_bytes = self._read_free_bytes()
            self._free_read_ns = now_ns
        return self._free_bytes

    def _statvfs(self) -> int:
        if not self.is_file:
            return 1 << 62
        stat = os.statvfs(Path(self.path).parent)
        return stat.f_bavail * stat.f_frsize


def _build_clickhouse(settings: ClickHouseSettings, clock: Clock) -> DatabaseBackend:
    try:
        from ingero.echo.db.clickhouse.backend import ClickHouseBackend  # noqa: PLC0415 - an extra's
    except ModuleNotFoundError as missing:
        raise UnsupportedError(
            f"this installation has no {missing.name}", hint="pip install 'ingero[clickhouse]'"
        ) from missing
    return ClickHouseBackend(settings, clock)
