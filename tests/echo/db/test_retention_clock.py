"""What retention deletes where the machine's clock is far ahead of the time that has passed."""

import datetime as dt

import pytest
from tests.echo.db.stores import count, make_store, rows_of

from ingero.echo.db.retention import Retention
from ingero.echo.db.rows import Rows
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S

DAY_NS = 86_400 * NS_PER_S
JUMP_NS = 60 * 365 * DAY_NS
KEPT = Retention(30 * DAY_NS, None)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def opened(tmp_path, clock):
    """Opens the store of one file, as often as a test wants, and closes what is left open."""
    there = []

    def again(**writer):
        close()
        given = {"retention": KEPT, "upkeep_ns": NS_PER_S} | writer
        store = make_store(tmp_path / "echo.db", clock, **given)
        store.open()
        there.append(store)
        return store

    def close():
        while there:
            there.pop().close()

    yield again
    close()


def keep_up(store, clock, elapsed_ns=2 * NS_PER_S):
    """Time passes, and the writer does what is due."""
    clock.advance(elapsed_ns)
    store.write(Rows())
    store.call(lambda _: None).result()


def live(store, clock, days):
    for _ in range(days):
        keep_up(store, clock, DAY_NS)


def said(caplog):
    return [one.getMessage() for one in caplog.records if "the clock" in one.getMessage()]


def test_a_clock_that_jumps_ahead_deletes_nothing_and_time_goes_on(opened, clock, caplog):
    store = opened()
    store.write(rows_of(5))
    live(store, clock, 20)
    clock.step_wall(JUMP_NS)
    keep_up(store, clock)
    keep_up(store, clock)
    assert count(store) == 5
    assert store.clock_ahead_s == pytest.approx(JUMP_NS / NS_PER_S, rel=1e-6)
    (line,) = said(caplog)
    assert "ahead" in line
    assert "--trust-clock" in line
    clock.step_wall(-JUMP_NS)
    keep_up(store, clock)
    assert (count(store), store.clock_ahead_s) == (5, 0)
    assert len(said(caplog)) == 2  # also that it is right again
    live(store, clock, 9)
    assert count(store) == 5
    live(store, clock, 2)
    assert count(store) == 0


def test_rows_go_in_their_time_while_the_clock_is_ahead(opened, clock):
    store = opened()
    store.write(rows_of(5))
    live(store, clock, 28)
    store.write(rows_of(3, start=100))
    clock.step_wall(JUMP_NS)
    live(store, clock, 3)
    assert count(store) == 3
    assert store.clock_ahead_s > 0


