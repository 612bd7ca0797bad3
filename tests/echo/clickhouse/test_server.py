"""A whole Echo over ClickHouse's HTTP interface, and what holds when inserts fail, processes end and days pass."""

import datetime as dt
import json
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest
from tests.echo.clickhouse.conftest import make_store, now_of
from tests.echo.clickhouse.server import PASSWORD
from tests.echo.service.conftest import (
    ALL,
    ONE,
    ask,
    bearers,
    collectives,
    health,
    push,
    result,
    sql,
)
from tests.support import local_http
from tests.support.echo import RunningEcho

from ingero.config import parse_model
from ingero.echo.db.backup_socket import backup_socket_path
from ingero.echo.db.clickhouse.backend import MAX_KEYS
from ingero.echo.db.clickhouse.settings import ClickHouseSettings
from ingero.echo.db.clickhouse.tables import VERSION
from ingero.echo.db.errors import DeadlineError
from ingero.echo.db.retention import Retention
from ingero.echo.db.retention_clock import RetentionTime
from ingero.echo.db.rows import Rows
from ingero.echo.db.stored_records import hash_record_uid
from ingero.echo.schema.tables import EVENTS, LOGS
from ingero.echo.service.config import EchoConfig, parse_store
from ingero.errors import ConfigError, StoreError
from ingero.otlp.names import Signal
from ingero.telemetry.clock import SystemClock
from ingero.testing.clock import ManualClock
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_S

DAY_NS = 86_400 * NS_PER_S


@pytest.fixture
def password_file(tmp_path):
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    return file


def through(server, database):
    return ClickHouseSettings("127.0.0.1", server.port, "echo", PASSWORD, database)


def rows_of(n, clock, *, start=0, table=EVENTS):
    rows = Rows(n_rows=n)
    for i in range(start, start + n):
        ts = now_of(clock) + dt.timedelta(microseconds=i)
        known = {"ts": ts, "cluster_id": "c1", "node_id": "n1", "metric_name": "m"}
        rows.table(table).add(7 + i, i, [known.get(name) for name in table.names])
    return rows


def both_tables(n, clock):
    rows = rows_of(n, clock)
    logs = rows_of(n, clock, start=10_000, table=LOGS)
    rows.tables |= logs.tables
    rows.n_rows += logs.n_rows
    return rows


def count(store, table="events"):
    with store.open_reader(10 * NS_PER_S) as reader:
        return reader.row(f"SELECT count(*) FROM {table}")[0]


@pytest.mark.slow
def test_a_site_on_clickhouse_is_asked_like_any_other(server, database, password_file, tmp_path):
    settings = {
        "store": f"clickhouse://echo@127.0.0.1:{server.port}/{database}",
        "store_password_file": str(password_file),
    }
    with RunningEcho(tmp_path / "echo.db", bearers(), settings) as echo:
        now_ns = time.time_ns()
        for cluster in ("c1", "c2"):
            assert push(echo, health(cluster, now_ns)).status_code == 200
            exported = collectives(cluster, now_ns)
            assert push(echo, exported, signal=Signal.LOGS).status_code == 200
        slow = result(echo, "fleet.cluster.find_stragglers", {"cluster_id": "c1"})
        assert [row["node_id"] for row in slow["rows"]] == ["c1-n3"]
        assert server.settings["readonly"] == "2"
        blamed = result(echo, "fleet.cluster.blame_chain", {"cluster_id": "c2"})["rows"]
        assert {row["culprit_node"] for row in blamed} == {"c2-n3"}
        lines = ask(echo, "fleet.cluster.summary", token=ONE, accept="application/x-ndjson")
        assert [json.loads(line)["cluster_id"] for line in lines.text.splitlines()] == ["c1"]
        foreign = ask(echo, "fleet.cluster.summary", {"cluster_id": "c2"}, ONE)
        assert foreign.status_code == 403
        counted = "SELECT cluster_id, count(*) AS n FROM events GROUP BY ALL"
        assert sql(echo, counted, ONE).json()["rows"] == [["c1", 45]]
        refused = sql(echo, "SELECT * FROM schema_migrations", ALL)
        assert refused.status_code == 400
        ready = local_http.get(f"http://127.0.0.1:{echo.at.health.port}/readyz")
        assert ready.status_code == 200
    assert list(tmp_path.iterdir()) == [password_file]  # nothing is kept beside the server
    assert not backup_socket_path(settings["store"]).exists()


