"""`Reader`: one connection with a deadline, for the queries; never for SQL that came from outside."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import duckdb
import pyarrow as pa
from typing_extensions import override

from ingero.echo.db.errors import BrokenInstanceError, DeadlineError, translate_errors
from ingero.errors import RetryableError, StoreError
from ingero.units import NS_PER_S

MAX_PAGE_BYTES: Final = 8 << 20
"""Of the values of a page; the rows that follow are left out. A tenant's text may be a megabyte in each row."""
_FETCHED_ROWS: Final = 64
_VALUE_BYTES: Final = 8
_MAX_RELEASE_S: Final = 5.0
_RETRY_S: Final = 0.05


class Reader(ABC):
    """Runs our own SQL, written in DuckDB's, with bound parameters, until it is stopped."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    @property
    def is_stopped(self) -> bool:
        """Its deadline has passed, or its instance is being closed; whatever holds it lets go."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """End what it runs, from another thread; nothing where it is closed already."""
        self._stopped.set()

    @abstractmethod
    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Every row of the answer; times are UTC without a zone.

        Raises:
            DeadlineError: The deadline passed.
            StoreError: The query failed.
        """

    def row(self, sql: str, params: Sequence[Any] = ()) -> tuple[Any, ...]:
        """The only row of the answer."""
        return self.rows(sql, params)[0]

    @abstractmethod
    def batches(
        self, sql: str, params: Sequence[Any] = (), batch_rows: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        """The answer as Arrow, one batch at a time, so that a large one is never held whole.

        The columns' types are the backend's own; `conform` gives them the wanted ones.
        """

    @abstractmethod
    def page_rows(
        self, sql: str, params: Sequence[Any], limit: int
    ) -> tuple[list[tuple[Any, ...]], int]:
        """The first rows of an ordered statement, as `take_page` takes them, and how many there are without a limit."""

    @abstractmethod
    def page_batches(
        self, sql: str, params: Sequence[Any], limit: int, batch_rows: int
    ) -> tuple[Iterator[pa.RecordBatch], int]:
        """The same as Arrow; batches may have further columns after the statement's own."""

    def _check_stopped(self) -> None:
        if self.is_stopped:
            raise DeadlineError("cannot read: stopped at its deadline")


def take_page(rows: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The first rows: as many as are within `MAX_PAGE_BYTES` together, and one at least."""
    page: list[tuple[Any, ...]] = []
    n_bytes = 0
    for row in rows:
        n_bytes += sum(map(_count_bytes, row))
        if page and n_bytes > MAX_PAGE_BYTES:
            break
        page.append(row)
    return page


def _count_bytes(value: object) -> int:
    """About what a value takes in an answer."""
    if isinstance(value, str):
        return len(value)
    return sum(map(_count_bytes, value)) if isinstance(value, list) else _VALUE_BYTES


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch under the wanted schema; columns are taken by place, those beyond the schema dropped.

    Raises:
        StoreError: A value does not fit its type.
    """
    try:
        arrays = [
            batch.column(at).cast(field.type, safe=not pa.types.is_floating(field.type))
            for at, field in enumerate(schema)
        ]
    except pa.ArrowException as error:
        raise StoreError(f"cannot read: {error}") from error
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class CursorReader(Reader):
    """A cursor of DuckDB."""

    def __init__(self, cursor: duckdb.DuckDBPyConnection) -> None:
        super().__init__()
        self._cursor = cursor
        self._sources: list[pa.RecordBatchReader] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_sacrificed = False

    def sacrifice(self) -> None:
        """Stop it because the writer needs the memory."""
        self._is_sacrificed = True
        self.stop()

    @override
    def stop(self) -> None:
        super().stop()
        with self._lock:
            if not self._is_closed:
                self._cursor.interrupt()

    def close(self) -> None:
        """Close the cursor, after what reads from it.

        A source that is left open keeps the instance alive, and DuckDB's next opening of the file spins until it is
        gone, which nothing can interrupt.
        """
        with self._lock:
            self._is_closed = True
            for source in self._sources:
                source.close()
            self._cursor.close()

    @override
    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._our_errors():
            return self._cursor.execute(sql, list(params)).fetchall()

    @override
    def batches(
        self, sql: str, params: Sequence[Any] = (), batch_rows: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        with self._our_errors():
            source = self._cursor.sql(sql, params=list(params)).to_arrow_reader(batch_rows)
        self._sources.append(source)
        return self._iterate(source)

    @override
    def page_rows(
        self, sql: str, params: Sequence[Any], limit: int
    ) -> tuple[list[tuple[Any, ...]], int]:
        with self._our_errors():
            cursor = self._cursor.execute(_count_beside(sql, limit), list(params))
            blocks = iter(partial(cursor.fetchmany, _FETCHED_ROWS), [])
            found = take_page(itertools.chain.from_iterable(blocks))
        return [row[:-1] for row in found], int(found[0][-1]) if found else 0

    @override
    def page_batches(
        self, sql: str, params: Sequence[Any], limit: int, batch_rows: int
    ) -> tuple[Iterator[pa.RecordBatch], int]:
        found = self.batches(_count_beside(sql, limit), params, batch_rows)
        for first in found:
            if first.num_rows:
                n_all = first.column(first.num_columns - 1)[0].as_py()
                return itertools.chain([first], found), int(n_all)
        return iter(()), 0

    @contextmanager
    def _our_errors(self) -> Iterator[None]:
        try:
            self._check_stopped()
            with translate_errors("read"):
                yield
        except DeadlineError:
            if self._is_sacrificed:
                raise RetryableError(
                    "the memory was needed for arriving rows; narrow the window, or ask again",
                    retry_after_ns=NS_PER_S,
                ) from None
            raise

    def _iterate(self, source: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        while True:
            with self._our_errors():
                try:
                    batch = source.read_next_batch()
                except StopIteration:
                    return
                except (
                    pa.ArrowException,
                    OSError,
                ) as error:  # the engine's error, as Arrow's C interface has it
                    kind = DeadlineError if self._stopped.is_set() else StoreError
                    raise kind(f"cannot read: {error}") from error
            yield batch


def _count_beside(sql: str, limit: int) -> str:
    """The statement with the number of all its rows as last column; DuckDB keeps the inner order."""
    return f"SELECT *, count(*) OVER () FROM ({sql}) LIMIT {int(limit)}"  # noqa: S608 - our statement


class ReaderPool:
    """Cursors of the living instance; knows who reads, so that the instance can be closed under them."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._catalog = ""
        self._active: set[CursorReader] = set()

    def attach(self, connection: duckdb.DuckDBPyConnection, catalog: str = "") -> None:
        """Serve this instance from now on; ``catalog`` is where its tables are, unless in its own file."""
        with self._lock:
            self._connection = connection
            self._catalog = catalog

    def detach(self) -> None:
        """Stop serving, interrupt who reads, and wait until nobody does."""
        with self._lock:
            self._connection = None
            while self._active:
                for reader in self._active:
                    reader.stop()
                self._lock.wait(timeout=_RETRY_S)

    def sacrifice(self) -> bool:
        """Stop everybody who reads and wait until they have let go; False where nobody reads."""
        with self._lock:
            doomed = set(self._active)
            for _ in range(round(_MAX_RELEASE_S / _RETRY_S)):
                for reader in doomed & self._active:
                    reader.sacrifice()  # again: DuckDB forgets an interrupt that comes between two statements
                if self._lock.wait_for(lambda: not doomed & self._active, timeout=_RETRY_S):
                    break
        return bool(doomed)

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
            with translate_errors("read"):
                cursor = self._connection.cursor()
                if self._catalog:
                    cursor.execute(f"USE {self._catalog}")
            reader = CursorReader(cursor)
            self._active.add(reader)
        alarm = threading.Timer(timeout_ns / NS_PER_S, reader.stop)
        alarm.daemon = True
        alarm.start()
        try:
            yield reader
        finally:
            alarm.cancel()
            with self._lock:
                self._active.discard(reader)
                self._lock.notify_all()
            reader.close()
