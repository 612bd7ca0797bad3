"""The one writer: collects what requests want written, commits it as a group, and only then says so.

A group is everything that arrived in ``group_ns`` (or until it is large). One commit costs one ``fdatasync`` whatever
its size, so acknowledging after the commit costs latency, not throughput. What was acknowledged survives ``kill -9``;
what was not may be there or not, and the sender's retry is recognised by its keys, also after a restart.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np
from typing_extensions import override

from ingero.echo.db.backend import DatabaseBackend
from ingero.echo.db.bisection import GroupBisector
from ingero.echo.db.deduplication import KeyWindow
from ingero.echo.db.errors import BadRowsError, BrokenInstanceError
from ingero.echo.db.retention import Retention
from ingero.echo.db.rows import Incoming, Rows, build_incoming, build_nodes, merge_nodes
from ingero.errors import IngeroError, StoreError
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S, NS_PER_US

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC).replace(tzinfo=None)

_LOG: Final = logging.getLogger("ingero.echo")
_SAY_EVERY_NS: Final = 10 * NS_PER_S

Done = Callable[[IngeroError | None], None]


@dataclass(frozen=True, slots=True)
class DatabaseWriterSettings:
    """How the writer groups, remembers and keeps.

    Attributes:
        group_ns: Longest wait for company.
        group_rows: Rows that end the wait at once.
        window_ns: How long a sender's retry is recognised.
        window_keys: Keys remembered at most.
        upkeep_ns: Time between two looks at retention.
        retention: What is kept.
    """

    group_ns: int = 50_000_000
    group_rows: int = 50_000
    window_ns: int = 600 * NS_PER_S
    window_keys: int = 16_000_000
    upkeep_ns: int = 60 * NS_PER_S
    retention: Retention = field(default_factory=lambda: Retention(None, None))


@dataclass(slots=True)
class DatabaseWriterCounters:
    """What happened to rows; read by anyone, written by the writer.

    Attributes:
        written: Durable.
        duplicates: Dropped: stored already, with the same value.
        conflicts: Of those written: there is another row of their series and time with another value.
        refused_rows: The database does not take them; the sender was told.
        commits: Groups that were stored.
        failed_commits: Groups that were not stored whole.
        reopened: Times that the database was opened again after a failure.
        aged_out: Deleted for their age.
        sized_out: Deleted for the size.
    """

    written: int = 0
    duplicates: int = 0
    conflicts: int = 0
    refused_rows: int = 0
    commits: int = 0
    failed_commits: int = 0
    reopened: int = 0
    aged_out: int = 0
    sized_out: int = 0


_Job = tuple[Callable[[Any], Any], Future[Any]]


@dataclass(slots=True)
class _Waiting:
    rows: Rows
    done: Done


class Writer(threading.Thread):
    """The thread that owns the backend.

    Args:
        backend: What keeps the rows.
        settings: Grouping, memory of keys, retention.
        clock: Arrival times and intervals.
    """

    def __init__(
        self, backend: DatabaseBackend, settings: DatabaseWriterSettings, clock: Clock
    ) -> None:
        super().__init__(name="echo-writer", daemon=True)
        self.counters = DatabaseWriterCounters()
        self.broken = ""
        self.is_dead = False
        self.on_death: Callable[[], object] | None = None
        self._backend = backend
        self._settings = settings
        self._clock = clock
        self._wake = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._n_waiting = 0
        self._n_waiting_bytes = 0
        self._jobs: list[_Job] = []
        self._closing = False
        self._opened: Future[None] = Future()
        self._keys = KeyWindow(settings.window_ns, settings.window_keys)
        self._places = KeyWindow(settings.window_ns, settings.window_keys // 2)
        self._in_hand: list[_Waiting] = []
        self._jobs_in_hand: list[_Job] = []
        self._next_upkeep_ns = 0
        self._next_say_ns = 0

    @property
    def n_waiting(self) -> int:
        """Rows not yet committed."""
        return self._n_waiting

    @property
    def n_waiting_bytes(self) -> int:
        """About what they take."""
        return self._n_waiting_bytes

    def open(self) -> None:
        """Start the thread and wait until the database is open.

        Raises:
            StoreError: It cannot be opened.
        """
        self.start()
        self._opened.result()

    def close(self) -> None:
        """Commit what waits, checkpoint, close the file, end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self.join()

    def put(self, rows: Rows, done: Done) -> None:
        """Queue rows; ``done`` is called on the writer's thread with None once they are on disk, or the error."""
        with self._wake:
            self._check_open()
            self._waiting.append(_Waiting(rows, done))
            self._n_waiting += rows.n_rows
            self._n_waiting_bytes += rows.n_bytes
            if len(self._waiting) == 1 or self._n_waiting >= self._settings.group_rows:
                self._wake.notify()

    def call(self, job: Callable[[Any], Any]) -> Future[Any]:
        """Run a job of the backend between two commits."""
        future: Future[Any] = Future()
        with self._wake:
            self._check_open()
            self._jobs.append((job, future))
            self._wake.notify()
        return future

    def _check_open(self) -> None:
        if self._closing or self.is_dead:
            raise StoreError("the writer has ended" if self.is_dead else "the store is closing")

    # The thread.

    @override
    def run(self) -> None:
        """Open, then serve until closed. Not to be called."""
        try:
            self._open()
        except IngeroError as error:
            self._opened.set_exception(error)
            return
        self._opened.set_result(None)
        try:
            while self._serve_once():
                pass
            self.broken = self._backend.close() or self.broken
        except BaseException as error:  # noqa: BLE001 - nobody may wait for a thread that is gone
            self._die(error)

    def _die(self, error: BaseException) -> None:
        """Nothing is written any more: say so to everybody who waits, asks or will come."""
        _LOG.critical("the writer has ended; nothing is taken any more", exc_info=error)
        with self._wake:
            self.is_dead = True
            self.broken = f"the writer has ended: {type(error).__name__}"
            waiting = self._in_hand + self._waiting
            jobs = self._jobs_in_hand + self._jobs
            self._waiting, self._jobs = [], []
            self._n_waiting = self._n_waiting_bytes = 0
        ended = StoreError("the writer has ended")
        for one in waiting:
            one.done(ended)
        for _, future in jobs:
            if not future.done():
                future.set_exception(ended)
        if self.on_death is not None:
            self.on_death()

    def _serve_once(self) -> bool:
        group, jobs, closing = self._collect()
        if group:
            self._write(group)
        for job, future in jobs:
            self._run_job(job, future)
        self._in_hand, self._jobs_in_hand = [], []
        self._maybe_upkeep()
        return not closing or bool(group or jobs)

    def _collect(self) -> tuple[list[_Waiting], list[_Job], bool]:
        settings = self._settings
        with self._wake:
            if not (self._waiting or self._jobs or self._closing):
                self._wake.wait(timeout=settings.upkeep_ns / NS_PER_S)
            if self._waiting and not (self._jobs or self._closing):
                self._wake.wait_for(
                    lambda: self._closing or self._n_waiting >= settings.group_rows,
                    timeout=settings.group_ns / NS_PER_S,
                )
            group, self._waiting = self._waiting, []
            jobs, self._jobs = self._jobs, []
            self._in_hand, self._jobs_in_hand = group, jobs  # for whoever outlives this thread
            return group, jobs, self._closing

    def _write(self, group: list[_Waiting]) -> None:
        errors = GroupBisector(self._commit_or_reopen).settle([waiting.rows for waiting in group])
        n_refused = sum(waiting.rows.outcome.n_refused for waiting in group)
        if n_refused or any(errors):
            self.counters.failed_commits += 1
            self.counters.refused_rows += n_refused
            self._say([waiting.rows.outcome.why for waiting in group], errors)
        with self._wake:
            self._n_waiting -= sum(waiting.rows.n_rows for waiting in group)
            self._n_waiting_bytes -= sum(waiting.rows.n_bytes for waiting in group)
        for waiting, error in zip(group, errors, strict=True):
            waiting.done(error)

    def _say(self, refusals: Sequence[str], errors: Sequence[IngeroError | None]) -> None:
        """One line in ten seconds; the counters have every row."""
        if self._clock.mono_ns() < self._next_say_ns:
            return
        self._next_say_ns = self._clock.mono_ns() + _SAY_EVERY_NS
        why = next((said for said in refusals if said), "")
        why = why or next(error.message for error in errors if error is not None)
        _LOG.error("rows were not stored (told at most every 10 s): %s", why)

    def _commit_or_reopen(self, group: Sequence[Rows]) -> None:
        if not self._backend.is_open:
            self._reopen()
        try:
            self._commit(group)
        except BrokenInstanceError:
            self._reopen()
            self._commit(group)  # what the first attempt did write, the reloaded keys know

    def _commit(self, group: Sequence[Rows]) -> None:
        now = self._now()
        try:
            joined, nodes = build_incoming(group, now, self._backend.secret), merge_nodes(group)
            build_nodes(nodes, now)
        except Exception as error:  # whatever a request holds, it alone is refused
            raise BadRowsError(f"{type(error).__name__}: {error}") from error
        fresh, n_duplicates = self._drop_duplicates(joined)
        mono_ns = self._clock.mono_ns()

        def keep(incoming: Incoming) -> None:
            self._note_conflicts(incoming, group, mono_ns)
            self._keys.add(incoming.keys, mono_ns)
            self.counters.written += len(incoming.keys)

        self._backend.commit(fresh, nodes, now, keep)
        self.counters.duplicates += n_duplicates
        self.counters.commits += 1

    def _drop_duplicates(self, group: list[Incoming]) -> tuple[list[Incoming], int]:
        fresh, n_duplicates = [], 0
        for incoming in group:
            is_new = self._keys.find_new(incoming.keys)
            n_new = int(is_new.sum())
            n_duplicates += len(is_new) - n_new
            if n_new == len(is_new):
                fresh.append(incoming)
            elif n_new:
                fresh.append(incoming.keep(is_new))
        return fresh, n_duplicates

    def _note_conflicts(self, incoming: Incoming, group: Sequence[Rows], mono_ns: int) -> None:
        """Count rows that are stored beside another of their series and time with another value."""
        is_first = self._places.find_new(incoming.places)
        self._places.add(incoming.places[is_first], mono_ns)
        if is_first.all():
            return
        owners, counts = np.unique(incoming.owner_idx[~is_first], return_counts=True)
        for owner, n_rows in zip(owners.tolist(), counts.tolist(), strict=True):
            group[owner].outcome.n_conflicts += n_rows
            self.counters.conflicts += n_rows

    def _run_job(self, job: Callable[[Any], Any], future: Future[Any]) -> None:
        try:
            if not self._backend.is_open:
                self._reopen()
            future.set_result(self._backend.run(job))
        except Exception as error:  # noqa: BLE001 - a job's failure is whose job it is
            future.set_exception(error)

    def _maybe_upkeep(self) -> None:
        if self._clock.mono_ns() < self._next_upkeep_ns:
            return
        self._next_upkeep_ns = self._clock.mono_ns() + self._settings.upkeep_ns
        try:
            if not self._backend.is_open:
                self._reopen()
            self._upkeep()
        except BrokenInstanceError as error:
            self.broken = error.message
            self._backend.drop()
        except IngeroError:
            self.counters.failed_commits += 1

    def _upkeep(self) -> None:
        now = self._now()
        n_aged, n_sized = self._backend.trim(now, self._since(now), self._settings.retention)
        self.counters.aged_out += n_aged
        self.counters.sized_out += n_sized

    def _open(self) -> None:
        now, settings = self._now(), self._settings
        keys = self._backend.open(now, self._since(now), settings.window_keys // 2)
        self._keys = KeyWindow(settings.window_ns, settings.window_keys)
        self._keys.add(keys, self._clock.mono_ns())
        self._places = KeyWindow(settings.window_ns, settings.window_keys // 2)
        self._next_upkeep_ns = self._clock.mono_ns() + settings.upkeep_ns
        self.broken = ""

    def _reopen(self) -> None:
        self._backend.drop()
        try:
            self._open()
        except IngeroError as error:
            self.broken = error.message
            raise
        self.counters.reopened += 1

    def _since(self, now: datetime) -> datetime:
        return now - timedelta(microseconds=self._settings.window_ns // NS_PER_US)

    def _now(self) -> datetime:
        return EPOCH + timedelta(microseconds=self._clock.wall_ns() // NS_PER_US)
