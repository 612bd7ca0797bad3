"""`ClickHouseBackend`: rows on a server that other people run.

There is no transaction across tables: a group is one insert per table, each with its rows' keys, and a table that was
written is reported as kept even where the next one fails. After any failed insert the backend is opened again, which
reads from the tables which keys are there, so that neither a lost answer nor a crash leaves a row twice or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Final

import numpy as np
import pyarrow as pa
from clickhouse_connect.driver.client import Client
from typing_extensions import override

from ingero.echo.db.backend import DatabaseBackend, Kept
from ingero.echo.db.clickhouse.client import connect, translate_errors
from ingero.echo.db.clickhouse.reader import ServerReader
from ingero.echo.db.clickhouse.settings import ClickHouseSettings
from ingero.echo.db.clickhouse.tables import CHANGED_COLUMNS, ROW_KEY, STATEMENTS, VERSION
from ingero.echo.db.deduplication import Keys
from ingero.echo.db.errors import BrokenInstanceError
from ingero.echo.db.reader import Reader
from ingero.echo.db.retention import Horizon, Retention
from ingero.echo.db.retention_clock import ClockMark, RetentionTime
from ingero.echo.db.rows import LATE, Incoming, NodeReports, NodeRow, build_nodes
from ingero.echo.schema.tables import NODES, SENT
from ingero.errors import StoreError
from ingero.telemetry.clock import Clock

_INSERT: Final = {"async_insert": 0}
"""A server may be set up to answer before the rows are in a table; ours are in one when it answers."""
_TIME: Final = "DateTime64(6, 'UTC')"
_MOMENT: Final = f"{{at:{_TIME}}}"
_FROM: Final = f"ingested_at >= {{stepped:{_TIME}}} AND ingested_at < {{until:{_TIME}}}"
_GONE: Final = f"(ingested_at < {{before:{_TIME}}} OR ({_FROM}))"
"""`Horizon.CONDITION` with the fields' names."""
_FACTS: Final = tuple(name for name in NODES.names if name not in {"cluster_id", "node_id", "ts"})
_KNOWN_OF_NODES: Final = (
    f"SELECT cluster_id, node_id, ts, {', '.join(_FACTS)} FROM nodes FINAL "  # noqa: S608 - our names
    "WHERE (cluster_id, node_id) IN (SELECT key.1, key.2 FROM ("
    "SELECT arrayJoin(JSONExtract({keys:String}, 'Array(Tuple(String, String))')) AS key))"
)
MAX_KEYS: Final = 10
"""Nodes that one statement asks about: they travel in a field of its address, of which a server takes 128 KiB.

Each takes 6 KiB at most: 256 characters of 22 bytes when encoded, and the cluster's name.
"""


