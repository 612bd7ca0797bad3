"""Rows that a recording could not take: how many, of what, and why, until they are written there."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from ingero.model.events import Events
from ingero.recording.store.rows import (
    ADD_AGGREGATE,
    ADD_COVERAGE,
    ADD_UNWRITTEN,
    count_by_kind,
    count_by_operation,
    count_by_source,
    lost_rows,
)
from ingero.recording.store.settings import WriterCounters

KeyT = TypeVar("KeyT")


@dataclass(frozen=True, slots=True)
class Loss:
    """Rows of one operation that are not in the recording.

    Attributes:
        source: Its source.
        op: Its code.
        cause: Why, in words.
        n_rows: Rows that were lost.
    """

    source: int
    op: int
    cause: str
    n_rows: int


@dataclass(slots=True)
class UnwrittenLosses:
    """Losses that are not in the recording's own counts yet.

    Attributes:
        by_source: Rows by (minute, source).
        by_operation: Rows by (minute, source, operation, cause).
        by_kind: Rows by (minute, source, operation, process), without calls in flight.
    """

    by_source: dict[tuple[int, int], int] = field(default_factory=dict)
    by_operation: dict[tuple[int, int, int, str], int] = field(default_factory=dict)
    by_kind: dict[tuple[int, int, int, int], int] = field(default_factory=dict)

    def write(self, connection: sqlite3.Connection, node: str) -> None:
        """Add them to the counts of a recording, in the transaction that is open."""
        sources = [(b, node, source, 0, 0, 0, n) for (b, source), n in self.by_source.items()]
        connection.executemany(ADD_COVERAGE, sources)
        operations = [(b, node, *key, n) for (b, *key), n in self.by_operation.items()]
        connection.executemany(ADD_UNWRITTEN, operations)
        connection.executemany(ADD_AGGREGATE, lost_rows(self.by_kind, node))


class LossCounts:
    """Losses of one writer. Any thread.

    Args:
        counters: Of the writer; ``events_lost`` is counted here.
    """

    def __init__(self, counters: WriterCounters) -> None:
        self.counters = counters
        self._lock = threading.Lock()
        self._unwritten = UnwrittenLosses()
        self._every: dict[tuple[int, int, str], int] = {}

    def add(self, events: Events, cause: str) -> None:
        """Count rows that were not stored."""
        with self._lock:
            self.counters.events_lost += len(events)
            for key, n_rows in count_by_source(events).items():
                self._unwritten.by_source[key] = self._unwritten.by_source.get(key, 0) + n_rows
            for kind, n_rows in count_by_kind(events).items():
                self._unwritten.by_kind[kind] = self._unwritten.by_kind.get(kind, 0) + n_rows
            for (bucket, source, op), n_rows in count_by_operation(events).items():
                new, cause_key = (bucket, source, op, cause), (source, op, cause)
                by_operation = self._unwritten.by_operation
                by_operation[new] = by_operation.get(new, 0) + n_rows
                self._every[cause_key] = self._every.get(cause_key, 0) + n_rows

    def list(self) -> list[Loss]:
        """All of them, most first."""
        with self._lock:
            every = [Loss(*key, n_rows) for key, n_rows in self._every.items()]
        return sorted(every, key=lambda loss: -loss.n_rows)

    def unwritten(self) -> UnwrittenLosses:
        """What is to be written into the recording."""
        with self._lock:
            found = self._unwritten
            return UnwrittenLosses(
                dict(found.by_source), dict(found.by_operation), dict(found.by_kind)
            )

    def settle(self, written: UnwrittenLosses) -> None:
        """Forget what was written."""
        with self._lock:
            self._unwritten = UnwrittenLosses(
                _subtract(self._unwritten.by_source, written.by_source),
                _subtract(self._unwritten.by_operation, written.by_operation),
                _subtract(self._unwritten.by_kind, written.by_kind),
            )


def _subtract(counts: Mapping[KeyT, int], written: Mapping[KeyT, int]) -> dict[KeyT, int]:
    left = {key: n_rows - written.get(key, 0) for key, n_rows in counts.items()}
    return {key: n_rows for key, n_rows in left.items() if n_rows}
