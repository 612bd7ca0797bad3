"""What arrives late is of the time when it happened, whatever came with it or before it."""

import numpy as np
import pytest
from tests.echo.ingest.test_rows import NOW_NS, read

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
