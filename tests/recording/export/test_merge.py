"""Merged recordings keep every row, every count and every node."""

import hashlib
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from click.testing import CliRunner

from ingero.cli.main import cli
from ingero.errors import BadDataError, StoreError
from ingero.model.events import EVENT
from ingero.model.gpu_view import UNKNOWN, GpuView
from ingero.model.recording import AGGREGATE, COVERAGE
from ingero.recording.causal.engine import explain
from ingero.recording.export.merge import merge_recordings
from ingero.recording.scenarios.builder import RecordingBuilder
from ingero.recording.scenarios.loop import Loop
from ingero.recording.store.reader import load_recording
from ingero.recording.store.writer import RecordingWriter

NODES = ("sample-gpu-node-01.db", "sample-gpu-node-02.db", "sample-gpu-node-03.db")


@pytest.fixture
def sources(data_dir):
    return [data_dir / "agent_dbs" / name for name in NODES]


def test_merge_of_the_three_nodes_holds_what_the_existing_merge_held(sources, tmp_path, data_dir):
    before = [hashlib.sha256(path.read_bytes()).digest() for path in sources]
    merged = merge_recordings(sources, tmp_path / "c.db")
    assert [one.n_events for one in merged.files] == [200, 200, 200]
    assert before == [hashlib.sha256(path.read_bytes()).digest() for path in sources]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.db"]
    ours = load_recording(tmp_path / "c.db")
    theirs = load_recording(data_dir / "agent_dbs/sample-cluster.db")
    assert sorted(ours.events.tolist()) == sorted(theirs.events.tolist())
    assert ours.nodes == theirs.nodes
    assert [i.node for i in explain(ours).incidents] == ["gpu-node-01"]


def test_names_of_equal_pids_on_two_nodes_do_not_collide(tmp_path):
    for node in ("a", "b"):
        built = RecordingBuilder(node)
        Loop(built, 7, f"train-{node}").steps(3)
        built.write(tmp_path / f"{node}.db")
    merge_recordings([tmp_path / "a.db", tmp_path / "b.db"], tmp_path / "c.db")
    merged = load_recording(tmp_path / "c.db")
    assert merged.process_names == {(0, 7): "train-a", (1, 7): "train-b"}
    assert len(merged.sessions) == 2


def test_a_pid_that_was_shown_other_gpus_in_another_file_shares_with_nobody(tmp_path):
    for name, views in (
        ("a", {7: GpuView(("nvidia0",)), 8: GpuView(("nvidia0",))}),
        ("b", {7: GpuView(("nvidia0",)), 8: GpuView(("nvidia1",))}),
    ):
        with RecordingWriter(tmp_path / f"{name}.db", "n1") as writer:
            writer.put_gpu_views(views)
            event = np.zeros(1, EVENT)
            event["start_ns"], event["source"], event["op"] = 61 * 10**9, 1, 3
            writer.put_events(event)
    merge_recordings([tmp_path / "a.db", tmp_path / "b.db"], tmp_path / "c.db")
    views = load_recording(tmp_path / "c.db").gpu_views
    assert views == {(0, 7): GpuView(("nvidia0",)), (0, 8): UNKNOWN}


def counted(path, node, count):
    aggregate, coverage = np.zeros(1, AGGREGATE), np.zeros(1, COVERAGE)
    aggregate[0] = (
        60 * 10**9,
        0,
        1,
        3,
        7,
        count,
        0,
        10 * count,
        10 - count,
        10 + count,
        0,
        0,
        count - 1,
    )
    coverage["seen"] = count
    event = np.zeros(1, EVENT)
    event["start_ns"], event["source"], event["op"], event["pid"] = 61 * 10**9 + count, 1, 3, 7
    with RecordingWriter(path, node) as writer:
        writer.put_aggregates(aggregate)
        writer.put_coverage(coverage)
        writer.put_events(event)


