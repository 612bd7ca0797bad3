"""What arrives late is of the time when it happened, whatever came with it or before it."""

import numpy as np
import pytest
from tests.echo.ingest.test_rows import NOW_NS, gauge, metrics, read

from ingero.echo.db.rows import Rows, merge_nodes
from ingero.echo.ingest.origin import to_timestamp
from ingero.echo.queries.catalog import QUERIES
from ingero.echo.queries.context import QueryContext
from ingero.model.collectives import COLLECTIVE_OP, ClockKind, CollectiveOp, CollectiveRun, Rank
from ingero.otlp.codec import Export, structs
from ingero.otlp.names import Signal
from ingero.serving.query import get_query
from ingero.units import NS_PER_S
from ingero.wire.collectives import MAX_LATE_NS, build_collectives

HOUR_NS = 3600 * NS_PER_S
DAY_NS = 24 * HOUR_NS
NODE = {"ingero.cluster.id": "c1", "ingero.node.id": "n1"}


def batch(rank, at_ns, late_ns=0):
    """What one rank pushes at a time: the other one waits for the first a second in each of ten operations."""
    ops = np.zeros(10, COLLECTIVE_OP)
    ops["seq"] = np.arange(10)
    ops["entry_ns"] = (1 + np.arange(10)) * NS_PER_S
    ops["inside_ns"] = NS_PER_S if rank else NS_PER_S // 1000
    ops["own_ns"] = NS_PER_S // 100
    ops["op"] = CollectiveOp.ALL_REDUCE
    run = CollectiveRun(Rank("c1", f"n{rank}", rank), "a" * 16, rank, 2, ClockKind.DEVICE, ops)
    return build_collectives([run], at_ns, late_ns=late_ns).root.resource_logs


def together(*batches):
    return Export.from_tree(
        Signal.LOGS, structs.LogsRequest([part for one in batches for part in one])
    )


@pytest.fixture
def ask(store):
    def ask(name, **args):
        query = get_query(QUERIES, name)
        with store.open_reader(60 * NS_PER_S) as reader:
            return query.run(QueryContext(reader, None, NOW_NS, None), query.args(**args)).rows

    return ask


def test_collectives_that_waited_for_fleet_are_of_when_they_happened(take, ask):
    late = [batch(rank, NOW_NS, late_ns=3 * HOUR_NS) for rank in (0, 1)]
    take(together(*late))
    take(together(*[batch(rank, NOW_NS + 1, late_ns=3 * HOUR_NS + 1) for rank in (0, 1)]))  # again
    for name in ("fleet.cluster.collective_skew", "fleet.cluster.blame_chain"):
        assert ask(name, time_window="10m") == []
    then = "2025-12-31T21:05:00Z"
    (_, waited) = ask("fleet.cluster.collective_skew", time_window="10m", until=then)
    assert (waited.node_id, waited.n_ops) == ("n1", 10)
    (blamed,) = ask("fleet.cluster.blame_chain", time_window="10m", until=then)
    assert (blamed.culprit_node, blamed.victim) == ("n0", "n1")


@pytest.mark.parametrize(
    ("pushed_ns", "late_ns", "expected_ns"),
    [
        (NOW_NS - HOUR_NS, 0, NOW_NS - HOUR_NS),
        (NOW_NS, HOUR_NS, NOW_NS - HOUR_NS),
        (0, HOUR_NS, NOW_NS - HOUR_NS),
        (NOW_NS + 2 * DAY_NS, HOUR_NS, NOW_NS - HOUR_NS),
        (NOW_NS + 2 * DAY_NS, 0, NOW_NS),
        (NOW_NS, MAX_LATE_NS, NOW_NS),
    ],
)
def test_each_batch_has_the_time_of_its_own_record_and_arrivals_where_that_cannot_be(
    store, take, pushed_ns, late_ns, expected_ns
):
    take(together(batch(0, pushed_ns, late_ns), batch(1, NOW_NS)))
    assert read(store, "SELECT DISTINCT node_id, epoch_ns(ts) FROM collectives ORDER BY 1") == [
        ("n0", expected_ns),
        ("n1", NOW_NS),
    ]


def health(state, at_ns, score=1.0):
    return gauge("ingero.node.health_score", score, at_ns, **{"ingero.node.state": state})


