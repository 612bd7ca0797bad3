"""One writer per recording, of this version's schema: everybody else is refused in words and changes nothing."""

import errno
import fcntl
import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest

from ingero.errors import StoreError
from ingero.model.events import EVENT, Source
from ingero.recording.store.lock import RESERVE_BYTES, WriterLock
from ingero.recording.store.reader import load_recording
from ingero.recording.store.rollover import list_aside
from ingero.recording.store.settings import WriterSettings
from ingero.recording.store.writer import RecordingWriter

T0 = 1_767_225_600 * 10**9
HOLD = """
import sys
from pathlib import Path
from ingero.recording.store.writer import RecordingWriter
writer = RecordingWriter(Path(sys.argv[1]), "n1")
print("open", flush=True)
sys.stdin.read()
"""


def rows(n, first=0):
    events = np.zeros(n, EVENT)
    events["start_ns"] = T0 + first + np.arange(n)
    events["pid"], events["source"], events["op"], events["weight"] = 41, Source.CUDA, 3, 1
    return events


@pytest.fixture
def holder(tmp_path):
    """Another process that writes to a recording."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "r.db")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "open\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_writer_is_told_who_the_first_is_and_what_to_do(tmp_path, holder):
    with pytest.raises(StoreError) as caught:
        RecordingWriter(tmp_path / "r.db", "n1")
    assert caught.value.exit_code == 4
    assert f"process {holder.pid}" in caught.value.message
    assert str(tmp_path / "r.db") in caught.value.message
    assert "--db" in caught.value.hint
    assert "--no-record" in caught.value.hint
    assert len(load_recording(tmp_path / "r.db").events) == 0  # a reader is not in the way


def test_another_name_of_the_same_file_is_the_same_recording(tmp_path, holder):
    (tmp_path / "other").mkdir()
    link = tmp_path / "other/link.db"
    link.symlink_to(tmp_path / "r.db")
    with pytest.raises(StoreError, match=f"process {holder.pid}"):
        RecordingWriter(link, "n1")


def test_a_killed_writer_leaves_no_lock_behind(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "r.db.lock").exists()
    with RecordingWriter(tmp_path / "r.db", "n1") as writer:
        writer.put_events(rows(3))
    assert len(load_recording(tmp_path / "r.db").events) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["r.db"]


def test_the_lock_outlives_setting_the_file_aside(tmp_path):
    path = tmp_path / "r.db"
    with RecordingWriter(path, "n1", WriterSettings(rollover_bytes=300_000)) as writer:
        for first in range(0, 4000, 500):
            writer.put_events(rows(500, first))
            writer.flush()
        assert list_aside(path)
        with pytest.raises(StoreError, match="records into it"):
            RecordingWriter(path, "n1")
    RecordingWriter(path, "n1").close()


def test_without_locks_the_writer_warns_and_writes(tmp_path, monkeypatch):
    def refuse(_fd, _operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)  # as some network file systems do
    with RecordingWriter(tmp_path / "r.db", "n1") as writer:
        writer.put_events(rows(2))
    assert "no locks" in writer.warning
    assert len(load_recording(tmp_path / "r.db").events) == 2


def test_the_reserve_is_on_the_disk_while_the_lock_is_held(tmp_path):
    lock = WriterLock(tmp_path / "r.db")
    file = tmp_path / "r.db.lock"
    assert file.stat().st_blocks * 512 >= RESERVE_BYTES
    lock.give_back()
    assert file.stat().st_blocks * 512 == RESERVE_BYTES // 2
    assert lock.has_room()
    assert file.stat().st_blocks * 512 >= RESERVE_BYTES
    lock.release()
    assert not file.exists()


def foreign(path):
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE t (x)")
        connection.execute("INSERT INTO t VALUES (1)")


def test_a_database_of_something_else_is_refused_and_stays_as_it_is(tmp_path):
    path = tmp_path / "other.db"
    foreign(path)
    before = hashlib.sha256(path.read_bytes()).digest()
    with pytest.raises(StoreError, match="without an events table"):
        RecordingWriter(path, "n1")
    assert hashlib.sha256(path.read_bytes()).digest() == before
    assert [file.name for file in tmp_path.iterdir()] == ["other.db"]


def test_a_text_file_is_refused_and_stays_as_it_is(tmp_path):
    path = tmp_path / "notes"
    path.write_text("these are notes\n" * 20)
    with pytest.raises(StoreError, match="not an SQLite database"):
        RecordingWriter(path, "n1")
    assert path.read_text() == "these are notes\n" * 20


def test_a_file_whose_writer_died_before_the_first_table_is_taken(tmp_path):
    path = tmp_path / "r.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
    assert path.stat().st_size > 0
    with RecordingWriter(path, "n1") as writer:
        writer.put_events(rows(1))
    assert len(load_recording(path).events) == 1
