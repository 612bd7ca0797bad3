"""The recording of a run: known to be possible at the start, whole or not there at the end."""

import errno

import pytest

from ingero.errors import ConfigError
from ingero.job_traces import operations
from ingero.sim.cluster.recording import open_recording
from ingero.sim.cluster.result import Progress, UpSettings
from ingero.units import NS_PER_S


def record_to(path, folder):
    folder.mkdir(exist_ok=True)
    (folder / "pushes.jsonl").touch()
    settings = UpSettings(2, (), 0, NS_PER_S, NS_PER_S, record=path)
    return open_recording(settings, Progress(), folder)


@pytest.mark.parametrize("place", ["/proc", "absent"])
def test_a_place_that_takes_no_file_is_known_before_the_run(tmp_path, place):
    opening = record_to(tmp_path / place / "run.parquet", tmp_path / "up")
    with pytest.raises(ConfigError, match=r"--record .*/run\.parquet: No such file"), opening:
        pytest.fail("the run began")


def test_a_recording_that_fails_half_way_leaves_the_file_of_before(tmp_path, monkeypatch):
    def write_half(path, *_):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(operations, "write_operations", write_half)
    kept = tmp_path / "run.parquet"
    kept.write_bytes(b"of before")
    with pytest.raises(OSError, match="No space"), record_to(kept, tmp_path / "up"):
        pass
    assert kept.read_bytes() == b"of before"
    assert {one.name for one in tmp_path.iterdir()} == {"up", "run.parquet"}


def test_a_run_that_is_interrupted_leaves_no_file(tmp_path):
    with pytest.raises(KeyboardInterrupt), record_to(tmp_path / "run.parquet", tmp_path / "up"):
        raise KeyboardInterrupt
    assert [one.name for one in tmp_path.iterdir()] == ["up"]
