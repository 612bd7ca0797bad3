"""`Rows`: what one request wants written, as columns, and how columns become Arrow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ingero.echo.db.window import Keys, build_keys
from ingero.echo.schema import NODES, TABLES, Table

NodeKey = tuple[str, str]
NodeRow = dict[str, Any]


@dataclass(slots=True)
class Chunk:
    """Ready-made Arrow columns for one table, for sources that are columnar already.

    Attributes:
        batch: Columns of the table without ``ingested_at``.
        series: Hash of what each row is about, shape (n,).
        time_ns: Sender's time of each row, shape (n,).
    """

    batch: pa.RecordBatch
    series: Keys
    time_ns: npt.NDArray[np.int64]


@dataclass(slots=True)
class TableRows:
    """Rows for one table.

    Attributes:
        columns: One list per column of the table, in its order, all of one length.
        series: Hash of what each row is about; parallel to the lists.
        time_ns: Sender's time of each row.
        chunks: Further rows that are Arrow already.
    """

    columns: tuple[list[Any], ...]
    series: list[int] = field(default_factory=list)
    time_ns: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    def add(self, series: int, time_ns: int, values: Sequence[Any]) -> None:
        """Append one row; ``values`` in the table's column order."""
        self.series.append(series)
        self.time_ns.append(time_ns)
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)

    @property
    def n_rows(self) -> int:
        """Rows in the lists and the chunks."""
        return len(self.series) + sum(len(chunk.series) for chunk in self.chunks)


@dataclass(slots=True)
class Rows:
    """Everything that one request wants written; committed whole or not at all.

    Attributes:
        tables: By table name.
        nodes: What nodes said about themselves, by (cluster, node): columns of NODES that are known.
        n_rows: Rows in ``tables``, kept by whoever builds it.
    """

    tables: dict[str, TableRows] = field(default_factory=dict)
    nodes: dict[NodeKey, NodeRow] = field(default_factory=dict)
    n_rows: int = 0

    def table(self, table: Table) -> TableRows:
        """The rows of one table, empty at first."""
        rows = self.tables.get(table.name)
        if rows is None:
            rows = self.tables[table.name] = TableRows(tuple([] for _ in table.columns))
        return rows


@dataclass(frozen=True, slots=True)
class Incoming:
    """One table's rows of a whole group, ready to be inserted.

    Attributes:
        table: Which.
        batch: All columns, ``ingested_at`` last.
        keys: Key per row.
    """

    table: Table
    batch: pa.Table
    keys: Keys


def build_incoming(group: Iterable[Rows], ingested_at: datetime) -> list[Incoming]:
    """Join the rows of a group table by table.

    Lossless: duplicates are still in; the caller masks them by key.
    """
    by_table: dict[str, list[TableRows]] = {}
    for rows in group:
        for name, table_rows in rows.tables.items():
            if table_rows.n_rows:
                by_table.setdefault(name, []).append(table_rows)
    return [_join(TABLES[name], parts, ingested_at) for name, parts in by_table.items()]


def _join(table: Table, parts: Sequence[TableRows], ingested_at: datetime) -> Incoming:
    batches, series, times = [], [], []
    n_listed = sum(len(part.series) for part in parts)
    if n_listed:
        arrays = [
            pa.array(_chain(part.columns[i] for part in parts), type=dtype)
            for i, (_, dtype) in enumerate(table.columns)
        ]
        batches.append(pa.RecordBatch.from_arrays(arrays, names=list(table.names)))
        series.append(np.array(_chain(part.series for part in parts), dtype=np.uint64))
        times.append(np.array(_chain(part.time_ns for part in parts), dtype=np.int64))
    for part in parts:
        for chunk in part.chunks:
            batches.append(chunk.batch)
            series.append(chunk.series)
            times.append(chunk.time_ns)
    joined = pa.Table.from_batches(batches)
    stamp = pa.array([ingested_at], type=pa.timestamp("us"))
    stamps = pa.repeat(stamp[0], joined.num_rows)
    return Incoming(
        table,
        joined.append_column("ingested_at", stamps),
        build_keys(np.concatenate(series), np.concatenate(times)),
    )


def _chain(lists: Iterable[list[Any]]) -> list[Any]:
    joined: list[Any] = []
    for one in lists:
        joined += one
    return joined


def merge_nodes(group: Iterable[Rows]) -> dict[NodeKey, NodeRow]:
    """What the group says of each node; a later request's values win, absent ones do not erase."""
    merged: dict[NodeKey, NodeRow] = {}
    for rows in group:
        for key, row in rows.nodes.items():
            merged.setdefault(key, {}).update(row)
    return merged


def build_nodes(nodes: dict[NodeKey, NodeRow], ingested_at: datetime) -> pa.Table:
    """What nodes said as rows of NODES, ``ingested_at`` last; what a node did not say is null."""
    arrays = {}
    for name, dtype in NODES.columns:
        if name == "cluster_id":
            values: list[Any] = [key[0] for key in nodes]
        elif name == "node_id":
            values = [key[1] for key in nodes]
        else:
            values = [row.get(name) for row in nodes.values()]
        arrays[name] = pa.array(values, type=dtype)
    arrays["ingested_at"] = pa.array([ingested_at] * len(nodes), type=pa.timestamp("us"))
    return pa.table(arrays)
