"""The e-detector: an obvious loop as oracle, its promises as properties, its guarantee by simulation."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.detect.fed_costs import add_bursts, feed, lognormal
from tests.support.properties import draw_examples

from ingero.detect.ranks.autocorrelation import BlockMeans
from ingero.detect.ranks.edetector import EDetector
from ingero.detect.ranks.settings import ALARM, NOTICE, EDetectorSettings
from ingero.detect.ranks.wealth import FAR


def detector(n_groups, n_peers, **changes):
    found = EDetector(n_peers, EDetectorSettings(**changes))
    return found, found.add_groups(n_groups)


def test_a_worker_that_is_slow_in_bursts_is_found_once_and_clears_when_they_end():
    """One operation in ten takes three times as long: 20 % in the sum, nothing in the median."""
    n_groups = 5
    parts = [
        add_bursts(lognormal(seed, (2500, 1, 4)), 500, 1500, 10, 3.0, seed)
        for seed in range(n_groups)
    ]
    found, groups = detector(n_groups, 4)
    crossings = feed(found, groups, np.concatenate(parts, axis=1))
    for group in range(n_groups):
        alarm, clear = [c for c in crossings if (c.group, c.tier) == (group, ALARM)]
        assert (alarm.worker, alarm.by_sums, alarm.is_alarm) == (1, True, True)
        assert 500 <= alarm.onset_op <= 560, "the last time at which the wealth left 0"
        assert alarm.op < 900
        assert not clear.is_alarm
        assert 1500 <= clear.op < 2100
    found, groups = detector(1, 4, use_sums=False)
    assert feed(found, groups, parts[0]) == []


@pytest.mark.parametrize("by_sums", [True, False])
def test_an_alarm_for_bursts_lasts_beside_new_peers_while_they_go_on(by_sums):
    costs = add_bursts(lognormal(0, (1000, 1, 4)), 0, 1000, 10, 3.0)
    found, groups = detector(1, 4)
    found.hold_alarm(0, 1, ALARM, is_alarm=True, by_sums=by_sums)
    feed(found, groups, costs[:90])
    assert found.alarms.in_alarm[ALARM, 0, 1] == by_sums
    feed(found, groups, lognormal(1, (1000, 1, 4)))
    assert not found.alarms.in_alarm[ALARM, 0, 1]


@cache
def feed_at_once(seed):
    """Costs of two groups, and what a detector makes of them when it gets them in one piece."""
    costs = add_bursts(lognormal(seed, (400, 2, 4)), 30, 250, 8, 3.0, seed)
    costs[30:, 1, 2] *= 1.3
    whole, groups = detector(2, 4, alpha=1e-3)
    return costs, feed(whole, groups, costs), whole


@draw_examples(8, 20)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(0, 5))
def test_how_operations_are_cut_into_blocks_changes_no_bit(cuts, seed):
    costs, crossings, whole = feed_at_once(seed)
    parts, groups = detector(2, 4, alpha=1e-3)
    again, at = [], 0
    while at < len(costs):
        size = min(cuts[at % len(cuts)], len(costs) - at)
        again += feed(parts, groups, costs[at : at + size])
        at += size
    assert sorted(map(str, again)) == sorted(map(str, crossings))
    assert (parts.wealth.slow == whole.wealth.slow).all()


@cache
def feed_a_slow_worker(n_workers):
    """Costs of a group of which one becomes slow, and the crossings of a detector that gets them as they are."""
    costs = lognormal(n_workers, (60, 1, n_workers))
    costs[20:, 0, 1] *= 1.4
    found, groups = detector(1, n_workers)
    return costs, [(c.op, c.worker, c.tier) for c in feed(found, groups, costs)]


@draw_examples(10, 20)
@given(st.floats(0.001, 1000.0))
def test_the_unit_of_time_does_not_matter(scale):
    costs, first = feed_a_slow_worker(4)
    found, groups = detector(1, 4)
    second = [(c.op, c.worker, c.tier) for c in feed(found, groups, costs * scale)]
    assert first
    assert first == second


@draw_examples(10, 20)
@given(st.permutations(range(5)))
def test_the_order_of_workers_does_not_matter(order):
    costs, first = feed_a_slow_worker(5)
    found, groups = detector(1, 5)
    second = {(c.op, order[c.worker], c.tier) for c in feed(found, groups, costs[:, :, order])}
    assert first
    assert set(first) == second


def test_equal_costs_are_no_evidence():
    found, groups = detector(1, 6)
    assert feed(found, groups, np.full((500, 1, 6), 1e8)) == []
    assert (found.wealth.slow[0] <= 1e-9).all()


def test_a_slow_worker_is_found_with_its_onset_and_size_and_clears_when_it_recovers():
    costs = lognormal(3, (600, 1, 8))
    costs[200:400, 0, 5] *= 1.5
    found, groups = detector(1, 8)
    crossings = [c for c in feed(found, groups, costs) if c.tier == ALARM]
    alarm, clear = crossings
    assert (alarm.worker, alarm.is_alarm) == (5, True)
    assert 198 <= alarm.onset_op <= 201
    assert alarm.op - 200 < 10
    assert (clear.worker, clear.is_alarm) == (5, False)
    assert 400 <= clear.op < 460
    again, _ = detector(1, 8)
    feed(again, groups, costs[:300])
    assert np.median(again.slowdowns(0, 5, 200)) == pytest.approx(1.5, rel=0.03)


def test_the_second_of_two_slow_workers_is_found_only_because_the_first_is_peeled():
    costs = lognormal(4, (400, 1, 4), sigma=0.03)
    costs[100:, 0, 0] *= 3.0
    costs[100:, 0, 1] *= 1.35
    for use_peeling, found_workers in ((True, {0, 1}), (False, {0})):
        found, groups = detector(
            1, 4, use_peeling=use_peeling, use_pooled=False, use_majority=False
        )
        crossings = feed(found, groups, costs)
        assert {c.worker for c in crossings if c.tier == ALARM} == found_workers


def test_a_slowdown_between_the_tiers_is_noticed_and_not_alarmed():
    costs = lognormal(5, (1500, 1, 8), sigma=0.02)
    costs[:, 0, 2] *= 1.06
    found, groups = detector(1, 8)
    assert {(c.worker, c.tier) for c in feed(found, groups, costs)} == {(2, NOTICE)}


def test_missing_peers_shrink_the_comparison_and_fewer_than_three_stop_it():
    costs = lognormal(6, (100, 2, 4))
    costs[:, :, 0] *= 2.0
    costs[:, 0, 3] = np.nan
    costs[:, 1, 2:] = np.nan
    found, groups = detector(2, 4)
    crossings = feed(found, groups, costs)
    assert {(c.group, c.worker) for c in crossings} == {(0, 0)}
    assert (found.wealth.slow[:, :, 1] == 0.0).all()


def test_an_alarm_does_not_hide_behind_its_own_past():
    """Its own residuals are not in the pool that it is compared with."""
    costs = lognormal(7, (260, 1, 3))
    costs[:, 0, 0] *= 1.5
    found, groups = detector(1, 3, use_rank=False)
    crossings = [c for c in feed(found, groups, costs) if c.tier == ALARM]
    assert [c.worker for c in crossings] == [0]
    assert crossings[0].is_pooled


NOISES = {
    "normal": lambda rng, shape: 1 + 0.05 * rng.standard_normal(shape),
    "heavy": lambda rng, shape: np.exp(0.1 * rng.standard_t(2, shape)),
    "skewed": lambda rng, shape: 1 + rng.exponential(0.3, shape),
}


@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize("slowdown", [0.0, 0.1])
def test_exchangeable_peers_raise_no_more_false_alarms_than_the_budget(name, slowdown):
    """Budget 1e-4 and 600 000 worker-operations: at most 60 crossings, whatever the noise; δ = 0 is the worst case."""
    alpha, n_ops, n_groups, m = 1e-4, 500, 200, 6
    rng = np.random.default_rng(8)
    costs = np.maximum(NOISES[name](rng, (n_ops, n_groups, m)), 1e-3) * 1e8
    found = EDetector(
        m, EDetectorSettings(alpha=alpha, alarm_slowdown=slowdown, notice_slowdown=slowdown)
    )
    crossings = feed(found, found.add_groups(n_groups), costs)
    alarms = [c for c in crossings if c.is_alarm and c.tier == ALARM]
    assert len(alarms) <= alpha * n_ops * n_groups * m


def test_two_slow_workers_of_four_are_found_because_each_is_in_the_upper_half():
    """Each hides from the other bets behind the other: never first, and no outlier among the others' residuals."""
    costs = lognormal(10, (150, 1, 4), sigma=0.02)
    costs[:, 0, 1:3] *= 1.3
    for use_majority, found_workers in ((True, {1, 2}), (False, set())):
        found, groups = detector(1, 4, use_majority=use_majority)
        crossings = [c for c in feed(found, groups, costs) if c.tier == ALARM and c.is_alarm]
        assert {c.worker for c in crossings} == found_workers
        assert all(c.op < 30 for c in crossings)


