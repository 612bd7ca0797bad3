"""Backups that a server makes of its own file: on time, checked, kept, and restored to a moment."""

import datetime as dt
import os
import shutil
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import duckdb
import pytest
from tests.echo.db.stores import OLD, make_store, rows_of
from tests.echo.db.stores import T0 as NOW

from ingero.echo.db import backups
from ingero.echo.db.backup_names import choose_backup, list_backups, stamp_of
from ingero.echo.db.backups import BackupPlan, BackupSchedule, verify
from ingero.echo.db.engine import DatabaseSettings, migrate, open_engine, wal_path
from ingero.echo.db.errors import ForeignDatabaseError, LockedError, translate_errors
from ingero.echo.db.files import back_up, restore
from ingero.echo.schema.migrations import MIGRATIONS
from ingero.errors import StoreError
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S

STREAMS = 6
"""The schema whose rows say of which sender they are."""
HOUR_NS = 3600 * NS_PER_S


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def store(tmp_path, clock):
    opened = make_store(tmp_path / "echo.db", clock)
    opened.open()
    yield opened
    opened.close()


@pytest.fixture
def schedule(store, tmp_path, clock):
    return BackupSchedule(store, BackupPlan(tmp_path / "backups", HOUR_NS, 3), None, clock)


def now_of(clock):
    return dt.datetime.fromtimestamp(clock.wall_ns() / 1e9, dt.UTC)


def count(path):
    opened = make_store(path)
    opened.open()
    with opened.open_reader(5 * NS_PER_S) as reader:
        found = reader.row("SELECT count(*) FROM events")[0]
    opened.close()
    return found


