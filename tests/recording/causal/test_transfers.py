"""Planted counters of connections: which cause is named, with which share, and what is no cause."""

from dataclasses import replace

import pytest

from ingero.model.counters import HostTraffic, Traffic
from ingero.recording.causal.transfers import MIN_SEGMENTS, find_link_causes
from ingero.units import NS_PER_MS, NS_PER_S

HEALTHY = HostTraffic(
    n_connections=2,
    rtt_ns=NS_PER_MS // 5,
    rtt_var_ns=NS_PER_MS // 20,
    min_rtt_ns=NS_PER_MS // 10,
    n_segments=2000,
    n_again=0,
    n_bytes=2_000_000,
    rate=125_000_000,
    busy_ns=NS_PER_S,
    window_ns=NS_PER_S // 10,
)
OTHERS = {"10.0.0.1": HEALTHY, "10.0.0.2": HEALTHY}


def find(errors=(), others=OTHERS, **changes):
    hosts = {**others, "10.0.0.9": replace(HEALTHY, **changes)}
    return find_link_causes(Traffic(hosts, dict(errors)))


def shares(found):
    return {cause.kind: cause.share for cause in found.causes}


def test_packets_that_take_long_to_one_host_are_delay_with_its_address_and_both_times():
    found = find(rtt_ns=40 * NS_PER_MS, rtt_var_ns=NS_PER_MS)
    (cause,) = found.causes
    assert (cause.kind, cause.share) == ("network-delay", pytest.approx(0.9, abs=0.01))
    assert cause.evidence == (
        "to 10.0.0.9: 2 MB over 2 connections, 1 s until they were acknowledged",
        "40 ms there and back, 200 µs to others, 100 µs the least of five minutes",
        "1e+03 Mbit/s acknowledged of late",
    )
    assert found.excess_ns == NS_PER_S
    assert any("tc -s qdisc" in step for step in found.todo)


def test_without_another_host_its_own_least_round_trip_is_the_reference():
    assert shares(find(others={}, rtt_ns=10 * NS_PER_MS))["network-delay"] > 0.8


def test_where_all_hosts_are_as_far_its_own_least_round_trip_is_the_reference_too():
    slow = {"rtt_ns": 40 * NS_PER_MS, "rtt_var_ns": NS_PER_MS}
    far = {host: replace(one, **slow) for host, one in OTHERS.items()}
    assert shares(find(others=far, **slow)) == {"network-delay": pytest.approx(0.891, abs=0.001)}


def test_acknowledgements_that_are_delayed_now_and_then_are_no_delay():
    assert "network-delay" not in shares(find(rtt_ns=23 * NS_PER_MS, rtt_var_ns=17 * NS_PER_MS))


def test_segments_that_are_sent_again_and_timeouts_are_loss_with_what_interfaces_counted():
    found = find({"eth0 receive errors": 7}, n_again=40, timeout_ns=800 * NS_PER_MS)
    (loss,) = found.causes
    assert (loss.kind, loss.share) == ("network-loss", 0.808)
    assert loss.evidence[1:] == (
        "40 of 2000 segments were sent again",
        "800 ms until a timer ran out",
        "7 eth0 receive errors",
    )


def test_window_that_is_full_counts_beyond_what_is_usual_towards_others():
    assert shares(find(window_ns=600 * NS_PER_MS))["window-limited"] == 0.5
    assert "window-limited" not in shares(find(window_ns=150 * NS_PER_MS))
    assert "window-limited" not in shares(find(others={}, window_ns=900 * NS_PER_MS))


def test_healthy_connections_explain_nothing_and_say_what_was_seen():
    found = find()
    assert shares(found) == {"unexplained": 1.0}
    assert "until they were acknowledged" in found.causes[0].evidence[0]
    assert {one.name for one in found.ruled_out} == {
        "packets take long on their way",
        "packets are lost on their way",
        "a full window or send buffer",
    }


@pytest.mark.parametrize(
    ("traffic", "why"),
    [
        (
            Traffic(reason="its connections cannot be read: Operation not permitted"),
            "not permitted",
        ),
        (Traffic({"10.0.0.1": replace(HEALTHY, n_segments=MIN_SEGMENTS - 1)}), "over TCP"),
        (Traffic({}), "over TCP"),
    ],
)
def test_what_cannot_be_seen_is_unexplained_with_the_reason(traffic, why):
    (cause,) = find_link_causes(traffic).causes
    assert (cause.kind, cause.share) == ("unexplained", 1.0)
    assert why in cause.evidence[0]
