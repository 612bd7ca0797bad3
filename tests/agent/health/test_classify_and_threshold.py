import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingero.agent.health.signals.classify import Classifier, ClassifierSettings
from ingero.agent.health.threshold_choice import (
    CachedThreshold,
    ModeSettings,
    ThresholdInputs,
    choose_threshold,
    fresh_max_age,
)
from ingero.errors import ConfigError

SECOND_NS = 1_000_000_000
MINUTE_NS = 60 * SECOND_NS
V017 = ModeSettings(holds_while_reachable=False)


def judge(classifier, score, threshold):
    is_changed = classifier.classify(score, threshold)
    return classifier.is_straggler, is_changed


def test_one_sample_under_the_threshold_is_a_straggler_and_it_must_come_back_above():
    classifier = Classifier()  # vector 15
    trail = [judge(classifier, score, 0.80) for score in (0.62, 0.81, 0.82)]
    assert trail == [(True, True), (True, False), (False, True)]
    assert judge(Classifier(), 0.80, 0.80) == (False, False)


def test_confirmation_takes_looks_in_a_row():
    classifier = Classifier(ClassifierSettings(confirm=2))
    trail = [judge(classifier, score, 0.80)[0] for score in (0.6, 0.9, 0.6, 0.6, 0.6)]
    assert trail == [False, False, False, True, True]


def test_nan_changes_nothing():
    classifier = Classifier()
    classifier.classify(0.1, 0.8)
    assert judge(classifier, math.nan, 0.8) == (True, False)
    assert judge(classifier, 0.1, math.nan) == (True, False)


@given(st.lists(st.floats(0, 1)), st.floats(0.1, 0.99))
def test_a_verdict_only_turns_outside_the_hysteresis_band(scores, threshold):
    classifier, was = Classifier(), False
    for score in scores:
        is_straggler, is_changed = judge(classifier, score, threshold)
        assert is_changed == (is_straggler != was)
        if is_changed and is_straggler:
            assert score < threshold
        if is_changed and not is_straggler:
            assert score > threshold + 0.02 - 1e-8
        was = is_straggler


@pytest.mark.parametrize("settings", [{"hysteresis": 0.5}, {"hysteresis": -0.1}, {"confirm": 0}])
def test_classifier_settings_out_of_range_are_refused(settings):
    with pytest.raises(ConfigError):
        ClassifierSettings(**settings)


def inputs(value, quorum, age_s, *, reachable, healthy=None):
    now_ns = 1000 * SECOND_NS
    cached = None if value is None else CachedThreshold(value, quorum, now_ns - age_s * SECOND_NS)
    return ThresholdInputs(cached, reachable, healthy, now_ns)


@pytest.mark.parametrize(
    ("facts", "mode", "threshold"),
    [
        (inputs(0.82, True, 5, reachable=True), "fleet", 0.82),
        (inputs(0.78, False, 5, reachable=True), "fleet-cached", 0.78),
        (inputs(0.82, True, 120, reachable=False), "local-cached", 0.82),
        (inputs(0.82, True, 600, reachable=False, healthy=1.0), "local-baseline", 0.85),
        (inputs(0.82, True, 600, reachable=False), "none", None),
        (inputs(None, None, 0, reachable=True), "none", None),
        (inputs(0.82, True, 30, reachable=True), "none", None),
    ],
)
def test_modes_of_the_pure_rule_are_the_wire_contracts(facts, mode, threshold):
    assert choose_threshold(facts, V017) == (mode, threshold)  # vector 18


def test_a_value_that_went_stale_while_fleet_answers_is_held_as_cached():
    applied = choose_threshold(inputs(0.82, True, 30, reachable=True), ModeSettings())
    assert applied == ("fleet-cached", 0.82)
    assert choose_threshold(inputs(0.82, True, 301, reachable=True), ModeSettings()) == (
        "none",
        None,
    )


def test_freshness_follows_the_push_interval():
    assert fresh_max_age(5 * SECOND_NS) == 20 * SECOND_NS
    assert fresh_max_age(24 * SECOND_NS) == 60 * SECOND_NS
    settings = ModeSettings(fresh_max_age_ns=fresh_max_age(24 * SECOND_NS))
    assert choose_threshold(inputs(0.82, True, 26, reachable=True), settings).mode == "fleet"


def test_a_pause_that_fleet_asked_for_keeps_its_value_fresh():
    facts = inputs(0.82, True, 30, reachable=True)
    assert choose_threshold(replace_pause(facts, 10), V017) == ("fleet", 0.82)
    assert choose_threshold(replace_pause(facts, 9), V017) == ("none", None)


def replace_pause(facts, seconds):
    return facts._replace(pause_ns=seconds * SECOND_NS)


def test_an_answer_that_came_during_the_look_is_fresh():
    assert choose_threshold(inputs(0.82, True, -1, reachable=True), V017).mode == "fleet"


def test_without_fleet_a_node_is_judged_by_its_own_usual_score():
    full_memory = 0.3975  # a healthy trainer that fills its GPU's memory: vector 8
    applied = choose_threshold(
        inputs(None, None, 0, reachable=False, healthy=full_memory), ModeSettings()
    )
    assert applied.mode == "local-baseline"
    assert applied.threshold == pytest.approx(0.85 * full_memory)
    assert full_memory > applied.threshold


def test_the_ladder_down_has_every_rung():
    settings = ModeSettings(fresh_max_age_ns=fresh_max_age(10 * SECOND_NS))
    trail = []
    for age_s, reachable in [
        (0, True),
        (20, True),
        (28, True),
        (31, False),
        (299, False),
        (301, False),
    ]:
        facts = inputs(0.8, True, age_s, reachable=reachable, healthy=0.94)
        trail.append(choose_threshold(facts, settings).mode.value)
    assert trail == [
        "fleet",
        "fleet",
        "fleet-cached",
        "local-cached",
        "local-cached",
        "local-baseline",
    ]
