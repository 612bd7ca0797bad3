"""A recording and a baseline on a disk that is full: nothing ends, counts arrive later, what is lost has a number."""

import contextlib
import hashlib
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ingero.agent.health.persist import save_baseline
from ingero.agent.health.signals.baseline import Baseline, BaselineSettings
from ingero.errors import StoreError
from ingero.model.events import EVENT, Source
from ingero.model.recording import AGGREGATE
from ingero.recording.store.event_loader import LoadFilter
from ingero.recording.store.files import open_recording
from ingero.recording.store.reader import load_recording
from ingero.recording.store.writer import RecordingWriter

pytestmark = pytest.mark.kernel
T0 = 1_767_225_600 * 10**9
MIB = 1 << 20
INGERO = (sys.executable, "-m", "ingero")
PLAIN = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}


def run(*arguments):
    command = [*INGERO, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=PLAIN, check=False)


@contextlib.contextmanager
def small_disk(folder, size):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def events(n, second):
    rows = np.zeros(n, EVENT)
    rows["start_ns"] = T0 + second * 10**9 + np.arange(n)
    rows["pid"] = rows["tid"] = 41
    rows["source"], rows["op"], rows["weight"] = Source.CUDA, 3, 1
    return rows


def counts(n):
    rows = np.zeros(1, AGGREGATE)
    rows["bucket_ns"], rows["source"], rows["op"], rows["pid"] = T0, Source.CUDA, 3, 41
    rows["count"] = n
    return rows


def test_a_full_disk_loses_rows_by_number_and_no_count(tmp_path):
    with small_disk(tmp_path, 6 * MIB) as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(b"x" * 3 * MIB)
        writer = RecordingWriter(disk / "r.db", "n1")
        n_put = 0
        for second in range(40):
            writer.put_events(events(2000, second))
            writer.put_aggregates(counts(2000))
            writer.flush()
            n_put += 2000
        assert writer.counters.events_lost > 0
        assert "full" in writer.counters.last_error
        ballast.unlink()
        writer.put_events(events(100, 50))
        writer.put_aggregates(counts(100))
        writer.close(T0 + 60 * 10**9)
        n_put += 100
        recording = load_recording(disk / "r.db", LoadFilter())
        stored, lost = writer.counters.events_stored, writer.counters.events_lost
        assert len(recording.events) == stored
        assert stored + lost == n_put
        assert recording.events["start_ns"].max() == T0 + 50 * 10**9 + 99  # it went on
        assert recording.aggregates["count"].sum() == n_put
        assert recording.coverage["stored"].sum() == stored
        assert recording.coverage["lost"].sum() == lost


def test_a_trace_on_a_full_disk_says_what_is_missing_and_its_recording_is_read(tmp_path):
    """The program's own end is seen, the status is 4, and what is not in the file is in its counts."""
    with small_disk(tmp_path, 3 * MIB) as disk:
        path = disk / "r.db"
        workload = [*INGERO, "sim", "run", "train", "steps=800"]
        traced = run("trace", "--json", "--record-all", "--sampling-rate", 1, "--db", path, "--",
                     "/bin/sh", "-c", '"$@"; echo "ended with $?"', "sh", *workload)  # fmt: skip
        assert traced.returncode == 4, traced.stderr
        assert "Traceback" not in traced.stderr
        assert "ended with 0" in traced.stderr
        (said,) = [line for line in traced.stderr.splitlines() if line.startswith("error:")]
        assert "the disk is full" in said
        assert "cudaLaunchKernel" in said
        told = json.loads(traced.stdout.splitlines()[-2])["recording"]
        n_lost = sum(loss["rows"] for loss in told["not_stored"])
        assert f"{n_lost} rows are not in it" in said
        with open_recording(path) as connection:
            (n_rows,) = connection.execute("SELECT count(*) FROM events").fetchone()
            (n_unwritten,) = connection.execute("SELECT sum(count) FROM unwritten").fetchone()
            seen, stored, left_out, lost = connection.execute(
                "SELECT sum(seen), sum(stored), sum(sampled_out), sum(lost) FROM coverage"
            ).fetchone()
        assert n_rows == stored == told["stored"] > 0
        assert n_unwritten == n_lost == lost > 0
        assert seen >= stored + left_out + lost  # of other programs' calls too
        explained = run("explain", "--db", path)
        assert explained.returncode == 0, explained.stderr
        assert f"incomplete: {n_lost} rows" in explained.stdout
        asked = run("query", "--db", path, "SELECT count(*) AS n FROM events", "--json")
        assert json.loads(asked.stdout) == [{"n": n_rows}]
        assert f"incomplete: {n_lost} rows" in asked.stderr


