"""δ from the persistent bias of peers: an obvious loop as oracle, who can move it, and what it does to reports."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingero.detect.ranks.edetector import EDetector
from ingero.detect.ranks.persistence import MIN_OTHERS, limits_from_peers
from ingero.detect.ranks.settings import ALARM, NOTICE, EDetectorSettings

LOW, HIGH = 0.03, 0.10
LEVELS = st.lists(st.one_of(st.just(math.nan), st.floats(-0.2, 0.2)), min_size=3, max_size=12)


def slow_limit(others, multiple):
    known = [level for level in others if not math.isnan(level)]
    if len(known) < MIN_OTHERS:
        return LOW
    middle = statistics.median(known)
    spread = 1.4826 * statistics.median(abs(level - middle) for level in known)
    return min(max(math.expm1(multiple * spread), LOW), HIGH)


@given(LEVELS, st.floats(0.5, 4))
def test_limits_agree_with_the_obvious_loop(levels, multiple):
    limits = limits_from_peers(np.array([levels]), multiple, LOW, HIGH)[0]
    for at, limit in enumerate(limits):
        others = levels[:at] + levels[at + 1 :]
        assert limit == pytest.approx(slow_limit(others, multiple), abs=1e-12)
        assert LOW <= limit <= HIGH


@given(
    st.lists(st.floats(-0.02, 0.02), min_size=6, max_size=12),
    st.lists(st.floats(-0.7, 0.7), min_size=12, max_size=12),
    st.data(),
)
def test_fewer_than_half_of_the_others_cannot_move_it_beyond_what_the_rest_shows(
    healthy, wild, data
):
    n_wild = data.draw(st.integers(0, (len(healthy) - 2) // 2))
    levels = np.array([*wild[:n_wild], *healthy[n_wild:]])
    honest = healthy[n_wild:]
    reach = max(honest) - min(honest)
    judged = limits_from_peers(levels[None, :], 3.0, 0.0, 10.0)[0, -1]
    assert judged <= math.expm1(3.0 * 1.4826 * reach) + 1e-12


def fed(costs, **changes):
    found = EDetector(costs.shape[2], EDetectorSettings(**changes))
    groups = found.add_groups(costs.shape[1])
    crossings, _ = found.observe(groups, costs, np.full(groups.size, costs.shape[0]))
    return found, crossings


def unlike_peers(spread, n_ops=600, shape=(6, 12), seed=1):
    rng = np.random.default_rng(seed)
    bias = spread * rng.standard_normal(shape)
    return np.exp(bias + 0.02 * rng.standard_normal((n_ops, *shape))) * 1e8


def test_how_slow_a_worker_is_does_not_change_its_own_limit_and_hardly_its_peers():
    for worker in (0, 7):
        costs = unlike_peers(0.04, 300, (4, 12))
        costs[:, :, worker] *= 1.5
        one, _ = fed(costs, notice_spread=1.5)
        costs[:, :, worker] *= 20.0
        other, _ = fed(costs, notice_spread=1.5)
        others = np.arange(12) != worker
        assert (
            one.persistence.limits[NOTICE, :, worker] == other.persistence.limits[NOTICE, :, worker]
        ).all()
        assert one.persistence.limits[NOTICE, :, worker].max() > 0.05
        apart = (
            one.persistence.limits[NOTICE, :, others] - other.persistence.limits[NOTICE, :, others]
        )
        assert np.abs(apart).max() < 0.01


def test_only_the_notice_tier_is_raised_between_the_settings_bounds_and_only_if_asked_for():
    for spread, multiple, low, high in (
        (0.03, 0.0, 0.03, 0.03),
        (0.0, 3.0, 0.03, 0.03),
        (0.03, 2.0, 0.04, 0.08),
        (0.2, 3.0, 0.10, 0.10),
    ):
        found, _ = fed(unlike_peers(spread), notice_spread=multiple)
        assert low <= np.median(found.persistence.limits[NOTICE]) <= high
        assert (found.persistence.limits[ALARM] == 0.10).all()
    few, _ = fed(unlike_peers(0.2, shape=(6, MIN_OTHERS)), notice_spread=3.0)
    assert (few.persistence.limits[NOTICE] == 0.03).all(), "too few others"
    short, _ = fed(unlike_peers(0.2, n_ops=100), notice_spread=3.0)
    assert (short.persistence.limits[NOTICE] == 0.03).all(), "too few operations"


def test_a_fleet_that_differs_persistently_reports_fewer_and_still_alarms_the_slow_one():
    costs = unlike_peers(0.03, 1200, (12, 16), seed=2)
    costs[400:, :3, 0] *= 1.3
    healthy = np.ones((12, 16), bool)
    healthy[:3, 0] = False
    reported = {}
    for multiple in (0.0, 3.0):
        found, _ = fed(costs, notice_spread=multiple)
        reported[multiple] = int(found.alarms.in_alarm[NOTICE][healthy].sum())
        assert found.alarms.in_alarm[ALARM, :3, 0].all()
    assert reported[0.0] >= 10
    assert reported[3.0] <= reported[0.0] / 2


@pytest.mark.parametrize("cuts", [(1, 7, 90), (33,), (299, 1)])
def test_a_limit_is_fixed_before_what_it_judges_however_reports_are_cut(cuts):
    """What comes later, or how much of it is known yet, changes nothing that was said before."""
    costs = unlike_peers(0.05, 300, (2, 8), seed=3)
    whole, crossings = fed(costs, notice_spread=2.0)
    parts = EDetector(8, EDetectorSettings(notice_spread=2.0))
    groups, again, at = parts.add_groups(2), [], 0
    while at < 300:
        size = min(cuts[at % len(cuts)], 300 - at)
        again += parts.observe(groups, costs[at : at + size], np.full(2, size))[0]
        at += size
    assert sorted(map(str, again)) == sorted(map(str, crossings))
    assert (parts.wealth.slow == whole.wealth.slow).all()
    assert (parts.persistence.limits == whole.persistence.limits).all()
    assert whole.persistence.limits[NOTICE].max() > 0.03
