"""Episodes of stragglers from the first event to their end, and what holds while most of a cluster falls."""

import pytest
from tests.fleet.processors.peer_threshold.bench import MS, Bench, event, facts, told

from ingero.fleet.component import WITHHELD
from ingero.units import NS_PER_S


def test_many_events_with_new_ids_are_one_episode_closed_by_zero():
    bench = Bench()
    bench.push(facts("n1", 0.4))
    for index in range(20):
        bench.push(event("n1", 1, event_id=f"id-{index}", score=0.4, threshold=0.9))
    (episode,) = bench.episodes()
    assert (episode.first.event_id, episode.n_events, episode.outcome) == ("id-0", 20, None)
    assert episode.last.score == 0.4
    bench.push(event("n1", 0))
    bench.push(event("n1", 0))
    (episode,) = bench.episodes()
    assert episode.outcome == "resolved"
    assert bench.host.read("ingero_fleet_straggler_episodes_total", outcome="resolved") == 1


@pytest.mark.parametrize("state", ["idle", "calibrating"])
def test_node_that_stops_being_judged_closes_its_episode(state):
    bench = Bench()
    bench.push(facts("n1", 0.4))
    bench.push(event("n1"))
    bench.push(facts("n1", 0.4, state=state))
    (episode,) = bench.episodes()
    assert episode.outcome == "state_change"


def test_straggler_that_falls_silent_is_open_until_its_ttl_and_then_lost():
    bench = Bench(push_interval="1s", ttl_multiplier=5)
    bench.push(facts("other", 0.9))
    bench.push(facts("n1", 0.4))
    bench.push(event("n1"))
    for _ in range(4):
        bench.wait(NS_PER_S)
        bench.push(facts("other", 0.9))
    assert bench.episodes()[0].outcome is None
    bench.wait(2 * NS_PER_S)
    assert bench.episodes()[0].outcome == "lost"
    assert bench.host.read("ingero_fleet_straggler_episodes_total", outcome="lost") == 1


def test_event_of_an_unknown_node_is_counted_and_opens_nothing():
    bench = Bench()
    bench.push(event("ghost"))
    assert bench.host.read("ingero_fleet_straggler_events_dropped_total") == 1
    assert not bench.registry.clusters


def test_when_most_of_a_cluster_falls_at_once_the_bar_holds_and_nobody_is_a_straggler():
    bench = Bench()
    for index in range(10):
        bench.push(facts(f"n{index}", 0.9))
    before = bench.registry.find_answer("c").threshold
    answers = [bench.push(facts(f"n{index}", 0.5))[1] for index in range(10)]
    state = bench.registry.clusters["c"].state
    assert state.in_panic
    assert not state.is_straggler.any()
    assert state.find_threshold() == before, "held"
    assert answers[5:] == [WITHHELD] * 5, "and told to nobody"
    assert bench.registry.find_answer("c") == WITHHELD
    assert bench.registry.find_answer("c", "aa", "n3") == WITHHELD


def test_panic_is_one_event_of_the_cluster_and_no_episode_of_a_node():
    bench = Bench()
    for index in range(10):
        bench.push(facts(f"n{index}", 0.9))
    assert told(bench) == [("quorum", True)]
    for index in range(10):
        bench.push(facts(f"n{index}", 0.5))
        bench.push(event(f"n{index}"))  # agents that judged themselves by the bar they had
    bench.wait(30 * NS_PER_S)
    assert told(bench) == [("panic", True)]
    assert not bench.registry.clusters["c"].episodes.list_announced()
    for index in range(10):
        bench.push(facts(f"n{index}", 0.9))
        bench.push(event(f"n{index}", 0))
    bench.wait(NS_PER_S)
    assert told(bench) == [("panic", False)]
    began, ended = list(bench.registry.notifications.events)[1:]
    assert ended.began_wall_ns == began.wall_ns
    assert (began.values["under_threshold"], began.values["threshold"]) == (6, 0.85)


def test_a_straggler_is_told_once_its_peers_were_heard_and_shown_until_its_end():
    bench = Bench()
    for index in range(6):
        bench.push(facts(f"n{index}", 0.9))
    bench.host.clock.advance(MS)
    bench.push(facts("n0", 0.5))
    bench.push(event("n0"))
    bench.registry.notifications.take()
    bench.wait(2 * NS_PER_S)
    assert told(bench) == [], "the others may have fallen too"
    for index in range(1, 6):
        bench.push(facts(f"n{index}", 0.9))
    bench.wait(NS_PER_S)
    assert told(bench) == [("n0", True)]
    assert bench.registry.clusters["c"].episodes.list_announced() == ["n0"]
    bench.push(event("n0", 0))
    assert told(bench) == [("n0", False)]
    assert bench.registry.clusters["c"].episodes.list_announced() == []


def test_a_node_still_a_straggler_after_the_panic_is_told_then():
    bench = Bench()
    for score in (0.9, 0.5):
        for index in range(10):
            bench.push(facts(f"n{index}", score))
            bench.host.clock.advance(MS)
    bench.push(event("n0"))
    bench.registry.notifications.take()
    for index in range(1, 10):
        bench.push(facts(f"n{index}", 0.9))
    assert not bench.registry.clusters["c"].state.in_panic
    bench.push(event("n0"))
    bench.wait(11 * NS_PER_S)
    assert told(bench) == [("panic", False), ("n0", True)]


def test_older_agents_can_be_told_the_lowest_bar_instead_of_none():
    bench = Bench(panic_answer="floor")
    for score in (0.9, 0.5):
        for index in range(10):
            _, answer = bench.push(facts(f"n{index}", score))
    assert (answer.threshold, answer.quorum_met) == (0.10, False)