def test_the_onset_of_a_small_slowdown_is_where_it_began():
    n_groups = 20
    costs = np.concatenate(
        [lognormal(seed, (600, 1, 4), sigma=0.02) for seed in range(n_groups)], axis=1
    )
    costs[300:, :, 1] *= 1.06
    found, groups = detector(n_groups, 4)
    noticed = [c for c in feed(found, groups, costs) if (c.worker, c.tier) == (1, NOTICE)]
    onsets = [next(c.onset_op for c in noticed if c.group == group) for group in range(n_groups)]
    assert 295 <= np.median(onsets) <= 305
    assert np.mean(np.abs(np.array(onsets) - 300) <= 32) >= 0.9


def heavy_stretches(seed, n_stretches, length, shape, sigma):
    rng = np.random.default_rng(seed)
    heavy = np.exp(sigma * rng.standard_normal((n_stretches, *shape)))
    return np.repeat(heavy, length, axis=0) * rng.lognormal(0, 0.02, (n_stretches * length, *shape))


def without_dependence(monkeypatch):
    monkeypatch.setattr(
        BlockMeans,
        "count_as_one",
        lambda self, groups, _, limits: (
            np.zeros((2, groups.size)),
            np.full(groups.size, limits[ALARM]),
        ),
    )


@pytest.mark.parametrize("weighed", [True, False])
def test_batches_that_are_heavy_twice_stay_within_the_budget(weighed, monkeypatch):
    """Forward and backward of a batch share its weight: counted apart, the budget is broken many times."""
    if not weighed:
        without_dependence(monkeypatch)
    alpha, n_stretches, n_groups, m = 1e-5, 250, 200, 6
    costs = heavy_stretches(9, n_stretches, 2, (n_groups, m), 0.4) * 1e8
    found = EDetector(m, EDetectorSettings(alpha=alpha))
    crossings = feed(found, found.add_groups(n_groups), costs)
    n_alarms = sum(c.is_alarm and c.tier == NOTICE for c in crossings)
    budget = alpha * 2 * n_stretches * n_groups * m
    assert n_alarms <= budget if weighed else n_alarms > 5 * budget


