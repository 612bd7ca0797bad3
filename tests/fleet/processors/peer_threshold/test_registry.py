"""Thresholds of clusters and cohorts: from pushes to answers, after a restart, and within what computing may cost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fleet.processors.peer_threshold.bench import MS, Bench, event, facts

from ingero.config import parse_model
from ingero.fleet.component import PushContext
from ingero.fleet.processors.peer_threshold.cluster import ClusterState
from ingero.fleet.processors.peer_threshold.config import IngeroConfig
from ingero.fleet.processors.peer_threshold.notifications import Arrival
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


def test_a_followed_cluster_is_learned_by_the_time_of_its_pushes_and_shown_when_it_is_judged():
    bench = Bench(max_clusters=1)
    registry, now_ns = bench.registry, 1000 * NS_PER_S
    bench.host.clock.advance(now_ns - bench.host.clock.mono_ns())
    registry.begin_replay("c", {})

    def replay(node, age_s):
        arrival = Arrival(now_ns - age_s * NS_PER_S, 0)
        registry.take([facts(node)], PushContext(is_replay=True), arrival)

    for age_s in range(900, 0, -5):
        replay("n0", age_s)
        replay("n1", age_s)
        if age_s > 600:
            replay("n2", age_s)
        bench.registry.tick()
    assert registry.clusters == {}
    assert registry.n_nodes == 0
    assert registry.find_answer("c") is None
    assert bench.host.read("ingero_fleet_scores_total") == 0
    bench.push(facts("m0", cluster="judged"))
    assert list(registry.clusters) == ["judged"], "what is followed takes no room"

    registry.end_replay("c", {})
    assert set(registry.clusters["c"].scores.nodes) == {"n0", "n1"}, "n2 is silent for long"
    assert registry.n_nodes == 3
    registry.begin_replay("c", {})
    assert registry.n_nodes == 1
