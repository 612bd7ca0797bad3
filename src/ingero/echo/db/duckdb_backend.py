"""`DuckDbBackend`: rows in one DuckDB file, a group in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple
from datetime import datetime
from typing import Any, Final

import duckdb
import numpy as np
import pyarrow as pa
from typing_extensions import override

from ingero.echo.db.backend import DatabaseBackend, Kept
from ingero.echo.db.deduplication import Keys
from ingero.echo.db.encryption import CATALOG
from ingero.echo.db.engine import (
    DatabaseSettings,
    checkpoint,
    fetch_row,
    migrate,
    open_engine,
    transaction,
    wal_path,
)
from ingero.echo.db.errors import MemoryLimitError, translate_errors, translate_row_errors
from ingero.echo.db.reader import Reader, ReaderPool
from ingero.echo.db.retention import Retention, trim
from ingero.echo.db.retention_clock import ClockMark, RetentionTime
from ingero.echo.db.rows import LATE, Incoming, NodeReports, build_nodes
from ingero.echo.schema.tables import NODES, USAGE
from ingero.errors import IngeroError, StoreError

_NEWEST: Final = "least(nodes.ts, excluded.ingested_at)"
"""Nothing could be newer than a stored time ahead of the clock: an earlier release left some, or a clock set back."""
_IS_LATE: Final = f"excluded.ts <= {_NEWEST} - INTERVAL {LATE.seconds} SECOND"
_NODE_UPDATES: Final = ", ".join((
    f"ts = greatest({_NEWEST}, excluded.ts)",
    "ingested_at = excluded.ingested_at",
    *(
        f"{name} = CASE WHEN {_IS_LATE} THEN coalesce(nodes.{name}, excluded.{name}) "
        f"ELSE coalesce(excluded.{name}, nodes.{name}) END"
        for name in NODES.names
        if name not in {"ts", "cluster_id", "node_id"}
    ),
))


class DuckDbBackend(DatabaseBackend):
    """One file.

    Args:
        path: The file, or ``:memory:``.
        settings: What the instance may use.
    """

    def __init__(self, path: str, settings: DatabaseSettings) -> None:
        self.readers = ReaderPool()
        self._path = path
        self._settings = settings
        self._connection: duckdb.DuckDBPyConnection | None = None

    @property
    @override
    def is_open(self) -> bool:
        return self._connection is not None

    @override
    def open(self, now: datetime, since: datetime, max_keys: int) -> Keys:
        connection = open_engine(self._path, self._settings)
        try:
            migrate(connection, now)
            with translate_errors("load the last keys"):
                loaded = connection.execute(
                    "SELECT key FROM ingest_keys WHERE ingested_at >= ? ORDER BY ingested_at DESC LIMIT ?",
                    [since, max_keys],
                ).fetchnumpy()["key"]
                self.secret = int(fetch_row(connection, "SELECT secret FROM ingest_secret")[0])
        except IngeroError:
            connection.close()
            raise
        self._connection = connection
        self.readers.attach(connection, CATALOG if self._settings.encryption else "")
        return np.asarray(loaded, dtype=np.uint64)

    @override
    def commit(
        self,
        group: Sequence[Incoming],
        nodes: NodeReports,
        now: datetime,
        kept: Kept,
    ) -> None:
        """One transaction: all of the group is kept, or nothing; who reads makes room for who writes."""
        try:
            self._commit(group, nodes, now)
        except MemoryLimitError:
            if not self.readers.sacrifice():
                raise
            self._commit(group, nodes, now)
        for incoming in group:
            kept(incoming)

    def _commit(self, group: Sequence[Incoming], nodes: NodeReports, now: datetime) -> None:
        connection = self._get()
        with translate_row_errors("write"), transaction(connection):
            for incoming in group:
                _insert(connection, incoming.table.name, incoming.batch)
            sent = [incoming.all_keys for incoming in group if incoming.table is not USAGE]
            if sent:
                keys = np.concatenate(sent)
                stamps = pa.repeat(pa.scalar(now, type=pa.timestamp("us")), len(keys))
                table = pa.table({"key": pa.array(keys), "ingested_at": stamps})
                _insert(connection, "ingest_keys", table)
            if nodes:
                _upsert_nodes(connection, nodes, now)

    @override
    def trim(self, now: RetentionTime, since: datetime, retention: Retention) -> tuple[int, int]:
        connection = self._get()
        with translate_errors("forget old keys"):
            connection.execute("DELETE FROM ingest_keys WHERE ingested_at < ?", [since])
        wal = wal_path(self._path)
        return trim(connection, retention, now, wal.stat().st_size if wal.exists() else 0)

    @override
    def load_clock(self) -> ClockMark | None:
        with translate_errors("read the time of the last upkeep"):
            sql = "SELECT known, wall, stepped, steady_ns FROM retention_clock"
            found = self._get().execute(sql).fetchall()
        return ClockMark(*found[0]) if found else None

    @override
    def save_clock(self, mark: ClockMark) -> None:
        connection = self._get()
        with translate_errors("write the time of the upkeep"), transaction(connection):
            connection.execute("DELETE FROM retention_clock")
            connection.execute("INSERT INTO retention_clock VALUES (?, ?, ?, ?)", astuple(mark))

    @override
    def run(self, job: Callable[[duckdb.DuckDBPyConnection], Any]) -> Any:
        """The job gets the connection."""
        return job(self._get())

    @override
    def drop(self) -> None:
        """Close the instance under its readers."""
        self.readers.detach()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @override
    def close(self) -> str:
        """Checkpoint and close; a checkpoint that fails leaves the log, which the next start replays."""
        self.readers.detach()
        trouble = ""
        if self._connection is not None:
            try:
                checkpoint(self._connection)
            except StoreError as error:
                trouble = error.message
        self.drop()
        return trouble

    @override
    def open_reader(self, timeout_ns: int) -> AbstractContextManager[Reader]:
        return self.readers.open_reader(timeout_ns)

    def _get(self) -> duckdb.DuckDBPyConnection:
        assert self._connection is not None
        return self._connection


def _insert(connection: duckdb.DuckDBPyConnection, table: str, rows: pa.Table) -> None:
    """Insert by the columns' names, whose order is another in a file of an older release.

    After a failure the rows stay registered, until the next ones take their place.

    A connection whose transaction has failed cannot forget them, and what it says then would hide the failure.
    """
    connection.register("incoming", rows)
    connection.execute(f"INSERT INTO {table} BY NAME SELECT * FROM incoming")  # noqa: S608 - our names
    connection.unregister("incoming")


def _upsert_nodes(connection: duckdb.DuckDBPyConnection, nodes: NodeReports, now: datetime) -> None:
    """Older reports first, for one statement takes one row of a node."""
    for i in range(max(map(len, nodes.values()))):
        rows = {key: [said[i]] for key, said in nodes.items() if i < len(said)}
        connection.register("incoming", build_nodes(rows, now))
        connection.execute(
            f"INSERT INTO nodes SELECT * FROM incoming "  # noqa: S608 - our names
            f"ON CONFLICT (cluster_id, node_id) DO UPDATE SET {_NODE_UPDATES}"
        )
        connection.unregister("incoming")
