"""A twin's figures are of the same steps, and say how far the first run's estimates were off."""

import pytest

from ingero.sim.cluster.act_result import ActProgress, ActSettings
from ingero.sim.cluster.result import UpSettings
from ingero.sim.cluster.savings import StepPoint
from ingero.sim.cluster.twin import find_off_by, measure_twin
from ingero.units import NS_PER_S

SETTINGS = ActSettings(UpSettings(4, (), 0, 0, 0), gpu_rate=36.0, currency="EUR")


def run(step_s, first, last, since_s):
    return tuple(
        StepPoint(int((since_s + (n - first) * step_s) * NS_PER_S), n)
        for n in range(first, last + 1, 10)
    )


@pytest.fixture
def first():
    """0.1 s a step; 0.2 s from second 20; the action at 40 s; 15 s of restart, ten steps twice; then 0.11 s to step 1300."""
    before = run(0.1, 0, 200, 0) + run(0.2, 210, 300, 22)
    after = run(0.11, 290, 1300, 55)
    moments = {"fault": 20 * NS_PER_S, "drained": 40 * NS_PER_S}
    return ActProgress(runs=(before, after), moments=moments)


def test_without_the_action_the_same_steps_took_what_the_twin_took_for_one(first):
    twin = ActProgress(
        runs=(run(0.1, 0, 100, 0) + run(0.21, 110, 1300, 12.1),), moments={"fault": 12 * NS_PER_S}
    )
    found = measure_twin("without-action", SETTINGS, first, twin)
    took_s = 55 + 101 * 1.1 - 40
    assert found["step_ms"] == 210.0
    assert found["saved_gpu_seconds"] == pytest.approx(4 * (1000 * 0.21 - took_s), abs=0.06)
    assert found["estimated_gpu_seconds"] == pytest.approx(4 * (1000 * 0.2 - took_s), abs=0.06)
    assert found["off_by_percent"] == pytest.approx(100 * -40 / (4 * (210 - took_s)), abs=0.1)


def test_without_the_fault_what_was_lost_is_the_time_until_the_job_was_where_it_had_been(first):
    twin = ActProgress(runs=(run(0.104, 0, 310, 3) + run(0.12, 320, 1300, 36.44),))
    found = measure_twin("without-fault", SETTINGS, first, twin)
    took_s = 55 + 2 * 1.1 - 20  # step 310 is the first one that was not done before
    assert found["before_fault_ms"] == 100.0
    assert found["step_ms"] == 104.0  # of the steps 200 to 310
    assert found["lost_gpu_seconds"] == pytest.approx(4 * (took_s - 110 * 0.104), abs=0.06)
    assert found["later_gpu_seconds"] == pytest.approx(4 * 990 * (0.11 - 0.12), abs=0.9)
    assert found["estimated_gpu_seconds"] == pytest.approx(4 * (took_s - 110 * 0.1), abs=0.06)
    off = found["estimated_gpu_seconds"] - found["lost_gpu_seconds"]
    assert found["off_by_percent"] == pytest.approx(100 * off / found["lost_gpu_seconds"], abs=0.1)


def test_a_fault_that_nothing_was_done_about_costs_until_the_end(first):
    alone = ActProgress(runs=first.runs[:1], moments={"fault": 20 * NS_PER_S})
    found = measure_twin(
        "without-fault", SETTINGS, alone, ActProgress(runs=(run(0.1, 0, 1300, 0),))
    )
    assert found["lost_gpu_seconds"] == pytest.approx(4 * 100 * 0.1, abs=0.5)
    assert found["later_gpu_seconds"] is None


def test_a_job_that_never_comes_back_to_where_it_was_tells_no_loss(first):
    short = ActProgress(runs=(first.runs[0], first.runs[1][:1]), moments=first.moments)
    found = measure_twin(
        "without-fault", SETTINGS, short, ActProgress(runs=(run(0.1, 0, 1300, 0),))
    )
    assert (found["lost_gpu_seconds"], found["off_by_percent"]) == (None, None)
    assert found["before_fault_ms"] == 100.0


def test_what_was_not_seen_is_null(first):
    nothing = ActProgress(runs=((),))
    for kind, name in (
        ("without-action", "saved_gpu_seconds"),
        ("without-fault", "lost_gpu_seconds"),
    ):
        found = measure_twin(kind, SETTINGS, first, nothing)
        assert (found[name], found["off_by_percent"]) == (None, None)
        found = measure_twin(kind, SETTINGS, nothing, first)
        assert (found[name], found["off_by_percent"]) == (None, None)
    assert find_off_by(5.0, 0.0) is None
    assert find_off_by(-90.0, -100.0) == 10.0


def test_gpu_time_has_a_price_where_one_was_given():
    assert SETTINGS.price(50.0) == 0.5
    assert SETTINGS.price(None) is None
    assert ActSettings(UpSettings(4, (), 0, 0, 0)).price(50.0) is None
