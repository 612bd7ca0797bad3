"""A recording and a baseline on a disk that is full: nothing ends, counts arrive later, what is lost has a number."""

import contextlib
import subprocess

import numpy as np
import pytest

from ingero.agent.health.baseline import Baseline, BaselineSettings
from ingero.agent.health.persist import save_baseline
from ingero.agent.store.reader import LoadFilter, load_recording
from ingero.agent.store.writer import RecordingWriter
from ingero.errors import StoreError
from ingero.model.events import EVENT, Source
from ingero.model.recording import AGGREGATE

pytestmark = pytest.mark.kernel
T0 = 1_767_225_600 * 10**9
MIB = 1 << 20


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