@pytest.mark.parametrize("is_done_first", [False, True])
def test_a_group_whose_insert_failed_is_there_once(server, database, is_done_first):
    clock = ManualClock()
    store = make_store(through(server, database), clock)
    store.open()
    server.fail_inserts, server.is_done_first = 1, is_done_first
    store.write(both_tables(5, clock))
    assert (count(store), count(store, "logs")) == (5, 5)
    assert store.counters.reopened == 1
    store.write(both_tables(5, clock))
    assert (count(store), count(store, "logs")) == (5, 5)
    store.close()


def test_a_server_that_refuses_twice_is_told_to_the_sender_and_its_retry_is_written_once(
    server, database
):
    clock = ManualClock()
    store = make_store(through(server, database), clock)
    store.open()
    server.fail_inserts, server.is_done_first = 2, False
    with pytest.raises(StoreError, match="planned"):
        store.write(rows_of(4, clock))
    store.write(rows_of(6, clock))
    assert count(store) == 6
    store.close()


def test_a_retry_after_a_restart_is_still_recognised(database):
    clock = ManualClock()
    settings = ClickHouseSettings("here", 0, database=database, is_embedded=True)
    first = make_store(settings, clock)
    first.open()
    first.write(rows_of(4, clock))
    first.close()
    second = make_store(settings, clock)
    second.open()
    second.write(rows_of(6, clock))
    assert (count(second), second.counters.duplicates) == (6, 4)
    second.close()


def test_a_record_that_comes_again_under_its_id_is_known_also_after_a_restart(database):
    clock = ManualClock()
    settings = ClickHouseSettings("here", 0, database=database, is_embedded=True)

    def log(time_ns):
        rows, known = Rows(n_rows=1), {"ts": now_of(clock), "cluster_id": "c1", "node_id": "n1"}
        rows.table(LOGS).add(7, time_ns, [known.get(name) for name in LOGS.names], uid=99)
        return rows

    for time_ns in (1, 2):
        store = make_store(settings, clock)
        store.open()
        store.write(log(time_ns))
        store.write(log(time_ns + 10))
        assert count(store, "logs") == 1
        assert store.counters.repeated == time_ns
        store.close()


def test_a_record_that_is_sent_again_after_days_is_known(database):
    clock = ManualClock()
    settings = ClickHouseSettings("here", 0, database=database, is_embedded=True)
    ts = now_of(clock) + dt.timedelta(microseconds=7)

    def log(*uids):
        rows = Rows(n_rows=len(uids))
        for uid in uids:
            known = {"ts": ts, "cluster_id": "c1", "node_id": "n1"}
            known["attributes"] = json.dumps({"a.b": 1, "log.record.uid": uid})
            row = [known.get(name) for name in LOGS.names]
            hashed = hash_record_uid("c1", uid)
            rows.table(LOGS).add(hashed, clock.wall_ns(), row, uid=hashed)
        return rows

    for uids, n_stored, n_repeated in ((("a", "b"), 2, 0), (("b", "c", "d"), 4, 1)):
        store = make_store(settings, clock)
        store.open()
        store.write(log(*uids))
        assert (count(store, "logs"), store.counters.repeated) == (n_stored, n_repeated)
        store.close()
        clock.advance(3 * DAY_NS)


def test_whole_days_that_are_past_retention_go_and_nodes_that_fell_silent_with_them(database):
    clock = ManualClock()
    settings = ClickHouseSettings("here", 0, database=database, is_embedded=True)
    store = make_store(settings, clock)
    store.open()
    backend = store.backend
    for node in ("old", "lively"):
        rows = rows_of(3, clock, start=100 if node == "old" else 200)
        rows.nodes["c1", node] = [{"ts": now_of(clock), "gpu_model": "H100"}]
        store.write(rows)
    clock.advance(3 * DAY_NS)
    rows = rows_of(2, clock, start=300)
    rows.nodes["c1", "lively"] = [{"ts": now_of(clock), "state": "active"}]
    store.write(rows)
    now = now_of(clock)
    time = RetentionTime.at(now)
    assert backend.trim(time, now, Retention(10 * DAY_NS, None)) == (0, 0)
    assert backend.trim(time, now, Retention(None, None)) == (0, 0)
    kept = Retention(2 * DAY_NS, None, {"events": None, "nodes": None})
    assert backend.trim(time, now, kept) == (0, 0)
    assert backend.trim(time, now, Retention(2 * DAY_NS, None)) == (6, 0)
    assert count(store) == 2
    with store.open_reader(10 * NS_PER_S) as reader:
        kept = reader.rows("SELECT node_id, gpu_model, state FROM nodes")
    assert kept == [("lively", "H100", "active")]  # also what it told long ago
    store.close()


