"""What an action saved is counted from steps that were seen."""

import pytest

from ingero.sim.cluster.savings import StepPoint, count_savings, find_step_ns
from ingero.units import NS_PER_S


def points(*pairs):
    return [StepPoint(int(at_s * NS_PER_S), step) for at_s, step in pairs]


def test_a_step_is_the_mean_of_those_within_a_stretch_of_time():
    told = points((0, 0), (1, 10), (2, 20), (4, 30), (6, 40))
    assert find_step_ns(told, 0, 2 * NS_PER_S) == NS_PER_S / 10
    assert find_step_ns(told, 2 * NS_PER_S) == NS_PER_S / 5
    assert find_step_ns(told) == 6 * NS_PER_S / 40


@pytest.mark.parametrize("told", [(), points((1, 10)), points((1, 10), (2, 10))])
def test_fewer_than_two_steps_are_no_step_time(told):
    assert find_step_ns(told) is None


def test_the_steps_after_the_action_are_compared_with_the_same_steps_as_slow_as_before():
    # 0.1 s a step; 0.2 s from second 10 on; the action at 20 s; the restart takes 15 s and repeats 10 steps.
    before = points((0, 0), (10, 100), (12, 110), (20, 150), (21, 155))
    after = points((35, 140), (36, 150), (136, 1150))
    saved = count_savings(before, after, 4, (10 * NS_PER_S, 20 * NS_PER_S))
    assert saved.slow_ns == NS_PER_S / 5
    assert saved.fast_ns == NS_PER_S / 10
    assert saved.restart_ns == 15 * NS_PER_S
    assert saved.n_repeated == 10
    assert (saved.n_steps, saved.passed_ns) == (1000, 116 * NS_PER_S)
    assert saved.saved_ns == 4 * (1000 * 0.2 - 116) * NS_PER_S
    assert saved.gained_ns == 4 * NS_PER_S
    assert saved.as_json()["saved_gpu_seconds"] == 336.0
    assert saved.as_json()["saved_gpu_seconds_per_further_hour"] == 14400.0


def test_an_action_that_cost_more_than_it_saved_is_a_loss():
    before = points((0, 100), (10, 150))
    after = points((40, 150), (41, 160))
    saved = count_savings(before, after, 4, (0, 10 * NS_PER_S))
    assert saved.saved_ns == 4 * (10 * 0.2 - 31) * NS_PER_S


def test_nothing_is_said_where_a_part_was_not_seen():
    before, after = points((0, 0), (10, 100)), points((35, 100), (36, 110))
    span = (0, 10 * NS_PER_S)
    assert count_savings(before, (), 4, span) is None
    assert count_savings((), after, 4, span) is None
    assert count_savings(before, after, 4, (11 * NS_PER_S, 12 * NS_PER_S)) is None
    assert count_savings(before, after[:1], 4, span).gained_ns is None
