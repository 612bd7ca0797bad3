"""A file whose rows are mostly gone becomes smaller, while rows arrive."""

import datetime as dt
import threading

import pytest
from tests.echo.db.stores import OLD, T0, make_store, rows_of

from ingero.echo.db import compaction
from ingero.echo.db.compaction import Compactor
from ingero.echo.db.retention import Retention
from ingero.echo.db.rows import Rows
from ingero.echo.schema.tables import LOGS
from ingero.errors import StoreError
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S

N_OLD = 200_000


def fill(store, n_rows=N_OLD, arrived="TIMESTAMP '2026-01-01'"):
    store.call(
        lambda connection: connection.execute(
            f"INSERT INTO events ({OLD}) SELECT TIMESTAMP '2026-01-01', 'c1', 'n1', 'old', random(), "
            f"md5(i::VARCHAR), {arrived} FROM range({n_rows}) t(i)"
        )
    ).result()
    store.call(lambda connection: connection.execute("CHECKPOINT")).result()


def delete_old(store):
    store.call(
        lambda connection: connection.execute("DELETE FROM events WHERE metric_name = 'old'")
    ).result()
    store.call(lambda connection: connection.execute("CHECKPOINT")).result()


def read(store, sql):
    with store.open_reader(10 * NS_PER_S) as reader:
        return reader.rows(sql)


@pytest.fixture
def compactor(store):
    return Compactor(store, store.backend, 1 << 20)


def test_a_file_that_is_mostly_empty_is_written_anew_and_one_that_is_not_stays(
    store, compactor, tmp_path
):
    fill(store)
    store.write(rows_of(100))
    full = (tmp_path / "echo.db").stat().st_size
    compactor.run_if_needed()
    assert (compactor.counters.done, (tmp_path / "echo.db").stat().st_size) == (0, full)
    delete_old(store)
    assert (tmp_path / "echo.db").stat().st_size >= full  # what DuckDB leaves
    inode = (tmp_path / "echo.db").stat().st_ino
    compactor.run_if_needed()
    assert (compactor.counters.done, compactor.counters.failed) == (1, 0)
    assert (tmp_path / "echo.db").stat().st_size < full / 4
    assert (tmp_path / "echo.db").stat().st_ino != inode
    assert not (tmp_path / "echo.db.compacted").exists()
    assert read(store, "SELECT count(*), sum(value_double) FROM events") == [(100, sum(range(100)))]
    store.write(rows_of(100))  # a retry of before is known after it
    assert store.counters.duplicates == 100
    compactor.run_if_needed()
    assert compactor.counters.done == 1


def test_rows_that_arrive_meanwhile_are_all_there_and_acknowledged(store, compactor):
    fill(store)
    delete_old(store)
    stop, sent, failed = threading.Event(), [], []

    def push():
        start = 0
        while not stop.is_set():
            try:
                store.write(rows_of(50, start=start))
            except StoreError as error:
                failed.append(error)
            else:
                sent.append(start)
            start += 50

    sender = threading.Thread(target=push)
    sender.start()
    for _ in range(3):
        compactor.compact()
    stop.set()
    sender.join()
    assert failed == []
    (row,) = read(store, "SELECT count(*), count(DISTINCT ts) FROM events")
    assert row == (50 * len(sent), 50 * len(sent))
    assert compactor.counters.done == 3


