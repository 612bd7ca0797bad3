"""The file that a writer appends to, as its one thread sees it: transactions, and what a full disk left out.

What ``coverage`` and the aggregates call *stored* is counted here from rows that were committed, so the numbers cannot
drift from the rows.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from ingero.errors import StoreError
from ingero.model.events import EVENT, Events
from ingero.model.recording import ProcessRank
from ingero.recording.store.creation import open_for_writing
from ingero.recording.store.limit import SizeLimits, shrink
from ingero.recording.store.lock import WriterLock
from ingero.recording.store.losses import LossCounts
from ingero.recording.store.rollover import set_aside, size_of
from ingero.recording.store.rows import (
    ADD_AGGREGATE,
    ADD_COVERAGE,
    INSERT_EVENT,
    INSERT_PARENT,
    INSERT_SESSION,
    count_by_kind,
    count_by_source,
    event_rows,
    find_parents,
    parent_rows,
    stored_rows,
)
from ingero.recording.store.schema import CARRIED_OVER
from ingero.recording.store.settings import WriterSettings

Work = Callable[[sqlite3.Connection], object]
"""A write of names or counts, in the transaction that is open."""

MAX_WAITING: Final = 100_000
"""Writes that wait for a full disk, a few of them each second."""
_FULL: Final = "the disk is full"


class RecordingAppender:
    """The open file of one writer. All methods on one thread.

    Args:
        path: The file; made when missing.
        node: Stamped on all rows.
        settings: Limits.
        losses: Counts what could not be stored.
        owner: User and group that new files are given to; None leaves the process's own.

    Attributes:
        connection: The open file.
        ranks: Places in the job that later rows are stamped with, by pid.

    Raises:
        StoreError: The file cannot be opened for writing, somebody else writes to it, it is no recording, or another
            version of the schema wrote it.
    """

    def __init__(
        self, path: Path, node: str, settings: WriterSettings, losses: LossCounts,
        owner: tuple[int, int] | None,
    ) -> None:  # fmt: skip
        self._path = path
        self._node = node
        self._settings = settings
        self._losses = losses
        self._counters = losses.counters
        self._limits = SizeLimits.divide(settings.max_bytes, settings.rollover_bytes)
        self._waiting: list[Work] = []
        self._session_id = 0
        self.ranks: dict[int, ProcessRank] = {}
        self._lock = WriterLock(path, owner, settings.max_bytes or settings.rollover_bytes)
        try:
            self.connection = open_for_writing(path, node, self._limits, owner)
        except StoreError:
            self._lock.release()
            raise
        (last,) = self.connection.execute("SELECT ifnull(max(rowid), 0) FROM events").fetchone()
        self._next_id = int(last) + 1

    @property
    def warning(self) -> str:
        """What the user should know of where the recording lies; empty for nothing."""
        return self._lock.warning

    def start_session(self, row: tuple[object, ...]) -> None:
        """Add a session, as INSERT_SESSION has it; it is the one that `update_session` means."""
        self._session_id = self.connection.execute(INSERT_SESSION, row).lastrowid or 0

    def update_session(self, column: str, value: object) -> None:
        """Set a column of the session that was started last."""
        sql = f"UPDATE sessions SET {column} = ? WHERE id = ?"  # noqa: S608 - own names
        self.connection.execute(sql, (value, self._session_id))

    def commit(self, batches: list[Events], works: list[Work]) -> None:
        """Names, counts and losses first, then rows, a bounded number in each transaction."""
        has_room = self._lock.has_room()
        if has_room:
            if self._write_works(works):
                self._try(self._write_lost)
        else:
            self._keep_waiting(works)
        for events in self._iter_chunks(batches):
            if has_room:
                has_room = self._write_chunk(events)
                self._keep_to_size()
            else:
                self._losses.add(events, _FULL)
        if has_room and any(map(len, batches)):
            self._try(self._write_lost)
        if not batches:
            self._keep_to_size()

    def close(self) -> None:
        """Write what still waits, fold the log into the file where there is room, and let go of the recording."""
        if self._waiting or self._losses.unwritten().by_operation:
            self._lock.give_back(everything=True)
            self._try(self._write_lost)
            self._write_works([])
        self._counters.counts_lost += len(self._waiting)
        self._lock.give_back(everything=True)
        self._try(lambda: self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)"))
        self._try(self.connection.close)
        self._lock.release()

    def _try(self, write: Callable[[], object]) -> bool:
        """Whether the disk took it; why not is in the counters."""
        try:
            write()
        except sqlite3.Error as error:
            self._counters.last_error = str(error)
            return False
        return True

    def _keep_to_size(self) -> None:
        """Delete the oldest rows, or set the file aside."""
        if self._limits.database_bytes:
            try:
                self._counters.events_pruned += shrink(self.connection, self._limits)
            except sqlite3.Error as error:
                self._counters.last_error = str(error)
        if 0 < self._settings.rollover_bytes <= size_of(self._path) and self._next_id > 1:
            self._roll()

    def _iter_chunks(self, batches: list[Events]) -> Iterator[Events]:
        events = np.concatenate(batches) if batches else np.empty(0, EVENT)
        for first in range(0, len(events), self._limits.chunk_rows):
            yield events[first : first + self._limits.chunk_rows]

    def _write_chunk(self, events: Events) -> bool:
        """Store rows in one transaction; False when the disk is full, which is noted on it at once."""
        next_id = self._next_id
        try:
            with self.connection:
                self._write_events(events)
        except sqlite3.Error as error:
            self._next_id = next_id
            self._counters.last_error = str(error)
            is_full = error.sqlite_errorcode == sqlite3.SQLITE_FULL
            self._losses.add(events, _FULL if is_full else str(error))
            if is_full:
                self._lock.give_back()
            self._try(self._write_lost)
            return not is_full
        self._counters.events_stored += len(events)
        return True

    def _write_works(self, works: list[Work]) -> bool:
        """Write names and counts, with those that waited; they wait on when the disk does not take them."""
        works = self._waiting + works
        self._waiting = []
        try:
            with self.connection:
                for work in works:
                    work(self.connection)
        except sqlite3.OperationalError as error:
            self._counters.last_error = str(error)
            self._keep_waiting(works)
            return False
        except sqlite3.Error as error:
            self._counters.last_error = str(error)
            self._counters.counts_lost += len(works)
        return True

    def _keep_waiting(self, works: list[Work]) -> None:
        self._waiting += works
        self._counters.counts_lost += max(len(self._waiting) - MAX_WAITING, 0)
        del self._waiting[MAX_WAITING:]

    def _write_events(self, events: Events) -> None:
        self.connection.executemany(
            INSERT_EVENT, event_rows(events, self._node, self._next_id, self.ranks)
        )
        self._next_id += len(events)
        self.connection.executemany(INSERT_PARENT, parent_rows(find_parents(events), self._node))
        self.connection.executemany(ADD_AGGREGATE, stored_rows(count_by_kind(events), self._node))
        by_source = count_by_source(events)
        self.connection.executemany(
            ADD_COVERAGE,
            [(bucket, self._node, source, 0, n, 0, 0) for (bucket, source), n in by_source.items()],
        )

    def _write_lost(self) -> None:
        unwritten = self._losses.unwritten()
        if not unwritten.by_operation:
            return
        with self.connection:
            unwritten.write(self.connection, self._node)
        self._losses.settle(unwritten)

    def _roll(self) -> None:
        """Set the file aside and go on in a new one, which begins with the session and the names known so far."""
        try:
            kept = [(sql, self.connection.execute(query).fetchall()) for query, sql in CARRIED_OVER]
            busy, *_ = self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.Error as error:
            self._counters.last_error = str(error)
            return
        if busy:  # somebody reads an old state; its log must not be left behind
            return
        self.connection.close()
        aside = None
        try:
            aside = set_aside(self._path, self._settings.rollover_keep)
            self.connection = open_for_writing(self._path, self._node, self._limits)
        except (OSError, StoreError) as error:
            self._counters.last_error = str(error)
            if aside is not None:
                aside.replace(self._path)
            self.connection = open_for_writing(self._path, self._node, self._limits)
            return
        self._next_id = 1
        self._write_works([functools.partial(run_many, sql=sql, rows=rows) for sql, rows in kept])


def run_many(connection: sqlite3.Connection, sql: str, rows: Iterable[tuple[object, ...]]) -> None:
    """Run one statement for many rows."""
    connection.executemany(sql, rows)
