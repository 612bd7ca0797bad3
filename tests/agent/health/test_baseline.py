import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingero.agent.health.signals.baseline import Baseline, BaselineSettings
from ingero.agent.health.signals.reading import Signals
from ingero.agent.health.signals.score import compute_score
from ingero.errors import ConfigError


def fold_all(baseline, samples, **options):
    for sample in samples:
        baseline.fold(Signals(*sample), **options)


def test_averages_of_a_short_history_are_the_wire_contracts():
    baseline, fast, floor = Baseline(), [], []  # vectors 9 and 10
    for throughput in (100, 200, 50, 100):
        baseline.fold(Signals(throughput, 0.9, 0.8, 0.7))
        fast.append(baseline.fast.throughput)
        floor.append(baseline.floor.throughput)
    assert fast == pytest.approx([100, 152.631578947368, 114.760147601476, 110.468159348648])
    assert floor == pytest.approx([100, 150.025012506255, 116.649977761102, 112.481234373447])
    saved = baseline.save()
    assert saved.n_samples == 4
    assert saved.fast[0] == pytest.approx(37.99)
    assert saved.floor[0] == pytest.approx(0.4492504999)


def test_averages_of_a_long_history_are_the_wire_contracts():
    baseline = Baseline()  # vector 11
    fold_all(baseline, [(1, 0.9, 0.9, 0.9)] * 100 + [(1, 0.5, 0.9, 0.9)] * 30)
    assert baseline.fast.compute == pytest.approx(0.516956032015, abs=1e-11)
    assert baseline.floor.compute == pytest.approx(0.803021892213, abs=1e-11)


def test_degradation_is_first_seen_at_the_eleventh_low_sample():
    baseline = Baseline()  # vector 12
    fold_all(baseline, [(1, 0.9, 0.9, 0.9)] * 200)
    seen = []
    for _ in range(11):
        baseline.fold(Signals(1, 0.2, 0.9, 0.9))
        seen.append(baseline.is_degraded())
    assert seen == [False] * 10 + [True]
    assert baseline.fast.compute == pytest.approx(0.419667417156, abs=1e-11)
    assert baseline.floor.compute == pytest.approx(0.859741693906, abs=1e-11)


def test_degradation_waits_for_the_warm_up():
    baseline = Baseline(BaselineSettings(warmup=30))
    fold_all(baseline, [(1, 0.9, 0.9, 0.9)] * 10 + [(1, 0.01, 0.9, 0.9)] * 19)
    assert not baseline.is_degraded()
    baseline.fold(Signals(1, 0.01, 0.9, 0.9))
    assert baseline.is_degraded()


def test_scores_against_the_past_are_the_wire_contracts():
    baseline, scores = Baseline(), []  # vector 14
    samples = [(100, 0.9, 0.9, 0.9)] * 6 + [(30, 0.5, 0.9, 0.9)] * 3 + [(100, 0.95, 0.95, 0.95)]
    for sample in samples:
        ratio = baseline.throughput_ratio(sample[0])
        scores.append(compute_score(Signals(ratio, *sample[1:])))
        baseline.fold(Signals(*sample))
    assert scores[0] == pytest.approx(0.27)  # vector 13: no past yet
    assert scores[1] == pytest.approx(0.94)
    expected = [0.42, 0.5684439890315937, 0.5965608274237544, 0.97]
    assert scores[6:] == pytest.approx(expected, abs=1e-12)


def test_a_frozen_baseline_never_makes_a_slowdown_normal():
    baseline = Baseline()
    fold_all(baseline, [(100, 0.9, 0.9, 0.9)] * 30)
    fold_all(baseline, [(30, 0.9, 0.9, 0.9)] * 500, frozen=True)
    assert baseline.throughput_ratio(30) == pytest.approx(0.3)
    assert baseline.n_samples == 30
    assert baseline.is_degraded(), "the recent average still shows the drift"


def test_dominant_signal_compares_like_with_like():
    baseline = Baseline()
    fold_all(baseline, [(1000, 0.9, 0.9, 0.9)] * 5)
    assert baseline.dominant_signal(Signals(1000, 0.4, 0.9, 0.9)) == "compute"
    assert baseline.dominant_signal(Signals(500, 0.8, 0.9, 0.9)) == "throughput"
    assert baseline.dominant_signal(Signals(1000, 0.9, 0.9, 0.9)) == "unknown"
    assert baseline.dominant_signal(Signals(None, None, None, 0.1)) == "cpu"


def test_an_absent_signal_leaves_its_average_where_it_was():
    baseline = Baseline()
    fold_all(baseline, [(100, 0.9, 0.8, 0.7)] * 3)
    before = baseline.fast.memory, baseline.floor.memory
    for value in (None, math.nan, math.inf):
        baseline.fold(Signals(100, 0.9, value, 0.7))
    assert (baseline.fast.memory, baseline.floor.memory) == pytest.approx(before)


def test_a_signal_that_appears_late_is_not_underestimated():
    baseline = Baseline()
    fold_all(baseline, [(None, 0.9, 0.9, 0.9)] * 5)
    assert baseline.throughput_ratio(100) == 0.0
    baseline.fold(Signals(100, 0.9, 0.9, 0.9))
    assert baseline.fast.throughput == pytest.approx(100)


@given(st.lists(st.lists(st.floats(0, 1e6) | st.none(), min_size=4, max_size=4), max_size=40))
def test_averages_stay_within_what_was_seen(samples):
    baseline = Baseline()
    fold_all(baseline, samples)
    for i, value in enumerate(baseline.fast):
        seen = [sample[i] for sample in samples if sample[i] is not None]
        if not seen:
            assert value is None
        else:
            slack = 1e-9 * max(seen) + 1e-12
            assert min(seen) - slack <= value <= max(seen) + slack


def test_a_restored_baseline_continues_where_it_was():
    first, second = Baseline(), Baseline()
    fold_all(first, [(100, 0.9, 0.8, 0.7), (200, 0.8, 0.7, 0.6)])
    second.restore(first.save())
    for baseline in (first, second):
        baseline.fold(Signals(50, 0.5, 0.5, 0.5))
    assert second.fast == pytest.approx(first.fast)
    assert second.floor == pytest.approx(first.floor)


@pytest.mark.parametrize(
    "settings",
    [
        {"fast_alpha": 1.0},
        {"floor_alpha": 0.2},
        {"warning_ratio": 0.0},
        {"warmup": -1},
        {"floor_warmth_min": 1.5},
    ],
)
def test_contradicting_constants_are_refused(settings):
    with pytest.raises(ConfigError):
        BaselineSettings(**settings)
