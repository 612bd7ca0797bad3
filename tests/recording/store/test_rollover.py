"""A recording set aside when it is large: nothing is lost on the way, names and owner go along, and the oldest go."""

import stat

import numpy as np
import pytest

from ingero.model.events import EVENT, Source
from ingero.model.gpu_view import GpuView
from ingero.model.recording import Session
from ingero.recording.store.event_loader import LoadFilter
from ingero.recording.store.reader import load_recording
from ingero.recording.store.rollover import list_aside, set_aside
from ingero.recording.store.settings import WriterSettings
from ingero.recording.store.writer import RecordingWriter

T0 = 1_767_225_600 * 10**9


def rows(first, n):
    events = np.zeros(n, EVENT)
    events["start_ns"] = T0 + (first + np.arange(n)) * 10**6
    events["arg0"] = first + np.arange(n)
    events["pid"], events["source"], events["op"], events["weight"] = 41, Source.CUDA, 3, 1
    return events


def test_every_row_is_in_one_of_the_files_and_each_has_the_session_and_the_names(tmp_path):
    path = tmp_path / "r.db"
    with RecordingWriter(path, "n1", WriterSettings(rollover_bytes=600_000)) as writer:
        writer.put_session(Session(node="n1", started_wall_ns=T0, kernel="6.18"))
        writer.put_process_names({41: "train"}, T0)
        writer.put_gpu_views({41: GpuView(("nvidia0",))})
        for first in range(0, 12000, 500):
            writer.put_events(rows(first, 500))
            writer.flush()
    aside = list_aside(path)
    assert len(aside) >= 2
    recordings = [load_recording(file, LoadFilter(has_extras=True)) for file in (*aside, path)]
    told = np.concatenate([recording.events["arg0"] for recording in recordings])
    assert sorted(told.tolist()) == list(range(12000))
    for recording in recordings:
        assert [session.kernel for session in recording.sessions] == ["6.18"]
        assert recording.process_name(0, 41) == "train"
        assert recording.gpu_views == {(0, 41): GpuView(("nvidia0",))}
    for file in aside:
        assert not file.with_name(f"{file.name}-wal").exists()
        assert 400_000 < file.stat().st_size < 600_000
    assert not writer.counters.last_error


def test_only_the_newest_are_kept_and_other_files_are_left_alone(tmp_path):
    path = tmp_path / "r.db"
    other = tmp_path / "r.notes.db"
    other.write_bytes(b"mine")
    path.write_bytes(b"")
    made = [set_aside(path, keep=2) for _ in range(4)]
    assert len(set(made)) == 4
    assert len(list_aside(path)) == 2
    assert set(list_aside(path)) < set(made)
    assert other.exists()


def test_a_new_recording_and_its_side_files_are_its_owner_s_alone(tmp_path):
    path = tmp_path / "r.db"
    with RecordingWriter(path, "n1", WriterSettings(rollover_bytes=100_000)) as writer:
        writer.put_events(rows(0, 2000))
        writer.flush()
        writer.put_events(rows(2000, 10))
        writer.flush()
        files = sorted(tmp_path.iterdir())
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
        assert any(file.name.endswith("-wal") for file in files)
        assert len(list_aside(path)) >= 1


def test_a_size_cap_takes_the_oldest_of_every_table_and_counts_the_rows(tmp_path):
    path = tmp_path / "r.db"
    with RecordingWriter(path, "n1", WriterSettings(max_bytes=400_000)) as writer:
        for first in range(0, 6000, 500):
            writer.put_events(rows(first, 500))
            writer.flush()
    kept = load_recording(path, LoadFilter(has_extras=True)).events["arg0"]
    assert writer.counters.events_pruned == 6000 - len(kept) > 0
    assert kept.max() == 5999
    assert kept.min() == 6000 - len(kept)


@pytest.mark.parametrize("stem", ["run[1]", "run*", "run?", "[!x]"])
def test_a_name_with_signs_of_patterns_stands_for_itself(tmp_path, stem):
    path = tmp_path / f"{stem}.db"
    path.write_bytes(b"")
    of_another = set_aside_of(tmp_path / "run1.db")
    made = [set_aside(path, keep=2) for _ in range(3)]
    assert len(list_aside(path)) == 2
    assert set(list_aside(path)) < set(made)
    assert of_another.exists()


def set_aside_of(path):
    path.write_bytes(b"")
    return set_aside(path, keep=1)
