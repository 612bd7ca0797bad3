"""`Reader`: one cursor with a deadline, for the queries; never for SQL that came from outside."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import duckdb
import pyarrow as pa

from ingero.echo.db.faults import BrokenInstanceError, our_errors
from ingero.errors import StoreError
from ingero.units import NS_PER_S


class Reader:
    """Runs our own SQL with bound parameters."""

    def __init__(self, cursor: duckdb.DuckDBPyConnection) -> None:
        self._cursor = cursor

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Every row of the answer.

        Raises:
            DeadlineError: The deadline passed.
            StoreError: The query failed.
        """
        with our_errors("read"):
            return self._cursor.execute(sql, list(params)).fetchall()

    def row(self, sql: str, params: Sequence[Any] = ()) -> tuple[Any, ...]:
        """The only row of the answer."""
        rows = self.rows(sql, params)
        return rows[0]

    def batches(
        self, sql: str, params: Sequence[Any] = (), batch_rows: int = 65_536
    ) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """The answer as Arrow, one batch at a time, so that a large one is never held whole."""
        with our_errors("read"):
            source = self._cursor.sql(sql, params=list(params)).to_arrow_reader(batch_rows)
        return source.schema, _iterate(source)


def _iterate(source: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    while True:
        with our_errors("read"):
            try:
                batch = source.read_next_batch()
            except StopIteration:
                return
            except pa.ArrowException as error:
                raise StoreError(f"cannot read: {error}") from error
        yield batch


class ReaderPool:
    """Cursors of the living instance; knows who reads, so that the instance can be closed under them."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._active: set[duckdb.DuckDBPyConnection] = set()

    def attach(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Serve this instance from now on."""
        with self._lock:
            self._connection = connection

    def detach(self) -> None:
        """Stop serving, interrupt who reads, and wait until nobody does."""
        with self._lock:
            self._connection = None
            while self._active:
                for cursor in self._active:
                    cursor.interrupt()
                self._lock.wait(timeout=0.05)

    @contextmanager
    def open_reader(self, timeout_ns: int) -> Iterator[Reader]:
        """A reader whose statements are interrupted ``timeout_ns`` from now.

        Raises:
            BrokenInstanceError: The database is being reopened; ask again.
        """
        with self._lock:
            if self._connection is None:
                raise BrokenInstanceError(
                    "cannot read: the database is being opened", hint="Ask again in a second."
                )
            with our_errors("read"):
                cursor = self._connection.cursor()
            self._active.add(cursor)
        alarm = threading.Timer(timeout_ns / NS_PER_S, cursor.interrupt)
        alarm.daemon = True
        alarm.start()
        try:
            yield Reader(cursor)
        finally:
            alarm.cancel()
            with self._lock:
                self._active.discard(cursor)
                self._lock.notify_all()
            cursor.close()
