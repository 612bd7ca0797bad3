"""Readings from a recording that somebody writes meanwhile."""

import sqlite3
from contextlib import closing

import numpy as np
import pytest

from ingero.agent.push.recorded import ALIVE_NS, RecordedSource
from ingero.model.events import CudaOp, DriverOp, GraphOp, Source
from ingero.model.recording import AGGREGATE
from ingero.recording.store.writer import RecordingWriter
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S

MINUTE_NS = 60 * NS_PER_S


class Trace:
    """A recording that grows by the second, as `ingero trace` writes one."""

    def __init__(self, path):
        self.clock = ManualClock(wall_ns=1_767_225_600 * NS_PER_S + 50 * NS_PER_S)
        self.offset_ns = self.clock.wall_ns() - self.clock.mono_ns()
        self.writer = RecordingWriter(path, "n1")
        self.notes = []
        self.source = RecordedSource(path, 10 * NS_PER_S, note=self.notes.append)

    def second(self, launches, spent_ns=0, source=Source.CUDA, op=CudaOp.LAUNCH_KERNEL):
        self.clock.advance(NS_PER_S)
        mono_ns = self.clock.mono_ns()
        rows = np.zeros(1, AGGREGATE)
        rows["bucket_ns"] = (mono_ns + self.offset_ns) // MINUTE_NS * MINUTE_NS
        rows["source"], rows["op"], rows["pid"], rows["count"] = source, op, 41, launches
        rows["sum_duration_ns"] = spent_ns
        self.writer.put_aggregates(rows)
        self.writer.put_clock_sample(mono_ns, self.clock.wall_ns())
        self.writer.flush()

    def read(self):
        return self.source.read(self.clock.wall_ns(), self.clock.mono_ns())


@pytest.fixture
def trace(tmp_path):
    trace = Trace(tmp_path / "t.db")
    yield trace
    trace.writer.close()


