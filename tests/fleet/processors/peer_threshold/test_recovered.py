"""Episodes whose end the agent never said: it started again, or its word was lost."""

import pytest
from tests.fleet.processors.peer_threshold.bench import Bench, event, facts

from ingero.units import NS_PER_S

PEERS = [f"n{at}" for at in range(1, 8)]


class OneFell(Bench):
    """Eight nodes, of which n0 is in an episode; the bar is 0.85."""

    def __init__(self, peers=PEERS, **config):
        super().__init__(**config)
        self.peers = peers
        self.push(*(facts(node, 0.9) for node in peers), facts("n0", 0.9))
        self.push(facts("n0", 0.4))
        self.push(event("n0"))

    def go_on(self, *scores, also=()):
        """A push interval for each score of n0, whose peers go on as they were."""
        for score in scores:
            self.wait(10 * NS_PER_S)
            self.push(*(facts(node, 0.9) for node in self.peers), facts("n0", score), *also)

    @property
    def outcome(self):
        (episode,) = self.episodes()
        return episode.outcome


def test_three_intervals_of_good_scores_without_a_word_of_the_agent_end_an_episode():
    bench = OneFell()
    bench.go_on(0.9, 0.9, 0.9)
    assert bench.outcome is None
    bench.go_on(0.9)
    assert bench.outcome == "resolved"
    assert bench.registry.clusters["c"].episodes.list_announced() == []
    assert bench.host.read("ingero_fleet_straggler_episodes_total", outcome="resolved") == 1


def test_a_straggler_that_says_so_still_is_in_its_episode_whatever_its_score():
    bench = OneFell()
    bench.go_on(*[0.9] * 8, also=[event("n0")])
    assert bench.outcome is None
    bench.go_on(*[0.9] * 4)
    assert bench.outcome == "resolved"


@pytest.mark.parametrize("score", [0.4, 0.86])
def test_scores_under_the_bar_or_barely_over_it_end_nothing(score):
    bench = OneFell()
    bench.go_on(*[score] * 8)
    assert bench.outcome is None
    bench.go_on(0.9, 0.9, score, 0.9, 0.9, 0.9)
    assert bench.outcome is None, "the wait starts again"


def test_nothing_is_concluded_without_a_quorum():
    bench = OneFell(PEERS[:3])
    bench.go_on(*[0.9] * 8)
    assert bench.outcome is None


@pytest.mark.parametrize("answer", ["withhold", "floor"])
def test_nothing_is_concluded_in_panic(answer):
    bench = OneFell(panic_answer=answer)
    for _ in range(8):
        bench.wait(10 * NS_PER_S)
        bench.push(*(facts(node, 0.4) for node in PEERS), facts("n0", 0.9))
    assert bench.registry.clusters["c"].state.in_panic
    assert bench.outcome is None


def test_a_node_is_measured_by_the_bar_of_its_cohort():
    bench = Bench()
    fast, slow = [f"f{at}" for at in range(1, 7)], [f"s{at}" for at in range(9)]

    def push_all(score):
        bench.push(*(facts(node, 0.9, cohort="fast") for node in fast))
        bench.push(*(facts(node, 0.5, cohort="slow") for node in slow))
        bench.push(facts("f0", score, cohort="fast"))

    push_all(0.9)
    push_all(0.7)
    bench.push(event("f0"))
    for _ in range(8):
        bench.wait(10 * NS_PER_S)
        push_all(0.7)
    (episode,) = bench.episodes()
    assert bench.registry.find_answer("c").threshold < 0.6, "of the whole cluster"
    assert episode.outcome is None, "well over that bar, and not over its own"
