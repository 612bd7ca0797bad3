"""Who had how much kept: counted at the commit, written down, and counted again after a crash."""

import datetime as dt

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from tests.echo.db.stores import ENGINE, T0, make_store, rows_of

from ingero.echo.db.deduplication import mix
from ingero.echo.db.engine import migrate, open_engine
from ingero.echo.db.retention import Retention
from ingero.echo.db.retention_clock import RetentionTime
from ingero.echo.db.rows import Rows, build_incoming
from ingero.echo.db.usage import SeriesSketch, UsageLedger, measure_rows
from ingero.echo.schema.tables import EVENTS, HISTOGRAMS, LOGS
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S

ROW_BYTES = 8 + len("c1") + len("n1") + len("m") + 8 + len("gauge") + len("1") + len("{}") + 8


def sent_by(rows, bearer):
    rows.bearer = bearer
    return rows


def read(store, sql):
    with store.open_reader(5 * NS_PER_S) as reader:
        return reader.rows(sql)


def entries(store):
    return read(
        store,
        "SELECT cluster_id, bearer, of_table, sum(n_rows), sum(n_bytes), max(n_series) FROM usage "
        "GROUP BY 1, 2, 3 ORDER BY 1, 2, 3",
    )


def test_rows_are_written_down_by_cluster_bearer_and_table_and_duplicates_are_not(tmp_path):
    clock = ManualClock()
    store = make_store(tmp_path / "echo.db", clock)
    store.open()
    store.write(sent_by(rows_of(10), "aa"))
    store.write(sent_by(rows_of(10), "aa"))  # the sender's retry
    store.write(sent_by(rows_of(5, start=50, cluster="c2"), "bb"))
    logs = Rows(n_rows=1, bearer="bb")
    logs.table(LOGS).add(9, 1, (T0, "c2", "n2", "event", "INFO", "körper", "{}"))
    store.write(logs)
    assert store.usage.find_stored_bytes(frozenset({"c1"})) == 10 * ROW_BYTES
    assert entries(store) == []  # they are held until it is time
    clock.advance(301 * NS_PER_S)
    store.write(sent_by(rows_of(1, start=99), "bb"))
    store.call(lambda connection: None).result()
    log_bytes = 8 + 2 + 2 + len("event") + len("INFO") + len("körper".encode()) + 2 + 8
    assert entries(store) == [
        ("c1", "aa", "events", 10, 10 * ROW_BYTES, 1),
        ("c1", "bb", "events", 1, ROW_BYTES, 1),
        ("c2", "bb", "events", 5, 5 * ROW_BYTES, 1),
        ("c2", "bb", "logs", 1, log_bytes, 1),
    ]
    store.close()


