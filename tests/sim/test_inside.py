"""Faults inside the example jobs: nothing is done, and next to nothing asked, until one begins."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "jobs" / "inside.py"


@pytest.fixture
def faults(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("inside", SCRIPT)
    inside = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(inside)
    monkeypatch.setenv(inside.FAULT, "slow-loader:0.001")
    monkeypatch.setenv(inside.FILE, str(tmp_path / "fault"))
    now = [100.0]
    monkeypatch.setattr(inside.time, "monotonic", lambda: now[0])
    made = inside.Faults()
    return made, inside.time, now, tmp_path / "fault", inside.LOOK_EVERY_S


def test_a_loader_that_may_become_slow_does_not_look_for_its_fault_at_each_row(faults, monkeypatch):
    made, _, now, _, every_s = faults
    looks = []
    monkeypatch.setattr(Path, "exists", lambda path: bool(looks.append(path)))
    for _ in range(1000):
        made.load()
    now[0] += every_s
    made.load()
    assert len(looks) == 2


def test_the_fault_begins_at_the_next_look_and_is_answered(faults):
    made, time, now, file, every_s = faults
    made.load()
    file.touch()
    made.load()
    assert not file.with_name("fault.seen").exists()
    now[0] += every_s
    before_s = time.thread_time()
    made.load()
    assert file.with_name("fault.seen").exists()
    assert time.thread_time() - before_s >= 0.001
