"""Merging keeps every row once: in any order of the files, with repeats, step by step, with any row numbers."""

import itertools
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingero.errors import BadDataError, StoreError
from ingero.model.events import EVENT, Source
from ingero.model.recording import AGGREGATE, COVERAGE, HISTOGRAM, SNAPSHOT, Session
from ingero.recording.export.merge import merge_recordings
from ingero.recording.store.reader import load_recording
from ingero.recording.store.rollover import list_aside
from ingero.recording.store.schema import TABLES
from ingero.recording.store.settings import WriterSettings
from ingero.recording.store.writer import RecordingWriter

T0 = 1_767_225_600 * 10**9
MINUTE_NS = 60 * 10**9
AUTO = ("annotations", "sessions", "system_snapshots")


def put(writer, start, n, *, pid=41, name="train"):
    """One second of a trace: `n` calls from number `start` on, all counted and stored."""
    events = np.zeros(n, EVENT)
    events["start_ns"] = T0 + (start + np.arange(n)) * 10**6
    events["duration_ns"], events["arg0"] = 500 + np.arange(n), start + np.arange(n)
    events["pid"], events["source"], events["op"], events["weight"] = pid, Source.CUDA, 3, 1
    events["stack_hash"] = 7
    exact, seen, bins = np.zeros(1, AGGREGATE), np.zeros(1, COVERAGE), np.zeros(1, HISTOGRAM)
    for rows in (exact, seen, bins):
        rows["bucket_ns"] = int(events["start_ns"][0]) // MINUTE_NS * MINUTE_NS
        rows["source"] = Source.CUDA
    exact["op"], exact["pid"], exact["count"] = 3, pid, n
    exact["sum_duration_ns"] = events["duration_ns"].sum()
    exact["min_duration_ns"], exact["max_duration_ns"] = 500, 499 + n
    seen["seen"] = n
    bins["op"], bins["pid"], bins["count"] = 3, pid, n
    bins["from_ns"], bins["to_ns"] = 512, 640
    shot = np.zeros(1, SNAPSHOT)
    shot["wall_ns"], shot["cpu_pct"] = events["start_ns"][0], 10.0
    writer.put_process_names({pid: name}, int(events["start_ns"][0]))
    writer.put_events(events)
    writer.put_aggregates(exact)
    writer.put_histograms(bins)
    writer.put_coverage(seen)
    writer.put_snapshots(shot)
    writer.put_stacks({7: '[{"s":"f"}]'})
    writer.put_annotations([(int(events["start_ns"][0]), '{"k":"v"}', pid, 1, 0, 0, 0, 0, 0)])
    writer.flush()


def record(path, node, *parts):
    with RecordingWriter(path, node) as writer:
        writer.put_session(Session(node, T0 + sum(start for start, _ in parts)))
        for start, n in parts:
            put(writer, start, n)
    return path