@pytest.mark.parametrize("weighed", [True, False])
def test_steps_that_are_heavy_as_a_whole_end_as_no_alarm(weighed, monkeypatch):
    """One batch per step for 60 operations: once that is known, what was taken for a slow worker is taken back."""
    if not weighed:
        without_dependence(monkeypatch)
    costs = heavy_stretches(11, 40, 60, (20, 4), 0.3) * 1e8
    found, groups = detector(20, 4)
    crossings = feed(found, groups, costs)
    assert any(c.is_retracted for c in crossings) == weighed
    late = [c for c in crossings if c.is_alarm and c.tier == ALARM and c.op >= 1000]
    assert len(late) <= 1 if weighed else len(late) > 50
    assert (
        found.alarms.in_alarm[ALARM].mean() < 0.05
        if weighed
        else found.alarms.in_alarm[ALARM].mean() > 0.1
    )


@pytest.mark.parametrize(("use_far", "at_least", "at_most"), [(True, 38, 40), (False, 0, 4)])
def test_what_is_beyond_the_reach_of_shared_causes_is_found_soon(use_far, at_least, at_most):
    """AR(1), 0.9, 20 %, and then one worker of four takes eight times as long for twelve operations."""
    n_groups, n_before = 40, 150
    costs = np.exp(autocorrelated(15, (n_before + 12, n_groups, 4), 0.9, 0.2)) * 1e8
    costs[n_before:, :, 2] *= 8
    found, groups = detector(n_groups, 4, use_far=use_far)
    crossings = [c for c in feed(found, groups, costs) if c.op >= n_before]
    alarms = [c.worker for c in crossings if c.is_alarm and c.tier == ALARM]
    assert at_least <= alarms.count(2) == len(alarms) <= at_most
    assert (found.persistence.block_length[ALARM] > 4).mean() > 0.9


