"""An agent with several Fleets: over real HTTP, with collectors that stand in for them."""

from contextlib import ExitStack

import pytest
from tests.support.collector import open_collector

from ingero.agent.health.cache import ThresholdCache
from ingero.agent.health.failover import FailoverTransport
from ingero.agent.health.push_queue import PushQueue
from ingero.agent.health.transport import HttpTransport, TransportSettings
from ingero.otlp.client.endpoint import parse_endpoint
from ingero.otlp.codec import Export, structs
from ingero.otlp.names import Signal
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S

EXPORT = Export.from_tree(Signal.METRICS, structs.MetricsRequest())


@pytest.fixture
def fleets():
    with ExitStack() as stack:
        yield [stack.enter_context(open_collector()) for _ in range(3)]


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def transport(fleets, clock):
    found = FailoverTransport(
        [
            HttpTransport(
                TransportSettings(
                    endpoint=parse_endpoint(fleet.url, is_insecure=True, option="--fleet"),
                    timeout_ns=20 * NS_PER_S,
                )
            )
            for fleet in fleets
        ],
        20 * NS_PER_S,
        clock.mono_ns,
    )
    yield found
    found.close()


def count(fleets):
    return [len(fleet.requests) for fleet in fleets]


def test_a_push_goes_to_the_next_fleet_when_its_own_is_gone_and_stays_there(fleets, transport):
    assert transport.send(EXPORT, 0).is_taken
    fleets[0].stop()
    assert transport.send(EXPORT, 0).is_taken
    fleets[0].start()
    assert transport.send(EXPORT, 0).is_taken
    assert count(fleets) == [1, 2, 0]


def test_a_fleet_that_asks_to_come_again_later_is_passed_over(fleets, transport):
    fleets[0].status, fleets[0].headers = 503, {"Retry-After": "2"}
    assert transport.send(EXPORT, 0).is_taken
    assert count(fleets) == [1, 1, 0]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_fleet_whose_proxy_says_that_it_is_away_is_passed_over(fleets, transport, status):
    fleets[0].status = status
    assert transport.send(EXPORT, 0).is_taken
    assert transport.send(EXPORT, 0).is_taken
    assert count(fleets) == [1, 2, 0]


def test_a_push_that_is_refused_as_wrong_is_not_tried_elsewhere(fleets, transport):
    fleets[0].status = 401
    assert transport.send(EXPORT, 0).is_refused
    assert count(fleets) == [1, 0, 0]


def test_when_none_takes_it_the_last_answer_counts_and_each_was_asked_once(fleets, transport):
    for fleet in fleets:
        fleet.status, fleet.headers = 503, {"Retry-After": "7"}
    reply = transport.send(EXPORT, 0)
    assert (reply.is_taken, reply.retry_after_ns) == (False, 7 * NS_PER_S)
    assert count(fleets) == [1, 1, 1]


def test_no_other_fleet_is_tried_when_the_time_of_a_push_is_over(fleets, transport, clock):
    fleets[0].stop()
    transport._now_ns = iter([0, 20 * NS_PER_S]).__next__
    assert transport.send(EXPORT, 0).is_cut_off
    assert count(fleets) == [0, 0, 0]
    clock.advance(1)
    transport._now_ns = clock.mono_ns
    assert transport.send(EXPORT, 0).is_taken
    assert count(fleets) == [0, 1, 0]


def test_the_threshold_of_a_fleet_that_could_not_take_the_push_is_kept_when_the_others_are_gone(
    fleets, transport, clock
):
    fleets[0].status = 503
    fleets[0].headers = {
        "Retry-After": "2",
        "X-Ingero-Threshold": "0.8",
        "X-Ingero-Quorum-Met": "true",
    }
    fleets[1].stop()
    fleets[2].stop()
    cache = ThresholdCache()
    queue = PushQueue(transport, cache, clock, lambda _ns: None, lambda: 0.0)
    queue.offer(EXPORT)
    queue.drain()
    assert not queue.last.is_taken
    assert cache.cached.value == 0.8
