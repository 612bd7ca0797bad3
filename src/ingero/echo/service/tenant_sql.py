"""A tenant's own SQL on its own rows: which rows it gets, and how it is run in the sandbox."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pyarrow as pa

from ingero.echo.db.cancellation import Cancellation
from ingero.echo.db.reader import Reader, conform
from ingero.echo.db.sandbox.runner import Rows, Sandbox, SandboxSettings
from ingero.echo.db.store import Store
from ingero.echo.queries.context import SqlAnswer, TimeSpan
from ingero.echo.schema.tables import TABLES, TENANT_TABLES
from ingero.echo.service.config import EchoConfig
from ingero.serving.columns import number_repeats
from ingero.telemetry.clock import Clock

_BATCH_ROWS: Final = 2048
"""One vector of DuckDB's: the least that is in memory at once."""


class TenantSql:
    """Runs statements in the sandbox.

    Args:
        store: Where the rows are.
        config: What a statement may use.
        clock: For deadlines.
    """

    def __init__(self, store: Store, config: EchoConfig, clock: Clock) -> None:
        self._store = store
        self._config = config
        settings = SandboxSettings(
            n_workers=config.sql_workers,
            timeout_ns=config.sql_timeout,
            memory_bytes=config.sql_memory,
            max_input_bytes=config.sql_max_bytes_in,
        )
        self.sandbox = Sandbox(settings, TENANT_TABLES, clock)

    def run(self, sql: str, span: TimeSpan, limit: int, cancellation: Cancellation) -> SqlAnswer:
        """Run one statement on the rows of a span, whose condition is the tenant's boundary.

        Raises:
            IngeroError: As `Sandbox.run`, or the rows cannot be read.
        """
        config = self._config
        with (
            self._store.open_reader(config.sql_timeout) as reader,
            cancellation.calls(reader.stop),
        ):
            export = RowsExport(reader, span, config.sql_max_rows_in)
            result = self.sandbox.run(sql, export, limit, cancellation)
        rows = msgspec.json.decode(result.rows)
        return SqlAnswer(number_repeats(result.columns), rows, result.is_cut, export.n_unseen)


class RowsExport:
    """A source of one tenant's rows: its clusters, its window, the newest; the `Export` of the sandbox.

    Rows are read as the store yields them, in no order: sorting would hold all of them in the memory that ingest needs.
    Where there are more than may be given, the time of the oldest that is given is looked up first, by its column
    alone.

    Args:
        reader: A cursor with a deadline.
        span: Its condition is the tenant's boundary.
        max_rows: Maximum number of rows of each table, the newest.
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
            where, params = self._span.of_clusters
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
        newest = f"SELECT ts FROM {table} WHERE {where} ORDER BY ts DESC LIMIT {self._max_rows}"  # noqa: S608
        (edge,) = self._reader.row(f"SELECT min(ts) FROM ({newest})", params)  # noqa: S608
        n_newer = int(self._reader.row(f"{counting} AND ts > ?", (*params, edge))[0])
        yield f"{where} AND ts > ? LIMIT {self._max_rows}", (*params, edge)
        yield f"{where} AND ts = ? LIMIT {max(0, self._max_rows - n_newer)}", (*params, edge)