class ClickHouseBackend(DatabaseBackend):
    """One database of one server.

    Args:
        settings: Where.
        clock: For readers' deadlines.
    """

    def __init__(self, settings: ClickHouseSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._client: Client | None = None

    @property
    @override
    def is_open(self) -> bool:
        return self._client is not None

    @override
    def open(self, now: datetime, since: datetime, max_keys: int) -> Keys:
        client = connect(self._settings)
        try:
            _migrate(client, now)
            keys = _load_keys(client, since, max_keys)
            self.secret = _load_secret(client)
        except StoreError:
            client.close()
            raise
        self._client = client
        return keys

    @override
    def commit(
        self,
        group: Sequence[Incoming],
        nodes: NodeReports,
        now: datetime,
        kept: Kept,
    ) -> None:
        """One insert per table; each is kept whole or found out about when the backend is opened again."""
        nodes = self._hold_back(nodes, now)
        for incoming in group:
            known_by = np.where(incoming.uids != 0, incoming.uids, incoming.keys)
            keyed = incoming.batch.append_column(ROW_KEY, pa.array(known_by))
            self._insert(incoming.table.name, keyed)
            kept(incoming)
        if nodes:
            self._insert("nodes", build_nodes(nodes, now))

    def _hold_back(self, nodes: NodeReports, now: datetime) -> NodeReports:
        """One row of each node, without what is known already and was reported too late to change it.

        The table is asked about old reports only: what it has is never newer than now.
        """
        old = [key for key, said in nodes.items() if said[0]["ts"] <= now - LATE]
        held_back = {key: [_join_reports(said)] for key, said in nodes.items()}
        for first in range(0, len(old), MAX_KEYS):
            keys = {"keys": json.dumps(old[first : first + MAX_KEYS])}
            with translate_errors("look for what is known of nodes"):
                found = self._get().query(_KNOWN_OF_NODES, keys).result_rows
            for cluster_id, node_id, ts, *values in found:
                key, late = (cluster_id, node_id), ts.replace(tzinfo=None) - LATE
                known = {
                    name for name, value in zip(_FACTS, values, strict=True) if value is not None
                }
                new = [
                    {name: value for name, value in row.items() if name not in known}
                    if row["ts"] <= late
                    else row
                    for row in nodes[key]
                ]
                held_back[key] = [_join_reports(new)]
        return held_back

    @override
    def trim(self, now: RetentionTime, since: datetime, retention: Retention) -> tuple[int, int]:
        """Drop whole days of arrival; the server's size is its owner's business, and keys go with their rows."""
        del since
        horizons = dict(retention.find_horizons(now))
        if not horizons:
            return 0, 0
        client = self._get()
        nodes_horizon = horizons.pop(NODES.name, None)
        with translate_errors("delete old rows"):
            n_aged = sum(_drop_days(client, name, horizon) for name, horizon in horizons.items())
            if nodes_horizon is not None:
                _delete_nodes(client, nodes_horizon)
        return n_aged, 0

    @override
    def load_clock(self) -> ClockMark | None:
        with translate_errors("read the time of the last upkeep"):
            found = (
                self
                ._get()
                .query(
                    "SELECT known, wall, stepped, steady_ns FROM retention_clock ORDER BY number DESC LIMIT 1"
                )
                .result_rows
            )
        if not found:
            return None
        *moments, steady_ns = found[0]
        known, wall, stepped = (one and one.replace(tzinfo=None) for one in moments)
        return ClockMark(known, wall, stepped, int(steady_ns))

    @override
    def save_clock(self, mark: ClockMark) -> None:
        """One more row; the server merges the earlier ones away."""
        sql = (
            "INSERT INTO retention_clock SELECT 0, (SELECT max(number) FROM retention_clock) + 1, "  # noqa: S608
            f"{{known:{_TIME}}}, {{wall:{_TIME}}}, {{stepped:Nullable({_TIME})}}, {{steady_ns:Int64}}"
        )
        with translate_errors("write the time of the upkeep"):
            self._get().command(sql, parameters=asdict(mark))

    @override
    def drop(self) -> None:
        """Forget the connection."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    @override
    @contextmanager
    def open_reader(self, timeout_ns: int) -> Iterator[Reader]:
        """A reader with a deadline that the server keeps."""
        client = self._client
        if client is None:
            raise BrokenInstanceError(
                "cannot read: the server is away", hint="Ask again in a second."
            )
        has_ids = not self._settings.is_embedded
        reader = ServerReader(client, self._clock, timeout_ns, has_ids=has_ids)
        try:
            yield reader
        finally:
            reader.stop()

    def _insert(self, table: str, rows: pa.Table) -> None:
        """One insert, never repeated by the client: how much of a failed one is there is asked of the tables."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows)
        whole = (
            part for part in (sink.getvalue().to_pybytes(),)
        )  # a generator cannot be sent twice
        try:
            with translate_errors(f"write {table}"):
                self._get().raw_insert(
                    table, rows.column_names, whole, settings=_INSERT, fmt="ArrowStream"
                )
        except BrokenInstanceError:
            raise
        except StoreError as error:
            raise BrokenInstanceError(error.message, hint=error.hint) from error

    def _get(self) -> Client:
        client = self._client
        if client is None:
            raise BrokenInstanceError("the server is away")
        return client


def _join_reports(reports: Iterable[NodeRow]) -> NodeRow:
    return {name: value for row in reports for name, value in row.items()}


def _migrate(client: Client, now: datetime) -> None:
    """Make what is missing; tables of a newer release are refused."""
    with translate_errors("set up the database"):
        client.command(
            "CREATE TABLE IF NOT EXISTS schema_migrations (number UInt32, applied_at DateTime64(6, 'UTC')) "
            "ENGINE = MergeTree ORDER BY number"
        )
        (row,) = client.query("SELECT max(number) FROM schema_migrations").result_rows
        before = int(row[0])
        if before > VERSION:
            raise StoreError(
                f"the database has schema {before} and this release knows {VERSION}",
                hint="Install the release that wrote it.",
            )
        if before == VERSION:
            return
        for statement in (*STATEMENTS, *(CHANGED_COLUMNS if before else ())):
            client.command(statement)
        client.command(
            f"INSERT INTO schema_migrations SELECT {{number:UInt32}}, {_MOMENT}",
            parameters={"number": VERSION, "at": now},
        )


def _drop_days(client: Client, table: str, horizon: Horizon) -> int:
    """Drop the days of which every row is gone; their rows."""
    day = timedelta(days=1)
    whole = Horizon(*map(_begin_day, (horizon.before, horizon.stepped + day, horizon.until)))
    found = client.query(
        f"SELECT toString(toDate(ingested_at)) AS day, count() FROM {table} "  # noqa: S608 - our names
        f"WHERE {_GONE} GROUP BY day",
        parameters=asdict(whole),
    ).result_rows
    for day, _ in found:
        client.command(f"ALTER TABLE {table} DROP PARTITION '{day}'")
    return sum(int(n_rows) for _, n_rows in found)


def _begin_day(moment: datetime) -> datetime:
    """In Python: ClickHouse's own has no days after 2106."""
    return moment.replace(hour=0, minute=0, second=0, microsecond=0)


def _delete_nodes(client: Client, horizon: Horizon) -> None:
    """Delete nodes whose last report is gone, with all parts of it."""
    silent = (
        "SELECT cluster_id, node_id FROM (SELECT cluster_id, node_id, max(ingested_at) AS ingested_at "  # noqa: S608
        f"FROM nodes GROUP BY ALL) WHERE {_GONE}"
    )
    values = asdict(horizon)
    (row,) = client.query(f"SELECT count() FROM ({silent})", parameters=values).result_rows  # noqa: S608
    if row[0]:
        client.command(
            f"DELETE FROM nodes WHERE (cluster_id, node_id) IN ({silent})",  # noqa: S608
            parameters=values,
        )


def _load_secret(client: Client) -> int:
    with translate_errors("load the secret of the keys"):
        (row,) = client.query("SELECT min(secret) FROM ingest_secret").result_rows
    return int(row[0])


def _load_keys(client: Client, since: datetime, max_keys: int) -> Keys:
    parts = " UNION ALL ".join(
        f"SELECT {ROW_KEY}, ingested_at FROM {table.name} WHERE ingested_at >= {_MOMENT}"  # noqa: S608
        for table in SENT
    )
    sql = f"SELECT {ROW_KEY} FROM ({parts}) ORDER BY ingested_at DESC LIMIT {int(max_keys)}"  # noqa: S608
    with translate_errors("load the last keys"):
        found = client.query_arrow(sql, parameters={"at": since})
    return np.asarray(found.column(0).combine_chunks(), dtype=np.uint64)