def test_what_retention_deletes_meanwhile_is_deleted_in_the_new_file(tmp_path, monkeypatch):
    clock = ManualClock()
    store = make_store(
        tmp_path / "echo.db", clock, retention=Retention(1000 * NS_PER_S, None), upkeep_ns=NS_PER_S
    )
    store.open()
    store.write(rows_of(100))
    logs = Rows(n_rows=1)
    logs.table(LOGS).add(9, 1, (T0, "c1", "n1", "event", "INFO", "x", "{}"))
    store.write(logs)  # all that its table has
    clock.advance(600 * NS_PER_S)
    store.write(rows_of(10, start=500))
    store.call(
        lambda connection: None
    ).result()  # the upkeep that was due is done: this clock stands still
    copy_snapshot = compaction.copy_snapshot

    def copy_and_wait(reader, target):
        newest = copy_snapshot(reader, target)
        clock.advance(600 * NS_PER_S)
        store.write(rows_of(1, start=900))
        store.call(lambda connection: None).result()
        assert store.counters.aged_out == 101
        return newest

    monkeypatch.setattr(compaction, "copy_snapshot", copy_and_wait)
    Compactor(store, store.backend, 1).compact()
    assert read(store, "SELECT count(*) FROM events") == [(11,)]
    assert read(store, "SELECT count(*) FROM logs") == [(0,)]
    store.close()


@pytest.mark.parametrize("step", ["add_arrivals", "copy_snapshot"])
def test_a_failure_leaves_the_file_as_it_was_and_ingest_goes_on(
    store, compactor, monkeypatch, tmp_path, caplog, step
):
    fill(store)
    delete_old(store)
    store.write(rows_of(10))
    done = getattr(compaction, step)

    def fail(*args):
        done(*args)
        raise StoreError("planned")

    monkeypatch.setattr(compaction, step, fail)
    before = (tmp_path / "echo.db").stat().st_ino
    compactor.run_if_needed()
    assert (compactor.counters.done, compactor.counters.failed) == (0, 1)
    assert "is as it was: planned" in caplog.text
    assert (tmp_path / "echo.db").stat().st_ino == before
    assert not (tmp_path / "echo.db.compacted").exists()
    store.write(rows_of(10, start=50))
    assert read(store, "SELECT count(*) FROM events") == [(20,)]
    monkeypatch.setattr(compaction, step, done)
    compactor.run_if_needed()
    assert compactor.counters.done == 1
    assert read(store, "SELECT count(*) FROM events") == [(20,)]


def test_a_row_that_an_earlier_clock_stamped_ends_it_and_is_kept(store, compactor, monkeypatch):
    """Its arrival is before the newest one that was copied, so it would be left out."""
    store.write(rows_of(10))
    copy_snapshot = compaction.copy_snapshot

    def copy_and_set_back(reader, target):
        newest = copy_snapshot(reader, target)
        fill(store, 1, f"TIMESTAMP '{T0 - dt.timedelta(days=1)}'")
        return newest

    monkeypatch.setattr(compaction, "copy_snapshot", copy_and_set_back)
    with pytest.raises(StoreError, match="11 rows and 10"):
        compactor.compact()
    assert read(store, "SELECT count(*) FROM events") == [(11,)]


def test_a_copy_that_a_killed_process_left_is_removed(store, compactor, tmp_path):
    (tmp_path / "echo.db.compacted").touch()
    (tmp_path / "echo.db.compacted.wal").touch()
    compactor.start()
    assert not list(tmp_path.glob("*.compacted*"))
    compactor.close()


def test_closing_ends_a_copy(store, compactor, monkeypatch):
    began = threading.Event()

    def slow(reader, target):
        began.set()
        reader.rows("SELECT count(*) FROM range(10000000000000) a WHERE hash(a.range) = 1")

    monkeypatch.setattr(compaction, "copy_snapshot", slow)
    monkeypatch.setattr(compaction, "_LOOK_S", 0.01)
    monkeypatch.setattr(compactor, "_is_needed", lambda: True)
    compactor.start()
    assert began.wait(120)
    compactor.close()
    assert (compactor.counters.done, compactor.counters.failed) == (0, 0)


def test_room_for_the_new_file_is_looked_for_first(store, compactor, monkeypatch, caplog):
    fill(store)
    delete_old(store)
    usage = type("Usage", (), {"free": 10})()
    monkeypatch.setattr(compaction.shutil, "disk_usage", lambda folder: usage)
    compactor.run_if_needed()
    assert compactor.counters.failed == 1
    assert "free beside it" in caplog.text