def test_what_a_killed_process_stored_is_counted_once_at_the_next_start(tmp_path):
    clock = ManualClock()
    store = make_store(tmp_path / "echo.db", clock)
    store.open()
    store.write(sent_by(rows_of(10), "aa"))
    store.close()
    connection = open_engine(str(tmp_path / "echo.db"), ENGINE)
    later = dt.datetime(1970, 1, 1) + dt.timedelta(microseconds=clock.wall_ns() // 1000 + 5)  # noqa: DTZ001
    for cluster in ("c1", "c3"):  # rows without an entry, as after a kill
        connection.execute(
            "INSERT INTO events SELECT ts, ?, node_id, metric_name, value_double, host_attr, kind, unit, attributes, "
            "stream, ? FROM events WHERE cluster_id = 'c1' LIMIT 4",
            [cluster, later],
        )
    connection.close()
    clock.advance(NS_PER_S)
    for _ in range(2):
        store = make_store(tmp_path / "echo.db", clock)
        store.open()
        assert entries(store) == [
            ("c1", "", "events", 4, 4 * ROW_BYTES, None),
            ("c1", "aa", "events", 10, 10 * ROW_BYTES, 1),
            ("c3", "", "events", 4, 4 * ROW_BYTES, None),
        ]
        assert store.usage.find_stored_bytes(frozenset({"c1"})) == 14 * ROW_BYTES
        assert store.usage.find_stored_bytes(None) == 18 * ROW_BYTES
        store.close()
        clock.advance(NS_PER_S)


def test_the_rows_of_an_older_release_are_counted_by_day(tmp_path):
    connection = open_engine(str(tmp_path / "echo.db"), ENGINE)
    migrate(connection, T0)
    for day in range(3):
        connection.execute(
            "INSERT INTO histograms (ts, cluster_id, node_id, metric_name, bounds, ingested_at) "
            "VALUES (?, 'c1', 'n1', 'm', [1.0, 2.0], ?)",
            [T0, T0 + dt.timedelta(days=day)],
        )
    connection.execute("DROP TABLE usage")
    connection.execute("DROP TABLE retention_clock")
    connection.execute("DELETE FROM schema_migrations WHERE number >= 4")
    connection.close()
    store = make_store(tmp_path / "echo.db", ManualClock())
    store.open()
    size = 8 + 2 + 2 + 1 + 4 * 8 + 16 + 8  # ts, names, four numbers, two bounds, arrival
    assert read(store, "SELECT ingested_at, n_bytes FROM usage ORDER BY 1") == [
        (T0 + dt.timedelta(days=day), size) for day in range(3)
    ]
    store.close()


def test_what_retention_deletes_no_longer_counts_as_stored(tmp_path):
    clock = ManualClock()
    retention = Retention(100 * NS_PER_S, None, {"logs": None})
    store = make_store(tmp_path / "echo.db", clock, retention=retention, usage_ns=NS_PER_S)
    store.open()
    store.write(sent_by(rows_of(10), "aa"))
    logs = Rows(n_rows=1, bearer="aa")
    logs.table(LOGS).add(9, 1, (T0, "c1", "n1", "event", "INFO", "x", "{}"))
    store.write(logs)
    for _ in range(3):
        clock.advance(61 * NS_PER_S)
        store.write(sent_by(rows_of(1, start=100 + _, cluster="c2"), "aa"))
        store.call(lambda connection: None).result()
    assert read(store, "SELECT count(*) FROM events WHERE cluster_id = 'c1'") == [(0,)]
    log_bytes = 8 + 2 + 2 + len("event") + len("INFO") + 1 + 2 + 8
    assert store.usage.find_stored_bytes(frozenset({"c1"})) == log_bytes
    # Entries stay for as long as the rows of any table.
    assert read(store, "SELECT sum(n_rows) FROM usage WHERE cluster_id = 'c1'") == [(11,)]
    store.close()


def node_rows(**said):
    return Rows(nodes={("c1", "n1"): [{"ts": T0} | said]})


def test_what_a_node_says_counts_once_however_often_it_is_replaced_and_not_when_it_is_gone(
    tmp_path,
):
    clock = ManualClock()
    node_bytes = 8 + len("c1") + len("n1") + 3 * 8 + 8  # its texts come in addition
    store = make_store(tmp_path / "echo.db", clock, retention=Retention(100 * NS_PER_S, None))
    store.open()
    mine = frozenset({"c1"})
    store.write(node_rows(provider="p" * 500))
    store.write(node_rows(provider="p" * 700))
    assert store.usage.find_stored_bytes(mine) == node_bytes + 700
    assert store.usage.find_stored_bytes(frozenset({"c2"})) == 0
    clock.advance(61 * NS_PER_S)
    store.write(node_rows(gpu_model="g" * 50))  # upkeep follows it
    store.call(lambda connection: None).result()
    assert store.usage.find_stored_bytes(mine) == node_bytes + 750
    assert store.usage.find_stored_bytes(None) == node_bytes + 750
    assert entries(store) == []
    store.close()
    store = make_store(tmp_path / "echo.db", clock, retention=Retention(100 * NS_PER_S, None))
    store.open()
    assert store.usage.find_stored_bytes(mine) == node_bytes + 750
    for number in range(2):
        clock.advance(61 * NS_PER_S)
        store.write(sent_by(rows_of(1, start=number, cluster="c2"), "aa"))
        store.call(lambda connection: None).result()
    assert store.usage.find_stored_bytes(mine) == 0
    store.close()


def test_what_is_stored_counts_also_where_its_entries_were_to_be_kept_for_less(tmp_path):
    clock = ManualClock()
    retention = Retention(1000 * NS_PER_S, None, {"usage": 10 * NS_PER_S})
    store = make_store(tmp_path / "echo.db", clock, retention=retention, usage_ns=NS_PER_S)
    store.open()
    store.write(sent_by(rows_of(10), "aa"))
    for number in range(3):
        clock.advance(61 * NS_PER_S)
        store.write(sent_by(rows_of(1, start=100 + number, cluster="c2"), "aa"))
        store.call(lambda connection: None).result()
    assert store.usage.find_stored_bytes(frozenset({"c1"})) == 10 * ROW_BYTES
    store.close()


@pytest.mark.parametrize(
    ("given_ages", "kept"),
    [
        (Retention(5, None), 5),
        (Retention(5, None, {"costs": 9}), 9),
        (Retention(5, None, {"costs": None}), None),
        (Retention(5, None, {"costs": 9, "usage": 2}), 9),
        (Retention(5, None, {"costs": 9, "usage": 20}), 20),
        (Retention(5, None, {"usage": None}), None),
        (Retention(None, None, {"usage": 2}), None),
    ],
)
def test_entries_are_kept_as_long_as_the_longest_kept_rows_or_longer_as_said(given_ages, kept):
    ages = Retention(
        None if given_ages.max_age_ns is None else given_ages.max_age_ns * 1000,
        None,
        {name: age and age * 1000 for name, age in given_ages.by_table.items()},
    )
    horizon = ages.find_horizons(RetentionTime.at(T0)).get("usage")
    before = None if horizon is None else horizon.before
    assert before == (None if kept is None else T0 - dt.timedelta(microseconds=kept))


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.text(max_size=9), st.none() | st.lists(st.floats(), max_size=4)),
        min_size=1,
        max_size=20,
    )
)
def test_a_row_is_as_large_as_its_values(values):
    rows = Rows()
    for text, bounds in values:
        rows.table(HISTOGRAMS).add(
            1,
            1,
            (T0, "c1", "n1", "m", 1, None, None, None, bounds, None, "delta", None, text, None),
        )
    (incoming,) = build_incoming([rows], T0)
    expected = [
        8 * 6 + 5 + len("delta") + len(text.encode()) + 8 * len(bounds or ())
        for text, bounds in values
    ]
    assert measure_rows(incoming.batch).tolist() == expected