def dump(path):
    """Everything a file holds, apart from numbers that are given as rows come in."""
    told = {}
    with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as connection:
        for table in TABLES:
            columns = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]
            if table in AUTO:
                columns.remove("id")
            rows = connection.execute(f"SELECT {', '.join(columns)} FROM {table}").fetchall()
            told[table] = sorted(rows, key=repr)
    return told


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Recordings of two nodes in one minute, all with row numbers from 1; the last is a later state of the first."""
    folder = tmp_path_factory.mktemp("files")
    made = [
        record(folder / "0.db", "a", (0, 3), (10, 2)),
        record(folder / "1.db", "a", (2000, 4)),
        record(folder / "2.db", "b", (0, 3)),
        record(folder / "3.db", "b", (70_000, 5)),
    ]
    later = folder / "4.db"
    shutil.copy(made[0], later)
    record(later, "a", (30, 6))
    return [*made, later]


N_EVENTS = {0: 5, 1: 4, 2: 3, 3: 5}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=7), st.randoms(use_true_random=False))
def test_the_order_and_repeats_of_the_files_do_not_matter(files, tmp_path_factory, chosen, random):
    folder = tmp_path_factory.mktemp("merged")
    shuffled = sorted(set(chosen))
    random.shuffle(shuffled)
    merge_recordings([files[i] for i in chosen], folder / "a")
    merge_recordings([files[i] for i in shuffled], folder / "b")
    assert dump(folder / "a") == dump(folder / "b")
    n_events = sum(N_EVENTS.get(i, 0) for i in set(chosen) - {0})
    n_events += 11 if 4 in chosen else 5 if 0 in chosen else 0
    merged = load_recording(folder / "a")
    assert len(merged.events) == n_events
    for counted in (
        merged.aggregates["count"],
        merged.aggregates["stored"],
        merged.histograms["count"],
    ):
        assert counted.sum() == n_events
    assert merged.coverage["seen"].sum() == merged.coverage["stored"].sum() == n_events
    assert merged.aggregates["sum_duration_ns"].sum() == merged.events["duration_ns"].sum()


@settings(max_examples=30, deadline=None)
@given(st.permutations([0, 1, 2, 3]), st.integers(1, 3))
def test_merging_step_by_step_gives_what_merging_at_once_does(files, tmp_path_factory, order, cut):
    folder = tmp_path_factory.mktemp("steps")
    merge_recordings([files[i] for i in order], folder / "at-once")
    merge_recordings([files[i] for i in order[:cut]], folder / "first")
    merge_recordings([*(files[i] for i in order[cut:]), folder / "first"], folder / "then")
    assert dump(folder / "then") == dump(folder / "at-once")
    again = merge_recordings([folder / "then", folder / "first", files[order[0]]], folder / "again")
    assert dump(folder / "again") == dump(folder / "at-once")
    assert [one.n_events for one in again.files] == [17, 0, 0]


def test_every_table_is_in_the_merged_file_and_a_session_of_a_file_once(files, tmp_path):
    merge_recordings(files[:4], tmp_path / "m.db")
    told = dump(tmp_path / "m.db")
    assert {table: len(told[table]) for table in ("annotations", "system_snapshots", "sessions")} == {
        "annotations": 5, "system_snapshots": 5, "sessions": 4,
    }  # fmt: skip
    assert len(told["recordings"]) == 4
    assert len(told["stack_traces"]) == 1


def test_files_set_aside_have_together_what_was_put(tmp_path):
    path = tmp_path / "r.db"
    with RecordingWriter(
        path, "n1", WriterSettings(rollover_bytes=600_000, rollover_keep=50)
    ) as writer:
        writer.put_session(Session("n1", T0))
        for start in range(0, 20_000, 500):
            put(writer, start, 500)
        writer.close(T0 + MINUTE_NS)
    files = [*list_aside(path), path]
    assert len(files) > 5
    merged = merge_recordings(files, tmp_path / "m.db")
    assert sum(one.n_events for one in merged.files) == merged.n_events == merged.n_calls == 20_000
    recording = load_recording(
        tmp_path / "m.db",
    )
    assert len(recording.events) == 20_000
    assert recording.aggregates["count"].sum() == recording.histograms["count"].sum() == 20_000
    assert [session.stopped_wall_ns for session in recording.sessions] == [T0 + MINUTE_NS]
    assert len(dump(tmp_path / "m.db")["annotations"]) == 40


def test_two_machines_files_without_a_node_keep_all_rows_under_one_name(tmp_path, data_dir):
    old = data_dir / "agent_dbs/pytorch-dataloader-starvation.db"
    other = tmp_path / "other.db"
    shutil.copy(old, other)
    with closing(sqlite3.connect(other)) as connection, connection:
        connection.execute("UPDATE events SET timestamp = timestamp + 77000000001")
        connection.execute("UPDATE sessions SET started_at = started_at + 77000000001")
    merged = merge_recordings([old, other], tmp_path / "m.db", force_node="x")
    assert [one.n_events for one in merged.files] == [3807, 3807]
    both = load_recording(tmp_path / "m.db")
    assert len(both.events) == 2 * 3807
    assert both.aggregates["count"].sum() == 2 * load_recording(old).aggregates["count"].sum()


def test_what_an_older_merge_holds_is_not_added_again(tmp_path, data_dir):
    cluster, one = (
        data_dir / "agent_dbs" / f"sample-{name}.db" for name in ("cluster", "gpu-node-01")
    )
    for order in itertools.permutations((cluster, one)):
        merged = merge_recordings(order, tmp_path / "m.db", is_replaced=True)
        assert {file.path.name: (file.n_events, file.n_repeated) for file in merged.files} == {
            cluster.name: (600, 0), one.name: (0, 200),
        }  # fmt: skip


def test_a_part_of_what_another_file_holds_is_refused(tmp_path, data_dir):
    cluster = data_dir / "agent_dbs/sample-cluster.db"
    part = tmp_path / "part.db"
    shutil.copy(data_dir / "agent_dbs/sample-gpu-node-01.db", part)
    with closing(sqlite3.connect(part)) as connection, connection:
        connection.execute("UPDATE events SET timestamp = timestamp + 1 WHERE rowid % 2")
    with pytest.raises(BadDataError, match="100 of its 200 events are in another"):
        merge_recordings([part, cluster], tmp_path / "m.db")
    assert not (tmp_path / "m.db").exists()


def test_merges_that_share_one_of_their_files_are_refused(files, tmp_path):
    merge_recordings(files[:2], tmp_path / "x")
    merge_recordings(files[1:3], tmp_path / "y")
    with pytest.raises(BadDataError, match="not to the same extent"):
        merge_recordings([tmp_path / "x", tmp_path / "y"], tmp_path / "m.db")


def test_a_merge_of_an_earlier_state_is_refused_beside_the_later_one(files, tmp_path):
    merge_recordings(files[:2], tmp_path / "x")
    with pytest.raises(BadDataError, match="not to the same extent"):
        merge_recordings([tmp_path / "x", files[4]], tmp_path / "m.db")


def test_copies_that_went_on_apart_are_refused(files, tmp_path):
    for name, start in (("x", 500), ("y", 600)):
        shutil.copy(files[0], tmp_path / name)
        record(tmp_path / name, "a", (start, 2))
    with pytest.raises(BadDataError, match="went on apart"):
        merge_recordings([tmp_path / "x", tmp_path / "y"], tmp_path / "m.db")


def test_rows_that_one_state_has_lost_are_kept_from_the_other(tmp_path):
    path = tmp_path / "r.db"
    with RecordingWriter(path, "n1", WriterSettings(max_bytes=400_000)) as writer:
        put(writer, 0, 500)
        shutil.copy(path, tmp_path / "early.db")
        shutil.copy(f"{path}-wal", tmp_path / "early.db-wal")
        for start in range(500, 6000, 500):
            put(writer, start, 500)
    assert len(load_recording(path).events) < 6000
    early = load_recording(tmp_path / "early.db")
    merge_recordings([path, tmp_path / "early.db"], tmp_path / "m.db")
    merged = load_recording(tmp_path / "m.db")
    assert len(merged.events) == len(early.events) + len(load_recording(path).events)
    assert merged.aggregates["count"].sum() == 6000
    assert (
        merged.aggregates["stored"].sum() == merged.coverage["stored"].sum() == len(merged.events)
    )


def test_a_pid_that_is_two_processes_is_called_by_both_names(tmp_path):
    for name, start, process in (("x", 0, "train"), ("y", 5000, "logrotate")):
        with RecordingWriter(tmp_path / name, "a") as writer:
            put(writer, start, 3, name=process)
    for order in ("xy", "yx"):
        merged = merge_recordings(
            [tmp_path / n for n in order], tmp_path / "m.db", is_replaced=True
        )
        assert any("process numbers are of different processes" in note for note in merged.notes)
        assert load_recording(tmp_path / "m.db").process_names == {(0, 41): "train / logrotate"}
        with closing(sqlite3.connect(tmp_path / "m.db")) as connection:
            rows = connection.execute("SELECT comm, count(*) FROM events GROUP BY 1").fetchall()
        assert sorted(rows) == [("logrotate", 3), ("train", 3)]


def test_a_pid_that_had_two_parents_keeps_one_in_any_order_and_is_no_difference(tmp_path):
    for name, start, parent in (("x", 0, 40), ("y", 5000, 1)):
        with RecordingWriter(tmp_path / name, "a") as writer:
            put(writer, start, 3)
            writer.put_parents({41: parent})
    for order in ("xy", "yx"):
        merged = merge_recordings(
            [tmp_path / n for n in order], tmp_path / "m.db", is_replaced=True
        )
        assert merged.notes == []
        assert load_recording(tmp_path / "m.db").parents == {(0, 41): 40}


def test_a_file_that_is_being_recorded_into_is_merged_and_not_replaced(tmp_path):
    with RecordingWriter(tmp_path / "r.db", "a") as writer:
        put(writer, 0, 5)
        merged = merge_recordings([tmp_path / "r.db"], tmp_path / "m.db")
        assert merged.n_events == 5
        with pytest.raises(StoreError, match="records into it"):
            merge_recordings([tmp_path / "m.db"], tmp_path / "r.db", is_replaced=True)


def test_damaged_rows_are_left_out_and_counted(files, tmp_path):
    shutil.copy(files[1], tmp_path / "r.db")
    with closing(sqlite3.connect(tmp_path / "r.db")) as connection, connection:
        connection.execute("UPDATE events SET pid = 'x' WHERE rowid = 2")
    (one,) = merge_recordings([tmp_path / "r.db"], tmp_path / "m.db").files
    assert (one.n_events, one.n_damaged) == (3, 1)