def test_a_clock_that_is_ahead_deletes_nothing_also_after_a_restart(database):
    clock = ManualClock()
    settings = ClickHouseSettings("here", 0, database=database, is_embedded=True)
    kept = {"retention": Retention(5 * DAY_NS, None), "upkeep_ns": NS_PER_S}

    def keep_up():
        clock.advance(2 * NS_PER_S)
        store.write(Rows())
        wait_until(lambda: store.counters.commits >= 1)
        store.close()

    store = make_store(settings, clock, **kept)
    store.open()
    rows = rows_of(3, clock)
    rows.nodes["c1", "n1"] = [{"ts": now_of(clock)}]
    store.write(rows)
    keep_up()
    steps = (
        (30_000, True),
        (-30_000, False),
        (6, True),
    )  # no DateTime of ClickHouse holds the first
    for days, is_ahead in steps:
        clock.step_wall(days * DAY_NS)
        for _ in range(2):
            store = make_store(settings, clock, **kept)
            store.open()
            keep_up()
            assert (store.clock_ahead_s > 0) is is_ahead
    store = make_store(settings, clock, **kept)
    store.open()
    assert (count(store), count(store, "nodes")) == (3, 1)
    store.close()
    store = make_store(settings, clock, is_clock_trusted=True, **kept)
    store.open()
    keep_up()
    store = make_store(settings, clock, **kept)
    store.open()
    assert (count(store), count(store, "nodes"), store.clock_ahead_s) == (0, 0, 0)
    store.close()


def test_tables_of_an_earlier_schema_get_the_senders_column_and_the_newest_time_of_a_node(
    database, engine
):
    clock = ManualClock()
    settings = ClickHouseSettings("here", 0, database=database, is_embedded=True)
    store = make_store(settings, clock)
    store.open()
    store.write(rows_of(2, clock))
    store.close()
    for table in ("events", "histograms"):
        engine.command(f"ALTER TABLE {database}.{table} DROP COLUMN stream")
    old_ts = "SimpleAggregateFunction(anyLast, DateTime64(6, 'UTC'))"
    engine.command(f"ALTER TABLE {database}.nodes MODIFY COLUMN ts {old_ts}")
    engine.command(f"ALTER TABLE {database}.schema_migrations DELETE WHERE number > 5")
    engine.command(f"INSERT INTO {database}.schema_migrations VALUES (5, now())")
    store = make_store(settings, clock)
    store.open()
    rows = rows_of(1, clock, start=5)
    rows.tables["events"].columns[EVENTS.names.index("stream")][0] = "ab"
    store.write(rows)
    with store.open_reader(10 * NS_PER_S) as reader:
        found = reader.rows("SELECT stream, count(*) FROM events GROUP BY stream ORDER BY stream")
    assert found == [("ab", 1), (None, 2)]
    assert "`ts` SimpleAggregateFunction(max," in engine.command(
        f"SHOW CREATE TABLE {database}.nodes"
    ).replace("\\n", "")
    store.close()


@pytest.mark.parametrize("is_served", [False, True])
def test_a_late_report_of_a_node_turns_nothing_back_and_fills_what_is_not_known(
    server, database, is_served
):
    clock = ManualClock()
    here = ClickHouseSettings("here", 0, database=database, is_embedded=True)
    store = make_store(through(server, database) if is_served else here, clock)
    store.open()
    now = now_of(clock)
    for ago_s, said in (
        (30, {"state": "active"}),
        (10800, {"state": "idle", "gpu_model": "H100"}),
        (75, {"state": "calibrating"}),
        (3600, {"state": "idle"}),
    ):
        rows = Rows()
        rows.nodes["c1", "it's (one)"] = [{"ts": now - dt.timedelta(seconds=ago_s)} | said]
        if ago_s == 3600:
            rows.nodes["c1", "it's (one)"].append({"ts": now, "gpu_count": 8})
        store.write(rows)
    with store.open_reader(10 * NS_PER_S) as reader:
        found = reader.rows("SELECT state, gpu_model, gpu_count, ts FROM nodes")
    assert found == [("calibrating", "H100", 8, now)]
    store.close()


def test_the_longest_names_of_nodes_fit_into_the_address_of_a_statement():
    keys = json.dumps([("c" * 64, "\U0001f600" * 256)] * MAX_KEYS)
    assert len(quote(keys.replace("\\", "\\\\"))) < 64 << 10


def test_a_server_that_is_away_or_newer_or_does_not_know_us_stops_the_start(server, database):
    clock = ManualClock()
    store = make_store(through(server, database), clock)
    store.open()
    store.close()
    server.find_engine(database).command(
        f"INSERT INTO schema_migrations VALUES ({VERSION + 1}, now())"
    )
    with pytest.raises(StoreError, match="this release knows"):
        make_store(through(server, database), clock).open()
    stranger = ClickHouseSettings("127.0.0.1", server.port, "echo", "wrong", database)
    with pytest.raises(StoreError, match="AUTHENTICATION_FAILED"):
        make_store(stranger, clock).open()
    nobody = ClickHouseSettings("127.0.0.1", 9, connect_timeout_s=1)
    with pytest.raises(StoreError, match=r"connect to ClickHouse at 127\.0\.0\.1:9"):
        make_store(nobody, clock).open()


