"""A table of three rows, as the service exports it to a statement."""

import datetime as dt

import msgspec
import pyarrow as pa

from ingero.echo.schema.tables import EVENTS

T0 = dt.datetime(2026, 1, 1)  # noqa: DTZ001 - the store's TIMESTAMP is UTC without a zone


def export(table, columns=None):
    """As the service does: at least the columns that are named."""
    schema, batches = export_whole(table)
    names = [name for name in schema.names if columns is None or name in columns]
    names = names or schema.names[:1]
    narrow = pa.schema([schema.field(name) for name in names])
    return narrow, [batch.select(names) for batch in batches]


def export_whole(table, columns=None):
    schema = EVENTS.arrow_schema()
    if table != "events":
        from ingero.echo.schema.tables import TABLES

        return TABLES[table].arrow_schema(), []
    rows = pa.table(
        {
            "ts": [T0, T0, T0],
            "cluster_id": ["c1"] * 3,
            "node_id": ["n1", "n2", "n3"],
            "metric_name": ["m"] * 3,
            "value_double": [1.0, 2.0, None],
            "host_attr": [None] * 3,
            "kind": ["gauge"] * 3,
            "unit": [""] * 3,
            "attributes": ['{"k":"v"}'] * 3,
            "stream": [None] * 3,
            "ingested_at": [T0] * 3,
        },
        schema=schema,
    )
    return schema, rows.to_batches()


def run(sandbox, sql, limit=1000):
    result = sandbox.run(sql, export, limit)
    return result.columns, msgspec.json.decode(result.rows), result.is_cut
