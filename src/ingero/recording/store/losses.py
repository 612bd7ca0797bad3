"""Rows that a recording could not take: how many, of what, and why, until that itself is written down."""

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

KeyT = TypeVar("KeyT")


@dataclass(frozen=True, slots=True)
class Loss:
    """Rows of one operation that are not in the recording.

    Attributes:
        source: Its source.
        op: Its code.
        cause: Why, in words.
        n_rows: How many.
    """

    source: int
    op: int
    cause: str
    n_rows: int


@dataclass(slots=True)
class Unsaid:
    """Losses that the recording does not tell of yet.

    Attributes:
        by_source: Rows by (minute, source).
        by_operation: Rows by (minute, source, operation, cause).
        by_kind: Rows by (minute, source, operation, process), without calls in flight.
    """

    by_source: dict[tuple[int, int], int] = field(default_factory=dict)
    by_operation: dict[tuple[int, int, int, str], int] = field(default_factory=dict)
    by_kind: dict[tuple[int, int, int, int], int] = field(default_factory=dict)

    def write(self, connection: sqlite3.Connection, node: str) -> None:
        """Add them to the books of a recording, in the transaction that is open."""
        sources = [(b, node, source, 0, 0, 0, n) for (b, source), n in self.by_source.items()]
        connection.executemany(ADD_COVERAGE, sources)
        operations = [(b, node, *key, n) for (b, *key), n in self.by_operation.items()]
        connection.executemany(ADD_UNWRITTEN, operations)
        connection.executemany(ADD_AGGREGATE, lost_rows(self.by_kind, node))


class LossBook:
    """Losses of one writer. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unsaid = Unsaid()
        self._every: dict[tuple[int, int, str], int] = {}

    def add(self, events: Events, cause: str) -> None:
        """Note rows that were not stored."""
        with self._lock:
            for key, n_rows in count_by_source(events).items():
                self._unsaid.by_source[key] = self._unsaid.by_source.get(key, 0) + n_rows
            for kind, n_rows in count_by_kind(events).items():
                self._unsaid.by_kind[kind] = self._unsaid.by_kind.get(kind, 0) + n_rows
            for (bucket, source, op), n_rows in count_by_operation(events).items():
                new, told = (bucket, source, op, cause), (source, op, cause)
                by_operation = self._unsaid.by_operation
                by_operation[new] = by_operation.get(new, 0) + n_rows
                self._every[told] = self._every.get(told, 0) + n_rows

    def list(self) -> list[Loss]:
        """All of them, most first."""
        with self._lock:
            every = [Loss(*key, n_rows) for key, n_rows in self._every.items()]
        return sorted(every, key=lambda loss: -loss.n_rows)

    def unsaid(self) -> Unsaid:
        """What is to be written down."""
        with self._lock:
            unsaid = self._unsaid
            return Unsaid(dict(unsaid.by_source), dict(unsaid.by_operation), dict(unsaid.by_kind))

    def settle(self, written: Unsaid) -> None:
        """Forget what was written down."""
        with self._lock:
            self._unsaid = Unsaid(
                _subtract(self._unsaid.by_source, written.by_source),
                _subtract(self._unsaid.by_operation, written.by_operation),
                _subtract(self._unsaid.by_kind, written.by_kind),
            )


def _subtract(counts: Mapping[KeyT, int], written: Mapping[KeyT, int]) -> dict[KeyT, int]:
    left = {key: n_rows - written.get(key, 0) for key, n_rows in counts.items()}
    return {key: n_rows for key, n_rows in left.items() if n_rows}
