"""A file that is no recording is refused in words, and no file is changed by reading it."""

import hashlib
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ingero.cli.main import cli, run_program
from ingero.errors import BadDataError, StoreError
from ingero.model.events import Source
from ingero.recording.scenarios.builder import RecordingBuilder
from ingero.recording.store.event_loader import LoadFilter
from ingero.recording.store.files import open_recording
from ingero.recording.store.reader import load_recording
from ingero.recording.store.writer import RecordingWriter

RECORDINGS = (
    "pytorch-dataloader-starvation.db",
    "sample-cluster.db",
    "sample-gpu-node-01.db",
    "sample-gpu-node-02.db",
    "sample-gpu-node-03.db",
)


def refusal(path):
    with pytest.raises(StoreError) as caught:
        load_recording(path)
    assert caught.value.exit_code == 4
    assert str(path) in caught.value.message
    return caught.value.message


def test_missing_file_is_named_and_not_created(tmp_path):
    path = tmp_path / "none.db"
    assert "no such file" in refusal(path)
    assert not list(tmp_path.iterdir())


def test_empty_file_is_called_empty(tmp_path):
    path = tmp_path / "empty.db"
    path.touch()
    assert "0 bytes" in refusal(path)
    assert path.stat().st_size == 0


def test_text_is_not_taken_for_a_database(tmp_path):
    path = tmp_path / "notes.db"
    path.write_text("these are notes\n" * 20)
    assert "not an SQLite database" in refusal(path)


def test_directory_is_refused(tmp_path):
    assert "directory" in refusal(tmp_path).lower()


def test_a_pipe_or_a_device_is_called_so_and_not_waited_for(tmp_path, data_dir):
    pipe = tmp_path / "run.db"
    os.mkfifo(pipe)
    kept = os.open(pipe, os.O_RDWR)  # else a reader waits for a writer
    try:
        os.write(kept, (data_dir / "agent_dbs/sample-gpu-node-01.db").read_bytes()[:4096])
        assert "a pipe or a device" in refusal(pipe)
    finally:
        os.close(kept)
    assert "a pipe or a device" in refusal(Path("/dev/zero"))
    assert "a pipe or a device" in refusal(pipe)  # nobody writes to it


@pytest.mark.parametrize("keep", [40, 99, 4096, 100_000])
def test_truncated_recording_is_called_cut_short(tmp_path, data_dir, keep):
    path = tmp_path / "cut.db"
    path.write_bytes((data_dir / "agent_dbs/sample-gpu-node-01.db").read_bytes()[:keep])
    assert "cut short" in refusal(path)


def test_a_name_that_is_not_utf8_is_one(tmp_path, data_dir):
    recording = data_dir / "agent_dbs/sample-gpu-node-01.db"
    named = tmp_path / os.fsdecode(b"run %41 ?#\xff.db")
    named.write_bytes(recording.read_bytes())
    assert len(load_recording(named).events) == 200
    assert run_program(cli, ["merge", str(named), "-o", str(tmp_path / "merged.db")]) == 0


def test_damaged_page_is_an_error_with_the_file_name(tmp_path, data_dir):
    content = bytearray((data_dir / "agent_dbs/sample-gpu-node-01.db").read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    path = tmp_path / "damaged.db"
    path.write_bytes(content)
    refusal(path)


def test_newer_schema_asks_for_an_upgrade(tmp_path):
    path = tmp_path / "newer.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE events (timestamp, pid, tid, source, op, duration)")
        connection.execute("PRAGMA user_version = 11")
    connection.close()
    assert "newer" in refusal(path)


def test_foreign_database_is_refused(tmp_path):
    path = tmp_path / "foreign.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE cookies (name)")
    connection.close()
    assert "without an events table" in refusal(path)


def test_text_in_a_number_column_is_bad_data(tmp_path):
    path = tmp_path / "text.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE events (timestamp, pid, tid, source, op, duration)")
        connection.execute("INSERT INTO events VALUES ('soon', 1, 1, 1, 1, 1)")
    connection.close()
    with pytest.raises(BadDataError, match="integers"):
        load_recording(path)


