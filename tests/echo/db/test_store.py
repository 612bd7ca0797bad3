"""Echo's store: what is acknowledged is kept, what comes twice is dropped, and what does not fit is refused and said."""

import datetime as dt
import threading

import duckdb
import numpy as np
import pytest
from tests.echo.db.stores import T0, count, make_store, rows_of

from ingero.echo.db import duckdb_backend
from ingero.echo.db.errors import DeadlineError, LockedError
from ingero.echo.db.retention import Retention
from ingero.echo.db.rows import Rows
from ingero.echo.schema.tables import EVENTS
from ingero.errors import IngeroError, RetryableError, StoreError
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S


def test_acknowledged_rows_are_read_back_by_value(store):
    store.write(rows_of(3))
    with store.open_reader(NS_PER_S) as reader:
        rows = reader.rows(
            "SELECT ts, cluster_id, node_id, metric_name, value_double FROM events ORDER BY ts"
        )
    assert rows == [(T0 + dt.timedelta(seconds=i), "c1", "n1", "m", float(i)) for i in range(3)]
    assert store.counters.written == 3
    assert store.n_waiting == 0


def test_a_retry_is_dropped_and_counted_and_the_rest_of_its_batch_is_kept(store):
    store.write(rows_of(3))
    store.write(rows_of(5))
    assert count(store) == 5
    assert store.counters.duplicates == 3


def test_a_retry_after_a_restart_is_still_recognised(tmp_path):
    first = make_store(tmp_path / "echo.db")
    first.open()
    first.write(rows_of(4))
    first.close()
    second = make_store(tmp_path / "echo.db")
    second.open()
    second.write(rows_of(6))
    assert count(second) == 6
    assert second.counters.duplicates == 4
    second.close()


def test_a_restart_remembers_no_more_keys_than_its_bound_and_the_newest(tmp_path):
    clock = ManualClock()
    first = make_store(tmp_path / "echo.db", clock)
    first.open()
    for start in range(0, 40, 10):
        first.write(rows_of(10, start=start))
        clock.advance(NS_PER_S)
    first.close()
    second = make_store(tmp_path / "echo.db", clock, window_keys=20)
    second.open()
    second.write(rows_of(10, start=30))
    assert (count(second), second.counters.duplicates) == (40, 10)
    second.write(rows_of(10, start=0))
    assert (count(second), second.counters.duplicates) == (50, 10)
    second.close()


def test_requests_that_arrive_together_share_one_commit(store):
    done = []
    store.call(
        lambda connection: [store.put(rows_of(1, start=i), done.append) for i in range(50)]
    ).result()
    store.call(lambda connection: None).result()
    assert done == [None] * 50
    assert count(store) == 50
    assert store.counters.commits <= 2


def test_nodes_keep_what_later_requests_leave_out(store):
    for row in ({"provider": "aws", "gpu_count": 8}, {"state": "active"}, {"gpu_count": 4}):
        rows = Rows(nodes={("c1", "n1"): [{"ts": T0} | row]})
        store.write(rows)
    with store.open_reader(NS_PER_S) as reader:
        found = reader.rows("SELECT node_id, provider, gpu_count, state FROM nodes")
    assert found == [("n1", "aws", 4, "active")]


def test_too_many_waiting_rows_are_refused_with_a_time_to_come_back(tmp_path):
    store = make_store(tmp_path / "echo.db", max_waiting_rows=10)
    store.open()
    done = []

    def fill(connection):
        store.put(rows_of(8), done.append)
        with pytest.raises(RetryableError) as raised:
            store.put(rows_of(8, start=100), done.append)
        return raised.value.retry_after_ns

    assert store.call(fill).result() == NS_PER_S
    store.call(lambda connection: None).result()
    assert done == [None]
    assert store.refused_full == 8
    store.close()


def test_a_nearly_full_disk_stops_ingest_and_not_reads_and_recovers_by_itself(tmp_path):
    free = [10 << 30]
    clock = ManualClock()
    store = make_store(tmp_path / "echo.db", clock, free_bytes=lambda: free[0])
    store.open()
    store.write(rows_of(2))
    free[0] = 1 << 20
    clock.advance(2 * NS_PER_S)
    with pytest.raises(RetryableError, match="disk"):
        store.write(rows_of(2, start=10))
    assert "free" in store.trouble
    assert count(store) == 2
    assert store.refused_disk == 2
    free[0] = 10 << 30
    clock.advance(2 * NS_PER_S)
    store.write(rows_of(2, start=10))
    assert (count(store), store.trouble) == (4, "")
    store.close()


