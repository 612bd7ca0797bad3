"""What becomes of pushes: bars, refusals, cohorts, episodes, expiry."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingero.config import parse_model
from ingero.fleet.component import WITHHELD, PushContext
from ingero.fleet.processors.peer_threshold.cluster import ClusterState
from ingero.fleet.processors.peer_threshold.config import IngeroConfig
from ingero.fleet.processors.peer_threshold.notifications import Arrival, ClusterEvent
from ingero.fleet.processors.peer_threshold.registry import ClusterRegistry
from ingero.fleet.processors.peer_threshold.scores import (
    ClusterScores,
    Cohort,
    Report,
    ReportedState,
)
from ingero.fleet.processors.peer_threshold.updates import SMALL_CLUSTER
from ingero.testing.host import ManualHost
from ingero.units import NS_PER_S
from ingero.wire.names import MAX_ID_LENGTH
from ingero.wire.push import PushFacts, ResourceFacts

MS = 1_000_000


def facts(node="n1", score=0.9, *, cluster="c", state="active", cohort="", workload="", **more):
    resource = ResourceFacts(node, cluster, 0, -1, "", "")
    return PushFacts(
        resource, health_score=score, state=state, cohort=cohort, workload_type=workload, **more
    )


def event(node="n1", value=1, *, cluster="c", event_id="e", **attributes):
    resource = ResourceFacts(node, cluster, 0, -1, "", "")
    return PushFacts(
        resource, straggler_event=value, event_id=event_id, event_attributes=attributes
    )


class Bench:
    """A registry with a host, and shorthands; thresholds do not wait for who is still to come unless a test says so."""

    def __init__(self, **config):
        self.host = ManualHost()
        config["quorum"] = {"settle_time": "0s"} | config.get("quorum", {})
        self.registry = ClusterRegistry(
            parse_model(IngeroConfig, config), self.host.clock, self.host.meter
        )

    def push(self, *pushes, hint=""):
        context = PushContext(cluster_hint=hint)
        clock = self.host.clock
        self.registry.take(pushes, context, Arrival(clock.mono_ns(), clock.wall_ns()))
        return context, self.registry.find_answer(
            context.cluster_id or "", context.cohort, context.node_id
        )

    def wait(self, duration_ns):
        """Move time on, ticking every 200 ms."""
        for _ in range(duration_ns // (200 * MS)):
            self.host.clock.advance(200 * MS)
            self.registry.tick()

    def dropped(self, reason):
        return self.host.read("ingero_fleet_scores_dropped_total", reason=reason)

    def episodes(self, cluster="c"):
        return self.registry.clusters[cluster].episodes.list_episodes()


def test_fifth_active_node_is_answered_with_a_threshold_that_knows_it():
    bench = Bench()
    for index in range(4):
        assert bench.push(facts(f"n{index}", 0.94))[1] is None
    answer = bench.push(facts("n4", 0.94))[1]
    assert answer is not None
    assert answer.quorum_met
    assert answer.threshold == pytest.approx(0.89)


def test_fifty_nodes_with_equal_scores_have_no_straggler():
    bench = Bench()
    for index in range(50):
        _, answer = bench.push(facts(f"n{index}", 0.94))
    assert answer.threshold < 0.94
    assert not bench.registry.clusters["c"].state.is_straggler.any()


def test_calibrating_and_idle_nodes_are_known_and_do_not_vote():
    bench = Bench()
    for index in range(5):
        bench.push(facts(f"c{index}", 0.27, state="calibrating"))
        bench.push(facts(f"i{index}", 0.0, state="idle"))
        bench.push(facts(f"o{index}", 0.1, state="from the future"))
    assert bench.push(facts("a0", 0.9))[1] is None
    for index in range(1, 5):
        _, answer = bench.push(facts(f"a{index}", 0.9))
    assert answer.threshold == pytest.approx(0.85)
    assert bench.registry.n_nodes == 20


def test_below_quorum_the_last_bar_is_told_for_one_ttl_and_then_none():
    bench = Bench(push_interval="1s", ttl_multiplier=5)
    for index in range(5):
        bench.push(facts(f"n{index}", 0.9))
    bench.wait(4 * NS_PER_S)
    for index in range(4):
        bench.push(facts(f"n{index}", 0.9))
    bench.wait(2 * NS_PER_S)  # the fifth node has expired
    _, answer = bench.push(facts("n0", 0.9))
    assert answer is not None
    assert not answer.quorum_met
    assert answer.threshold == pytest.approx(0.85)
    for _ in range(6):
        bench.wait(NS_PER_S)
        for index in range(4):
            _, answer = bench.push(facts(f"n{index}", 0.9))
    assert answer is None


def test_two_cohorts_are_told_two_bars_and_a_cohort_of_one_the_clusters():
    bench = Bench()
    for index in range(5):
        bench.push(facts(f"n{index}", 0.6))
    for index in range(6):
        bench.push(facts(f"a{index}", 0.9, cohort="aa"))
        bench.push(facts(f"b{index}", 0.7, cohort="bb"))
    high = bench.push(facts("a0", 0.9, cohort="aa"))[1]
    low = bench.push(facts("b0", 0.7, cohort="bb"))[1]
    alone = bench.push(facts("x", 0.8, cohort="cc"))[1]
    cluster = bench.registry.find_answer("c")
    assert high.threshold == pytest.approx(0.85)
    assert low.threshold == pytest.approx(0.65)
    assert alone == cluster
    assert cluster.threshold == pytest.approx(0.55)


def test_five_nodes_with_five_hashes_share_the_clusters_bar():
    bench = Bench()
    for index in range(5):
        _, answer = bench.push(facts(f"n{index}", 0.9, cohort=f"{index:016x}"))
    assert answer.threshold == pytest.approx(0.85)


def test_one_hash_with_two_workloads_is_two_cohorts():
    bench = Bench()
    for index in range(5):
        bench.push(facts(f"a{index}", 0.9, cohort="aa", workload="train"))
        bench.push(facts(f"b{index}", 0.5, cohort="aa", workload="serve"))
    registry = bench.registry
    assert registry.find_answer("c", "aa", "a0").threshold == pytest.approx(0.85)
    assert registry.find_answer("c", "aa", "b0").threshold == pytest.approx(0.45)
    assert registry.find_answer("c", "aa") == registry.find_answer("c")


def test_event_push_without_a_score_is_answered_for_the_nodes_own_cohort():
    bench = Bench()
    for index in range(5):
        bench.push(facts(f"a{index}", 0.9, cohort="aa"))
        bench.push(facts(f"b{index}", 0.5, cohort="bb"))
    _, answer = bench.push(event("b0"))
    assert answer.threshold == pytest.approx(0.45)


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (math.nan, "not_finite"),
        (math.inf, "not_finite"),
        (1.5, "out_of_range"),
        (-0.1, "out_of_range"),
    ],
)
def test_score_that_is_no_score_is_counted_and_dropped(score, reason):
    bench = Bench()
    context, _ = bench.push(facts("n1", score))
    assert bench.dropped(reason) == 1
    assert context.n_rejected == 1
    assert "health score" in context.rejected_why
    assert bench.registry.n_nodes == 0


def test_sender_without_a_name_is_counted_by_what_is_missing():
    bench = Bench()
    bench.push(facts("", 0.9))
    bench.push(facts("n", 0.9, cluster=""))
    bench.push(facts("n" * (MAX_ID_LENGTH + 1), 0.9))
    bench.push(facts("n", 0.9, cohort="h" * (MAX_ID_LENGTH + 1)))
    assert bench.dropped("no_node_id") == 1
    assert bench.dropped("no_cluster_id") == 1
    assert bench.dropped("id_too_long") == 2
    assert bench.registry.n_nodes == 0


def test_hint_names_the_cluster_only_when_the_body_does_not():
    bench = Bench()
    context, _ = bench.push(facts("n", 0.9, cluster=""), hint="hinted")
    assert context.cluster_id == "hinted"
    context, _ = bench.push(facts("n", 0.9, cluster="body"), hint="hinted")
    assert context.cluster_id == "body"
    assert set(bench.registry.clusters) == {"hinted", "body"}
    assert bench.host.read("ingero_fleet_cluster_mismatch_total") == 1


def test_nodes_over_the_cap_are_refused_and_known_ones_still_served():
    bench = Bench(max_expected_nodes=6, quorum={"statistical_min": 5})
    for index in range(10):
        bench.push(facts(f"n{index}", 0.9))
    assert bench.registry.n_nodes == 6
    assert bench.dropped("node_cap") == 4
    _, answer = bench.push(facts("n0", 0.8))
    assert answer is not None
    assert bench.dropped("node_cap") == 4


def test_a_cluster_at_its_cap_does_not_keep_the_nodes_of_others_out():
    bench = Bench(max_expected_nodes=6)
    for index in range(20):
        bench.push(facts(f"invented{index}", 0.9, cluster="a"))
    for index in range(5):
        _, answer = bench.push(facts(f"n{index}", 0.9, cluster="b"))
    assert answer is not None
    assert bench.registry.clusters["a"].scores.n_nodes == 6
    assert bench.registry.clusters["b"].scores.n_nodes == 5
    assert bench.dropped("node_cap") == 14


def test_total_cap_counts_nodes_of_every_cluster_and_frees_places_on_expiry():
    bench = Bench(max_total_nodes=2, push_interval="1s", ttl_multiplier=2)
    bench.push(facts("n", 0.9, cluster="a"))
    bench.push(facts("n", 0.9, cluster="b"))
    bench.push(facts("n", 0.9, cluster="c"))
    assert set(bench.registry.clusters) == {"a", "b"}
    assert bench.dropped("total_cap") == 1
    bench.wait(4 * NS_PER_S)
    assert bench.registry.n_nodes == 0
    assert not bench.registry.clusters
    bench.push(facts("n", 0.9, cluster="c"))
    assert set(bench.registry.clusters) == {"c"}


def told(bench):
    """What is to be announced, as (kind, began)."""
    return [
        (news.kind.value, news.is_on)
        if isinstance(news, ClusterEvent)
        else (news.node_id, news.outcome is None)
        for news in bench.registry.notifications.take()
    ]


def test_a_cap_is_news_when_it_begins_to_refuse_and_when_it_ends_not_with_each_push():
    bench = Bench(max_expected_nodes=2, push_interval="1s")
    for index in range(50):
        bench.push(facts(f"n{index}", 0.9))
    assert told(bench) == [("node_cap", True)]
    bench.wait(4 * NS_PER_S)
    assert told(bench) == [("node_cap", False)]


def test_coverage_of_a_cluster_is_measured_against_its_own_size_where_that_is_given():
    bench = Bench(expected_nodes={"small": 6})
    for index in range(5):
        bench.push(facts(f"n{index}", 0.9, cluster="small"))
        bench.push(facts(f"n{index}", 0.9, cluster="other"))
    assert not bench.registry.clusters["small"].state.coverage_low
    assert bench.registry.clusters["other"].state.coverage_low


def test_clusters_over_the_cap_are_refused():
    bench = Bench(max_clusters=3)
    for index in range(5):
        bench.push(facts("n", 0.9, cluster=f"c{index}"))
    assert len(bench.registry.clusters) == 3
    assert bench.dropped("cluster_cap") == 2


def test_gateway_push_of_several_nodes_is_taken_and_answered_for_the_cluster():
    bench = Bench()
    context, answer = bench.push(*(facts(f"n{index}", 0.9) for index in range(5)))
    assert (context.cluster_id, context.node_id) == ("c", None)
    assert answer.threshold == pytest.approx(0.85)
    context, answer = bench.push(facts("n", 0.9, cluster="c"), facts("n", 0.9, cluster="d"))
    assert context.cluster_id == ""
    assert answer is None


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


FIRST = (0.9, 0.8, 0.7, 0.95, 0.85)


def test_after_a_restart_the_first_threshold_told_is_that_of_the_whole_cluster():
    bench = Bench(quorum={"settle_time": "10s"})
    scores = [*FIRST, *[0.93] * 15]
    told = []
    for second in range(40):
        for node in range(second % 10, 20, 10):
            answer = bench.push(facts(f"n{node}", scores[node]))[1]
            told += [answer.threshold] if answer else []
        bench.wait(NS_PER_S)
        if second < 10:
            assert not told
        if second == 20:
            assert told
    assert told[0] == pytest.approx(0.88)
    assert {round(one, 3) for one in told} == {0.88}


def test_nobody_waits_for_a_cluster_that_was_heard_twice():
    bench = Bench(quorum={"settle_time": "10s"})
    answers = [bench.push(facts(f"n{index % 6}", 0.9))[1] for index in range(12)]
    assert answers[:11] == [None] * 11
    assert answers[11].threshold == pytest.approx(0.85)


def test_the_wait_ends_without_a_push():
    bench = Bench(quorum={"settle_time": "10s"})
    for index in range(5):
        bench.push(facts(f"n{index}", 0.9))
    bench.wait(9 * NS_PER_S)
    assert bench.registry.find_answer("c") is None
    bench.wait(2 * NS_PER_S)
    assert bench.registry.find_answer("c").threshold == pytest.approx(0.85)


def test_nodes_that_come_and_go_below_quorum_leave_nothing_behind():
    bench = Bench(push_interval="1s", ttl_multiplier=2)
    bench.push(facts("n", 0.9))
    for index in range(20):
        bench.push(facts(f"i{index}", 0.1, state="idle"))
        bench.push(facts("n", 0.9))
        bench.wait(NS_PER_S)
    assert len(bench.registry.clusters["c"].first_reports._seen_at) <= 4


def test_other_settings_apply_to_the_scores_that_are_known():
    bench = Bench(threshold={"min_margin": 0.05, "ema_alpha": 1.0})
    for index in range(6):
        bench.push(facts(f"n{index}", 0.9))
    settings = {"threshold": {"min_margin": 0.2, "ema_alpha": 1.0}}
    bench.registry.configure(parse_model(IngeroConfig, settings))
    bench.wait(10 * NS_PER_S)
    assert bench.registry.find_answer("c").threshold == pytest.approx(0.7)


@pytest.fixture
def computed(monkeypatch):
    """The clusters whose thresholds were computed, in order."""
    found = []
    recompute = ClusterState.recompute

    def count(cluster, now_ns):
        found.append(cluster.cluster_id)
        recompute(cluster, now_ns)

    monkeypatch.setattr(ClusterState, "recompute", count)
    return found


def test_large_cluster_is_computed_at_most_once_per_interval(computed):
    bench = Bench()
    for index in range(SMALL_CLUSTER + 50):
        bench.push(facts(f"n{index:04}", 0.9))
    state = bench.registry.clusters["c"]
    computed.clear()
    for index in range(SMALL_CLUSTER + 50):
        bench.push(facts(f"n{index:04}", 0.8))
    assert len(computed) <= 1
    assert state.is_dirty
    bench.wait(200 * MS)
    assert not state.is_dirty
    assert float(state.state.levels.median[0]) == 0.8


def test_threshold_follows_the_clock_not_the_number_of_recomputes():
    once, often = Bench(), Bench()
    for bench in (once, often):
        for index in range(5):
            bench.push(facts(f"n{index}", 0.9))
        for index in range(5):
            bench.push(facts(f"n{index}", 0.88))
    for _ in range(20):
        once.host.clock.advance(NS_PER_S // 2)
        for bench in (often,):
            bench.host.clock.advance(NS_PER_S // 2)
            bench.push(facts("n0", 0.88 + 1e-12 * _))
    _, first = once.push(facts("n0", 0.88 + 1e-11))
    _, second = often.push(facts("n0", 0.88 + 1e-11))
    assert first.threshold == pytest.approx(second.threshold, abs=2e-6)


def test_node_that_changes_its_cohort_with_every_push_leaves_nothing_behind():
    bench = Bench()
    for index in range(1000):
        bench.push(facts("n1", 0.9, cohort=f"{index:016x}"))
    assert len(bench.registry.clusters["c"].scores.cohorts) <= 16


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdefgh"),
            st.floats(0, 1),
            st.sampled_from(list(ReportedState)),
            st.sampled_from(["", "x", "y", "z"]),
            st.integers(0, 30),
        ),
        max_size=80,
    )
)
def test_columns_agree_with_a_dictionary(steps):
    scores, slow, now_ns = ClusterScores(), {}, 0
    for node, score, state, cohort, gap in steps:
        now_ns += gap
        gone = scores.expire(now_ns - 40)
        expected_gone = {name for name, row in slow.items() if row[3] < now_ns - 40}
        assert set(gone) == expected_gone
        for name in expected_gone:
            del slow[name]
        scores.put(Report(node, score, state, Cohort(cohort, "")), now_ns)
        slow[node] = (score, state, cohort, now_ns)
    found = {
        node: (
            float(scores.scores[row]),
            ReportedState(int(scores.states[row])),
            scores.cohorts[int(scores.cohort_idx[row])].cgroup_path_hash,
            int(scores.seen_ns[row]),
        )
        for row, node in enumerate(scores.nodes)
    }
    assert found == slow
    assert len(scores.cohort_names) == len(scores.cohorts)
    assert np.all(scores.cohort_idx < max(1, len(scores.cohorts)))
    for node, row in slow.items():
        assert scores.find_cohort_of(node) == Cohort(row[2], "")


class CostlyClock:
    """Each reading costs a millisecond, as if computing took that long."""

    def __init__(self):
        self.now_ns = NS_PER_S

    def mono_ns(self):
        self.now_ns += MS
        return self.now_ns

    def wall_ns(self):
        return self.now_ns


def test_computing_in_pushes_stops_when_it_takes_more_than_its_share_and_the_tick_catches_up(
    computed,
):
    clock = CostlyClock()
    registry = ClusterRegistry(parse_model(IngeroConfig, {}), clock, ManualHost().meter)
    for index in range(2000):
        push = facts(f"n{index % 5}", 0.5 + index / 10_000)
        registry.take([push], PushContext(), Arrival(clock.mono_ns(), 0))
    state = registry.clusters["c"]
    assert 200 <= len(computed) < 700
    assert state.is_dirty
    clock.now_ns += 200 * MS
    registry.tick()
    assert not state.is_dirty