@pytest.mark.parametrize("name", RECORDINGS)
def test_reading_changes_no_byte_and_leaves_no_file(tmp_path, data_dir, name):
    path = tmp_path / name
    content = (data_dir / "agent_dbs" / name).read_bytes()
    path.write_bytes(content)
    path.chmod(0o444)
    assert len(load_recording(path).events) > 0
    assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(content).digest()
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", RECORDINGS)
def test_no_side_file_exists_while_a_recording_is_read(tmp_path, data_dir, name):
    path = tmp_path / name
    path.write_bytes((data_dir / "agent_dbs" / name).read_bytes())
    with open_recording(path) as connection:
        assert connection.execute("SELECT count(*) FROM events").fetchone()[0] >= 200
        assert [p.name for p in tmp_path.iterdir()] == [name]


def test_open_connection_cannot_write(data_dir):
    with (
        pytest.raises(StoreError, match="readonly"),
        open_recording(data_dir / "agent_dbs/sample-gpu-node-01.db") as connection,
    ):
        connection.execute("DELETE FROM events")


def test_every_row_of_each_generation_is_loaded(data_dir):
    n_rows = {n: len(load_recording(data_dir / "agent_dbs" / n).events) for n in RECORDINGS}
    assert n_rows == dict(zip(RECORDINGS, (3807, 600, 200, 200, 200), strict=True))


def test_completion_times_become_starts(data_dir):
    recording = load_recording(data_dir / "agent_dbs/sample-gpu-node-01.db")
    events = recording.events
    reads = events[(events["source"] == Source.IO) & (events["pid"] == 1887)]
    waits = events[events["source"] == Source.HOST]
    # Each read lies in one off-CPU span of its issuer: only true when both are read as completions.
    ends = waits["start_ns"] + waits["duration_ns"]
    inside = [
        bool(
            (
                (waits["start_ns"] <= r["start_ns"] + 20_000)
                & (ends >= r["start_ns"] + r["duration_ns"] - 20_000)
            ).any()
        )
        for r in reads
    ]
    assert sum(inside) == 98
    assert (events["start_ns"][1:] >= events["start_ns"][:-1]).all()


def test_nodes_of_a_merged_file_are_told_apart(data_dir):
    recording = load_recording(data_dir / "agent_dbs/sample-cluster.db")
    assert recording.nodes == ("gpu-node-01", "gpu-node-02", "gpu-node-03")
    pids = {
        recording.nodes[i]: set(recording.events["pid"][recording.events["node"] == i].tolist())
        for i in range(3)
    }
    assert [1887 in pids[node] for node in recording.nodes] == [True, False, False]


def test_filter_keeps_the_newest_rows_and_says_so(tmp_path):
    built = RecordingBuilder()
    for i in range(100):
        built.call((Source.CUDA, 3), i * 1000, 10, pid=7 + i % 2)
    path = tmp_path / "r.db"
    built.write(path)
    newest = load_recording(path, LoadFilter(max_rows=10))
    assert newest.is_truncated
    assert newest.n_events_stored == 100
    everything = load_recording(path)
    assert newest.events.tolist() == everything.events[-10:].tolist()
    only = load_recording(
        path, LoadFilter(pids=(8,), from_ns=int(everything.events["start_ns"][50]))
    )
    assert set(only.events["pid"].tolist()) == {8}
    assert len(only.events) == 25


def test_log_left_behind_is_read_and_nothing_is_made_beside_it(tmp_path):
    built = RecordingBuilder()
    for i in range(50):
        built.call((Source.CUDA, 3), i * 1000, 10, pid=7)
    (tmp_path / "copy").mkdir()
    with RecordingWriter(tmp_path / "r.db", "n") as writer:
        writer.put_events(built.events())
        writer.flush()
        assert len(load_recording(tmp_path / "r.db").events) == 50  # beside the living writer
        for name in ("r.db", "r.db-wal"):
            (tmp_path / "copy" / name).write_bytes((tmp_path / name).read_bytes())
    copies = sorted((tmp_path / "copy").iterdir())
    before = [path.read_bytes() for path in copies]
    assert len(load_recording(tmp_path / "copy/r.db").events) == 50
    assert sorted((tmp_path / "copy").iterdir()) == copies
    assert [path.read_bytes() for path in copies] == before