def test_rows_that_arrived_after_the_step_have_the_age_that_the_clock_says(opened, clock):
    """Or a table that is kept for an hour would grow for as long as the clock is not believed."""
    store = opened(retention=Retention(30 * DAY_NS, None, {"events": DAY_NS // 2}))
    store.write(rows_of(5))
    clock.step_wall(100 * DAY_NS)
    keep_up(store, clock)
    store.write(rows_of(4, start=100))
    keep_up(store, clock, DAY_NS // 4)
    assert count(store) == 9
    keep_up(store, clock, DAY_NS // 2)
    assert (count(store), store.clock_ahead_s > 0) == (0, True)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_process_that_starts_with_a_clock_ahead_deletes_nothing(opened, clock, is_known):
    store = opened()
    store.write(rows_of(5))
    keep_up(store, clock)
    if not is_known:  # as in a file of an older release
        store.call(lambda db: db.execute("DELETE FROM retention_clock")).result()
    store.close()
    clock.step_wall(JUMP_NS)
    for n in range(3):
        store = opened()
        store.write(rows_of(1, start=100 + n))  # these have the wrong arrival
        keep_up(store, clock)
        assert count(store) == 6 + n
        assert store.clock_ahead_s > 0
    clock.step_wall(-JUMP_NS)
    store = opened()
    keep_up(store, clock)
    assert (count(store), store.clock_ahead_s) == (8, 0)


def test_after_months_without_the_process_old_rows_go_once_the_clock_was_steady(opened, clock):
    store = opened()
    store.write(rows_of(5))
    keep_up(store, clock)
    store.close()
    clock.step_wall(200 * DAY_NS)
    store = opened()
    live(store, clock, 4)
    store = opened()  # the days before count
    live(store, clock, 2)
    assert (count(store), store.clock_ahead_s > 0) == (5, True)
    live(store, clock, 2)
    assert (count(store), store.clock_ahead_s) == (0, 0)
    live(store, clock, 2)
    assert store.clock_ahead_s == 0


def test_a_clock_that_steps_again_is_not_steady(opened, clock):
    store = opened()
    store.write(rows_of(5))
    clock.step_wall(JUMP_NS)
    for _ in range(3):
        live(store, clock, 5)
        store.write(rows_of(1, start=1000))
        clock.step_wall(100 * DAY_NS)
    assert count(store) == 6
    live(store, clock, 8)
    assert store.clock_ahead_s == 0


def test_months_without_rows_are_no_step(opened, clock):
    store = opened()
    store.write(rows_of(5))
    live(store, clock, 100)
    assert (count(store), store.clock_ahead_s) == (0, 0)


def test_an_operator_who_trusts_the_clock_has_it_believed_at_once(opened, clock):
    store = opened()
    store.write(rows_of(5))
    store.close()
    clock.step_wall(200 * DAY_NS)
    store = opened(is_clock_trusted=True)
    keep_up(store, clock)
    assert (count(store), store.clock_ahead_s) == (0, 0)
    store = opened()  # and afterwards
    keep_up(store, clock)
    assert store.clock_ahead_s == 0


def test_a_first_start_with_a_clock_ahead_leaves_nothing_held_once_it_is_right(opened, clock):
    clock.step_wall(JUMP_NS)
    store = opened()
    store.write(rows_of(2))
    keep_up(store, clock)
    clock.step_wall(-JUMP_NS)
    keep_up(store, clock)
    store.write(rows_of(3, start=100))
    live(store, clock, 31)
    assert store.clock_ahead_s == 0
    with store.open_reader(NS_PER_S) as reader:
        left = reader.rows("SELECT year(ingested_at), count(*) FROM events GROUP BY ALL")
    assert [n for _, n in left] == [2]  # theirs is the arrival that the clock said


def test_a_machine_that_starts_with_an_old_date_is_right_once_the_network_says_so(
    opened, clock, caplog
):
    store = opened()
    store.write(rows_of(5))
    live(store, clock, 20)
    store.write(rows_of(1, start=100))
    store.close()
    for n_minutes in (0, 1, 20):
        clock.step_wall(-JUMP_NS)
        store = opened()
        if n_minutes == 1:  # as in a file of an older release
            store.call(lambda db: db.execute("DELETE FROM retention_clock")).result()
            store = opened()
        keep_up(store, clock, n_minutes * 60 * NS_PER_S)
        assert (count(store), store.clock_ahead_s) == (6, 0)
        clock.step_wall(JUMP_NS)
        keep_up(store, clock)
        assert (count(store), store.clock_ahead_s) == (6, 0)
    assert not said(caplog)
    live(store, clock, 11)
    assert count(store) == 1


def test_a_first_start_with_an_old_date_is_no_step(opened, clock, caplog):
    clock.step_wall(-JUMP_NS)
    store = opened()
    keep_up(store, clock)
    clock.step_wall(JUMP_NS)
    keep_up(store, clock)
    assert store.clock_ahead_s == 0
    assert not said(caplog)


def test_a_clock_that_stays_behind_is_the_time_after_a_week(opened, clock):
    clock.step_wall(JUMP_NS)
    store = opened()
    clock.step_wall(-JUMP_NS)
    live(store, clock, 9)
    store.write(rows_of(5))
    clock.step_wall(JUMP_NS)
    keep_up(store, clock)
    assert (count(store), store.clock_ahead_s > 0) == (5, True)


def test_a_day_without_the_process_is_believed(opened, clock):
    store = opened()
    store.write(rows_of(5))
    keep_up(store, clock)
    store.close()
    clock.step_wall(DAY_NS - 3600 * NS_PER_S)
    store = opened()
    keep_up(store, clock)
    assert store.clock_ahead_s == 0


def test_what_is_stored_is_summed_up_with_the_rows_that_the_clock_would_have_deleted(opened, clock):
    store = opened()
    store.write(rows_of(5))
    keep_up(store, clock, 600 * NS_PER_S)
    before = store.usage.find_stored_bytes(None)
    clock.step_wall(JUMP_NS)
    keep_up(store, clock)
    assert store.usage.find_stored_bytes(None) == before > 0


def test_the_time_is_kept_when_the_file_is_made_smaller(opened, clock):
    from pathlib import Path

    from ingero.echo.db.compaction import Compactor

    store = opened()
    store.write(rows_of(5))
    keep_up(store, clock)
    Compactor(store, store.backend, 0).compact()
    with store.open_reader(NS_PER_S) as reader:
        ((known,),) = reader.rows("SELECT known FROM retention_clock")
    assert known <= dt.datetime(1970, 1, 1) + dt.timedelta(microseconds=clock.wall_ns() // 1000)  # noqa: DTZ001
    assert Path(store.path).exists()
