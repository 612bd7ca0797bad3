"""The one writer: collects what requests want written, commits it as a group, and only then says so.

A group is everything that arrived in ``group_ns`` (or until it is large). One commit costs one ``fdatasync`` whatever
its size, so acknowledging after the commit costs latency, not throughput. What was acknowledged survives ``kill -9``;
what was not may be there or not, and the sender's retry is recognised by its keys, also after a restart.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np
from typing_extensions import override

from ingero.echo.db.backend import DatabaseBackend
from ingero.echo.db.bisection import GroupBisector
from ingero.echo.db.deduplication import Keys, KeyWindow
from ingero.echo.db.errors import BadRowsError, BrokenInstanceError
from ingero.echo.db.rows import Incoming, Rows, build_incoming, build_nodes, merge_nodes
from ingero.echo.db.stored_records import drop_stored
from ingero.echo.db.upkeep import Upkeep
from ingero.echo.db.usage import UsageLedger
from ingero.echo.db.write_queue import Done, WriteQueue
from ingero.echo.db.writer_settings import DatabaseWriterCounters, DatabaseWriterSettings
from ingero.errors import IngeroError
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S, NS_PER_US

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC).replace(tzinfo=None)

_LOG: Final = logging.getLogger("ingero.echo")
_LOG_EVERY_NS: Final = 10 * NS_PER_S


class DuplicateFilter:
    """Which rows of a group were written lately.

    Args:
        window_ns: How long a row is remembered.
        max_keys: Rows remembered at most.
    """

    def __init__(self, window_ns: int, max_keys: int) -> None:
        self._keys = KeyWindow(window_ns, max_keys)
        self._places = KeyWindow(window_ns, max_keys // 2)

    def load(self, keys: Keys, mono_ns: int) -> None:
        """Remember keys that the database has."""
        self._keys.add(keys, mono_ns)

    def drop(self, group: Sequence[Incoming]) -> tuple[list[Incoming], int, int]:
        """The rows of a group that are new; how many are not by the ids of their senders, and how many else."""
        fresh, n_repeated, n_duplicates = [], 0, 0
        for incoming in group:
            is_new = np.ones(len(incoming.keys), np.bool_)
            has_uid = incoming.uids != 0
            if has_uid.any():
                is_new[has_uid] = self._keys.find_new(incoming.uids[has_uid])
                n_repeated += len(is_new) - int(is_new.sum())
            n_left = int(is_new.sum())
            is_new[is_new] = self._keys.find_new(incoming.keys[is_new])
            n_new = int(is_new.sum())
            n_duplicates += n_left - n_new
            if n_new:
                fresh.append(incoming if n_new == len(is_new) else incoming.keep(is_new))
        return fresh, n_repeated, n_duplicates

    def add(self, incoming: Incoming, mono_ns: int) -> dict[int, int]:
        """Remember rows that were written.

        Returns:
            By request, how many of them are stored beside another of their series and time.
        """
        self._keys.add(incoming.all_keys, mono_ns)
        is_first = self._places.find_new(incoming.places)
        self._places.add(incoming.places[is_first], mono_ns)
        owners, counts = np.unique(incoming.owner_idx[~is_first], return_counts=True)
        return dict(zip(owners.tolist(), counts.tolist(), strict=True))


class OverdueError(BaseException):
    """Ends the writer's thread; not an error of rows or of a job, so that nothing on the way takes it for one."""


