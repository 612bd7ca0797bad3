"""`make evidence-gpu`: each part alone, with its limit, and not twice."""

import json
import os
import subprocess
import sys

import pytest
from scripts.evidence import __main__ as command
from scripts.evidence.running import ROOT, EvidenceError, Part, has_passed, keep, run_part


def build_part(name, *, holds):
    def run(setting):
        if not holds:
            raise EvidenceError("the device answers nothing")
        return "seen", {"left": setting.left_s() > 0}

    return Part(name, 10, run)


def test_a_part_that_held_is_run_again_on_another_commit_alone(tmp_path):
    part = build_part("one", holds=True)
    outcome = run_part(part, None, is_dry=False, left_s=10)
    assert not has_passed(part, tmp_path, "a")
    keep(outcome, tmp_path, "a")
    assert json.loads((tmp_path / "one.json").read_text())["seen"] == {"left": True}
    assert has_passed(part, tmp_path, "a")
    assert not has_passed(part, tmp_path, "b")
    failed = run_part(build_part("one", holds=False), None, is_dry=False, left_s=10)
    keep(failed, tmp_path, "a")
    assert not has_passed(part, tmp_path, "a")


def test_a_failed_part_stops_no_other_and_is_the_commands_status(tmp_path, monkeypatch, capsys):
    parts = (build_part("first", holds=False), build_part("second", holds=True))
    monkeypatch.setattr(command, "PARTS", parts)
    monkeypatch.setattr(command, "has_driver", lambda: True)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert command.main(["--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "FAIL first" in said
    assert "ok   second" in said
    assert sorted(file.name for file in tmp_path.iterdir()) == ["first.json", "second.json"]
    monkeypatch.setattr(command, "PARTS", (build_part("first", holds=True), parts[1]))
    assert command.main(["--out", str(tmp_path)]) == 0
    assert "second               held before on this commit" in capsys.readouterr().out


def test_a_command_that_lasts_too_long_is_a_failure(tmp_path):
    part = Part("slow", 0.2, lambda setting: (setting.call(["sleep", "60"]).stdout, {}))
    outcome = run_part(part, None, is_dry=False, left_s=10)
    assert (outcome.passed, outcome.line) == (False, "not over in time: sleep 60")


def test_a_dry_run_starts_parts_and_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "-v")
    if command.has_driver():
        pytest.skip("a device is here")
    run = subprocess.run(
        [sys.executable, "-m", "scripts.evidence", "--dry-run", "--out", str(tmp_path), "tier", "nccl-plugin"],
        capture_output=True, text=True, cwd=ROOT, timeout=100, check=False,
    )  # fmt: skip
    if os.geteuid():
        assert run.returncode == 3
    else:
        assert run.returncode == 0, run.stdout + run.stderr
        assert "2 of 2 parts started" in run.stdout
    assert not list(tmp_path.iterdir())
