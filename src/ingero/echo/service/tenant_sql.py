"""Which rows a tenant's statement gets: its clusters, its window, the newest, and no others; of them the columns it names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pyarrow as pa

from ingero.echo.db.cancellation import Cancellation
from ingero.echo.db.reader import Reader, conform
from ingero.echo.db.sandbox.runner import Rows, Sandbox, SandboxSettings
from ingero.echo.db.store import Store
from ingero.echo.queries.context import SqlAnswer, TimeSpan
from ingero.echo.schema import TABLES
from ingero.echo.service.config import EchoConfig

_TIME: Final = "ts >= ? AND ts < ? AND "
_BATCH_ROWS: Final = 2048
"""One vector of DuckDB's: the least that is in memory at once."""


@dataclass(frozen=True, slots=True)
class Statement:
    """What a tenant wants run.

    Attributes:
        sql: Its text.
        span: The rows it may see.
        limit: Most rows of the answer.
    """

    sql: str
    span: TimeSpan
    limit: int


def sandbox_settings(config: EchoConfig) -> SandboxSettings:
    """What a statement may use, as the user said it."""
    return SandboxSettings(
        n_workers=config.sql_workers,
        timeout_ns=config.sql_timeout,
        memory_bytes=config.sql_memory,
        max_input_bytes=config.sql_max_bytes_in,
    )


def run_statement(
    store: Store, sandbox: Sandbox, config: EchoConfig, statement: Statement, stop: Cancellation
) -> SqlAnswer:
    """Run one in the sandbox on its tenant's rows.

    Raises:
        IngeroError: As `Sandbox.run`, or the rows cannot be read.
    """
    with store.open_reader(config.sql_timeout) as reader, stop.calls(reader.stop):
        export = RowsExport(reader, statement.span, config.sql_max_rows_in)
        result = sandbox.run(statement.sql, export, statement.limit, stop)
    rows = msgspec.json.decode(result.rows)
    return SqlAnswer(result.columns, rows, result.is_cut, export.n_unseen)


class RowsExport:
    """A source of one tenant's rows; the `Export` of the sandbox.

    Rows are read as the store yields them, in no order: sorting would hold all of them in the memory that ingest needs.
    Where there are more than may be given, the time of the oldest that still is one is looked up first, by its column alone.

    Args:
        reader: A cursor with a deadline.
        span: Its condition is the tenant's boundary.
        max_rows: Most rows of each table, the newest.
    """

    def __init__(self, reader: Reader, span: TimeSpan, max_rows: int) -> None:
        self._reader = reader
        self._span = span
        self._max_rows = int(max_rows)
        self.n_unseen = 0
        """Rows of the tables asked for that were left out, so far."""

    def __call__(self, table: str, columns: frozenset[str] | None) -> Rows:
        """The rows of one table."""
        every = TABLES[table].arrow_schema()
        wanted = [name for name in every.names if columns is None or name in columns]
        wanted = wanted or every.names[:1]
        schema = pa.schema([every.field(name) for name in wanted])
        where, params = self._span.where, self._span.params
        if table == "nodes":  # what a node is does not belong to a window
            where, params = where.removeprefix(_TIME), params[2:]
        head = f"SELECT {', '.join(wanted)} FROM {table} WHERE "  # noqa: S608 - our names
        batches = itertools.chain.from_iterable(
            self._reader.batches(head + condition, given, _BATCH_ROWS)
            for condition, given in self._iter_parts(table, where, params)
        )
        return schema, (conform(batch, schema) for batch in batches)

    def _iter_parts(
        self, table: str, where: str, params: tuple[Any, ...]
    ) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Conditions that together are true for the rows to give."""
        counting = f"SELECT count(*) FROM {table} WHERE {where}"  # noqa: S608 - our names
        n_all = int(self._reader.row(counting, params)[0])
        if n_all <= self._max_rows:
            yield where, params
            return
        self.n_unseen += n_all - self._max_rows
        (edge,) = self._reader.row(
            f"SELECT min(ts) FROM (SELECT ts FROM {table} WHERE {where} ORDER BY ts DESC LIMIT {self._max_rows})",  # noqa: S608
            params,
        )
        n_newer = int(self._reader.row(f"{counting} AND ts > ?", (*params, edge))[0])
        yield f"{where} AND ts > ? LIMIT {self._max_rows}", (*params, edge)
        yield f"{where} AND ts = ? LIMIT {max(0, self._max_rows - n_newer)}", (*params, edge)
