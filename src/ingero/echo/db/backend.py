"""`DatabaseBackend`: what keeps the rows, as the writer and the store see it. DuckDB is one, ClickHouse the other.

The writer's thread alone opens, writes, trims and closes; readers come from any thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any

from ingero.echo.db.deduplication import Keys
from ingero.echo.db.reader import Reader
from ingero.echo.db.retention import Retention
from ingero.echo.db.retention_clock import ClockMark, RetentionTime
from ingero.echo.db.rows import Incoming, NodeReports
from ingero.errors import StoreError

Kept = Callable[[Incoming], None]


class DatabaseBackend(ABC):
    """One database that is open or not.

    Attributes:
        secret: 64 bits that no sender knows, the same for as long as the database lives; known once it was open.
        is_read_only: Nothing is ever written to it.
    """

    secret: int = 0
    is_read_only: bool = False

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether it can be written."""

    @abstractmethod
    def open(self, now: datetime, since: datetime, max_keys: int) -> Keys:
        """Open it and bring its schema up to date.

        Args:
            now: The arrival clock's time.
            since: Whose keys are wanted: of rows that arrived then or later.
            max_keys: Most of them, the newest.

        Returns:
            Keys of rows that are there.

        Raises:
            StoreError: It cannot be opened; the hint says what repairs it.
        """

    @abstractmethod
    def commit(
        self,
        group: Sequence[Incoming],
        nodes: NodeReports,
        now: datetime,
        kept: Kept,
    ) -> None:
        """Write rows; ``kept`` is called for each part that is durable, also when a later part then fails.

        Raises:
            BrokenInstanceError: It must be opened again, and what of the group is there is known only then.
            StoreError: The parts that were not ``kept`` are not there.
        """

    @abstractmethod
    def trim(self, now: RetentionTime, since: datetime, retention: Retention) -> tuple[int, int]:
        """Forget keys older than ``since`` and what retention no longer keeps; rows gone for age, and for size."""

    @abstractmethod
    def load_clock(self) -> ClockMark | None:
        """What the last upkeep knew of the clock; None in a new database, and in one of an older release."""

    @abstractmethod
    def save_clock(self, mark: ClockMark) -> None:
        """Keep it for the next start."""

    def run(self, job: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - what the job returns
        """Run a job on the writer's connection.

        Raises:
            StoreError: This backend has no such jobs.
        """
        del job
        raise StoreError("this is done to a database file, and the rows are on a ClickHouse server")

    @abstractmethod
    def drop(self) -> None:
        """Let go of an instance that is broken."""

    def close(self) -> str:
        """Let go in order; what went wrong, or empty. Everything that was acknowledged is safe either way."""
        self.drop()
        return ""

    @abstractmethod
    def open_reader(self, timeout_ns: int) -> AbstractContextManager[Reader]:
        """A reader whose statements end ``timeout_ns`` from now.

        Raises:
            BrokenInstanceError: It is being opened; ask again.
        """
