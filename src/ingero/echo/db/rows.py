"""`Rows`: what one request wants written, as columns, and how columns become Arrow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import compress
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ingero.echo.db.deduplication import Keys, build_keys, mix
from ingero.echo.schema.tables import EVENTS, NODES, TABLES, Table
from ingero.model.arrays import BoolArray, IntArray

NodeKey = tuple[str, str]
NodeRow = dict[str, Any]
NodeReports = dict[NodeKey, list[NodeRow]]
"""Oldest first; rows of one node are `LATE` apart or more."""
LATE: Final = timedelta(minutes=1)
"""A report of a node that is so much older than its newest one says nothing but what is not known yet.

Not less: several senders report one node, each as quickly as it can, and what each says is of its own facts."""


@dataclass(slots=True)
class Chunk:
    """Ready-made Arrow columns for one table, for sources that are columnar already.

    Attributes:
        batch: Columns of the table without ``ingested_at``.
        series: Hash of what each row is about, shape (n,).
        time_ns: Sender's time of each row, shape (n,).
        content: Hash of what each row says beside that, shape (n,); None where rows of one series and time are one.
    """

    batch: pa.RecordBatch
    series: Keys
    time_ns: IntArray
    content: Keys | None = None

    def slice(self, start: int, stop: int) -> Chunk:
        """Some of its rows."""
        content = None if self.content is None else self.content[start:stop]
        batch = self.batch.slice(start, stop - start)
        return Chunk(batch, self.series[start:stop], self.time_ns[start:stop], content)


@dataclass(slots=True)
class TableRows:
    """Rows for one table.

    Attributes:
        columns: One list per column of the table, in its order, all of one length.
        series: Hash of what each row is about; parallel to the lists.
        time_ns: Sender's time of each row.
        content: Hash of what each row says beside that; empty where rows of one series and time are one.
        uids: Hash of the id that its sender gave each row; 0 where it gave none.
        chunks: Further rows that are Arrow already.
    """

    columns: tuple[list[Any], ...]
    series: list[int] = field(default_factory=list)
    time_ns: list[int] = field(default_factory=list)
    content: list[int] = field(default_factory=list)
    uids: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    def add(
        self, series: int, time_ns: int, values: Sequence[Any], content: int = 0, uid: int = 0
    ) -> None:
        """Append one row; ``values`` in the table's column order."""
        self.series.append(series)
        self.time_ns.append(time_ns)
        self.content.append(content)
        self.uids.append(uid)
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)

    def keep_listed(self, is_kept: BoolArray) -> None:
        """Drop rows of the lists that are not in a mask."""
        chosen = is_kept.tolist()
        for values in (*self.columns, self.series, self.time_ns, self.content, self.uids):
            values[:] = compress(values, chosen)

    @property
    def n_rows(self) -> int:
        """Rows in the lists and the chunks."""
        return len(self.series) + sum(len(chunk.series) for chunk in self.chunks)

    def slice(self, start: int, stop: int) -> TableRows:
        """Some of its rows, counted over lists and chunks."""
        columns = tuple(column[start:stop] for column in self.columns)
        part = TableRows(
            columns, self.series[start:stop], self.time_ns[start:stop], self.content[start:stop],
            self.uids[start:stop],
        )  # fmt: skip
        at = len(self.series)
        for chunk in self.chunks:
            first, last = max(start - at, 0), min(stop - at, len(chunk.series))
            if first < last:
                part.chunks.append(chunk.slice(first, last))
            at += len(chunk.series)
        return part


@dataclass(slots=True)
class PutOutcome:
    """What became of a request's rows beside being written.

    Attributes:
        n_conflicts: Rows that are kept beside another of their series and time.
        n_refused: Rows that the database does not take.
        why: What it said of the first of them.
    """

    n_conflicts: int = 0
    n_refused: int = 0
    why: str = ""


