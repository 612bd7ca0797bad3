"""Quantiles and octaves out of the kernel's buckets, against a slow loop and true durations. No root."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ingero.agent.capture.probes.sampling import MAX_KEEP_ONE_IN, SamplingControl
from ingero.model.latency import (
    HIST_BUCKETS,
    build_bucket_edges_ns,
    fold_octaves,
    gather_histogram,
    quantiles_ns,
)

durations = st.lists(st.integers(1, 2**37), min_size=1, max_size=200)


def bucket(duration_ns):
    """bucket_of() of bpf/include/ingero/counts.h, spelled out."""
    if duration_ns < 128:
        return 0
    log2 = duration_ns.bit_length() - 1
    return min(1 + (log2 - 7) * 4 + (duration_ns >> (log2 - 2) & 3), HIST_BUCKETS - 1)


def histogram_of(values):
    histogram = np.zeros(HIST_BUCKETS, np.uint64)
    for value in values:
        histogram[bucket(value)] += 1
    return histogram


@given(durations)
def test_a_duration_lies_between_its_bucket_s_edges(values):
    edges = build_bucket_edges_ns()
    for value in values:
        assert edges[bucket(value)] <= value < edges[bucket(value) + 1]


@given(durations, st.sampled_from([0.5, 0.95, 0.99]))
def test_a_quantile_is_in_the_bucket_of_the_true_one_or_touches_it(values, share):
    (found,) = quantiles_ns(histogram_of(values), (share,))
    true = sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]
    edges = build_bucket_edges_ns()
    assert edges[bucket(true)] <= found <= edges[bucket(true) + 1]


@given(durations)
def test_octaves_count_every_duration_under_its_power_of_two(values):
    octaves = fold_octaves(histogram_of(values))
    expected = np.zeros(64, np.uint64)
    for value in values:
        expected[max(value.bit_length() - 1, 6)] += 1
    assert octaves.tolist() == expected.tolist()


@given(durations)
def test_stored_buckets_come_back_as_they_were_counted(values):
    histogram = histogram_of(values)
    edges = build_bucket_edges_ns().astype(np.int64)
    at = np.flatnonzero(histogram)
    back = gather_histogram(edges[at], edges[at + 1], histogram[at].astype(np.int64))
    assert back.tolist() == histogram.tolist()


@given(durations)
def test_whole_octaves_of_an_older_recording_keep_their_calls(values):
    octaves = fold_octaves(histogram_of(values))
    at = np.flatnonzero(octaves)
    back = gather_histogram(2**at, 2 ** (at + 1), octaves[at].astype(np.int64))
    expected = np.zeros(HIST_BUCKETS)
    for value in values:
        log2 = value.bit_length() - 1
        if log2 < 7:
            expected[0] += 1
        else:
            steps = [1 + (log2 - 7) * 4 + step for step in range(4)]
            inside = [step for step in steps if step < HIST_BUCKETS]
            expected[inside] += 1 / len(inside)
    assert np.allclose(back, expected)


def test_an_empty_histogram_has_no_quantile():
    assert np.isnan(quantiles_ns(np.zeros(HIST_BUCKETS, np.uint64), (0.5,))).all()


def test_sampling_rises_at_the_first_loss_and_falls_only_after_quiet():
    control = SamplingControl()
    assert control.update(0, 0.0) == 1
    assert control.update(5, 0.1) == 4
    assert control.update(0, 0.9) == 16  # nearly full counts like loss
    assert [control.update(0, 0.0) for _ in range(6)] == [16] * 5 + [4]
    assert [control.update(0, 0.0) for _ in range(7)] == [4] * 5 + [1, 1]


def test_sampling_keeps_to_its_budget_and_does_not_swing_about_it():
    control = SamplingControl()
    offered = 40_000
    settings = [control.update(0, 0.0, offered // control.keep_one_in) for _ in range(30)]
    assert settings[:4] == [4, 16, 64, 64]
    assert set(settings[3:]) == {64}


def test_sampling_has_a_ceiling_and_a_fixed_choice_stays():
    control, fixed = SamplingControl(), SamplingControl(fixed=7)
    for _ in range(20):
        control.update(1, 0.0)
        assert fixed.update(1, 1.0) == 7
    assert control.keep_one_in == MAX_KEEP_ONE_IN