class Writer(threading.Thread):
    """The thread that owns the backend.

    Args:
        backend: What keeps the rows.
        settings: Grouping, memory of keys, retention.
        clock: Arrival times and intervals.

    Attributes:
        upkeep: Whose usage and time any thread may read.
    """

    def __init__(
        self, backend: DatabaseBackend, settings: DatabaseWriterSettings, clock: Clock
    ) -> None:
        super().__init__(name="echo-writer", daemon=True)
        self.counters = DatabaseWriterCounters()
        self.queue = WriteQueue(settings.group_ns, settings.group_rows)
        self.broken = ""
        self.is_dead = False
        self.on_death: Callable[[], object] | None = None
        self._backend = backend
        self._settings = settings
        self._clock = clock
        self._opened: Future[None] = Future()
        self._filter = DuplicateFilter(settings.window_ns, settings.window_keys)
        self.upkeep = Upkeep(backend, settings, clock, self.counters)
        self._next_log_ns = 0

    @property
    def usage(self) -> UsageLedger:
        """Who had how much kept; to be read only."""
        return self.upkeep.usage

    def open(self) -> None:
        """Start the thread and wait until the database is open.

        Raises:
            StoreError: It cannot be opened.
        """
        self.start()
        self._opened.result()

    def close(self) -> None:
        """Commit what waits, checkpoint, close the file, end the thread."""
        self.queue.close()
        self.join()

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
            if self._backend.is_open:
                self._keep_up(self.upkeep.write_usage)
            self.broken = self._backend.close() or self.broken
        except BaseException as error:  # noqa: BLE001 - nobody may wait for a thread that is gone
            _LOG.critical("the writer has ended; nothing is taken any more", exc_info=error)
            self._die(f"the writer has ended: {type(error).__name__}")

    def _serve_once(self) -> bool:
        group = self.queue.take(self._settings.upkeep_ns / NS_PER_S)
        if group.requests:
            self._write(group.requests)
        for job in group.jobs:
            self._run_job(*job)
        self.queue.finish()
        self._maybe_upkeep()
        return not group.is_last or bool(group.requests or group.jobs)

    def _write(self, requests: list[tuple[Rows, Done]]) -> None:
        group = [rows for rows, _ in requests]
        errors = GroupBisector(self._commit_or_reopen).settle(group)
        n_refused = sum(rows.outcome.n_refused for rows in group)
        if n_refused or any(errors):
            self.counters.failed_commits += 1
            self.counters.refused_rows += n_refused
            refusals = [rows.outcome.why for rows in group]
            self._log_failure(refusals + [error.message for error in errors if error is not None])
        self.queue.forget(requests)
        for (_, done), error in zip(requests, errors, strict=True):
            done(error)

    def _log_failure(self, reasons: Sequence[str]) -> None:
        """One line in ten seconds; the counters have every row."""
        if self._clock.mono_ns() < self._next_log_ns:
            return
        self._next_log_ns = self._clock.mono_ns() + _LOG_EVERY_NS
        why = next(reason for reason in reasons if reason)
        _LOG.error("rows were not stored (logged at most every 10 s): %s", why)

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
            described = build_nodes(nodes, now)
        except Exception as error:  # whatever a request holds, it alone is refused
            raise BadRowsError(f"{type(error).__name__}: {error}") from error
        fresh, n_repeated, n_duplicates = self._filter.drop(joined)
        window = timedelta(microseconds=self._settings.window_ns // NS_PER_US)
        fresh, n_stored = drop_stored(self._backend, fresh, now, window)
        mono_ns = self._clock.mono_ns()

        def keep(incoming: Incoming) -> None:
            self.usage.add(incoming, [rows.bearer for rows in group], now)
            for owner, n_rows in self._filter.add(incoming, mono_ns).items():
                group[owner].outcome.n_conflicts += n_rows
                self.counters.conflicts += n_rows
            self.counters.written += len(incoming.keys)

        self._backend.commit(fresh, nodes, now, keep)
        self.usage.add_nodes(described)
        self.counters.duplicates += n_duplicates
        self.counters.repeated += n_repeated + n_stored
        self.counters.commits += 1

    def _run_job(self, job: Callable[[Any], Any], future: Future[Any]) -> None:
        try:
            if not self._backend.is_open:
                self._reopen()
            future.set_result(self._backend.run(job))
        except Exception as error:  # noqa: BLE001 - a job's failure is whose job it is
            future.set_exception(error)

    def _maybe_upkeep(self) -> None:
        if self.upkeep.is_due:
            self.upkeep.postpone()
            self._keep_up(self.upkeep.run)

    def _keep_up(self, work: Callable[[datetime], None]) -> None:
        """Do a part of the upkeep; what fails is counted, said, and tried again when it is due."""
        try:
            if not self._backend.is_open:
                self._reopen()
            work(self._now())
        except BrokenInstanceError as error:
            self._note_upkeep(error)
            self.broken = error.message
            self._backend.drop()
        except IngeroError as error:
            self._note_upkeep(error)

    def _note_upkeep(self, error: IngeroError) -> None:
        self.counters.failed_commits += 1
        _LOG.error("retention or usage was not done, and is tried again: %s", error.message)

    def _open(self) -> None:
        now, settings = self._now(), self._settings
        keys = self._backend.open(now, self.upkeep.since(now), settings.window_keys // 2)
        self._filter = DuplicateFilter(settings.window_ns, settings.window_keys)
        self._filter.load(keys, self._clock.mono_ns())
        try:
            self.upkeep.begin(now)
        except IngeroError:
            self._backend.drop()
            raise
        self.broken = ""

    def _reopen(self) -> None:
        with self._in_time():
            self._backend.drop()
            try:
                self._open()
            except IngeroError as error:
                self.broken = error.message
                raise
        self.counters.reopened += 1

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        """Nothing is taken any more once an opening takes too long; DuckDB's cannot be interrupted.

        Raises:
            OverdueError: It did, and came to its end after all.
        """
        watchdog = threading.Timer(self._settings.reopen_ns / NS_PER_S, self._miss)
        watchdog.daemon = True
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()
            watchdog.join()
            if self.is_dead:
                raise OverdueError

    def _miss(self) -> None:
        limit = f"{self._settings.reopen_ns / NS_PER_S:g} s"
        _LOG.critical("the database was not open again after %s; nothing is taken any more", limit)
        self._die(f"the database was not open again after {limit}")

    def _die(self, why: str) -> None:
        self.is_dead = True
        self.broken = why
        self.queue.abandon(why)
        if self.on_death is not None:
            self.on_death()

    def _now(self) -> datetime:
        return EPOCH + timedelta(microseconds=self._clock.wall_ns() // NS_PER_US)
