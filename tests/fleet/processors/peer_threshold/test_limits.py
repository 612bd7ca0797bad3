"""Pushes that are refused or only counted: without a score or a name, and over the caps of nodes and clusters."""

import math

import pytest
from tests.fleet.processors.peer_threshold.bench import Bench, facts, told

from ingero.units import NS_PER_S
from ingero.wire.names import MAX_ID_LENGTH


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
