"""`ingero up` as a user without root runs it: plain processes that tell their own calls.

The agents' pushes and Fleet are real.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.support.unprivileged import AS_UNPRIVILEGED, NOBODY

from ingero.cli.commands.replay.offline import judge_trace
from ingero.errors import UnsupportedError
from ingero.job_traces.operations import read_labels
from ingero.job_traces.readers import read_trace
from ingero.sim.local_nats import find_nats_server

PROGRAM = "from ingero.cli.main import main; main()"


@pytest.fixture
def home():
    """Its home and folder for temporary files; short, because a socket's path is at most 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder)
        if os.geteuid() == 0:
            os.chown(path, NOBODY, NOBODY)
        yield path


def up(home, *arguments):
    return subprocess.run(
        [
            *(AS_UNPRIVILEGED if os.geteuid() == 0 else ()),
            sys.executable,
            "-c",
            PROGRAM,
            "up",
            *arguments,
        ],
        env={**os.environ, "HOME": str(home), "TMPDIR": str(home)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.live
def test_slow_rank_is_named_and_it_says_that_nothing_was_probed(home):
    fault = ("--fault", "slow-rank:1:1.5x", "--duration", "40s", "--push-interval", "2s")
    record = home / "run.parquet"
    run = up(home, "--json", "--ranks", "4", *fault, "--record", str(record))
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["culprits"] == [1]
    assert result["victims"] == [0, 2, 3]
    assert result["wrongly_named"] == []
    assert result["detection_s"] > 0
    assert (result["isolation"], result["probes"]) == ("processes", False)
    assert "no probes: the simulator reports its own calls" in result["note"]
    assert result["note"] in run.stderr
    labels = read_labels(record)
    assert labels["faults"] == [{"kind": "slow-rank", "rank": 1, "amount": 1.5}]
    (again,) = judge_trace(read_trace(record))
    assert [(v.rank.rank, v.kind.value) for v in again.verdicts if v.is_alarm] == [(1, "culprit")]
    (culprit,) = again.culprits
    assert culprit.detected_entry_ns > labels["onset_s"] * 1e9 > 0
    assert list(home.iterdir()) == [record]


@pytest.mark.slow
@pytest.mark.live
def test_the_slow_rank_is_named_once_though_the_fleet_that_judges_is_killed(home):
    try:
        find_nats_server()
    except UnsupportedError as error:
        pytest.skip(str(error))
    fault = ("--fault", "slow-rank:1:1.5x", "--duration", "60s", "--push-interval", "2s")
    run = up(home, "--json", "--ranks", "4", "--fleets", "2", "--kill-fleet", "1s", *fault)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["culprits"] == [1]
    assert result["episodes"] == [{"rank": 1, "verdict": "culprit"}]
    assert result["takeover_s"] > 0
    assert result["wrongly_named"] == []


def test_the_only_fleet_is_not_killed(home):
    run = up(home, "--ranks", "4", "--kill-fleet", "1s")
    assert run.returncode == 2
    assert "--fleets" in run.stderr


def test_slow_link_without_root_is_refused_with_the_reason(home):
    run = up(home, "--ranks", "6", "--fault", "slow-link:3")
    assert run.returncode == 3
    assert "network namespaces; without root" in run.stderr
