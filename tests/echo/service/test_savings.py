"""What an action saved, asked of an Echo that was told of simulated jobs by Fleet's and the remediator's own records."""

import datetime as dt
import json
from dataclasses import replace

import pytest
from tests.detect.acted_jobs import NS, JobPlan, simulate
from tests.echo.service.conftest import ONE, TWO, result
from tests.echo.service.told_jobs import BEGAN_NS, act, tell

PLAN = JobPlan(n_ranks=4, n_steps=500, acted_s=150.0)
TOOL = "fleet.cluster.savings"


def test_echo_tells_what_an_action_saved_within_a_tenth_of_the_truth(open_echo):
    echo = open_echo()
    tell(echo, PLAN)
    acted, unaided = simulate(PLAN), simulate(replace(PLAN, acted_s=None))
    truth_s = unaided.gpu_s - acted.gpu_s
    found = result(echo, TOOL)
    (row,), (saving,) = found["rows"], found["savings"]
    assert (row["action_id"], row["node_id"], row["target"], row["state"]) == (
        "a1", "n2", "host-2", "undone",
    )  # fmt: skip
    assert saving["unknown"] is None
    assert saving["rank"] == PLAN.slow
    assert saving["n_gpus"] == PLAN.n_ranks
    assert saving["saved_gpu_seconds"] == pytest.approx(truth_s, rel=0.1)
    assert saving["saved_amount"] == pytest.approx(truth_s / 100, rel=0.1)  # 36 USD an hour
    assert saving["currency"] == "USD"
    assert saving["standstill_gpu_seconds"] == pytest.approx(
        PLAN.n_ranks * PLAN.standstill_s, rel=0.1
    )
    (charged,) = result(echo, "fleet.cluster.cost_by_culprit", {"time_window": "1d"})["rows"]
    known = saving["lost_gpu_seconds"] + saving["still_lost_gpu_seconds"]
    assert known == pytest.approx(charged["gpu_seconds"])
    until = dt.datetime.fromisoformat(saving["until"]).timestamp()
    assert until == pytest.approx(BEGAN_NS / NS + acted.took_s, abs=0.1)
    assert "would have taken as long" in found["assumption"]
    assert result(echo, TOOL, {"action_id": "a1", "node_id": "n2"}, ONE)["savings"] == [saving]
    for other in ({"action_id": "a2"}, {"node_id": "n3"}, {"time_window": "1m"}):
        nothing = result(echo, TOOL, other)
        assert (nothing["rows"], nothing["savings"]) == ([], [])
    assert result(echo, TOOL, {}, TWO)["savings"] == []


@pytest.mark.parametrize(
    "evidence", ["", "no JSON", "[]", '{"rank": 2}', '{"onset_entry_ns": "x", "rank": 2}']
)
def test_an_action_whose_record_says_too_little_is_shown_without_a_number(open_echo, evidence):
    echo = open_echo()
    act(echo, 10.0, evidence)
    found = result(echo, TOOL)
    assert [row["action_id"] for row in found["rows"]] == ["a1"]
    (saving,) = found["savings"]
    assert (saving["saved_gpu_seconds"], saving["lost_gpu_seconds"], saving["rank"]) == (
        None,
        None,
        None,
    )
    assert "does not say which rank" in saving["unknown"]


def test_an_action_without_operations_says_that_they_are_missing(open_echo):
    echo = open_echo()
    for rank, labels in ((2, {}), (-1, {"dp": "1"})):
        act(
            echo,
            10.0,
            json.dumps({"onset_entry_ns": 5, "rank": rank, "labels": labels}),
            f"a{rank}",
        )
    savings = result(echo, TOOL)["savings"]
    assert {one["rank"] for one in savings} == {2, None}
    assert all("no operations of it were kept" in one["unknown"] for one in savings)
