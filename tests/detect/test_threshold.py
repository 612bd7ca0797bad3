"""The peer threshold: oracle, guards, and each promise as a property."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingero.detect.threshold import (
    Scores,
    ThresholdSettings,
    ThresholdState,
    grouped_median,
    round_down,
    step_threshold,
)

SETTINGS = ThresholdSettings()
SECOND = 1_000_000_000
scores = st.floats(0.0, 1.0)


def in_one_cohort(values, cohort=""):
    return Scores(np.array(values, float), np.zeros(len(values), np.int64), (cohort,))


def run(values, state=None, now_ns=0, settings=SETTINGS):
    return step_threshold(state or ThresholdState(), in_one_cohort(values), now_ns, settings)


@given(st.lists(st.tuples(scores, st.integers(0, 4)), min_size=1, max_size=40))
def test_grouped_median_agrees_with_the_obvious_loop(rows):
    values, groups = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
    medians = grouped_median(values, groups, 5)
    for group in range(5):
        mine = [value for value, of in rows if of == group]
        if mine:
            assert medians[group] == pytest.approx(statistics.median(mine))
        else:
            assert math.isnan(medians[group])


@given(st.lists(st.tuples(scores, st.sampled_from(["", "a", "b"])), min_size=5, max_size=60))
def test_first_threshold_agrees_with_the_formula_for_cluster_and_cohorts(rows):
    names = ("", "a", "b")
    state = step_threshold(
        ThresholdState(),
        Scores(np.array([r[0] for r in rows]), np.array([names.index(r[1]) for r in rows]), names),
        0,
        SETTINGS,
    )

    def formula(values):
        middle = statistics.median(values)
        mad = statistics.median([abs(v - middle) for v in values])
        raw = middle - max(2.0 * 1.4826 * mad, 0.05)
        if raw < 0.10 and middle - 0.05 < 0.10:
            return None  # at 0.10 it would be closer to the median than the margin allows
        return min(max(raw, 0.10), 0.99)

    of_cluster = formula([r[0] for r in rows])
    for name in names:
        mine = [value for value, of in rows if of == name]
        expected = formula(mine) if name and len(mine) >= 5 else of_cluster
        threshold = state.find_threshold(name)
        if expected is None:
            assert threshold is None
            continue
        assert threshold == pytest.approx(expected, abs=1.1e-6)
        assert threshold <= expected + 1e-9


@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8),
    st.integers(5, 40),
    st.lists(st.integers(0, 60), min_size=8, max_size=8),
)
def test_equal_scores_never_flag_whatever_came_before(levels, n_nodes, gaps):
    state, now = ThresholdState(), 0
    for level, gap in zip(levels, gaps, strict=False):
        now += gap * SECOND
        state = run([level] * n_nodes, state, now)
        assert not state.is_straggler.any()


@given(
    st.integers(3, 20),
    st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3),
    st.floats(0.3, 0.95),
    st.randoms(use_true_random=False),
)
def test_half_the_nodes_wrong_never_flags_the_other_half(n_half, wrong, level, random):
    healthy = [level + random.uniform(-0.01, 0.01) for _ in range(n_half)]
    values = healthy + [wrong[i % 3] for i in range(n_half)]
    state = run(values)
    for step in range(1, 6):
        assert not state.is_straggler[:n_half].any()
        state = run(values, state, step * 10 * SECOND)


def test_one_bad_node_among_healthy_ones_is_a_straggler():
    state = run([0.92, 0.91, 0.58, 0.93, 0.92, 0.90])
    assert state.is_straggler.tolist() == [False, False, True, False, False, False]
    assert state.levels.n_under[0] == 1


@pytest.mark.parametrize("score", [0.0, 0.05, 0.1, 0.149])
def test_equal_scores_so_low_that_the_clamp_would_be_above_them_have_no_bar(score):
    state = run([score] * 8)
    assert state.find_threshold() is None
    assert not state.is_straggler.any()
    assert not state.in_panic


def test_the_clamp_still_catches_a_node_far_below_peers_that_differ_much():
    state = run([0.9, 0.7, 0.5, 0.3, 0.2, 0.8, 0.6, 0.02])
    assert state.levels.settled[0] < 0.02
    assert state.find_threshold() == 0.10
    assert state.is_straggler.tolist() == [False] * 7 + [True]


def test_a_cohort_too_low_to_be_told_its_own_bar_is_not_told_the_clusters():
    rows = [0.9] * 9 + [0.05] * 5
    of_cohorts = Scores(np.array(rows), np.array([0] * 9 + [1] * 5), ("", "low"))
    state = step_threshold(ThresholdState(), of_cohorts, 0, SETTINGS)
    assert state.find_threshold() == 0.85
    assert state.find_threshold("low") is None
    assert not state.is_straggler.any()


WAITING = ThresholdSettings(settle_ns=10 * SECOND)


def test_the_first_bar_is_that_of_all_who_report_within_the_wait_not_of_the_first_five():
    first, all_of_them = [0.9, 0.8, 0.7, 0.95, 0.85], [0.9, 0.8, 0.7, 0.95, 0.85] + [0.93] * 15
    state = run(first, settings=WAITING)
    for tick in range(1, 10):
        state = run(all_of_them[: 5 + 2 * tick], state, tick * SECOND, WAITING)
        assert state.find_threshold() is None
        assert not state.is_straggler.any()
    state = run(all_of_them, state, 10 * SECOND, WAITING)
    assert state.find_threshold() == pytest.approx(0.88)
    assert run(first).find_threshold() == pytest.approx(0.702, abs=1e-3), "what it would have been"


def test_who_knows_that_everybody_was_heard_need_not_wait():
    scores = in_one_cohort([0.9] * 6)
    state = step_threshold(ThresholdState(), scores, 0, WAITING, is_complete=True)
    assert state.find_threshold() == 0.85


def test_a_cohort_that_begins_is_told_the_clusters_bar_until_its_own_has_settled():
    names = ("", "new")
    old = run([0.9] * 8, settings=WAITING)
    old = run([0.9] * 8, old, 10 * SECOND, WAITING)
    both = Scores(np.array([0.9] * 8 + [0.6] * 5), np.array([0] * 8 + [1] * 5), names)
    state = step_threshold(old, both, 20 * SECOND, WAITING)
    assert state.find_threshold("new") == state.find_threshold() > 0.8
    state = step_threshold(state, both, 30 * SECOND, WAITING)
    assert state.find_threshold("new") == pytest.approx(0.55)


def test_a_quorum_that_comes_back_within_a_ttl_does_not_wait_again():
    state = run([0.9] * 5, settings=WAITING)
    state = run([0.9] * 5, state, 10 * SECOND, WAITING)
    state = run([0.9] * 4, state, 20 * SECOND, WAITING)
    assert state.find_threshold() is None
    assert run([0.9] * 5, state, 25 * SECOND, WAITING).find_threshold() == 0.85


def test_recomputing_often_settles_where_recomputing_once_does():
    low, high = [0.9] * 9 + [0.5], [0.95] * 9 + [0.5]
    often = once = run(high)
    for tick in range(1, 51):
        often = run(low, often, tick * SECOND // 5)
    once = run(low, once, 10 * SECOND)
    assert often.levels.settled[0] == pytest.approx(once.levels.settled[0], abs=1e-12)
    assert once.find_threshold() == pytest.approx(0.89, abs=1e-6)


def test_without_quorum_there_is_nothing_to_tell_and_after_a_ttl_the_average_is_forgotten():
    state = run([0.9] * 5)
    assert state.find_threshold() == 0.85
    state = run([0.9] * 4, state, 10 * SECOND)
    assert state.find_threshold() is None
    back = run([0.5] * 5, state, 30 * SECOND)
    assert back.levels.settled[0] > 0.45, "a short gap keeps the average"
    state = run([0.9] * 4, state, 60 * SECOND)
    assert run([0.5] * 5, state, 61 * SECOND).find_threshold() == 0.45


def test_a_cohort_without_quorum_is_told_the_clusters_threshold():
    names = ("big", "small")
    state = step_threshold(
        ThresholdState(),
        Scores(np.array([0.9] * 6 + [0.5] * 2), np.array([0] * 6 + [1] * 2), names),
        0,
        SETTINGS,
    )
    assert state.find_threshold("big") == 0.85
    assert state.find_threshold("small") == state.find_threshold("") == state.find_threshold("new")


def test_when_most_nodes_fall_the_bar_stands_still_and_nobody_is_blamed():
    state = run([0.9] * 10)
    state = run([0.5] * 6 + [0.9] * 4, state, 10 * SECOND)
    assert state.in_panic
    assert not state.is_straggler.any()
    assert state.find_threshold() == 0.85
    for tick in (2, 3):
        state = run([0.9] * 10, state, tick * 10 * SECOND)
        assert state.in_panic, "quiet, but not for long enough"
    state = run([0.9] * 9 + [0.5], state, 40 * SECOND)
    assert not state.in_panic
    assert state.is_straggler.tolist() == [False] * 9 + [True]


def test_exactly_half_is_no_panic():
    state = run([0.9] * 10)
    state = run([0.5] * 5 + [0.9] * 5, state, 1)
    assert not state.in_panic
    assert state.is_straggler.tolist() == [True] * 5 + [False] * 5


@given(st.floats(0.1, 0.99))
def test_rounding_never_raises_and_never_loses_a_millionth(value):
    rounded = float(round_down(np.array([value]))[0])
    assert value - 1e-6 <= rounded <= value + 1e-9
    assert float(f"{rounded:.6f}") == rounded


def test_a_value_that_six_decimals_spell_is_left_alone():
    assert round_down(np.array([0.870348, 0.85, 0.1])).tolist() == [0.870348, 0.85, 0.1]


def test_cohorts_keep_their_average_when_others_come_and_go():
    first = Scores(np.array([0.9] * 5 + [0.6] * 5), np.repeat([0, 1], 5), ("a", "b"))
    state = step_threshold(ThresholdState(), first, 0, SETTINGS)
    second = Scores(np.array([0.9] * 5 + [0.7] * 5), np.repeat([0, 1], 5), ("c", "b"))
    state = step_threshold(state, second, 10 * SECOND, SETTINGS)
    assert state.find_threshold("b") == pytest.approx(0.55 + 0.2 * 0.10, abs=1e-6)
    assert state.find_threshold("c") == 0.85
    assert state.find_row("a") == 0


def test_a_clock_that_steps_back_moves_nothing():
    state = run([0.9] * 5, now_ns=100 * SECOND)
    state = run([0.8] * 5 + [0.9] * 6, state, 50 * SECOND)
    assert state.find_threshold() == 0.85


def test_the_order_of_nodes_does_not_matter():
    rng = np.random.default_rng(1)
    values, groups = rng.uniform(0, 1, 50), rng.integers(0, 3, 50)
    order = rng.permutation(50)
    names = ("", "a", "b")
    one = step_threshold(ThresholdState(), Scores(values, groups, names), 0, SETTINGS)
    two = step_threshold(ThresholdState(), Scores(values[order], groups[order], names), 0, SETTINGS)
    assert one.is_straggler[order].tolist() == two.is_straggler.tolist()
    assert one.levels.thresholds.tolist() == two.levels.thresholds.tolist()


def test_coverage_is_low_below_its_share_of_expected_nodes():
    few = ThresholdSettings(max_expected_nodes=10)
    assert run([0.9] * 7, settings=few).coverage_low
    assert not run([0.9] * 8, settings=few).coverage_low


def test_no_nodes_at_all_is_no_error():
    state = step_threshold(
        ThresholdState(), Scores(np.zeros(0), np.zeros(0, np.int64), ()), 0, SETTINGS
    )
    assert state.find_threshold() is None
