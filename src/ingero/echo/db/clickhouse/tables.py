"""Our tables as ClickHouse has them, made from the same columns as DuckDB's. No I/O.

Beside a table's own columns each has ``ingested_at`` and ``row_key``, the key that a sender's retry is known by: it is
written with the row in one insert, so that after a crash what is known is what is there. Lists cannot be NULL in
ClickHouse: an absent one is empty.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from ingero.echo.schema.tables import APPENDED, EVENTS, HISTOGRAMS, NODES, STREAM, Table

ROW_KEY: Final = "row_key"
_NAMES: Final = frozenset({"cluster_id", "node_id", "metric_name"})
_MOMENT: Final = "DateTime64(6, 'UTC')"
_SCALARS: Final = {
    pa.string(): "String",
    pa.float64(): "Float64",
    pa.int32(): "Int32",
    pa.int64(): "Int64",
    pa.uint64(): "UInt64",
    pa.timestamp("us"): _MOMENT,
}


def _type_of(name: str, dtype: pa.DataType) -> str:
    if pa.types.is_list(dtype):
        return f"Array({_SCALARS[dtype.value_type]})"
    scalar = _SCALARS[dtype]
    return scalar if name in _NAMES or name == "ts" else f"Nullable({scalar})"


def build_table(table: Table) -> str:
    """The statement that makes one growing table: sorted for one cluster's window, parted by the day of arrival."""
    columns = [f"{name} {_type_of(name, dtype)}" for name, dtype in table.columns]
    sort = [name for name in ("cluster_id", "metric_name", "ts") if name in table.names]
    return (
        f"CREATE TABLE IF NOT EXISTS {table.name} ({', '.join(columns)}, ingested_at {_MOMENT}, {ROW_KEY} UInt64) "
        f"ENGINE = MergeTree PARTITION BY toDate(ingested_at) ORDER BY ({', '.join(sort)})"
    )


def build_nodes_table() -> str:
    """The statement for NODES: of each column what was written last, of ``ts`` the newest. Read with ``final``.

    A ``ts`` that was stored ahead of the clock stays until that time comes; no other column waits for it.
    """
    columns = []
    for name, dtype in (*NODES.columns, ("ingested_at", pa.timestamp("us"))):
        kind = _MOMENT if name == "ingested_at" else _type_of(name, dtype)
        is_key = name in {"cluster_id", "node_id"}
        keeps = "max" if name == "ts" else "anyLast"
        columns.append(
            f"{name} {kind}" if is_key else f"{name} SimpleAggregateFunction({keeps}, {kind})"
        )
    return (
        f"CREATE TABLE IF NOT EXISTS {NODES.name} ({', '.join(columns)}) "
        "ENGINE = AggregatingMergeTree ORDER BY (cluster_id, node_id)"
    )


_CLOCK: Final = (
    f"CREATE TABLE IF NOT EXISTS retention_clock (id UInt8, number UInt64, known {_MOMENT}, wall {_MOMENT}, "
    f"stepped Nullable({_MOMENT}), steady_ns Int64) ENGINE = ReplacingMergeTree(number) ORDER BY id"
)
STATEMENTS: Final = (
    *(build_table(table) for table in APPENDED),
    build_nodes_table(),
    _CLOCK,
    "CREATE TABLE IF NOT EXISTS ingest_secret (secret UInt64) ENGINE = MergeTree ORDER BY secret",
    "INSERT INTO ingest_secret SELECT cityHash64(generateUUIDv4()) WHERE (SELECT count() FROM ingest_secret) = 0",
)
"""What makes an empty database ours, and one of an earlier schema today's.

Without the secret (1), ``hangs`` (2), ``usage`` (3) or ``retention_clock`` (4).
"""
CHANGED_COLUMNS: Final = (
    *(
        f"ALTER TABLE {table.name} ADD COLUMN IF NOT EXISTS {name} {_type_of(name, dtype)} AFTER attributes"
        for table in (EVENTS, HISTOGRAMS)
        for name, dtype in (STREAM,)
    ),
    f"ALTER TABLE {NODES.name} MODIFY COLUMN ts SimpleAggregateFunction(max, {_MOMENT})",
)
"""What gives tables of an earlier schema their later columns: ``stream`` (5), and the newest ``ts`` of a node (7)."""
VERSION: Final = 7
"""Of the tables above; raise it with a statement that brings older ones up to date."""
