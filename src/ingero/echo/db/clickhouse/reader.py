"""`ServerReader`: our statements on ClickHouse, each in its dialect and with what is left of the deadline."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
from clickhouse_connect.driver.client import Client
from typing_extensions import override

from ingero.echo.db.clickhouse.client import translate_errors
from ingero.echo.db.clickhouse.dialect import SETTINGS, translate
from ingero.echo.db.errors import BrokenInstanceError
from ingero.echo.db.reader import Reader, take_page
from ingero.errors import StoreError
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

_KILL: Final = "KILL QUERY WHERE query_id = {id:String} ASYNC"
_KILL_TRIES: Final = 25
_KILL_EVERY_S: Final = 0.2
"""A statement that was sent may not run yet when it is to be killed."""
_LOG: Final = logging.getLogger("ingero.echo.clickhouse")


@dataclass(frozen=True, slots=True)
class _Statement:
    """One that the server may be running; `ended` is set once it does not."""

    query_id: str = field(default_factory=lambda: str(uuid4()))
    ended: threading.Event = field(default_factory=threading.Event)


class ServerReader(Reader):
    """One whose statements the server itself stops at the deadline, and by their ids when the reader is stopped.

    Args:
        client: Shared with other readers.
        clock: For the deadline.
        timeout_ns: From now to the deadline.
        has_ids: The server takes a statement's id; the engine in this process does not.
    """

    def __init__(
        self, client: Client, clock: Clock, timeout_ns: int, *, has_ids: bool = True
    ) -> None:
        super().__init__()
        self._client = client
        self._clock = clock
        self._deadline_ns = clock.mono_ns() + timeout_ns
        self._has_ids = has_ids
        self._lock = threading.Lock()
        self._running: _Statement | None = None

    @property
    @override
    def is_stopped(self) -> bool:
        return super().is_stopped or self._clock.mono_ns() >= self._deadline_ns

    @override
    def stop(self) -> None:
        super().stop()
        with self._lock:
            statement = self._running
        if statement is not None:
            self._kill(statement)

    @override
    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        text, values = translate(sql, params)
        with self._run() as settings, translate_errors("read"):
            found = self._client.query(text, parameters=values, settings=settings)
            return [tuple(row) for row in found.result_rows]

    @override
    def batches(
        self, sql: str, params: Sequence[Any] = (), batch_rows: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        text, values = translate(sql, params)
        found = self._iterate(text, values, batch_rows)
        first = next(found, None)  # what is wrong with the statement is said here
        return iter(()) if first is None else itertools.chain([first], found)

    @override
    def page_rows(
        self, sql: str, params: Sequence[Any], limit: int
    ) -> tuple[list[tuple[Any, ...]], int]:
        found = self.rows(_first(sql, limit), params)
        n_all = len(found) if len(found) < limit else self._count(sql, params)
        return take_page(found), n_all

    @override
    def page_batches(
        self, sql: str, params: Sequence[Any], limit: int, batch_rows: int
    ) -> tuple[Iterator[pa.RecordBatch], int]:
        n_all = self._count(sql, params)
        return self.batches(_first(sql, limit), params, batch_rows), n_all

    def _count(self, sql: str, params: Sequence[Any]) -> int:
        return int(self.row(f"SELECT count(*) FROM ({sql})", params)[0])  # noqa: S608 - our statement

    def _iterate(
        self, text: str, values: dict[str, Any], batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        with self._run() as settings:
            settings["max_block_size"] = batch_rows
            with translate_errors("read"):
                stream = self._client.query_arrow_stream(text, parameters=values, settings=settings)
            with stream:
                found = iter(stream)
                while True:
                    self._check_stopped()
                    with translate_errors("read"):
                        batch = next(found, None)
                    if batch is None:
                        return
                    for start in range(0, batch.num_rows, batch_rows):
                        yield batch.slice(start, batch_rows)

    @contextmanager
    def _run(self) -> Iterator[dict[str, Any]]:
        """Settings of a statement that `stop` ends in the server; so does leaving it before its end."""
        statement = _Statement()
        settings = self._settings()
        if self._has_ids:
            settings["query_id"] = statement.query_id
            with self._lock:
                self._check_stopped()
                self._running = statement
        try:
            yield settings
        except (BrokenInstanceError, GeneratorExit):
            if self._has_ids:
                self._kill(statement)
            raise
        finally:
            with self._lock:
                self._running = None
            statement.ended.set()

    def _kill(self, statement: _Statement) -> None:
        """On a thread: who stops a reader does not wait for the server."""
        killing = threading.Thread(
            target=_kill, args=(self._client, statement), name="echo-kill", daemon=True
        )
        killing.start()

    def _settings(self) -> dict[str, Any]:
        self._check_stopped()
        left_ns = max(1, self._deadline_ns - self._clock.mono_ns())
        # Whole seconds, rounded up: 0 is no limit.
        return SETTINGS | {"readonly": 2, "max_execution_time": -(-left_ns // NS_PER_S)}


def _kill(client: Client, statement: _Statement) -> None:
    """End a statement in the server, where its user may end its own; one that has not begun is waited for."""
    by_id = {"id": statement.query_id}
    for _ in range(_KILL_TRIES):
        try:
            with translate_errors("end a statement in the server"):
                found = client.command(_KILL, parameters=by_id)
        except StoreError as error:
            _LOG.warning("%s", error.message)
            return
        if isinstance(found, str | list) or statement.ended.wait(_KILL_EVERY_S):
            return


def _first(sql: str, limit: int) -> str:
    """An ordered statement, cut. Not from around it: an outer SELECT does not keep the inner order."""
    return f"{sql} LIMIT {int(limit)}"
