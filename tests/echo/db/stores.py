"""Rows, and stores to put them into."""

import datetime as dt

from ingero.echo.db.engine import DatabaseSettings
from ingero.echo.db.rows import Rows
from ingero.echo.db.store import Store, StoreSettings
from ingero.echo.db.writer_settings import DatabaseWriterSettings
from ingero.echo.schema.tables import EVENTS
from ingero.telemetry.clock import SystemClock
from ingero.units import NS_PER_S

T0 = dt.datetime(2026, 1, 1)  # noqa: DTZ001 - the store's TIMESTAMP is UTC without a zone


ENGINE = DatabaseSettings(memory_limit_bytes=256 << 20, threads=1)
OLD = "ts, cluster_id, node_id, metric_name, value_double, attributes, ingested_at"
"""Columns of events that each release has had."""


def rows_of(n, *, start=0, cluster="c1", node="n1", stream=None):
    rows = Rows(n_rows=n)
    table = rows.table(EVENTS)
    for i in range(start, start + n):
        table.add(
            7,
            i * NS_PER_S,
            (
                T0 + dt.timedelta(seconds=i),
                cluster,
                node,
                "m",
                float(i),
                None,
                "gauge",
                "1",
                "{}",
                stream,
            ),
        )
    return rows


def make_store(path, clock=None, *, free_bytes=None, max_waiting_rows=500_000, **writer):
    settings = StoreSettings(
        engine=ENGINE,
        writer=DatabaseWriterSettings(**({"group_ns": 1_000_000} | writer)),
        max_waiting_rows=max_waiting_rows,
    )
    return Store(str(path), settings, clock or SystemClock(), free_bytes)


def count(store, table="events"):
    with store.open_reader(NS_PER_S * 5) as reader:
        return reader.row(f"SELECT count(*) FROM {table}")[0]