@dataclass(slots=True)
class Rows:
    """Everything that one request wants written.

    Attributes:
        tables: By table name.
        nodes: What nodes said about themselves, by (cluster, node): columns of NODES that are known, oldest first.
        n_rows: Rows in ``tables``, counted by the code that fills them.
        n_bytes: About what they take in memory, as far as rows do not say it.
        clusters: Every cluster that the request names or writes to.
        bearer: Who sent it, as `ingero.serving.bearer.Principal.label` has it.
        outcome: Filled in by the writer.
    """

    tables: dict[str, TableRows] = field(default_factory=dict)
    nodes: NodeReports = field(default_factory=dict)
    n_rows: int = 0
    n_bytes: int = 0
    clusters: set[str] = field(default_factory=set)
    bearer: str = ""
    outcome: PutOutcome = field(default_factory=PutOutcome)

    def name_cluster(self, cluster_id: str) -> None:
        """Note a cluster that something in the request names; one that names none is not one."""
        if cluster_id:
            self.clusters.add(cluster_id)

    def split(self) -> tuple[Rows, Rows] | None:
        """Two halves, with one outcome; None for what cannot be split."""
        nodes = list(self.nodes.items())
        tables = [(name, rows) for name, rows in self.tables.items() if rows.n_rows]
        if len(tables) + bool(nodes) > 1:
            half = len(tables) // 2
            return self._part(dict(tables[:half]), {} if half else self.nodes), self._part(
                dict(tables[half:]), self.nodes if half else {}
            )
        if tables and tables[0][1].n_rows > 1:
            (name, rows), half = tables[0], tables[0][1].n_rows // 2
            parts = rows.slice(0, half), rows.slice(half, rows.n_rows)
            return self._part({name: parts[0]}, {}), self._part({name: parts[1]}, {})
        if len(nodes) > 1:
            half = len(nodes) // 2
            return self._part({}, dict(nodes[:half])), self._part({}, dict(nodes[half:]))
        return None

    def _part(self, tables: dict[str, TableRows], nodes: NodeReports) -> Rows:
        n_rows = sum(table.n_rows for table in tables.values())
        return Rows(tables, nodes, n_rows, bearer=self.bearer, outcome=self.outcome)

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
        keys: Key per row: of its series, time and content.
        places: Key per row of its series and time alone.
        uids: Key per row of the id that its sender gave it; 0 where it gave none.
        owner_idx: Which of the group's requests each row is of.
        series: Hash of what each row is about.
    """

    table: Table
    batch: pa.Table
    keys: Keys
    places: Keys
    uids: Keys
    owner_idx: IntArray
    series: Keys

    @property
    def all_keys(self) -> Keys:
        """Every key by which one of the rows is known again."""
        return np.concatenate((self.keys, self.uids[self.uids != 0]))

    def keep(self, is_kept: BoolArray) -> Incoming:
        """The rows of a mask."""
        return Incoming(
            self.table,
            self.batch.filter(pa.array(is_kept)),
            self.keys[is_kept],
            self.places[is_kept],
            self.uids[is_kept],
            self.owner_idx[is_kept],
            self.series[is_kept],
        )


_Owned = tuple[int, TableRows]


def build_incoming(group: Iterable[Rows], ingested_at: datetime, secret: int = 0) -> list[Incoming]:
    """Join the rows of a group table by table; ``secret`` goes into their keys.

    Lossless: duplicates are still in; the caller masks them by key.
    """
    by_table: dict[str, list[_Owned]] = {}
    for owner, rows in enumerate(group):
        for name, table_rows in rows.tables.items():
            if table_rows.n_rows:
                by_table.setdefault(name, []).append((owner, table_rows))
    return [_join(TABLES[name], parts, ingested_at, secret) for name, parts in by_table.items()]


def _join(table: Table, owned: Sequence[_Owned], ingested_at: datetime, secret: int) -> Incoming:
    batches, series, times, contents, uids, owners = [], [], [], [], [], []
    parts = [part for _, part in owned]
    n_listed = sum(len(part.series) for part in parts)
    if n_listed:
        arrays = [
            pa.array(_chain(part.columns[i] for part in parts), type=dtype)
            for i, (_, dtype) in enumerate(table.columns)
        ]
        batches.append(pa.RecordBatch.from_arrays(arrays, names=list(table.names)))
        series.append(np.array(_chain(part.series for part in parts), dtype=np.uint64))
        times.append(np.array(_chain(part.time_ns for part in parts), dtype=np.int64))
        given = (part.content or [0] * len(part.series) for part in parts)
        contents.append(np.array(_chain(given), dtype=np.uint64))
        ids = (part.uids or [0] * len(part.series) for part in parts)
        uids.append(np.array(_chain(ids), dtype=np.uint64))
        owners += [np.full(len(part.series), owner) for owner, part in owned]
    for owner, part in owned:
        for chunk in part.chunks:
            n_rows, content = len(chunk.series), chunk.content
            batches.append(chunk.batch)
            series.append(chunk.series)
            times.append(chunk.time_ns)
            contents.append(np.zeros(n_rows, np.uint64) if content is None else content)
            uids.append(np.zeros(n_rows, np.uint64))
            owners.append(np.full(n_rows, owner))
    joined = pa.Table.from_batches(batches)
    stamp = pa.array([ingested_at], type=pa.timestamp("us"))
    stamps = pa.repeat(stamp[0], joined.num_rows)
    about = np.concatenate(series)
    places = build_keys(about, np.concatenate(times), secret)
    content = np.concatenate(contents)
    if table is EVENTS:
        content += _hash_numbers(joined.column("value_double"))
    return Incoming(
        table,
        joined.append_column("ingested_at", stamps),
        mix(places + mix(content)),
        places,
        build_uid_keys(np.concatenate(uids), secret),
        np.concatenate(owners),
        about,
    )


def build_uid_keys(uids: Keys, secret: int) -> Keys:
    """A key of each id that a sender gave, shape (n,); 0 where it gave none."""
    keys = mix(uids ^ np.uint64(secret))
    keys[uids == 0] = 0
    return keys


def _hash_numbers(column: pa.ChunkedArray) -> Keys:
    """A hash of each number, shape (n,); absent ones have one too, and -0 is 0."""
    numbers = column.to_numpy() + 0.0
    numbers[np.isnan(numbers)] = np.nan  # one of the many bit patterns
    return mix(numbers.view(np.uint64))


def _chain(lists: Iterable[list[Any]]) -> list[Any]:
    joined: list[Any] = []
    for one in lists:
        joined += one
    return joined


def build_reports(facts: Mapping[str, tuple[datetime, Any]]) -> list[NodeRow]:
    """Rows of one node's facts with the time of each, oldest first: a fact is less than `LATE` older than its row."""
    reports: list[NodeRow] = []
    for name, (at, value) in sorted(facts.items(), key=lambda fact: fact[1][0], reverse=True):
        if not reports or at <= reports[-1]["ts"] - LATE:
            reports.append({"ts": at})
        reports[-1][name] = value
    return reports[::-1]