ENDLESS = "SELECT sipHash64(number) AS n FROM numbers(1000000000000) WHERE sipHash64(number) > 0"
"""Some hours, with its first rows at once."""


def find_statements(engine):
    found = engine.query("SELECT query FROM system.processes").result_rows
    return [text for (text,) in found if "1000000000000" in text and "KILL" not in text]


def stop_while_running(store, engine, ask):
    """Stop a reader in the middle of its statement; what it raised, once the server runs it no more."""
    with ThreadPoolExecutor(1) as pool, store.open_reader(600 * NS_PER_S) as reader:
        asking = pool.submit(ask, reader)
        wait_until(lambda: find_statements(engine))
        reader.stop()
        try:
            raised = asking.exception(timeout=20)
            wait_until(lambda: not find_statements(engine))
        finally:  # where it goes on, nothing else would end it
            engine.command(
                "KILL QUERY WHERE query LIKE '%1000000000000%' AND query NOT LIKE '%KILL%'"
            )
    return raised


def read_all(reader):
    for _ in reader.batches(ENDLESS, batch_rows=1000):
        pass


@pytest.mark.parametrize(
    "ask",
    [lambda reader: reader.rows(f"SELECT count(*) FROM ({ENDLESS})"), read_all],
    ids=["whole", "in batches"],
)
def test_a_statement_that_is_not_wanted_any_more_ends_in_the_server(engine, server, database, ask):
    store = make_store(through(server, database), SystemClock())
    store.open()
    try:
        assert isinstance(stop_while_running(store, engine, ask), DeadlineError)
    finally:
        store.close()


def test_a_statement_is_ended_where_its_answer_is_left_half_read_and_only_there(server, database):
    store = make_store(through(server, database), SystemClock())
    store.open()
    server.killed.clear()
    try:
        with store.open_reader(600 * NS_PER_S) as reader:
            whole = list(reader.batches("SELECT number FROM numbers(5000)", batch_rows=1000))
            assert sum(batch.num_rows for batch in whole) == 5000
            assert reader.row("SELECT 1") == (1,)
        assert server.killed == []
        with store.open_reader(600 * NS_PER_S) as reader:
            batches = reader.batches("SELECT number FROM numbers(5000)", batch_rows=1000)
            assert next(batches).num_rows == 1000
            del batches
        wait_until(lambda: server.killed)
    finally:
        store.close()


def test_what_is_done_to_a_file_is_refused(database):
    settings = ClickHouseSettings("here", 0, database=database, is_embedded=True)
    store = make_store(settings, ManualClock())
    store.open()
    with pytest.raises(StoreError, match="ClickHouse server"):
        store.call(lambda connection: connection).result()
    store.close()


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("clickhouse://127.0.0.1", ("127.0.0.1", 8123, "default", "default", False)),
        ("clickhouses://echo@ch.example/site", ("ch.example", 8443, "echo", "site", True)),
        ("clickhouses://echo@ch.example:443/", ("ch.example", 443, "echo", "default", True)),
    ],
)
def test_a_stores_url_says_where(url, found):
    settings = parse_store(url)
    told = (settings.host, settings.port, settings.user, settings.database, settings.is_tls)
    assert told == found


@pytest.mark.parametrize(
    ("given", "description"),
    [
        ({"store": "postgres://x/y"}, "clickhouses://USER@HOST:PORT/DATABASE"),
        ({"store": "clickhouses://"}, "clickhouses://USER@HOST:PORT/DATABASE"),
        ({"store": "clickhouses://a:secret@h/d"}, "store_password_file"),
        ({"store": "clickhouse://h.example/d"}, "TLS"),
        ({"store": "clickhouses://h/d/e"}, "more than"),
        ({"store": "clickhouses://h/d?readonly=0"}, "more than"),
        ({"store": "clickhouses://h:99999/d"}, "ort"),
        ({"store": "clickhouses://h/d", "max_db_size": "1GiB"}, "max_db_size"),
        ({"store_password_file": "x"}, "belong to store"),
    ],
)
def test_a_store_that_cannot_be_is_refused_with_the_reason(given, description):
    with pytest.raises(ConfigError) as raised:
        parse_model(EchoConfig, {"insecure_no_tls": True, **given})
    assert description in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_password_is_not_printed():
    assert "hidden" not in repr(ClickHouseSettings("h", 1, password="hidden"))
