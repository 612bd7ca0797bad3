import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingero.agent.health.signals.reading import Anomaly, Signals, drop_non_finite
from ingero.agent.health.signals.score import ScoreSettings, compute_score
from ingero.errors import ConfigError

# Vectors 1 to 8 of the wire contract of agent v0.17.
VECTORS = [
    ((0.9, 0.9, 0.9, 0.9), 0.9),
    ((0.40, 0.9, 0.9, 0.9), 0.70),
    ((0.35, 0.8, 0.8, 0.8), 0.62),
    ((0.30, 0.8, 0.8, 0.8), 0.45),
    ((0.25, 0.8, 0.8, 0.8), 0.29),
    ((0.10, 0.8, 0.8, 0.8), 0.26),
    ((math.nan, 0.9, 0.9, 0.9), 0.27),
    ((2, 2, 2, 2), 1.0),
    ((-0.5, -0.5, -0.5, -0.5), 0.0),
    ((0.11, 0.22, 0.33, 0.44), 0.1155),
    ((1, 1, 0.05, 0.9), 0.3975),
]
shares = st.floats(0, 1) | st.none()


@pytest.mark.parametrize(("signals", "expected"), VECTORS)
def test_score_is_the_wire_contracts(signals, expected):
    assert compute_score(Signals(*signals)) == pytest.approx(expected, abs=1e-12)


def test_equal_weights_are_honoured():
    settings = ScoreSettings(weights=(0.25, 0.25, 0.25, 0.25))
    score = compute_score(Signals(0.8, 0.6, 0.4, 0.2), settings)
    assert score == pytest.approx(0.25, abs=1e-12)


@pytest.mark.parametrize(
    ("bad", "reason"), [(math.nan, "NaN"), (math.inf, "Inf"), (-math.inf, "Inf")]
)
def test_a_signal_that_is_no_number_is_named(bad, reason):
    kept, anomalies = drop_non_finite(Signals(0.9, 0.9, bad, 0.9))
    assert kept == Signals(0.9, 0.9, None, 0.9)
    assert anomalies == (Anomaly("memory", reason),)


def test_an_absent_signal_takes_no_part_and_is_not_zero():
    assert compute_score(Signals(0.8, 0.8, None, 0.8)) == pytest.approx(0.8)
    assert compute_score(Signals(None, None, None, None)) is None


def _slow_score(signals):
    weights = (0.40, 0.25, 0.20, 0.15)
    total = raw = 0.0
    worst = 1.0
    for weight, value in zip(weights, signals, strict=True):
        if value is None:
            continue
        total += weight
        raw += weight * value
        worst = min(worst, value)
    raw /= total
    if worst <= 0.25:
        return raw * 0.5
    if worst < 0.35:
        return raw * (0.5 + 0.5 * (worst - 0.25) / 0.10)
    return raw


@given(st.tuples(shares, shares, shares, shares).filter(lambda s: any(v is not None for v in s)))
def test_score_agrees_with_the_obvious_loop_and_stays_in_range(signals):
    score = compute_score(Signals(*signals))
    assert 0 <= score <= 1
    assert score == pytest.approx(_slow_score(signals), abs=1e-9)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"weights": (0.5, 0.5, 0.5, 0.5)}, {"weights"}),
        ({"weights": (1.0, 0.0, 0.0, 0.0)}, {"weights"}),
        ({"penalty_floor": 0.4}, {"penalty_floor"}),
        ({"weights": (2.0, 0.0, 0.0, 0.0), "penalty_floor": -1.0}, {"weights", "penalty_floor"}),
    ],
)
def test_contradicting_constants_are_refused_all_at_once(settings, names):
    with pytest.raises(ConfigError) as caught:
        ScoreSettings(**settings)
    assert {problem.path for problem in caught.value.problems} == names