def test_a_reader_is_stopped_at_its_deadline_and_the_store_goes_on(store):
    with pytest.raises(DeadlineError), store.open_reader(50_000_000) as reader:
        reader.rows("SELECT sum(a.i * b.i) FROM range(1000000) a(i), range(1000000) b(i)")
    store.write(rows_of(1))
    assert count(store) == 1


def test_the_file_is_opened_again_while_a_batch_that_was_not_read_to_its_end_is_still_held(
    tmp_path,
):
    store = make_store(tmp_path / "echo.db", reopen_ns=60 * NS_PER_S)
    store.open()
    store.write(rows_of(20_000))
    with store.open_reader(60 * NS_PER_S) as reader:
        batches = reader.batches("SELECT * FROM events ORDER BY value_double", (), 2048)
        assert next(batches).num_rows == 2048
    store.call(lambda _: store.backend.drop()).result()
    store.write(rows_of(1, start=20_000))
    assert (count(store), store.counters.reopened, store.is_dead) == (20_001, 1, False)
    with pytest.raises(StoreError):
        next(batches)
    store.close()


def test_an_opening_that_takes_too_long_is_a_death_that_says_so_and_answers_what_waits(tmp_path):
    store = make_store(tmp_path / "echo.db", reopen_ns=NS_PER_S // 5)
    died = threading.Event()
    store.on_death(died.set)
    store.open()
    store.write(rows_of(20_000))
    held = []

    def hold(connection):
        source = connection.cursor().sql("SELECT * FROM events").to_arrow_reader(2048)
        source.read_next_batch()
        held.append(source)  # DuckDB spins in its next opening until this is gone
        store.backend.drop()

    store.call(hold).result()
    with pytest.raises(StoreError, match=r"not open again after 0\.2 s"):
        store.write(rows_of(1, start=20_000))
    assert died.wait(60)
    assert (store.is_dead, "not open again" in store.trouble) == (True, True)
    with pytest.raises(StoreError, match="not open again"):
        store.write(rows_of(1, start=20_000))
    held.clear()
    store.close()  # the opening came to its end after all, and nothing was made of it
    assert (store.is_dead, bool(store.trouble)) == (True, True)


@pytest.mark.slow
def test_an_instance_killed_by_an_internal_error_is_reopened_with_every_row(store):
    store.write(rows_of(3))

    def kill(connection):
        parts = ", ".join(["a"] * 50)  # one text of 5 GB, which no step before it makes
        with pytest.raises(duckdb.Error):
            connection.execute(f"SELECT concat({parts}) FROM (SELECT repeat('x', 100000000) a)")
        try:
            connection.execute("SELECT 1")
        except duckdb.Error:
            return True
        return False

    if not store.call(kill).result():
        pytest.skip("this DuckDB survives the statement")
    store.write(rows_of(2, start=10))
    assert count(store) == 5
    assert store.counters.reopened == 1


def test_a_second_process_is_told_that_the_file_is_in_use(store, tmp_path):
    import subprocess
    import sys

    code = (
        "import sys\nfrom ingero.echo.db.engine import *\nfrom ingero.echo.db.errors import LockedError\n"
        "try:\n    open_engine(sys.argv[1], DatabaseSettings())\nexcept LockedError as e:\n    print(e.hint)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, store.path], capture_output=True, text=True, check=True
    )
    assert "Stop the ingero-echo" in done.stdout
    assert issubclass(LockedError, StoreError)


def test_tables_may_have_an_age_of_their_own(tmp_path):
    clock, day_ns = ManualClock(), 86_400 * NS_PER_S
    ages = {"events": day_ns, "logs": None}
    store = make_store(
        tmp_path / "echo.db",
        clock,
        retention=Retention(7 * day_ns, None, ages),
        upkeep_ns=NS_PER_S,
    )
    store.open()
    tables = ("events", "logs", "verdicts")

    def insert(connection):
        now = dt.datetime.fromtimestamp(clock.wall_ns() / NS_PER_S, dt.UTC).replace(tzinfo=None)
        samples = {"TIMESTAMP": now, "VARCHAR": "x", "BOOLEAN": False}
        for name in tables:
            needed = connection.execute(
                "SELECT column_name, data_type FROM duckdb_columns() WHERE table_name = ? AND NOT is_nullable"
                " AND column_default IS NULL", [name],
            ).fetchall()  # fmt: skip
            given = {column: samples.get(kind, 0) for column, kind in needed}
            marks = ", ".join("?" * len(given))
            connection.execute(
                f"INSERT INTO {name} ({', '.join(given)}) VALUES ({marks})", list(given.values())
            )

    left = []
    store.call(insert).result()
    for days in (0.5, 1, 10):
        clock.advance(round(days * day_ns))
        store.write(Rows())
        store.call(lambda connection: None).result()
        left.append([count(store, name) for name in tables])
    store.close()
    assert left == [[1, 1, 1], [0, 1, 1], [0, 1, 0]]


def test_retention_that_fails_is_said_and_done_later(tmp_path, caplog):
    clock = ManualClock()
    kept = Retention(3600 * NS_PER_S, None)
    store = make_store(tmp_path / "echo.db", clock, retention=kept, upkeep_ns=NS_PER_S)
    store.open()
    store.write(rows_of(5))

    def rename(name, other):
        sql = f"ALTER TABLE {name} RENAME TO {other}"
        store.call(lambda connection: connection.execute(sql)).result()
        clock.advance(7200 * NS_PER_S)
        store.write(Rows())
        store.call(lambda connection: None).result()

    rename("events", "away")
    (said,) = [one.getMessage() for one in caplog.records if "retention" in one.getMessage()]
    assert "cannot delete old rows of events" in said
    assert store.counters.failed_commits == 1
    rename("away", "events")
    assert count(store) == 0
    store.close()


def test_age_goes_by_arrival_and_deletes_only_what_is_old(tmp_path):
    clock = ManualClock()
    day_ns = 86_400 * NS_PER_S
    store = make_store(
        tmp_path / "echo.db",
        clock,
        retention=Retention(max_age_ns=7 * day_ns, max_bytes=None),
        upkeep_ns=NS_PER_S,
    )
    store.open()
    store.write(rows_of(5))
    clock.advance(5 * day_ns)
    store.write(rows_of(3, start=100))
    clock.advance(3 * day_ns)
    store.write(rows_of(1, start=200))
    store.call(lambda connection: None).result()
    assert count(store) == 4
    assert store.counters.aged_out == 5
    store.close()


def test_size_deletes_the_oldest_arrivals_first(tmp_path):
    clock = ManualClock()
    store = make_store(
        tmp_path / "echo.db",
        clock,
        retention=Retention(max_age_ns=None, max_bytes=3 << 20),
        window_ns=NS_PER_S,
        upkeep_ns=NS_PER_S,
    )
    store.open()
    rng = np.random.default_rng(1)
    for day in range(6):
        rows = Rows(n_rows=100_000)
        table = rows.table(EVENTS)
        table.series += rng.integers(0, 2**63, 100_000).tolist()
        table.time_ns += [day] * 100_000
        for column, values in zip(
            table.columns,
            (
                [T0] * 100_000,
                ["c"] * 100_000,
                [f"d{day}"] * 100_000,
                ["m"] * 100_000,
                rng.random(100_000).tolist(),
                [None] * 100_000,
                [None] * 100_000,
                [None] * 100_000,
                [None] * 100_000,
                [None] * 100_000,
            ),
            strict=True,
        ):
            column.extend(values)
        store.write(rows)
        clock.advance(2 * NS_PER_S)
    store.call(lambda connection: None).result()
    with store.open_reader(NS_PER_S) as reader:
        left = [row[0] for row in reader.rows("SELECT DISTINCT node_id FROM events ORDER BY 1")]
    assert store.counters.sized_out > 0
    assert left
    assert left == [f"d{day}" for day in range(6)][-len(left) :]
    store.close()


def no_memory(times):
    """DuckDB's error for so many inserts, and then the real insert."""
    left = iter(range(times))

    def insert(*given, real=duckdb_backend._insert):
        if next(left, None) is not None:
            raise duckdb.OutOfMemoryException("failed to allocate")
        real(*given)

    return insert


def test_who_reads_is_stopped_where_a_commit_finds_no_memory_and_the_rows_are_kept(
    store, monkeypatch
):
    ended, reading = [], threading.Event()

    def read():
        with store.open_reader(600 * NS_PER_S) as reader:
            reading.set()
            try:
                reader.row("SELECT count(*) FROM range(1000000) a, range(1000000) b, range(9) c")
            except IngeroError as error:
                ended.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert reading.wait(120)
    monkeypatch.setattr(duckdb_backend, "_insert", no_memory(1))
    store.write(rows_of(3))
    thread.join()
    (error,) = ended
    assert isinstance(error, RetryableError)
    assert "arriving rows" in error.message
    assert count(store) == 3


def test_without_readers_a_commit_that_finds_no_memory_is_refused_and_the_next_is_kept(
    store, monkeypatch
):
    monkeypatch.setattr(duckdb_backend, "_insert", no_memory(1))
    with pytest.raises(IngeroError):
        store.write(rows_of(3))
    store.write(rows_of(5))
    assert count(store) == 5


def test_a_reader_that_was_stopped_between_two_statements_begins_no_other(store):
    with store.open_reader(600 * NS_PER_S) as reader:
        assert reader.row("SELECT 1") == (1,)
        reader.stop()
        with pytest.raises(DeadlineError):
            reader.row("SELECT 1")
