"""Real PyTorch jobs with real faults, recorded as their agents pushed them: the slow rank is named, and nobody else ever."""

import json
from pathlib import Path

import pytest
from benchmarks.jobs import __main__ as program
from benchmarks.jobs.methods import METHODS
from benchmarks.jobs.score import judge_recording, score_one
from tests.support.looks import cut_trace, look_often

from ingero.job_traces.operations import read_labels
from ingero.job_traces.readers import read_trace

RECORDED = Path(__file__).parents[1] / "data" / "jobs"
SETTINGS = json.loads((Path(program.__file__).parent / "settings.json").read_text())
OURS = METHODS[0][0]
NOT_SLOW = {"pause", "kill"}
"""Faults that stop a job: only live progress shows them."""


class Recorded:
    """A recording with what its labels say of it."""

    def __init__(self, path):
        faults = read_labels(path)["faults"]
        self.path, self.kind = path, faults[0]["kind"] if faults else "none"
        self.rank = faults[0]["rank"] if faults and self.kind not in NOT_SLOW else None

    @property
    def said(self):
        return judge_recording(self.path, SETTINGS, METHODS[:1])["said"][OURS]


@pytest.fixture(scope="module")
def recorded():
    return {path.stem: Recorded(path) for path in sorted(RECORDED.glob("*.parquet"))}


def test_every_slow_rank_is_named_after_its_onset_and_nobody_else_in_any_run(recorded):
    scores = {name: score_one(one, one.said) for name, one in recorded.items()}
    assert {name: score["innocents"] for name, score in scores.items() if score["innocents"]} == {}
    missed = {
        name for name, one in recorded.items() if one.rank is not None and not scores[name]["right"]
    }
    assert missed == set()


def test_nobody_else_is_named_at_any_push(recorded):
    """What is said for a while only is not in the last answer, and users have read it."""
    named = {name: look_often(cut_trace(read_trace(one.path))) for name, one in recorded.items()}
    assert {name: named[name].keys() - {one.rank} for name, one in recorded.items()} == {
        name: set() for name in recorded
    }
    assert sum(map(len, named.values())) >= 9


def test_the_set_holds_five_jobs_and_a_third_of_it_is_healthy(recorded):
    jobs = {read_labels(one.path)["job"] for one in recorded.values()}
    assert len(jobs) == 5
    n_healthy = sum(one.kind == "none" for one in recorded.values())
    assert 3 * n_healthy >= len(recorded) - 3
    assert {"cpu-quota", "cpu-hog", "stop-pulses", "slow-rank"} <= {
        one.kind for one in recorded.values()
    }
