import pytest

from ingero.agent.health.cache import (
    HeaderOutcome,
    ThresholdCache,
    ThresholdHeaders,
    parse_threshold_headers,
)
from ingero.agent.health.poll import read_page


@pytest.mark.parametrize(
    ("threshold", "quorum", "expected"),
    [
        ("0.9214", "true", ThresholdHeaders(HeaderOutcome.HIT, 0.9214, True)),
        ("0.9214", "True", ThresholdHeaders(HeaderOutcome.HIT, 0.9214, True)),
        ("0.9214", "FALSE", ThresholdHeaders(HeaderOutcome.HIT, 0.9214, False)),
        (" 0.1 ", "true", ThresholdHeaders(HeaderOutcome.HIT, 0.1, True)),
        ("0.99", "true", ThresholdHeaders(HeaderOutcome.HIT, 0.99, True)),
        ("9.5e-1", "true", ThresholdHeaders(HeaderOutcome.HIT, 0.95, True)),
    ],
)
def test_good_headers_are_read(threshold, quorum, expected):
    assert parse_threshold_headers(threshold, quorum) == expected  # vector 17


@pytest.mark.parametrize(("threshold", "quorum"), [("0.9", "yes"), ("0.9", "1")])
def test_a_quorum_that_is_no_truth_value_is_rejected(threshold, quorum):
    assert parse_threshold_headers(threshold, quorum).outcome is HeaderOutcome.REJECTED


@pytest.mark.parametrize(
    "threshold",
    [
        ".05",
        ".999",
        "0",
        "1.0",
        "-.5",
        "1.5",
        "1e400",
        "NaN",
        "Inf",
        "abc",
        "0.9,0.8",
        "0_9",
        "0x1",
    ],
)
def test_a_threshold_outside_its_range_is_rejected(threshold):
    assert parse_threshold_headers(threshold, "true").outcome is HeaderOutcome.REJECTED


@pytest.mark.parametrize(
    ("threshold", "quorum"),
    [(None, None), ("0.9", None), (None, "true"), ("0.9", " "), ("", "true")],
)
def test_one_header_alone_is_none(threshold, quorum):
    assert parse_threshold_headers(threshold, quorum) == ThresholdHeaders(HeaderOutcome.MISS)


@pytest.mark.parametrize("pair", [(None, None), ("0.9", "true"), ("0", "x")])
def test_panic_outranks_every_threshold(pair):
    headers = parse_threshold_headers(*pair, "true")
    assert headers == ThresholdHeaders(HeaderOutcome.WITHHELD)
    cache = ThresholdCache()
    cache.record_response(parse_threshold_headers("0.9", "true"), 5)
    cache.record_response(headers, 6)
    assert cache.cached == (None, False, 6)
    assert (cache.is_withheld, cache.is_piggybacked) == (True, True)
    cache.record_response(parse_threshold_headers("0.9", "true"), 7)
    assert not cache.is_withheld


def test_the_page_says_panic_too():
    assert read_page(0.0, quorum_met=False, panic=True).outcome is HeaderOutcome.WITHHELD
    assert read_page(0.0, quorum_met=False).outcome is HeaderOutcome.MISS


def test_the_last_good_value_stays_when_a_later_answer_has_none():
    cache = ThresholdCache()
    cache.record_response(parse_threshold_headers("0.9", "true"), 5)
    cache.record_response(parse_threshold_headers(None, None), 6)
    cache.record_response(parse_threshold_headers("0", "true"), 7)
    assert cache.cached == (0.9, True, 5)
    assert cache.counts == (1, 1, 1)


def test_only_a_usable_value_puts_the_poller_to_sleep():
    cache = ThresholdCache()
    seen = []
    for threshold in ("0.9", "0", "0.9", None):
        cache.record_response(parse_threshold_headers(threshold, "true"), 0)
        seen.append(cache.is_piggybacked)
    assert seen == [True, False, True, False]


def test_a_poll_fills_the_cache_and_does_not_put_itself_to_sleep():
    cache = ThresholdCache()
    cache.record_poll(ThresholdHeaders(HeaderOutcome.HIT, 0.8, True), 3)
    assert cache.cached == (0.8, True, 3)
    assert not cache.is_piggybacked


def test_three_failed_pushes_in_a_row_are_unreachable_and_one_success_ends_it():
    cache, seen = ThresholdCache(), []
    for is_taken in (False, False, True, False, False, False, False, True):
        cache.note_push(is_taken=is_taken)
        seen.append(cache.is_reachable)
    assert seen == [True, True, True, True, True, False, False, True]
