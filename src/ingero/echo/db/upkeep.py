"""`Upkeep`: what the writer does from time to time between commits: retention, and the ledger of usage."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from ingero.echo.db.backend import DatabaseBackend
from ingero.echo.db.retention_clock import RetentionClock, RetentionTime
from ingero.echo.db.rows import Incoming
from ingero.echo.db.usage import UsageLedger, find_newest_arrival, find_uncounted
from ingero.echo.db.writer_settings import DatabaseWriterCounters, DatabaseWriterSettings
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S, NS_PER_US

_COUNT_NS: Final = 1800 * NS_PER_S
"""Longest reading of the tables at a start, which waits for it; about 0.4 s for a million rows of an older release."""
_READ_NS: Final = 60 * NS_PER_S


class Upkeep:
    """Retention and usage of one backend. The writer's thread alone has it.

    Args:
        backend: Open whenever this is called.
        settings: How often, and what is kept.
        clock: Time.
        counters: Where deleted rows are counted.

    Attributes:
        usage: Who had how much kept.
        time: What retention goes by.
    """

    def __init__(
        self,
        backend: DatabaseBackend,
        settings: DatabaseWriterSettings,
        clock: Clock,
        counters: DatabaseWriterCounters,
    ) -> None:
        self.usage = UsageLedger()
        self.time = RetentionClock(clock, is_trusted=settings.is_clock_trusted)
        self._backend = backend
        self._settings = settings
        self._clock = clock
        self._counters = counters
        self._next_ns = 0
        self._next_entry_ns = 0
        self._is_counted = False

    @property
    def is_due(self) -> bool:
        """Whether `run` has something to do."""
        return self._clock.mono_ns() >= self._next_ns or self.usage.is_full

    def begin(self, now: datetime) -> None:
        """The backend was opened: count what no entry has, once in the life of the process.

        Raises:
            StoreError: The tables could not be read, or the entries not be written.
        """
        self.postpone()
        if self._is_counted or self._backend.is_read_only:
            return
        if not self.time.is_begun:
            self._begin_time(now)
        with self._backend.open_reader(_COUNT_NS) as reader:
            uncounted = find_uncounted(reader)
        if uncounted is not None:
            self._write(uncounted, now)
        self._is_counted = True
        self._refresh(self.time.advance(now))
        self._next_entry_ns = self._clock.mono_ns() + self._settings.usage_ns

    def postpone(self) -> None:
        """Let the whole interval pass before the next run."""
        self._next_ns = self._clock.mono_ns() + self._settings.upkeep_ns

    def run(self, now: datetime) -> None:
        """Delete what retention no longer keeps, write usage where it is time, and sum up what is stored.

        Raises:
            BrokenInstanceError: The backend must be opened again.
            StoreError: A part of it was not possible; the next run tries again.
        """
        self.postpone()
        since, retention = self.since(now), self._settings.retention
        if self._backend.is_read_only:
            self._backend.trim(RetentionTime.at(now), since, retention)
            return
        time = self.time.advance(now)
        self._save_time()
        n_aged, n_sized = self._backend.trim(time, since, retention)
        self._counters.aged_out += n_aged
        self._counters.sized_out += n_sized
        if self.usage.is_full or self._clock.mono_ns() >= self._next_entry_ns:
            self.write_usage(now)
        self._refresh(time)

    def write_usage(self, now: datetime) -> None:
        """Write what was counted since the last entry.

        Raises:
            StoreError: It was not possible; nothing is forgotten.
        """
        self._next_entry_ns = self._clock.mono_ns() + self._settings.usage_ns
        entries = self.usage.build(now)
        if entries is not None:
            self._write(entries, now)
            self.usage.forget()

    def since(self, now: datetime) -> datetime:
        """The arrival from which on keys of rows are remembered."""
        return now - timedelta(microseconds=self._settings.window_ns // NS_PER_US)

    def _write(self, entries: Incoming, now: datetime) -> None:
        self._backend.commit([entries], {}, now, lambda _: None)

    def _begin_time(self, now: datetime) -> None:
        found, newest = self._backend.load_clock(), None
        if found is None:
            with self._backend.open_reader(_COUNT_NS) as reader:
                newest = find_newest_arrival(reader)
        self.time.begin(found, newest, now)
        self._save_time()

    def _save_time(self) -> None:
        mark = self.time.take_unsaved()
        if mark is not None:
            self._backend.save_clock(mark)
            self.time.note_saved(mark)

    def _refresh(self, now: RetentionTime) -> None:
        with self._backend.open_reader(_READ_NS) as reader:
            self.usage.refresh(reader, self._settings.retention.find_horizons(now))
