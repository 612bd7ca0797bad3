"""What a Fleet that takes a cluster over says of episodes and panics: their ends, under the ids they began with."""

import pytest
from tests.fleet.processors.peer_threshold.bench import Bench, event, facts

from ingero.fleet.component import PushContext
from ingero.fleet.processors.peer_threshold.episode_events import (
    build_episodes,
    describe_notification,
)
from ingero.fleet.processors.peer_threshold.notifications import Arrival
from ingero.otlp.codec import iter_log_rows
from ingero.units import NS_PER_S

NODES = [f"n{at}" for at in range(10)]


class OneOfTwo(Bench):
    """A Fleet that reports under a ledger which all of a test share."""

    def __init__(self, states, records, began_s):
        super().__init__()
        self.states, self.records = states, records
        self.host.clock.advance(began_s * NS_PER_S)

    def take_over(self, *pushes_before):
        self.registry.begin_replay("c", dict(self.states))
        arrival = Arrival(self.host.clock.mono_ns(), self.host.clock.wall_ns())
        self.registry.take(list(pushes_before), PushContext(is_replay=True), arrival)
        self.registry.end_replay("c", dict(self.states))
        self.announce()

    def go_on(self, *pushes):
        self.push(*pushes)
        self.wait(12 * NS_PER_S)
        self.announce()

    def announce(self):
        for one in self.registry.notifications.take():
            said = describe_notification(one)
            if any(self.states.get(about) != state for about, state in said.items()):
                for row in iter_log_rows(build_episodes([one])):
                    named = row.attributes
                    self.records.append((
                        named["ingero.episode.incident_id"],
                        named["ingero.episode.state"],
                        named["ingero.episode.start_ns"],
                    ))
                kept = {about: state for about, state in said.items() if state is not None}
                for about in said:
                    self.states.pop(about, None)
                self.states |= kept


def all_at(score):
    return [facts(node, score) for node in NODES]


def check(records, *end_states):
    """One beginning and one end of the same."""
    assert [state for _, state, _ in records] == ["open", *end_states]
    assert len({incident for incident, _, _ in records}) == 1
    assert len({began for _, _, began in records}) == 1


@pytest.mark.parametrize("is_over", [False, True])
def test_a_panic_that_another_fleet_reported_ends_under_the_id_that_it_began_with(is_over):
    states, records = {}, []
    judge = OneOfTwo(states, records, 1000)
    judge.take_over(*all_at(0.9))
    judge.go_on(*all_at(0.5))
    assert [state for _, state, _ in records] == ["open"]
    heir = OneOfTwo(states, records, 1100)  # its own time is another one
    heir.take_over(*all_at(0.9), *(() if is_over else all_at(0.5)))
    heir.go_on(*all_at(0.9))
    check(records, "resolved")


@pytest.mark.parametrize("pushed_before", [0, 1, 2])
def test_an_episode_older_than_what_is_read_again_goes_on_and_ends_under_its_id(pushed_before):
    """An agent's events have a new id each: the first names the episode."""
    states, records = {}, []
    judge = OneOfTwo(states, records, 1000)
    judge.take_over(*all_at(0.9))
    judge.go_on(facts("n3", 0.5), event("n3", event_id="first"))
    assert [record[:2] for record in records] == [("first", "open")]
    heir = OneOfTwo(states, records, 2000)
    rest = [event("n3", event_id="later"), event("n3", 0)]
    heir.take_over(*all_at(0.9), *rest[:pushed_before])
    heir.go_on(*all_at(0.9), *rest[max(pushed_before, 1) :])
    check(records, "resolved")
    third = OneOfTwo(states, records, 3000)
    third.take_over(*all_at(0.9))
    check(records, "resolved")


def test_an_episode_of_a_node_of_which_nothing_is_known_any_more_is_lost_once():
    states, records = {}, []
    judge = OneOfTwo(states, records, 1000)
    judge.take_over(*all_at(0.9))
    judge.go_on(facts("n3", 0.5), event("n3", event_id="first"))
    for began_s in (2000, 3000):
        heir = OneOfTwo(states, records, began_s)
        heir.take_over(*all_at(0.9)[4:])
    check(records, "lost")