def test_one_is_made_when_it_is_due_and_the_newest_are_kept(store, schedule, clock, tmp_path):
    folder = tmp_path / "backups"
    made = []
    for number in range(5):
        store.write(rows_of(10, start=number * 10))
        schedule.run_if_due()
        schedule.run_if_due()  # not yet due again
        made.append(stamp_of(list_backups(folder)[-1]))
        clock.advance(HOUR_NS)
    assert [stamp_of(one) for one in list_backups(folder)] == made[-3:]
    assert [verify(one) for one in list_backups(folder)] == [
        32,
        43,
        54,
    ]  # events, and usage's entries
    assert {one.stat().st_mode & 0o777 for one in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    counters = schedule.counters
    assert (counters.done, counters.failed) == (5, 0)
    assert counters.last_wall_s == pytest.approx(clock.wall_ns() / 1e9 - 3600)
    assert counters.last_bytes == list_backups(folder)[-1].stat().st_size


def test_a_new_process_goes_on_from_the_newest_backup(store, schedule, clock, tmp_path):
    schedule.run_if_due()
    made_s = schedule.counters.last_wall_s
    clock.advance(HOUR_NS // 2)
    later = BackupSchedule(store, BackupPlan(tmp_path / "backups", HOUR_NS, 3), None, clock)
    later.look_back()
    assert later.counters.last_wall_s == pytest.approx(made_s, abs=1)
    later.run_if_due()
    assert later.counters.done == 0
    clock.advance(HOUR_NS // 2 + NS_PER_S)
    later.run_if_due()
    assert later.counters.done == 1


def test_backups_of_a_clock_that_was_ahead_are_neither_the_newest_nor_kept_for_ever(
    store, schedule, clock, tmp_path
):
    folder = tmp_path / "backups"
    real_ns = clock.wall_ns()
    for ahead_days in (0, 200, 100):
        clock.step_wall(real_ns + ahead_days * 24 * HOUR_NS - clock.wall_ns())
        schedule.run_if_due()
    made = [stamp_of(one) for one in list_backups(folder)]
    assert [(one - made[0]).days for one in made] == [0, 200, 100]
    ahead = list_backups(folder)[1:]
    clock.step_wall(real_ns + HOUR_NS - clock.wall_ns())
    again = BackupSchedule(store, BackupPlan(folder, HOUR_NS, 3), None, clock)
    again.look_back()
    for _ in range(3):
        again.run_if_due()
        again.run_if_due()  # not yet due again
        assert stamp_of(list_backups(folder)[-1]) == now_of(clock).replace(microsecond=0)
        assert choose_backup(folder, None) == list_backups(folder)[-1]
        assert again.counters.last_wall_s == pytest.approx(clock.wall_ns() / 1e9)
        clock.advance(HOUR_NS)
    assert len(list_backups(folder)) == 3
    assert not any(one.exists() for one in ahead)


def test_backups_without_a_number_are_older_those_of_a_clock_that_was_ahead_first(
    schedule, clock, tmp_path
):
    folder = tmp_path / "backups"
    folder.mkdir()
    source = make_file(tmp_path / "source.db", 1)
    earlier = {}
    for days in (-3, -2, -1, 90, 300):
        at = now_of(clock) + dt.timedelta(days=days)
        earlier[days] = folder / f"echo-{at:%Y%m%dT%H%M%SZ}.db"
        shutil.copy(source, earlier[days])
    shutil.copy(source, folder / "echo-20261399T000000Z.db")  # no time, so none of ours
    assert list_backups(folder) == list(earlier.values())
    schedule.look_back()
    schedule.run_if_due()
    *kept, newest = list_backups(folder)
    assert kept == [earlier[-2], earlier[-1]]
    assert stamp_of(newest) == now_of(clock).replace(microsecond=0)


def test_a_moment_is_restored_from_a_backup_that_was_surely_made_later(
    store, schedule, clock, tmp_path
):
    """One of a clock that was ahead names a later time than it was made at, and lacks what arrived between."""
    folder = tmp_path / "backups"
    ahead_ns = 100 * 24 * HOUR_NS
    store.write(rows_of(10))
    clock.step_wall(ahead_ns)
    schedule.run_if_due()
    clock.step_wall(-ahead_ns)
    clock.advance(HOUR_NS)
    store.write(rows_of(10, start=10))
    until = now_of(clock)
    clock.advance(HOUR_NS)
    store.write(rows_of(10, start=20))
    schedule.run_if_due()
    done = restore(
        choose_backup(folder, until), tmp_path / "2.db", until=until.replace(tzinfo=None)
    )
    assert done.newest == until.replace(tzinfo=None)
    assert count(tmp_path / "2.db") == 20


def test_one_that_cannot_be_read_is_not_kept_and_the_older_ones_are(
    store, schedule, clock, tmp_path, monkeypatch, caplog
):
    folder = tmp_path / "backups"
    for number in range(3):
        store.write(rows_of(5_000, start=number * 5_000))
        schedule.run_if_due()
        clock.advance(HOUR_NS)
    before = list_backups(folder)
    copy_now = backups.copy_now

    def damage(connection, path, fds):
        done = copy_now(connection, path, fds)
        size = os.fstat(fds[0]).st_size
        for at in range(3 * 4096, size, 4096):
            os.pwrite(fds[0], b"\xff", at + 777)  # a disk that forgets
        return done

    monkeypatch.setattr(backups, "copy_now", damage)
    schedule.run_if_due()
    assert list_backups(folder) == before
    assert sorted(folder.iterdir()) == before
    assert (schedule.counters.done, schedule.counters.failed) == (3, 1)
    assert "no backup was made" in caplog.text
    monkeypatch.setattr(backups, "copy_now", copy_now)
    schedule.run_if_due()
    assert schedule.counters.done == 3
    clock.advance(600 * NS_PER_S)  # it is tried again before the next one is due
    schedule.run_if_due()
    assert schedule.counters.done == 4


def test_a_folder_that_cannot_be_written_is_told_and_counted(store, clock, tmp_path, caplog):
    (tmp_path / "file").touch()
    schedule = BackupSchedule(store, BackupPlan(tmp_path / "file", HOUR_NS, 3), None, clock)
    schedule.run_if_due()
    assert schedule.counters.failed == 1
    assert "File exists" in caplog.text


def test_what_a_killed_process_left_half_made_is_removed(schedule, tmp_path):
    folder = tmp_path / "backups"
    folder.mkdir()
    (folder / "echo-20200101T000000Z.db.partial").touch()
    (folder / "notes.txt").touch()
    schedule.run_if_due()
    assert [one.name for one in folder.iterdir() if "partial" in one.name] == []
    assert (folder / "notes.txt").exists()


def test_closing_ends_a_check_that_runs(store, tmp_path, monkeypatch):
    began = threading.Event()

    def slow(connection):
        began.set()
        with translate_errors("read"):
            connection.execute(
                "SELECT count(*) FROM range(10000000000000) a WHERE hash(a.range) = 1"
            ).fetchall()

    monkeypatch.setattr(backups, "read_whole", slow)
    schedule = BackupSchedule(
        store, BackupPlan(tmp_path / "backups", HOUR_NS, 3), None, ManualClock()
    )
    schedule.start()
    assert began.wait(120)
    schedule.close()
    assert list_backups(tmp_path / "backups") == []
    assert schedule.counters.failed == 0


def test_a_backup_is_restored_to_a_moment(store, schedule, clock, tmp_path):
    folder = tmp_path / "backups"
    moments = []
    for number in range(4):
        store.write(rows_of(10, start=number * 10))
        moments.append(now_of(clock))
        clock.advance(HOUR_NS // 2)
        schedule.run_if_due()
    # Backups have the rows of pushes 1, 3 (30 min later each): made at 0:30 and 1:30.
    assert len(list_backups(folder)) == 2
    for until, n_rows in ((moments[0], 10), (moments[1], 20), (moments[2], 30)):
        backup = choose_backup(folder, until)
        done = restore(backup, tmp_path / f"{n_rows}.db", until=until.replace(tzinfo=None))
        assert done.aside is None
        assert done.newest == until.replace(tzinfo=None)
        assert count(tmp_path / f"{n_rows}.db") == n_rows
    assert choose_backup(folder, None) == list_backups(folder)[-1]
    assert choose_backup(folder, moments[3] + dt.timedelta(days=1)) == list_backups(folder)[-1]
    with pytest.raises(StoreError, match="no backup"):
        choose_backup(tmp_path / "nowhere", None)


def test_rows_left_out_by_a_restore_are_taken_again_when_they_are_sent_again(
    store, schedule, clock, tmp_path
):
    store.write(rows_of(10))
    until = now_of(clock).replace(tzinfo=None)
    clock.advance(NS_PER_S)
    store.write(rows_of(10, start=10))
    schedule.run_if_due()
    (backup,) = list_backups(tmp_path / "backups")
    done = restore(backup, tmp_path / "again.db", until=until)
    assert done.n_left_out == 10
    again = make_store(tmp_path / "again.db", clock)
    again.open()
    again.write(rows_of(20))
    assert (again.counters.written, again.counters.duplicates) == (10, 10)
    again.close()
    assert verify(backup) >= 20  # it is as it was


def test_verify_finds_one_changed_bit_in_any_block_that_is_used_and_changes_nothing(
    store, schedule, tmp_path
):
    store.call(
        lambda connection: connection.execute(
            f"INSERT INTO events ({OLD}) SELECT TIMESTAMP '2026-01-01', 'c1', 'n1', 'm', random(), "
            "md5(i::VARCHAR), TIMESTAMP '2026-01-01' FROM range(50000) t(i)"
        )
    ).result()
    schedule.run_if_due()
    (backup,) = list_backups(tmp_path / "backups")
    whole = backup.read_bytes()
    assert verify(backup) == 50_000
    assert backup.read_bytes() == whole
    said = []
    for at in range(13_000, len(whole), 512 << 10):
        backup.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            said.append(str(verify(backup)))
        except StoreError as error:
            said.append(error.message)
    assert sum("checksum" in one for one in said) >= len(said) / 2  # the others are free
    assert any(one.startswith("cannot read events") for one in said)  # opening alone found nothing
    with pytest.raises(StoreError, match="does not exist"):
        verify(tmp_path / "nowhere.db")


def make_file(path, n_rows):
    """A database that was closed in order."""
    with closing(open_engine(str(path), DatabaseSettings())) as connection:
        migrate(connection, NOW)
        insert(connection, n_rows)
    return path


def insert(connection, n_rows):
    connection.execute(
        f"INSERT INTO events ({OLD}) SELECT ?, 'c1', 'n1', 'm', i, '{{}}', ? FROM range(?) t(i)",
        [NOW, NOW, n_rows],
    )


def make_unclean(path, n_rows):
    """The same as it is when its server is killed: the rows are in the log."""
    source = path.with_name("source.db")
    with closing(open_engine(str(source), DatabaseSettings())) as connection:
        migrate(connection, NOW)
        connection.execute("CHECKPOINT")
        insert(connection, n_rows)
        shutil.copy(source, path)
        shutil.copy(wal_path(str(source)), wal_path(str(path)))
    return path


def overwrite(path, offset, n_bytes):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xa5" * n_bytes)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: overwrite(path, 0, 12288),
        lambda path: overwrite(path, 4096, 4096),
        lambda path: os.truncate(path, 20_000),
        lambda path: os.truncate(path, 0),
    ],
    ids=["headers", "one header", "cut off", "empty"],
)
def test_a_damaged_database_is_kept_aside_with_its_log_and_said_when_it_is_replaced(
    tmp_path, spoil
):
    backup = make_file(tmp_path / "copy.db", 7)
    db = make_unclean(tmp_path / "echo.db", 300_000)
    spoil(db)
    damaged, log = db.read_bytes(), wal_path(str(db)).read_bytes()
    done = restore(backup, db)
    assert (count(db), done.n_rows) == (7, 7)
    assert "echo.db" in done.damage
    assert done.aside.read_bytes() == damaged
    assert wal_path(str(done.aside)).read_bytes() == log
    assert not wal_path(str(db)).exists()


def test_what_is_no_echo_database_or_in_use_stays_in_its_place(tmp_path):
    backup, db = make_file(tmp_path / "copy.db", 7), tmp_path / "echo.db"
    with duckdb.connect(str(db)) as foreign:
        foreign.execute("CREATE TABLE mine (a INTEGER)")
    before = db.read_bytes()
    with pytest.raises(ForeignDatabaseError, match="no Echo database"):
        restore(backup, db)
    with pytest.raises(ForeignDatabaseError, match="no Echo database"):
        verify(db)
    with closing(make_store(tmp_path / "served.db")) as served:
        served.open()
        with pytest.raises(LockedError):
            restore(backup, tmp_path / "served.db")
    assert db.read_bytes() == before
    assert not list(tmp_path.glob("*before-restore*"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OSError(28, "No space left")])
@pytest.mark.parametrize("at", ["copy", "link", "name"])
def test_a_restore_that_is_interrupted_leaves_the_old_database_with_its_log(
    tmp_path, monkeypatch, at, error
):
    backup = make_file(tmp_path / "copy.db", 7)
    db = make_unclean(tmp_path / "echo.db", 50)
    before, log = db.read_bytes(), wal_path(str(db)).read_bytes()
    kept = sorted(path.name for path in tmp_path.iterdir())

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        owner, name = {
            "copy": (shutil, "copyfileobj"),
            "link": (Path, "hardlink_to"),
            "name": (Path, "replace"),
        }[at]
        patch.setattr(owner, name, fail)
        with pytest.raises(StoreError if isinstance(error, OSError) else error):
            restore(backup, db)
    assert sorted({path.name for path in tmp_path.iterdir()} - {"echo.db.lock"}) == kept
    assert (db.read_bytes(), wal_path(str(db)).read_bytes()) == (before, log)
    assert count(db) == 50


def test_a_restore_that_is_interrupted_after_the_new_database_has_its_place_keeps_the_old_one(
    tmp_path, monkeypatch
):
    backup = make_file(tmp_path / "copy.db", 7)
    db = make_unclean(tmp_path / "echo.db", 50)
    replace = Path.replace

    def interrupted(self, target):
        replace(self, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            restore(backup, db)
    assert count(db) == 7
    assert count(tmp_path / "echo.db.before-restore-1") == 50


def test_a_backup_with_a_log_is_restored_whole_and_left_as_it_is(tmp_path):
    backup = make_unclean(tmp_path / "copy.db", 50)
    before, log = backup.read_bytes(), wal_path(str(backup)).read_bytes()
    assert restore(backup, tmp_path / "echo.db").n_rows == 50
    assert (backup.read_bytes(), wal_path(str(backup)).read_bytes()) == (before, log)
    assert count(tmp_path / "echo.db") == 50


def test_the_backup_that_a_replica_answers_from_is_restored(tmp_path):
    backup = make_file(tmp_path / "echo-20260131T020000Z.db", 7)
    code = (
        "import sys\nfrom ingero.echo.db.engine import *\n"
        "held = open_engine(sys.argv[1], DatabaseSettings(is_read_only=True))\n"
        "print('open', flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(backup)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as replica:  # fmt: skip
        assert replica.stdout.readline() == "open\n"
        assert restore(backup, tmp_path / "echo.db").n_rows == 7
        replica.stdin.close()
    assert count(tmp_path / "echo.db") == 7


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS)))
def test_a_file_of_an_older_release_is_read_copied_and_restored_to_a_moment(tmp_path, version):
    old, copy, restored = (tmp_path / name for name in ("old.db", "copy.db", "echo.db"))
    arrivals = [dt.datetime(2026, 11, day) for day in (1, 20)]  # noqa: DTZ001 - the store's TIMESTAMP is UTC
    with duckdb.connect(str(old)) as connection:
        connection.execute(
            "CREATE TABLE schema_migrations (number INTEGER PRIMARY KEY, title VARCHAR, applied_at TIMESTAMP)"
        )
        for step in MIGRATIONS[:version]:
            for statement in step.statements:
                connection.execute(statement)
            connection.execute(
                "INSERT INTO schema_migrations VALUES (?, 'old', now()::TIMESTAMP)", [step.number]
            )
        if version < STREAMS:
            for table in ("events", "histograms"):
                connection.execute(f"ALTER TABLE {table} DROP COLUMN stream")
        for at in arrivals:
            connection.execute(
                f"INSERT INTO events ({OLD}) SELECT ?, 'c', 'n', 'm', 1, '{{}}', ?", [at, at]
            )
    assert verify(old) == 2
    assert back_up(old, copy)[1] == 2
    done = restore(copy, restored, until=arrivals[0] + dt.timedelta(days=1))
    assert (done.n_rows, done.n_left_out, done.newest) == (1, 1, arrivals[0])
    assert count(restored) == 1  # brought up to date as it is opened
    store = make_store(restored)
    store.open()
    store.write(rows_of(1, stream="ab"))
    with store.open_reader(5 * NS_PER_S) as reader:
        rows = reader.rows("SELECT stream, kind, node_id FROM events ORDER BY kind NULLS FIRST")
    assert rows == [(None, None, "n"), ("ab", "gauge", "n1")]
    store.close()