def info(at_ns):
    return gauge("ingero.node.info", 1, at_ns, **{"ingero.gpu_model": "H100"})


def seen(store):
    return read(store, "SELECT state, gpu_model, epoch_ns(ts) FROM nodes")


def test_a_late_report_of_a_node_turns_nothing_back_and_fills_what_is_not_known(store, take):
    take(metrics(health("active", NOW_NS)))
    take(metrics(health("idle", NOW_NS - 3 * HOUR_NS), info(NOW_NS - 3 * HOUR_NS)))
    assert seen(store) == [("active", "H100", NOW_NS)]
    take(metrics(health("calibrating", NOW_NS)))
    assert seen(store) == [("calibrating", "H100", NOW_NS)]


def test_a_sender_a_little_behind_another_one_is_still_believed(store, take):
    take(metrics(health("active", NOW_NS - 60 * NS_PER_S), info(NOW_NS)))
    take(metrics(health("idle", NOW_NS - 30 * NS_PER_S)))
    assert seen(store) == [("idle", "H100", NOW_NS)]


@pytest.mark.parametrize("order", [1, -1])
def test_of_several_points_in_one_request_the_newest_is_the_nodes_state(store, take, order):
    points = [health("idle", NOW_NS - HOUR_NS), health("active", NOW_NS)][::order]
    take(metrics(*points, gauge("m", 1.0, NOW_NS - 2 * HOUR_NS)))
    assert seen(store) == [("active", None, NOW_NS)]


def test_of_several_resources_in_one_request_the_newest_says_what_the_node_is(store, take):
    parts = [
        metrics(gauge("m", 1.0, at_ns), resource=NODE | {"ingero.world_size": size}).root
        for size, at_ns in ((64, NOW_NS - HOUR_NS), (128, NOW_NS), (32, NOW_NS - 2 * HOUR_NS))
    ]
    resources = [one for part in parts for one in part.resource_metrics]
    take(Export.from_tree(Signal.METRICS, structs.MetricsRequest(resources)))
    assert read(store, "SELECT world_size, epoch_ns(ts) FROM nodes") == [(128, NOW_NS)]


def test_a_clock_that_was_ahead_holds_up_nothing_once_it_is_right(store, take):
    take(metrics(health("idle", NOW_NS + 20 * HOUR_NS)))
    take(metrics(health("active", NOW_NS)))
    assert seen(store) == [("active", None, NOW_NS)]


def test_a_report_with_the_words_of_a_late_one_is_written_at_once(store, take):
    take(metrics(health("idle", NOW_NS - HOUR_NS)))
    take(metrics(health("idle", NOW_NS)))
    assert seen(store) == [("idle", None, NOW_NS)]


def test_of_requests_that_are_committed_together_the_newest_report_wins():
    said = [(NOW_NS, "active"), (NOW_NS - 1000, "idle"), (NOW_NS - 2000, None)]
    group = [
        Rows(nodes={("c1", "n1"): [{"ts": to_timestamp(at_ns), "state": state}]})
        for at_ns, state in said
    ]
    for given in (group, group[::-1]):
        newest = {"ts": to_timestamp(NOW_NS), "state": "active"}
        assert merge_nodes(given) == {("c1", "n1"): [newest]}


def test_a_late_state_beside_a_newer_report_in_one_request_or_commit_changes_nothing(store, take):
    take(metrics(health("active", NOW_NS - NS_PER_S)))
    take(metrics(health("idle", NOW_NS - HOUR_NS), info(NOW_NS)))
    assert seen(store) == [("active", "H100", NOW_NS)]
    late, newer = (
        Rows(nodes={("c1", "n1"): [{"ts": to_timestamp(at_ns)} | said]})
        for at_ns, said in ((NOW_NS - HOUR_NS, {"state": "idle"}), (NOW_NS, {"gpu_count": 8}))
    )
    both = Rows(nodes=merge_nodes([newer, late]))
    store.write(both)
    assert seen(store) == [("active", "H100", NOW_NS)]


def test_a_time_that_is_stored_ahead_of_the_clock_freezes_nothing(store, take):
    take(metrics(health("idle", NOW_NS - NS_PER_S)))
    store.call(lambda on: on.execute("UPDATE nodes SET ts = ts + INTERVAL 20 HOUR")).result()
    take(metrics(health("active", NOW_NS)))
    assert seen(store) == [("active", None, NOW_NS)]
