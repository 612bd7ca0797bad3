"""Which rows a tenant's statement gets: its clusters, its window, newest first, and no others; of them the columns it names."""

from __future__ import annotations

import pyarrow as pa

from ingero.echo.db.reader import Reader, conform
from ingero.echo.db.sandbox.pool import Export, Rows
from ingero.echo.queries.ask import Span
from ingero.echo.schema import TABLES

_TIME: str = "ts >= ? AND ts < ? AND "


def export_rows(reader: Reader, span: Span, max_rows: int) -> Export:
    """A source of one tenant's rows.

    Args:
        reader: A cursor with a deadline.
        span: Its condition is the tenant's boundary.
        max_rows: Most rows of each table, the newest.
    """

    def export(table: str, columns: frozenset[str] | None) -> Rows:
        every = TABLES[table].arrow_schema()
        wanted = [name for name in every.names if columns is None or name in columns]
        wanted = wanted or every.names[:1]
        schema = pa.schema([every.field(name) for name in wanted])
        where, params = span.where, span.params
        if table == "nodes":  # what a node is does not belong to a window
            where, params = where.removeprefix(_TIME), params[2:]
        batches = reader.batches(
            f"SELECT {', '.join(wanted)} FROM {table} WHERE {where} ORDER BY ts DESC LIMIT {int(max_rows)}",  # noqa: S608
            params,
        )
        return schema, (conform(batch, schema) for batch in batches)

    return export
