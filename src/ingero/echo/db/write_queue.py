"""`WriteQueue`: what requests want written, until the writer takes it as a group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ingero.echo.db.rows import Rows
from ingero.errors import IngeroError, StoreError
from ingero.units import NS_PER_S

Done = Callable[[IngeroError | None], None]
Job = tuple[Callable[[Any], Any], Future[Any]]


@dataclass(slots=True)
class WriteGroup:
    """What the writer does at once.

    Attributes:
        requests: Rows, and what is called with what became of them.
        jobs: Jobs of the backend, to run after the commit.
        is_last: The queue is closed.
    """

    requests: list[tuple[Rows, Done]] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    is_last: bool = False


class WriteQueue:
    """Collects requests; any thread puts, the writer's takes.

    Args:
        group_ns: Longest wait for company.
        group_rows: Rows that end the wait at once.
    """

    def __init__(self, group_ns: int, group_rows: int) -> None:
        self.n_rows = 0
        self.n_bytes = 0
        self._group_s = group_ns / NS_PER_S
        self._group_rows = group_rows
        self._wake = threading.Condition()
        self._next = WriteGroup()
        self._taken = WriteGroup()
        self._refusal = ""

    def put(self, rows: Rows, done: Done) -> None:
        """Queue rows; ``done`` is called on the writer's thread with None once they are on disk, or the error.

        Raises:
            StoreError: Nothing is taken any more.
        """
        with self._wake:
            self._check_open()
            self._next.requests.append((rows, done))
            self.n_rows += rows.n_rows
            self.n_bytes += rows.n_bytes
            if len(self._next.requests) == 1 or self.n_rows >= self._group_rows:
                self._wake.notify()

    def call(self, job: Callable[[Any], Any]) -> Future[Any]:
        """Queue a job that runs between two commits.

        Raises:
            StoreError: Nothing is taken any more.
        """
        future: Future[Any] = Future()
        with self._wake:
            self._check_open()
            self._next.jobs.append((job, future))
            self._wake.notify()
        return future

    def close(self) -> None:
        """Take nothing any more; what is there is still written."""
        with self._wake:
            self._refusal = self._refusal or "the store is closing"
            self._next.is_last = True
            self._wake.notify()

    def take(self, timeout_s: float) -> WriteGroup:
        """The next group, which is empty after ``timeout_s``; `finish` when all of it is done."""
        with self._wake:
            waiting = self._next
            if not (waiting.requests or waiting.jobs or waiting.is_last):
                self._wake.wait(timeout=timeout_s)
            if waiting.requests and not (waiting.jobs or waiting.is_last):
                self._wake.wait_for(
                    lambda: waiting.is_last or self.n_rows >= self._group_rows,
                    timeout=self._group_s,
                )
            self._taken, self._next = waiting, WriteGroup(is_last=waiting.is_last)
            return waiting

    def forget(self, requests: list[tuple[Rows, Done]]) -> None:
        """Count rows as waiting no longer."""
        with self._wake:
            self.n_rows -= sum(rows.n_rows for rows, _ in requests)
            self.n_bytes -= sum(rows.n_bytes for rows, _ in requests)

    def finish(self) -> None:
        """What was taken last has had its answers."""
        with self._wake:
            self._taken = WriteGroup()

    def abandon(self, why: str) -> None:
        """Refuse all that is here, also what was taken and not finished, and all that comes."""
        with self._wake:
            self._refusal = why
            left = (self._taken, self._next)
            self._taken, self._next = WriteGroup(), WriteGroup()
            self.n_rows = self.n_bytes = 0
        for group in left:
            for _, done in group.requests:
                done(StoreError(why))
            for _, future in group.jobs:
                if not future.done():
                    future.set_exception(StoreError(why))

    def _check_open(self) -> None:
        if self._refusal:
            raise StoreError(self._refusal)
