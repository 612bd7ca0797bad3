"""`ServerReader`: our statements on ClickHouse, each in its dialect and with what is left of the deadline."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from clickhouse_connect.driver.client import Client

from ingero.echo.db.clickhouse.client import translate_errors
from ingero.echo.db.clickhouse.dialect import SETTINGS, translate
from ingero.echo.db.errors import DeadlineError
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S


class ServerReader:
    """A `Reader` that the server itself stops at its deadline.

    Args:
        client: Shared with other readers.
        clock: For the deadline.
        timeout_ns: From now to the deadline.
    """

    def __init__(self, client: Client, clock: Clock, timeout_ns: int) -> None:
        self._client = client
        self._clock = clock
        self._deadline_ns = clock.mono_ns() + timeout_ns
        self._stopped = threading.Event()

    @property
    def is_stopped(self) -> bool:
        """See `Reader`."""
        return self._stopped.is_set() or self._clock.mono_ns() >= self._deadline_ns

    def stop(self) -> None:
        """See `Reader`; a statement that runs ends at its deadline, its rows are not waited for."""
        self._stopped.set()

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """See `Reader`."""
        text, values = translate(sql, params)
        settings = self._settings()
        with translate_errors("read"):
            found = self._client.query(text, parameters=values, settings=settings)
            return [tuple(row) for row in found.result_rows]

    def row(self, sql: str, params: Sequence[Any] = ()) -> tuple[Any, ...]:
        """See `Reader`."""
        rows = self.rows(sql, params)
        return rows[0]

    def batches(
        self, sql: str, params: Sequence[Any] = (), batch_rows: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        """See `Reader`."""
        text, values = translate(sql, params)
        settings = self._settings() | {"max_block_size": batch_rows}
        with translate_errors("read"):
            stream = self._client.query_arrow_stream(text, parameters=values, settings=settings)
        return self._iterate(stream, batch_rows)

    def page_rows(
        self, sql: str, params: Sequence[Any], limit: int
    ) -> tuple[list[tuple[Any, ...]], int]:
        """See `Reader`."""
        found = self.rows(_first(sql, limit), params)
        return found, len(found) if len(found) < limit else self._count(sql, params)

    def page_batches(
        self, sql: str, params: Sequence[Any], limit: int, batch_rows: int
    ) -> tuple[Iterator[pa.RecordBatch], int]:
        """See `Reader`."""
        n_all = self._count(sql, params)
        return self.batches(_first(sql, limit), params, batch_rows), n_all

    def _count(self, sql: str, params: Sequence[Any]) -> int:
        return int(self.row(f"SELECT count(*) FROM ({sql})", params)[0])  # noqa: S608 - our statement

    def _iterate(self, stream: Any, batch_rows: int) -> Iterator[pa.RecordBatch]:  # noqa: ANN401 - the client's
        with stream:
            found = iter(stream)
            while True:
                if self.is_stopped:
                    raise DeadlineError("cannot read: stopped at its deadline")
                with translate_errors("read"):
                    batch = next(found, None)
                if batch is None:
                    return
                for start in range(0, batch.num_rows, batch_rows):
                    yield batch.slice(start, batch_rows)

    def _settings(self) -> dict[str, Any]:
        left_ns = self._deadline_ns - self._clock.mono_ns()
        if self._stopped.is_set() or left_ns <= 0:
            raise DeadlineError("cannot read: stopped at its deadline")
        # Whole seconds, rounded up: 0 is no limit.
        return SETTINGS | {"readonly": 2, "max_execution_time": -(-left_ns // NS_PER_S)}


def _first(sql: str, limit: int) -> str:
    """An ordered statement, cut. Not from around it: an outer SELECT does not keep the inner order."""
    return f"{sql} LIMIT {int(limit)}"