@pytest.mark.parametrize("n", [0, 1, 100, 5_000, 200_000])
def test_the_sketch_counts_within_seven_hundredths(n):
    sketch = SeriesSketch()
    hashes = mix(np.arange(n, dtype=np.uint64) + np.uint64(12345))
    for start in range(0, n, 1000):
        sketch.add(hashes[start : start + 1000])
        sketch.add(hashes[start : start + 500])
    assert abs(sketch.count() - n) <= 0.07 * n


def test_a_group_of_many_tenants_is_told_apart():
    ledger = UsageLedger()
    group = [
        sent_by(rows_of(n + 1, cluster=f"c{n % 3}", start=100 * n, node="n" * (n + 1)), f"b{n % 2}")
        for n in range(6)
    ]
    (incoming,) = build_incoming(group, T0)
    ledger.add(incoming, [rows.bearer for rows in group], T0)
    entry = ledger.build(T0)
    told = {(row["cluster_id"], row["bearer"]): row["n_rows"] for row in entry.batch.to_pylist()}
    assert told == {
        ("c0", "b0"): 1, ("c1", "b1"): 2, ("c2", "b0"): 3, ("c0", "b1"): 4, ("c1", "b0"): 5, ("c2", "b1"): 6,
    }  # fmt: skip
    sizes = {(row["cluster_id"], row["bearer"]): row["n_bytes"] for row in entry.batch.to_pylist()}
    assert sizes == {who: n * (ROW_BYTES - len("n1") + n) for who, n in told.items()}
    assert ledger.rows_of_bearer == {"b0": 9, "b1": 12}
    assert EVENTS.name in entry.batch.column("of_table").to_pylist()
