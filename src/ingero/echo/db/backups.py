"""`BackupSchedule`: backups that a server makes of its own file: copied, opened, read whole, and only then named.

Ingest waits while the file is copied, as for ``ingero-echo backup``; the check is done beside it, on the copy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import duckdb

from ingero.echo.db.backup_names import list_backups, name_backup, stamp_of
from ingero.echo.db.backup_socket import copy_now, fill_copy
from ingero.echo.db.encryption import Encryption
from ingero.echo.db.engine import DatabaseSettings, check_there, open_engine, read_whole
from ingero.echo.db.files import make_copy
from ingero.echo.db.store import Store
from ingero.errors import IngeroError
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

_LOG: Final = logging.getLogger("ingero.echo")
_LOOK_S: Final = 5.0
_RETRY_NS: Final = 600 * NS_PER_S
"""A backup that failed is tried again after this, or after the interval where that is shorter."""
_CHECK_BYTES: Final = 256 << 20
_END_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class BackupPlan:
    """When, where and how many.

    Attributes:
        folder: Where; it is made.
        every_ns: From one to the next.
        keep: The newest that are kept.
    """

    folder: Path
    every_ns: int
    keep: int


@dataclass(slots=True)
class BackupCounters:
    """What became of backups; read by the scrape.

    Attributes:
        done: Made and checked.
        failed: Not made, or not readable.
        last_wall_s: When the newest one was made; 0 while there is none.
        last_bytes: Its size.
        last_took_s: How long it took with its check; 0 where another process made it.
    """

    done: int = 0
    failed: int = 0
    last_wall_s: float = 0.0
    last_bytes: int = 0
    last_took_s: float = 0.0


def verify(
    path: Path, encryption: Encryption | None = None, check: RunningCheck | None = None
) -> int:
    """Read every value of a database file without changing it; its rows.

    Raises:
        ConfigError: Its key is not this one.
        StoreError: It is not there, no Echo database, or damaged.
    """
    check_there(path)
    settings = DatabaseSettings(
        memory_limit_bytes=_CHECK_BYTES, threads=1, encryption=encryption, is_read_only=True
    )
    connection = open_engine(str(path), settings)
    try:
        with (check or RunningCheck()).holding(connection):
            return read_whole(connection)
    finally:
        connection.close()


class RunningCheck:
    """The check that runs now, for another thread to end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: duckdb.DuckDBPyConnection | None = None

    @contextmanager
    def holding(self, connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
        """Let `interrupt` end what the connection runs."""
        with self._lock:
            self._connection = connection
        try:
            yield
        finally:
            with self._lock:
                self._connection = None

    def interrupt(self) -> None:
        """End its statement; the caller asks again, since one that has not begun does not notice."""
        with self._lock:
            if self._connection is not None:
                self._connection.interrupt()


class BackupSchedule:
    """Makes a backup when one is due, on a thread of its own.

    Args:
        store: Open, and a file.
        plan: When and where.
        encryption: How the file is encrypted.
        clock: Time.

    Attributes:
        counters: What became of them.
    """

    def __init__(
        self, store: Store, plan: BackupPlan, encryption: Encryption | None, clock: Clock
    ) -> None:
        self.counters = BackupCounters()
        self._store = store
        self._plan = plan
        self._encryption = encryption
        self._clock = clock
        self._check = RunningCheck()
        self._stopping = threading.Event()
        self._next_wall_ns = 0
        self._thread = threading.Thread(target=self._run, name="echo-backups", daemon=True)

    def start(self) -> None:
        """Begin; one that is due is made at once."""
        self.look_back()
        self._thread.start()

    def close(self) -> None:
        """Let go of what is being made; the next start makes it."""
        self._stopping.set()
        while self._thread.is_alive():
            self._check.interrupt()
            self._thread.join(_END_S)

    def look_back(self) -> None:
        """Go on from the newest backup that is there."""
        found = list_backups(self._plan.folder)
        if found:
            newest = found[-1]
            self.counters.last_wall_s = stamp_of(newest).timestamp()
            self.counters.last_bytes = newest.stat().st_size
            self._next_wall_ns = round(self.counters.last_wall_s) * NS_PER_S + self._plan.every_ns

    def run_if_due(self) -> None:
        """Make a backup where it is time for one. What fails is counted, said, and tried again soon."""
        now_ns = self._clock.wall_ns()
        # One that lies farther ahead than an interval was counted from a clock that has been set back since.
        if self._next_wall_ns - self._plan.every_ns <= now_ns < self._next_wall_ns:
            return
        began_s = time.monotonic()
        try:
            made = self._make(datetime.fromtimestamp(now_ns / NS_PER_S, UTC))
        except (IngeroError, OSError) as error:
            if self._stopping.is_set():
                return
            self._next_wall_ns = now_ns + min(_RETRY_NS, self._plan.every_ns)
            self.counters.failed += 1
            reason = (
                error.message if isinstance(error, IngeroError) else error.strerror or str(error)
            )
            _LOG.error("no backup was made in %s: %s", self._plan.folder, reason)
            return
        counters = self.counters
        counters.last_took_s = time.monotonic() - began_s
        counters.last_wall_s, counters.last_bytes = now_ns / NS_PER_S, made.stat().st_size
        counters.done += 1
        self._next_wall_ns = now_ns + self._plan.every_ns
        _LOG.info("backup %s: made and read whole in %.1f s", made, counters.last_took_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.run_if_due()
            self._stopping.wait(_LOOK_S)

    def _make(self, now: datetime) -> Path:
        plan, store = self._plan, self._store
        plan.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in plan.folder.glob("echo-*.db.partial*"):
            left.unlink()
        name = name_backup(plan.folder, now)

        def fill(copy: Path) -> Mapping[str, int]:
            def copy_into(fds: list[int]) -> dict[str, int]:
                job = store.call(lambda connection: copy_now(connection, store.path, fds))
                done: dict[str, int] = job.result()
                return done

            return fill_copy(copy, copy_into)

        make_copy(
            name, self._encryption, fill, lambda copy: verify(copy, self._encryption, self._check)
        )
        for old in list_backups(plan.folder)[: -plan.keep]:
            old.unlink()
        return name