def merge_nodes(group: Iterable[Rows]) -> NodeReports:
    """What the group says of each node; a later report's values win, absent ones do not erase.

    Older facts keep rows of their own, or the time of newer ones would let them overwrite what is stored.
    """
    reports: NodeReports = {}
    for rows in group:
        for key, said in rows.nodes.items():
            reports.setdefault(key, []).extend(said)
    merged: NodeReports = {}
    for key, said in reports.items():
        said.sort(key=lambda row: row["ts"])
        facts = {
            name: (row["ts"], value)
            for row in said
            for name, value in row.items()
            if value is not None
        }
        merged[key] = build_reports(facts)
    return merged


def build_nodes(nodes: NodeReports, ingested_at: datetime) -> pa.Table:
    """What nodes said as rows of NODES, ``ingested_at`` last; what a node did not say is null."""
    reports = [(key, row) for key, said in nodes.items() for row in said]
    arrays = {}
    for name, dtype in NODES.columns:
        if name == "cluster_id":
            values: list[Any] = [key[0] for key, _ in reports]
        elif name == "node_id":
            values = [key[1] for key, _ in reports]
        else:
            values = [row.get(name) for _, row in reports]
        arrays[name] = pa.array(values, type=dtype)
    arrays["ingested_at"] = pa.array([ingested_at] * len(reports), type=pa.timestamp("us"))
    return pa.table(arrays)