def test_recording_goes_on_when_there_is_room_again_and_says_what_it_missed(tmp_path):
    with small_disk(tmp_path, 4 * MIB) as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(b"x" * 2 * MIB)
        with RecordingWriter(disk / "r.db", "n1") as writer:
            for second in range(12):
                writer.put_events(events(2000, second))
                writer.flush()
            n_lost = writer.counters.events_lost
            assert n_lost > 0
            ballast.unlink()
            writer.put_events(events(100, 50))
            writer.flush()
            assert writer.counters.events_lost == n_lost
        recording = load_recording(disk / "r.db")
        assert recording.events["start_ns"].max() == T0 + 50 * 10**9 + 99
        assert recording.coverage["lost"].sum() == n_lost
        assert [(loss.cause, loss.n_rows) for loss in recording.unwritten] == [
            ("the disk is full", n_lost)
        ]


def test_a_log_that_a_full_disk_left_behind_is_read_from_a_read_only_medium(tmp_path):
    with small_disk(tmp_path, 2 * MIB) as disk:
        writer = RecordingWriter(disk / "r.db", "n1")
        for second in range(12):
            writer.put_events(events(2000, second))
            writer.flush()
        (disk / "ballast").touch()
        with contextlib.suppress(OSError), (disk / "ballast").open("wb") as ballast:
            while True:
                ballast.write(b"x" * 4096)
                ballast.flush()
        writer.close(T0)
        n_rows = writer.counters.events_stored
        assert n_rows > 0
        assert (disk / "r.db-wal").stat().st_size > 0  # there was no room to fold it in
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        before = {file.name: hashlib.sha256(file.read_bytes()).digest() for file in disk.iterdir()}
        assert len(load_recording(disk / "r.db").events) == n_rows
        after = {file.name: hashlib.sha256(file.read_bytes()).digest() for file in disk.iterdir()}
        assert after == before


@pytest.mark.parametrize("has_index", [True, False])
def test_what_a_killed_writer_left_is_read_from_a_read_only_medium(tmp_path, has_index):
    kill = (
        "import os, sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path; import test_full_disk as t;"
        "w = t.RecordingWriter(Path(sys.argv[1]), 'n1'); w.put_events(t.events(500, 1)); w.flush(); "
        "os.kill(os.getpid(), 9)"
    )
    with small_disk(tmp_path, 4 * MIB) as disk:
        here = str(Path(__file__).parent)
        subprocess.run([sys.executable, "-c", kill, disk / "r.db", here], check=False)
        assert (disk / "r.db-wal").stat().st_size > 0
        if not has_index:
            (disk / "r.db-shm").unlink()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert len(load_recording(disk / "r.db").events) == 500
        result = run("query", "--db", disk / "r.db", "SELECT count(*) FROM events", "--json")
        assert result.returncode == 0, result.stderr
        refused = run("trace", "--db", disk / "r.db", "--", "/bin/touch", tmp_path / "started")
        assert refused.returncode == 4
        assert refused.stderr.startswith("error:")


def test_two_traces_of_one_recording_the_second_is_refused_before_its_program_runs(tmp_path):
    path = tmp_path / "r.db"
    marker = tmp_path / "started"
    command = [*INGERO, "trace", "--json", "--db", path, "--", "/bin/sh", "-c", "echo on >&2; cat"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=PLAIN, text=True, **pipes) as first:
        while (line := first.stderr.readline()) != "on\n":
            assert line, "the first trace ended"
        second = run("trace", "--db", path, "--", "/bin/touch", marker)
        first.stdin.close()
        first.stdout.read()
        assert first.wait() == 0
    assert second.returncode == 4
    assert f"{path}: process {first.pid} records into it" in second.stderr
    assert "--no-record" in second.stderr
    assert not marker.exists()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM sessions").fetchone() == (1,)


def test_a_baseline_that_cannot_be_written_leaves_the_old_one(tmp_path):
    with small_disk(tmp_path, 64 << 10) as disk:
        path, settings = disk / "baseline.json", BaselineSettings()
        save_baseline(path, Baseline(settings).save(), settings, wall_ns=T0)
        before = path.read_bytes()
        with pytest.raises(OSError, match="No space left"):
            (disk / "ballast").write_bytes(b"x" * (1 << 20))
        with pytest.raises(StoreError):
            save_baseline(path, Baseline(settings).save(), settings, wall_ns=T0 + 1)
        assert path.read_bytes() == before
        assert {file.name for file in disk.iterdir()} == {"baseline.json", "ballast"}
