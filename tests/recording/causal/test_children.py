"""Who is whose child holds whatever part of a recording is looked at, and is unknown where nobody noted it."""

import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from ingero.agent.trace.recent_recording import RecentRecording
from ingero.model.events import EVENT, HostOp, Source
from ingero.recording.causal.engine import explain
from ingero.recording.export.merge import merge_recordings
from ingero.recording.queries.recording_file import RecordingFile
from ingero.recording.queries.transfer import decode_part, encode_part, join_parts
from ingero.recording.queries.window import Wanted, load_part
from ingero.recording.scenarios.builder import START_NS, RecordingBuilder
from ingero.recording.scenarios.loop import Loop
from ingero.recording.store import reader
from ingero.recording.store.event_loader import LoadFilter
from ingero.recording.store.migration import migrate
from ingero.recording.store.reader import load_recording
from ingero.recording.store.schema import FORKED
from ingero.recording.store.settings import WriterSettings
from ingero.recording.store.typed import select_typed
from ingero.recording.store.writer import RecordingWriter

MS = 1_000_000
SECOND = 1000 * MS
PID, WORKER = 4821, 4900
WAITS = [("input_starvation", "waiting for worker pt_data_worker")]


def starved_job(*, has_fork=True, waker=WORKER):
    """A job whose steps wait for a worker, which it forked at the start."""
    built = RecordingBuilder().name(WORKER, "pt_data_worker")
    if has_fork:
        built.call((Source.HOST, HostOp.FORK), 0, 0, PID, arg1=WORKER)
    loop = Loop(built, PID, at_ns=SECOND)
    for _ in range(60):
        loop.step()
        loop.sleep(100 * MS, other_pid=waker)
    return built


def told(recording):
    return [
        (i.rule, i.causes[0].name)
        for i in explain(recording).incidents
        if i.rule == "input_starvation"
    ]


@pytest.fixture
def path(tmp_path):
    starved_job().write(tmp_path / "r.db")
    return tmp_path / "r.db"


def forget_table(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE process_parents")
        connection.commit()


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize(
    "wanted", [Wanted(start="2s"), Wanted(since="4s"), Wanted(last=300), Wanted()], ids=str
)
def test_a_worker_is_named_in_every_window(path, wanted, is_old):
    if is_old:
        forget_table(path)
    assert told(load_part(path, wanted)) == WAITS


def test_forks_of_an_older_recording_are_looked_for_once_while_it_stays_as_it_was(
    path, monkeypatch
):
    forget_table(path)
    asked = []

    def select(connection, table, *args, **kwargs):
        asked.append(table)
        return select_typed(connection, table, *args, **kwargs)

    monkeypatch.setattr(reader, "select_typed", select)
    file = RecordingFile(path)
    for wanted in (Wanted(last=300), Wanted(start="2s"), Wanted(since="4s")):
        assert told(file.load(wanted)) == WAITS
    assert asked.count(f"({FORKED})") == 1
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE events SET arg1 = 77 WHERE arg1 = ?", (WORKER,))
        connection.commit()
    assert file.load(Wanted(last=300)).parents == {(0, 77): PID}


def test_a_recording_that_goes_on_knows_the_children_of_the_one_before(path):
    forget_table(path)
    RecordingWriter(path, "node-0").close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT * FROM process_parents").fetchall() == [
            (WORKER, PID, "node-0")
        ]


def test_a_fork_that_does_not_say_of_whom_stops_no_migration_and_no_recorder(tmp_path):
    path, copy = tmp_path / "r.db", tmp_path / "copy.db"
    built = starved_job()
    built.call((Source.HOST, HostOp.FORK), 0, 0, PID, arg1=77)
    built.write(path)
    forget_table(path)
    with closing(sqlite3.connect(path)) as connection:  # as files of older versions may have it
        connection.execute("PRAGMA writable_schema = 1")
        connection.execute(
            "UPDATE sqlite_master SET sql = replace(sql, 'arg1 INTEGER NOT NULL', 'arg1 INTEGER') WHERE name = 'events'"
        )
        connection.commit()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE events SET arg1 = NULL WHERE arg1 = 77")
        connection.commit()
    shutil.copy(path, copy)
    migrate(path)
    RecordingWriter(copy, "node-0").close()
    for one in (path, copy):
        assert load_recording(one).parents == {(0, WORKER): PID}


