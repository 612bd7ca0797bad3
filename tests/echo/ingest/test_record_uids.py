"""A log record that comes again under its id is kept once, whatever else it says by then."""

import pytest

from ingero.echo.db.engine import DatabaseSettings
from ingero.echo.db.store import Store, StoreSettings
from ingero.echo.db.writer_settings import DatabaseWriterSettings
from ingero.echo.ingest.intake import Intake
from ingero.otlp.codec import build_logs, merge_exports
from ingero.serving.bearer import Principal
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S
from ingero.wire.log_records import LogSeverity, build_record
from ingero.wire.record_uids import RECORD_UID

ANY = Principal("d", "k", None)
WINDOW_NS = 600 * NS_PER_S


class Echo:
    """A store on disk and what takes records into it."""

    def __init__(self, path, clock):
        self.clock = clock
        settings = StoreSettings(
            engine=DatabaseSettings(memory_limit_bytes=128 << 20, threads=1),
            writer=DatabaseWriterSettings(group_ns=1_000_000, window_ns=WINDOW_NS),
        )
        self.store = Store(str(path), settings, clock)
        self.intake = Intake(self.store, clock)

    def __enter__(self):
        self.store.open()
        return self

    def __exit__(self, *_):
        self.store.close()

    def take(self, *exports):
        self.store.write(self.intake.build(merge_exports(exports), ANY, "").rows)

    def read(self, table="verdicts"):
        with self.store.open_reader(NS_PER_S) as reader:
            return reader.rows(f"SELECT cluster_id, {SAYS[table]} FROM {table} ORDER BY ALL")

    @property
    def dropped(self):
        return self.store.counters.repeated, self.store.counters.duplicates


SAYS = {"verdicts": "summary", "logs": "body"}


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def echo(tmp_path, clock):
    with Echo(tmp_path / "echo.db", clock) as opened:
        yield opened


def record(text, uid=None, *, after_s=0, cluster="c1", event="ingero.verdict"):
    said = {"ingero.verdict.kind": "culprit"} | ({} if uid is None else {RECORD_UID: uid})
    at_ns = ManualClock().wall_ns() + after_s * NS_PER_S
    one = build_record(event, said, LogSeverity.WARN, text, at_ns)
    return build_logs({"ingero.cluster.id": cluster}, [one], "ingero.fleet")


def test_a_repeat_with_another_time_and_other_words_is_dropped_and_counted(echo):
    echo.take(record("first", "a"))
    echo.take(record("second", "a", after_s=3), record("another", "b"))
    assert echo.read() == [("c1", "another"), ("c1", "first")]
    assert echo.dropped == (1, 0)


def test_of_two_in_one_request_the_first_is_kept(echo):
    echo.take(record("first", "a"), record("second", "a", after_s=1), record("third", "b"))
    assert echo.read() == [("c1", "first"), ("c1", "third")]
    assert echo.dropped == (1, 0)


def test_an_id_is_known_after_a_restart_and_for_as_long_as_a_retry_is(tmp_path, clock):
    with Echo(tmp_path / "echo.db", clock) as echo:
        echo.take(record("first", "a"))
    clock.advance(WINDOW_NS // 2)
    with Echo(tmp_path / "echo.db", clock) as echo:
        echo.take(record("second", "a", after_s=5))
        assert (echo.read(), echo.dropped) == ([("c1", "first")], (1, 0))


@pytest.mark.parametrize("event", ["ingero.verdict", "acme.note"])
def test_a_record_that_is_sent_again_after_days_is_known(tmp_path, clock, event):
    table = "verdicts" if event == "ingero.verdict" else "logs"
    with Echo(tmp_path / "echo.db", clock) as echo:
        echo.take(
            record("first", "a", event=event), record("theirs", "b", cluster="c2", event=event)
        )
    clock.advance(3 * 86_400 * NS_PER_S)
    with Echo(tmp_path / "echo.db", clock) as echo:
        echo.take(
            record("again", "a", event=event),
            record("of the same time", "b", event=event),
            record("of another time", "c", after_s=60, event=event),
        )
        assert echo.read(table) == [
            ("c1", "first"),
            ("c1", "of another time"),
            ("c1", "of the same time"),
            ("c2", "theirs"),
        ]
        assert echo.dropped == (1, 0)
        assert echo.store.counters.written == 2


def test_a_record_of_a_clock_that_is_ahead_is_known_after_the_window(echo, clock):
    echo.take(record("first", "a", after_s=3600))
    for _ in range(3):
        clock.advance(WINDOW_NS)
        echo.take(record("of now", f"at {clock.wall_ns()}", after_s=clock.mono_ns() // NS_PER_S))
    echo.take(record("again", "a", after_s=3600))
    assert [text for _, text in echo.read()] == ["first", "of now", "of now", "of now"]
    assert echo.dropped == (1, 0)


def test_many_records_that_come_again_at_once_are_each_known(echo, clock):
    echo.take(*(record(f"{at}", f"{at}", after_s=at // 3) for at in range(900)))
    clock.advance(86_400 * NS_PER_S)
    echo.take(record("before", "x"))
    clock.advance(2 * WINDOW_NS)
    echo.take(record("between", "y"))
    echo.take(*(record("again", f"{at}", after_s=at // 3) for at in range(901)))
    assert [text for _, text in echo.read()].count("again") == 1
    assert echo.dropped == (900, 0)


def test_records_without_an_id_are_taken_and_known_as_before(echo):
    echo.take(record("first"), record("second"), record("second", after_s=1))
    echo.take(record("second"))
    assert [text for _, text in echo.read()] == ["first", "second", "second"]
    assert echo.dropped == (0, 1)


@pytest.mark.parametrize("uid", ["", 7, ["a"], "a" * 257])
def test_what_can_be_no_id_is_none(echo, uid):
    echo.take(record("first", uid), record("second", uid))
    assert [text for _, text in echo.read()] == ["first", "second"]
    assert echo.dropped == (0, 0)


def test_a_cluster_cannot_use_up_another_ones_ids(echo):
    echo.take(record("theirs", "a", cluster="c2"))
    echo.take(record("ours", "a"))
    assert echo.read() == [("c1", "ours"), ("c2", "theirs")]


def test_ids_of_other_senders_logs_count_too(echo):
    echo.take(record("first", "a", event="acme.note"))
    echo.take(record("second", "a", event="acme.note"))
    assert echo.read("logs") == [("c1", "first")]


def test_a_record_that_an_older_release_stored_is_known_by_what_it_says(echo, monkeypatch):
    """An older Echo keeps no ids: the retry of what it took comes to the newer one."""
    with monkeypatch.context() as older:
        older.setattr("ingero.echo.ingest.logs.read_record_uid", lambda _: "")
        echo.take(record("first", "a"))
    echo.take(record("first", "a"))
    assert (echo.read(), echo.dropped) == ([("c1", "first")], (0, 1))


def test_a_record_that_this_release_stored_is_known_to_an_older_one(echo, monkeypatch):
    echo.take(record("first", "a"))
    monkeypatch.setattr("ingero.echo.ingest.logs.read_record_uid", lambda _: "")
    echo.take(record("first", "a"))
    assert (echo.read(), echo.dropped) == ([("c1", "first")], (0, 1))