def test_rates_are_what_came_in_the_window_also_over_the_turn_of_a_minute(trace):
    trace.second(7777)  # before the first look
    assert trace.read() is None
    for _ in range(30):
        trace.second(100, NS_PER_S // 4)
        reading = trace.read()
    assert reading.signals.throughput == pytest.approx(100)
    assert reading.signals.compute == pytest.approx(0.25)
    assert reading.launches == 1000
    assert reading.signals.memory is None
    assert reading.is_pending is None
    for _ in range(10):
        trace.second(40)
        reading = trace.read()
    assert reading.signals.throughput == pytest.approx(40)


@pytest.mark.parametrize(
    ("table", "column", "what"),
    [
        ("event_aggregates", "sum_dur", "event_aggregates"),
        ("event_aggregates", "op", "event_aggregates"),
        ("clock_samples", "mono_ns", "the time of its writer"),
        ("clock_samples", "wall_ns", "the time of its writer"),
    ],
)
def test_null_where_the_schema_excludes_it_is_no_reading_and_said(trace, table, column, what):
    trace.second(5)
    assert trace.read() is None
    assert not trace.notes
    trace.writer.close()
    with closing(sqlite3.connect(trace.source.path)) as connection, connection:
        connection.execute(f"CREATE TABLE loose AS SELECT * FROM {table}")
        connection.execute(f"UPDATE loose SET {column} = NULL")
        connection.execute(f"DROP TABLE {table}")
        connection.execute(f"ALTER TABLE loose RENAME TO {table}")
    assert trace.read() is None
    assert [f"{trace.source.path}: {what} cannot be read" in note for note in trace.notes] == [True]


def test_a_silent_process_is_zero_and_a_silent_writer_is_no_reading(trace):
    trace.second(5)
    trace.read()
    for _ in range(11):
        trace.second(0)
        reading = trace.read()
    assert reading.launches == 0
    trace.clock.advance(ALIVE_NS)
    assert trace.read() is not None
    trace.clock.advance(1)
    assert trace.read() is None
    assert trace.read() is None
    assert trace.notes == [f"{trace.source.path}: nobody writes to it; is `ingero trace` running?"]
    trace.second(5)
    assert trace.read() is None  # what came while nobody looked is no rate
    trace.second(5)
    assert trace.read().launches == 5


def test_a_launch_that_runtime_and_driver_both_count_is_one(trace):
    trace.second(0)
    trace.read()
    trace.second(100)
    trace.writer.put_aggregates(_driver(trace, 100))
    trace.writer.flush()
    assert trace.read().launches == 100
    trace.second(3, source=Source.CUDA_GRAPH, op=GraphOp.LAUNCH)
    assert trace.read().launches == 103


def _driver(trace, launches):
    rows = np.zeros(1, AGGREGATE)
    rows["bucket_ns"] = (trace.clock.mono_ns() + trace.offset_ns) // MINUTE_NS * MINUTE_NS
    rows["source"], rows["op"], rows["pid"] = Source.DRIVER, DriverOp.LAUNCH_KERNEL, 41
    rows["count"] = launches
    return rows


def test_a_step_of_the_wall_clock_changes_no_rate(trace):
    trace.second(0)
    trace.read()
    for step_s in (3600, -7200):
        trace.clock.step_wall(step_s * NS_PER_S)
        for _ in range(10):
            trace.second(50)
            reading = trace.read()
        assert reading.signals.throughput == pytest.approx(50)


FIVE_NS = 5 * NS_PER_S


def existing(path, now_ns, *, table, width_ns):
    """A recording as the existing agent leaves it at a moment: 100 launches of 1 ms a second, whole buckets only."""
    counts = (
        "bucket INTEGER, source INTEGER, op INTEGER, pid INTEGER, count INTEGER, stored INTEGER, sum_dur INTEGER, "
        "min_dur INTEGER, max_dur INTEGER, sum_arg0 INTEGER, PRIMARY KEY (bucket, source, op, pid)"
    )
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(
            "CREATE TABLE events (id TEXT PRIMARY KEY, timestamp, pid, tid, source, op, duration)"
        )
        connection.execute("CREATE TABLE system_snapshots (id, timestamp UNIQUE, cpu_pct)")
        connection.execute(f"CREATE TABLE event_aggregates ({counts})")
        if table != "event_aggregates":
            connection.execute(f"CREATE TABLE {table} ({counts})")
        connection.execute("INSERT INTO system_snapshots VALUES (1, ?, 10)", (now_ns,))
        seconds = width_ns // NS_PER_S
        for back in range(1, 13):
            bucket = now_ns // width_ns * width_ns - back * width_ns
            for source, op in (
                (Source.CUDA, CudaOp.LAUNCH_KERNEL),
                (Source.DRIVER, DriverOp.LAUNCH_KERNEL),
            ):
                connection.execute(
                    f"INSERT INTO {table} VALUES (?, ?, ?, 41, ?, 0, ?, 0, 0, 0)",
                    (bucket, source, op, 100 * seconds, 100 * seconds * 1_000_000),
                )


@pytest.mark.parametrize(
    ("table", "width_ns"), [("event_aggregates_5s", FIVE_NS), ("event_aggregates", MINUTE_NS)]
)
def test_the_existing_agent_s_recording_gives_rates_of_its_whole_buckets(tmp_path, table, width_ns):
    now_ns = 1_767_225_600 * NS_PER_S + 33 * NS_PER_S
    path = tmp_path / "theirs.db"
    existing(path, now_ns, table=table, width_ns=width_ns)
    notes = []
    source = RecordedSource(path, 60 * NS_PER_S, note=notes.append)
    reading = source.read(now_ns + NS_PER_S, 0)
    assert reading.signals.throughput == pytest.approx(100)
    assert reading.launches == 6000
    assert reading.signals.compute == pytest.approx(0.2)
    assert source.read(now_ns + ALIVE_NS + 1, 0) is None
    assert ["nobody writes" in note for note in notes] == [True]


def test_a_file_that_is_no_recording_is_told_once(tmp_path):
    notes = []
    source = RecordedSource(tmp_path / "none.db", NS_PER_S, note=notes.append)
    assert source.read(0, 0) is None
    assert source.read(0, 0) is None
    assert len(notes) == 1
    assert "none.db" in notes[0]