def test_rows_that_a_size_cap_takes_leave_the_parents(tmp_path):
    path = tmp_path / "r.db"
    many = np.zeros(40_000, EVENT)
    many["start_ns"] = START_NS + 7200 * SECOND + np.arange(len(many))
    many["pid"], many["source"], many["op"], many["weight"] = PID, Source.CUDA, 3, 1
    with RecordingWriter(path, "node-0", WriterSettings(max_bytes=2 << 20)) as writer:
        writer.put_events(starved_job().events())
        for part in np.array_split(many, 10):
            writer.put_events(part)
            writer.flush()
    recording = load_recording(path, LoadFilter())
    assert not (
        recording.events["op"][recording.events["source"] == Source.HOST] == HostOp.FORK
    ).any()
    assert recording.parents == {(0, WORKER): PID}


def test_the_newest_rows_of_a_trace_know_a_child_that_was_forked_before():
    recording = starved_job().build()
    recent = RecentRecording(recording.sessions[0], max_rows=300)
    recent.put_process_names({WORKER: "pt_data_worker"}, 0)
    for part in np.array_split(recording.events, 20):
        recent.put_events(part)
    kept = recent.freeze().build(300)
    assert not (kept.events["arg1"] == WORKER).any()
    assert told(kept) == WAITS


def test_what_a_node_sends_has_the_parents(path):
    sent = decode_part(encode_part(load_part(path, Wanted(last=300))))
    assert told(join_parts([("a", RecordingBuilder("other").build()), ("b", sent)])) == WAITS


@pytest.mark.parametrize("node", ["", "node-0"])
def test_merged_recordings_of_an_older_version_keep_who_is_whose_child(path, tmp_path, node):
    forget_table(path)
    damaged = "source = ?, op = ?, arg1 = 'x' WHERE rowid = (SELECT max(rowid) FROM events)"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE events SET node = ?", (node,))
        connection.execute(f"UPDATE events SET {damaged}", (Source.HOST, HostOp.FORK))
        connection.commit()
    merged = merge_recordings([path], tmp_path / "m.db", force_node="node-0")
    assert [one.n_damaged for one in merged.files] == [1]
    assert load_recording(tmp_path / "m.db").parents == {(0, WORKER): PID}
    assert told(load_part(tmp_path / "m.db", Wanted(start="2s"))) == WAITS


def test_a_parent_that_was_noted_without_a_fork_counts():
    recording = starved_job(has_fork=False).build()
    assert told(replace(recording, parents={(0, WORKER): PID})) == WAITS


def test_a_wait_for_a_process_of_unknown_parent_is_unknown_and_a_pause_is_nothing():
    explained = explain(starved_job(has_fork=False).build())
    (one,) = (one for one in explained.unknown if "input_starvation" in one.rules)
    assert "pt_data_worker" in one.missing
    assert "record with this version" in one.how
    assert "input_starvation" not in explained.judged
    known = replace(starved_job(has_fork=False).build(), parents={(0, WORKER): 1})
    for recording in (known, starved_job(has_fork=False, waker=0).build()):
        explained = explain(recording)
        assert told(recording) == []
        assert "input_starvation" in explained.judged


@pytest.mark.parametrize("is_noted", [True, False])
def test_a_job_whose_own_parent_is_known_has_no_worker_of_unknown_parent(is_noted):
    """It waits for a server of the machine: its children were read with it, or its forks watched."""
    built = starved_job(has_fork=False, waker=7777)
    if not is_noted:
        built.call((Source.HOST, HostOp.FORK), 0, 0, 1, arg1=PID)
    recording = replace(built.build(), parents={(0, PID): 1, (0, WORKER): PID} if is_noted else {})
    explained = explain(recording)
    assert told(recording) == []
    assert "input_starvation" in explained.judged
    assert not [one for one in explained.unknown if "input_starvation" in one.rules]
