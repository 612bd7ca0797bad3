"""`ServerReader`: our statements on ClickHouse, each in its dialect and with what is left of the deadline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from clickhouse_connect.driver.client import Client
from typing_extensions import override

from ingero.echo.db.clickhouse.client import translate_errors
from ingero.echo.db.clickhouse.dialect import SETTINGS, translate
from ingero.echo.db.reader import Reader, take_page
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S


class ServerReader(Reader):
    """One that the server itself stops at its deadline.

    Args:
        client: Shared with other readers.
        clock: For the deadline.
        timeout_ns: From now to the deadline.
    """

    def __init__(self, client: Client, clock: Clock, timeout_ns: int) -> None:
        super().__init__()
        self._client = client
        self._clock = clock
        self._deadline_ns = clock.mono_ns() + timeout_ns

    @property
    @override
    def is_stopped(self) -> bool:
        return super().is_stopped or self._clock.mono_ns() >= self._deadline_ns

    @override
    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        text, values = translate(sql, params)
        settings = self._settings()
        with translate_errors("read"):
            found = self._client.query(text, parameters=values, settings=settings)
            return [tuple(row) for row in found.result_rows]

    @override
    def batches(
        self, sql: str, params: Sequence[Any] = (), batch_rows: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        text, values = translate(sql, params)
        settings = self._settings() | {"max_block_size": batch_rows}
        with translate_errors("read"):
            stream = self._client.query_arrow_stream(text, parameters=values, settings=settings)
        return self._iterate(stream, batch_rows)

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

    def _iterate(self, stream: Any, batch_rows: int) -> Iterator[pa.RecordBatch]:  # noqa: ANN401 - the client's
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

    def _settings(self) -> dict[str, Any]:
        self._check_stopped()
        left_ns = max(1, self._deadline_ns - self._clock.mono_ns())
        # Whole seconds, rounded up: 0 is no limit.
        return SETTINGS | {"readonly": 2, "max_execution_time": -(-left_ns // NS_PER_S)}


def _first(sql: str, limit: int) -> str:
    """An ordered statement, cut. Not from around it: an outer SELECT does not keep the inner order."""
    return f"{sql} LIMIT {int(limit)}"
