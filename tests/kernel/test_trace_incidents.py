"""``ingero trace`` tells what is wrong while it traces, and ends with how many incidents there are."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.kernel

INGERO = (sys.executable, "-m", "ingero")
PLAIN = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
OF_OTHERS = {"runnable_wait", "preemption", "noisy_neighbour"}
"""What other tasks of a busy machine do to any program."""


def run(*arguments):
    result = subprocess.run(
        [*INGERO, *map(str, arguments)], capture_output=True, text=True, env=PLAIN, check=False
    )
    assert result.returncode == 0, result.stderr
    return result


def test_an_incident_is_told_once_and_the_last_line_says_what_to_run(tmp_path):
    database = tmp_path / "d.db"
    done = run("trace", "--db", database, "--json", "--",
               *INGERO, "sim", "run", "train", "steps=600", "slow_from=300", "slow_us=20000")  # fmt: skip
    lines = list(map(json.loads, done.stdout.splitlines()))
    last = lines[-1]
    assert last["type"] == "incidents"
    assert last["explain"] == f"ingero explain --db {database}"
    told = [line for line in lines if line["type"] == "incident"]
    (changed,) = [line for line in told if line["rule"] == "step_time_changed"]
    assert changed["severity"] == "HIGH"
    assert changed["process"] == "workload"
    explained = json.loads(run("explain", "--db", database, "--json").stdout)["incidents"]
    (same,) = [one for one in explained if one["rule"] == "step_time_changed"]
    assert changed.keys() - {"type"} == same.keys()
    assert changed["id"] == same["id"]
    assert last["count"] == len(explained)
    assert last["high"] == sum(one["severity"] == "HIGH" for one in explained)


def test_a_healthy_program_is_accused_of_nothing(tmp_path):
    done = run("trace", "--db", tmp_path / "d.db", "--json", "--",
               *INGERO, "sim", "run", "train", "steps=600", "slow_from=1000")  # fmt: skip
    lines = list(map(json.loads, done.stdout.splitlines()))
    told = {line["rule"] for line in lines if line["type"] == "incident"}
    assert told <= OF_OTHERS
    if not told:
        assert lines[-1]["count"] == 0
    assert "step_time_changed" in lines[-1]["judged"]


def test_without_a_terminal_and_a_recording_it_is_said_on_standard_error():
    done = run("trace", "--no-record", "--", *INGERO, "sim", "run", "train",
               "steps=600", "slow_from=300", "slow_us=20000")  # fmt: skip
    said = done.stderr.splitlines()
    assert sum(line.startswith("[HIGH] Steps of workload take") for line in said) == 1
    assert " HIGH" in said[-1]
    assert said[-1].endswith("; nothing was recorded to ask")


def test_the_looking_can_be_switched_off():
    done = run("trace", "--no-record", "--no-incidents", "--json", "-d", "1s")
    assert json.loads(done.stdout.splitlines()[-1])["type"] == "coverage"
    assert '"type":"incident' not in done.stdout