def test_the_far_bet_waits_until_it_is_known_how_far_shared_causes_reach():
    """Residuals reach beyond δ from the start; how far means of eight reach shows in six differences of them."""
    costs = np.exp(autocorrelated(16, (48, 20, 4), 0.9, 0.2)) * 1e8
    costs[30:, :, 2] *= 8
    found, groups = detector(20, 4)
    feed(found, groups, costs)
    assert np.isinf(found.persistence.log_far).mean() >= 0.8
    assert (found.wealth.slow[FAR] <= 0.0)[:, np.isinf(found.persistence.log_far)].all()


def test_a_persistent_change_is_no_dependence():
    for factors in ((1.5, 1.0, 1.0, 1.0), (1.4, 1.4, 1.0, 1.0)):
        costs = lognormal(12, (600, 1, 4), sigma=0.02)
        costs[250:] *= factors
        found, groups = detector(1, 4)
        crossings = feed(found, groups, costs)
        assert not any(c.is_retracted for c in crossings if c.tier == ALARM)
        assert found.persistence.block_length[ALARM, 0] == 1


def test_a_worker_in_alarm_that_ties_with_its_own_past_is_weighed_against_the_others_only():
    """Exactly δ slower than before: its own residuals level with the query are not among those it is compared with."""
    costs = np.full((300, 1, 4), 1e8)
    costs[100:200, 0, 2], costs[200:, 0, 2] = 2e8, 2.2e8
    found, groups = detector(1, 4, use_peeling=False)
    crossings = feed(found, groups, costs)
    assert {(c.worker, c.is_alarm) for c in crossings if c.tier == ALARM} == {(2, True)}


def autocorrelated(seed, shape, phi, sigma):
    noise = sigma * np.random.default_rng(seed).standard_normal(shape)
    noise[1:] *= np.sqrt(1 - phi**2)
    for t in range(1, noise.shape[0]):
        noise[t] += phi * noise[t - 1]
    return noise


@pytest.mark.parametrize("weighed", [True, False])
def test_noise_that_wanders_stays_within_the_budget_at_the_alarm_tier(weighed, monkeypatch):
    """AR(1), 0.9, 5 %: now and then a healthy worker is 10 % slow for tens of operations. Budget: 1e-5 × 1 200 000."""
    if not weighed:
        without_dependence(monkeypatch)
    noise = autocorrelated(13, (2000, 100, 6), 0.9, 0.05)
    found, groups = detector(100, 6, alpha=1e-5)
    crossings = feed(found, groups, np.exp(noise) * 1e8)
    alarmed = {(c.group, c.worker) for c in crossings if c.is_alarm and c.tier == ALARM}
    assert len(alarmed) <= 12 if weighed else len(alarmed) > 24


def test_wide_noise_counts_as_dependent_only_until_blocks_tell_that_it_does_not_last():
    """Residuals of 3 % reach beyond δ of 3 % operation by operation, and their means over a block do not."""
    found, groups = detector(60, 4)
    costs = lognormal(14, (260, 60, 4), sigma=0.024)
    feed(found, groups, costs[:48])
    assert (found.persistence.block_length[NOTICE] > 1).mean() > 0.3
    feed(found, groups, costs[48:])
    assert (found.persistence.block_length[NOTICE] == 1).all()


def test_a_small_slowdown_beside_a_noisy_peer_is_noticed_by_its_rank():
    """The noisy peer's residuals hide the gap from the pooled bet, whose half of the mean is lost each time."""
    rng = np.random.default_rng(15)
    costs = np.exp(rng.standard_normal((460, 40, 4)) * [0.01, 0.01, 0.04, 0.01]) * 1e8
    costs[260:, :, 1] *= 1.04
    found, groups = detector(40, 4, use_sums=False)
    crossings = [c for c in feed(found, groups, costs) if c.is_alarm]
    assert {(c.worker, c.tier) for c in crossings} == {(1, NOTICE)}
    in_time = {c.group for c in crossings if 260 <= c.op < 460}
    assert len(in_time) >= 36