def test_counts_of_one_node_are_added_and_of_two_kept_apart(tmp_path):
    counted(tmp_path / "1", "a", 3)
    counted(tmp_path / "2", "b", 5)
    merge_recordings([tmp_path / "1", tmp_path / "2"], tmp_path / "c.db")
    merged = load_recording(tmp_path / "c.db")
    assert {int(a["node"]): (int(a["count"]), int(a["stored"])) for a in merged.aggregates} == {
        0: (3, 1),
        1: (5, 1),
    }


def test_counts_of_one_minute_in_two_files_are_added(tmp_path):
    counted(tmp_path / "1", "a", 3)
    counted(tmp_path / "2", "a", 4)
    with closing(sqlite3.connect(tmp_path / "2")) as second, second:
        second.execute("UPDATE events SET id = 'a:2'")
    second.close()
    merge_recordings([tmp_path / "1", tmp_path / "2"], tmp_path / "c.db")
    (aggregate,) = load_recording(tmp_path / "c.db").aggregates
    assert (aggregate["count"], aggregate["stored"], aggregate["sum_duration_ns"]) == (7, 2, 70)
    assert (aggregate["min_duration_ns"], aggregate["max_duration_ns"]) == (6, 14)
    assert load_recording(tmp_path / "c.db").coverage["seen"].sum() == 7


def test_merging_a_file_twice_repeats_nothing(sources, tmp_path):
    once = merge_recordings(sources[:1], tmp_path / "once.db")
    twice = merge_recordings([sources[0], sources[0]], tmp_path / "twice.db")
    assert (once.files[0].n_events, twice.files[1].n_events, twice.files[1].n_repeated) == (
        200,
        0,
        200,
    )
    assert len(load_recording(tmp_path / "twice.db").snapshots) == len(
        load_recording(tmp_path / "once.db").snapshots
    )


def test_rows_without_a_node_need_a_name(tmp_path, data_dir):
    old = data_dir / "agent_dbs/pytorch-dataloader-starvation.db"
    with pytest.raises(BadDataError, match="no node"):
        merge_recordings([old], tmp_path / "c.db")
    assert not list(tmp_path.iterdir())
    merge_recordings([old], tmp_path / "c.db", force_node="gpu-7")
    merged = load_recording(tmp_path / "c.db")
    assert merged.nodes == ("gpu-7",)
    before, after = explain(load_recording(old)), explain(merged)
    assert [(i.rule, i.causes, i.coverage) for i in before.incidents] == [
        (i.rule, i.causes, i.coverage) for i in after.incidents
    ]


def test_existing_output_is_not_touched(sources, tmp_path):
    (tmp_path / "c.db").write_text("mine")
    with pytest.raises(StoreError, match="exists"):
        merge_recordings(sources, tmp_path / "c.db")
    assert (tmp_path / "c.db").read_text() == "mine"


def test_what_a_killed_writer_left_is_not_read_into_the_file_that_takes_its_place(
    sources, tmp_path
):
    """SQLite takes a log beside a database for that database's own."""
    output, writing = tmp_path / "c.db", tmp_path / "writing.db"
    shutil.copy(sources[0], writing)
    with closing(sqlite3.connect(writing)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE more (x)")
        connection.executemany("INSERT INTO more VALUES (?)", [(n,) for n in range(20_000)])
        connection.commit()
        for end in ("", "-wal", "-shm"):
            shutil.copy(f"{writing}{end}", f"{output}{end}")
    merge_recordings(sources[1:], output, is_replaced=True)
    assert [path.name for path in tmp_path.glob("c.db*")] == ["c.db"]
    assert len(load_recording(output).events) == 400


def test_command_says_what_it_added(sources, tmp_path):
    result = CliRunner().invoke(cli, ["merge", *map(str, sources), "-o", str(tmp_path / "c.db")])
    assert result.exit_code == 0, result.output
    assert "600 events" in result.output
