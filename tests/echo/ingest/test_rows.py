import math
from dataclasses import replace

import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from ingero.config import parse_model
from ingero.echo.ingest.intake import ForbiddenError
from ingero.echo.ingest.origin import to_timestamp
from ingero.fleet.component import Hardware
from ingero.fleet.processors.collectives.costs import CostDelta, CostParties, build_costs
from ingero.fleet.processors.collectives.rates import Rates, RatesConfig
from ingero.fleet.processors.peer_threshold.episode_events import build_episodes
from ingero.fleet.processors.peer_threshold.episodes import Episode, Outcome, StragglerEvent
from ingero.model.collectives import COLLECTIVE_OP, ClockKind, CollectiveOp, CollectiveRun, Rank
from ingero.otlp.codec import Export, build_attributes, decode_export, structs
from ingero.otlp.names import ContentType, Signal
from ingero.serving.bearer import Principal
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S
from ingero.wire.collectives import build_collectives

NOW_NS = ManualClock().wall_ns()


def read(store, sql):
    with store.open_reader(5 * NS_PER_S) as reader:
        return reader.rows(sql)


def metrics(*entries, resource=None):
    resource = {"ingero.cluster.id": "c1", "ingero.node.id": "n1"} if resource is None else resource
    return Export.from_tree(
        Signal.METRICS,
        structs.MetricsRequest([
            structs.ResourceMetrics(
                structs.Resource(build_attributes(resource)),
                [structs.ScopeMetrics(None, list(entries))],
            )
        ]),
    )


def gauge(name, value, at_ns=NOW_NS, **attributes):
    point = structs.NumberDataPoint(build_attributes(attributes), 0, at_ns, as_double=value)
    return structs.Metric(name, gauge=structs.Gauge([point]))


def both_encodings(export):
    protobuf = export.message.SerializeToString()
    return export, decode_export(protobuf, Signal.METRICS, ContentType.PROTOBUF)


def test_a_gauge_is_one_row_whose_first_six_columns_are_the_known_ones(store, take):
    export = metrics(
        gauge("m", 0.5, **{"ingero.node.state": "active", "n": 3}),
        resource={"ingero.cluster.id": "c1", "ingero.node.id": "n1", "host.name": "h1"},
    )
    for form in both_encodings(export):
        take(form)
    rows = read(store, "SELECT epoch_ns(ts), * EXCLUDE (ts, stream, ingested_at) FROM events")
    assert rows == [
        (NOW_NS, "c1", "n1", "m", 0.5, "h1", "gauge", "", '{"ingero.node.state":"active","n":3}')
    ]
    assert store.counters.duplicates == 1


def test_sums_keep_their_temporality_and_value_as_sent(store, take):
    point = structs.NumberDataPoint([], 0, NOW_NS, as_int=7)
    take(
        metrics(
            structs.Metric("a", sum=structs.Sum([point], 2, is_monotonic=True)),
            structs.Metric("b", sum=structs.Sum([point], 1)),
        )
    )
    assert read(store, "SELECT metric_name, value_double, kind FROM events ORDER BY 1") == [
        ("a", 7.0, "cumulative"),
        ("b", 7.0, "delta"),
    ]


def test_what_is_no_number_is_null_and_not_zero(store, take):
    take(metrics(gauge("nan", math.nan), gauge("inf", math.inf)))
    assert read(store, "SELECT value_double FROM events") == [(None,), (None,)]


def test_times_since_boot_are_replaced_by_arrival_and_still_tell_rows_apart(store, take):
    take(metrics(gauge("m", 1.0, at_ns=5_000), gauge("m", 2.0, at_ns=6_000)))
    take(metrics(gauge("m", 1.0, at_ns=5_000)))
    rows = read(store, "SELECT epoch_ns(ts), value_double FROM events ORDER BY 2")
    assert rows == [(NOW_NS, 1.0), (NOW_NS, 2.0)]


def test_a_histogram_keeps_its_buckets(store, take):
    point = structs.HistogramDataPoint([], 0, NOW_NS, 6, 12.0, [1, 2, 3], [1.0, 5.0], max=9.0)
    take(metrics(structs.Metric("h", unit="ms", histogram=structs.Histogram([point], 2))))
    assert read(
        store, "SELECT count, sum, min, max, bounds, bucket_counts, kind, unit FROM histograms"
    ) == [(6, 12.0, None, 9.0, [1.0, 5.0], [1, 2, 3], "cumulative", "ms")]


def test_an_exponential_histogram_is_spelled_out_with_the_same_counts():
    from opentelemetry.proto.metrics.v1.metrics_pb2 import ExponentialHistogramDataPoint

    from ingero.echo.ingest.histograms import read_exponential

    point = ExponentialHistogramDataPoint(count=21, scale=0, zero_count=2)
    point.positive.offset = 1
    point.positive.bucket_counts.extend([5, 6])  # (2, 4], (4, 8]
    point.negative.bucket_counts.extend([8])  # [-2, -1)
    bounds, counts = read_exponential(point)
    assert bounds == [-1.0, 0.0, 2.0, 4.0, 8.0]
    assert counts == [8, 2, 0, 5, 6, 0]
    assert bounds == sorted(bounds)


def test_summary_quantiles_are_rows_beside_its_count_and_sum(store, take):
    point = structs.SummaryDataPoint(
        [],
        0,
        NOW_NS,
        4,
        10.0,
        [structs.ValueAtQuantile(0.5, 2.0), structs.ValueAtQuantile(0.99, 4.0)],
    )
    export = metrics(structs.Metric("s", unit="s", summary=structs.Summary([point])))
    for one in both_encodings(export):
        take(one)
    assert read(store, "SELECT kind, value_double, attributes FROM events ORDER BY 2") == [
        ("quantile", 2.0, '{"quantile":0.5}'),
        ("quantile", 4.0, '{"quantile":0.99}'),
    ]
    columns = 'metric_name, "count", "sum", "min", bounds, bucket_counts, kind, unit, attributes'
    assert read(store, f"SELECT {columns} FROM histograms") == [
        ("s", 4, 10.0, None, [], [], "cumulative", "s", "{}")
    ]


def test_a_summary_without_quantiles_keeps_its_count_and_sum(store, take):
    point = structs.SummaryDataPoint(build_attributes({"route": "/a"}), 0, NOW_NS, 7, 3.5)
    built = take(metrics(structs.Metric("s", summary=structs.Summary([point]))))
    assert built.rows.n_rows == 1
    assert read(store, 'SELECT "count", "sum", attributes FROM histograms') == [
        (7, 3.5, '{"route":"/a"}')
    ]


def test_metrics_of_one_name_value_and_time_are_kept_apart_by_kind_unit_and_scope(store, take):
    def number(number_value=1.0):
        return structs.NumberDataPoint([], 0, NOW_NS, as_double=number_value)

    kinds = [
        structs.Metric("m", gauge=structs.Gauge([number()])),
        structs.Metric("m", unit="s", gauge=structs.Gauge([number()])),
        structs.Metric("m", sum=structs.Sum([number()], 1)),
        structs.Metric("m", sum=structs.Sum([number()], 2)),
    ]
    scopes = [
        structs.ScopeMetrics(structs.InstrumentationScope(name), kinds) for name in ("a", "b")
    ]
    export = Export.from_tree(
        Signal.METRICS,
        structs.MetricsRequest([structs.ResourceMetrics(structs.Resource(), scopes)]),
    )
    n_conflicts = [take(export).rows.outcome.n_conflicts for _ in range(2)]  # then a sender's retry
    assert n_conflicts == [7, 0]
    assert read(store, "SELECT kind, unit, count(*) FROM events GROUP BY ALL ORDER BY ALL") == [
        ("cumulative", "", 2),
        ("delta", "", 2),
        ("gauge", "", 2),
        ("gauge", "s", 2),
    ]


def test_what_a_node_says_of_itself_is_one_row_per_node(store, take):
    take(
        metrics(
            gauge("ingero.node.health_score", 0.9, **{"ingero.node.state": "active"}),
            gauge("ingero.node.info", 1, **{"ingero.gpu_model": "H100", "ingero.gpu_count": 8}),
            resource={
                "ingero.cluster.id": "c1",
                "ingero.node.id": "n1",
                "ingero.provider": "aws",
                "ingero.world_size": 64,
            },
        )
    )
    take(
        metrics(gauge("ingero.node.health_score", 0.2, NOW_NS + 1, **{"ingero.node.state": "idle"}))
    )
    assert read(
        store, "SELECT node_id, provider, gpu_model, gpu_count, world_size, state FROM nodes"
    ) == [("n1", "aws", "H100", 8, 64, "idle")]


def test_attributes_of_the_wrong_type_do_not_spoil_the_commit(store, take):
    take(
        metrics(
            gauge("ingero.node.info", 1, **{"ingero.gpu_model": 7, "ingero.gpu_count": "eight"}),
            resource={
                "ingero.cluster.id": "c1",
                "ingero.node.id": "n1",
                "ingero.provider": 3,
                "host.name": [1],
            },
        )
    )
    assert read(store, "SELECT provider, gpu_model, gpu_count, host_attr FROM nodes") == [
        (None,) * 4
    ]
    assert len(read(store, "SELECT 1 FROM events")) == 1


@pytest.mark.parametrize("value", [True, False, 2**31, -(2**31) - 1, 7.0, "7"])
def test_what_is_no_32_bit_integer_is_absent_and_zero_is_zero(store, take, value):
    who = {"ingero.cluster.id": "c1", "ingero.node.id": "n1"}
    told = {"ingero.world_size": value, "ingero.node.rank": value}
    built = take(
        metrics(gauge("ingero.node.info", 1, **{"ingero.gpu_count": value}), resource=who | told)
    )
    take(
        log("ingero.verdict", {"ingero.rank": value, "v.slowdown": value if value != 7.0 else None})
    )
    assert built.rows.outcome.n_refused == 0
    assert read(store, "SELECT world_size, node_rank, gpu_count FROM nodes") == [(None,) * 3]
    assert read(store, "SELECT rank FROM verdicts") == [(None,)]
    zero = {"ingero.world_size": 0, "ingero.node.rank": 0}
    take(metrics(gauge("m", 1.0, NOW_NS + 1), resource=who | zero))
    assert read(store, "SELECT world_size, node_rank FROM nodes") == [(0, 0)]


def test_fleets_own_series_find_their_cluster_in_the_point_and_others_in_the_hint(store, take):
    take(metrics(gauge("ingero_fleet_threshold", 0.8, cluster_id="c7"), resource={}), hint="c9")
    take(metrics(gauge("x", 1.0), resource={}), hint="c9")
    assert read(store, "SELECT cluster_id, node_id FROM events ORDER BY 1") == [
        ("c7", ""),
        ("c9", ""),
    ]


def test_a_scoped_bearer_writes_its_clusters_and_no_other_nor_a_mixture(store, take):
    scoped = Principal("d", "k", frozenset({"c1"}))
    take(metrics(gauge("m", 1.0)), scoped)
    for foreign in (
        metrics(gauge("m", 2.0), resource={"ingero.cluster.id": "c2"}),
        metrics(gauge("m", 2.0), resource={}),
        metrics(gauge("m", 2.0), gauge("m", 2.0, cluster_id="c2"), resource={}),
    ):
        with pytest.raises(ForbiddenError):
            take(foreign, scoped)
    assert read(store, "SELECT value_double FROM events") == [(1.0,)]


def collectives(n_ops=3, cluster="c1"):
    ops = np.zeros(n_ops, COLLECTIVE_OP)
    ops["seq"] = np.arange(10, 10 + n_ops)
    ops["entry_ns"] = np.arange(n_ops) * 1000
    ops["inside_ns"] = [500, -1, 700][:n_ops]
    ops["own_ns"] = [-1, 20, 30][:n_ops]
    ops["n_bytes"] = 4096
    ops["op"] = CollectiveOp.ALL_REDUCE
    rank = Rank(cluster, "n1", 5, 8, (("dp", "0"), ("pp", "1")))
    run = CollectiveRun(rank, "00000000000000ab", 1, 4, ClockKind.DEVICE, ops)
    return build_collectives([run], NOW_NS)


def test_collective_batches_are_unpacked_with_unknown_as_null_and_once(store, take):
    take(collectives())
    take(
        decode_export(collectives().message.SerializeToString(), Signal.LOGS, ContentType.PROTOBUF)
    )
    rows = read(
        store,
        "SELECT rank, comm, comm_rank, n_ranks, n_gpus, clock, seq, op, entry_ns, inside_ns, own_ns, labels "
        "FROM collectives ORDER BY seq",
    )
    head = (5, "00000000000000ab", 1, 4, 8, "device")
    labels = '{"dp":"0","pp":"1"}'
    assert rows == [
        (*head, 10, "all_reduce", 0, 500, None, labels),
        (*head, 11, "all_reduce", 1000, None, 20, labels),
        (*head, 12, "all_reduce", 2000, 700, 30, labels),
    ]
    assert read(store, "SELECT 1 FROM logs") == []


def test_collectives_of_a_foreign_cluster_are_refused(take):
    with pytest.raises(ForbiddenError):
        take(collectives(cluster="c2"), Principal("d", "k", frozenset({"c1"})))


def log(event_name, attributes, body="text", severity=17):
    record = structs.LogRecord(
        NOW_NS,
        0,
        severity,
        "",
        structs.AnyValue(body),
        build_attributes(attributes),
        event_name=event_name,
    )
    resource = structs.Resource(build_attributes({"ingero.cluster.id": "c1"}))
    return Export.from_tree(
        Signal.LOGS,
        structs.LogsRequest([structs.ResourceLogs(resource, [structs.ScopeLogs(None, [record])])]),
    )


def test_records_with_a_known_name_go_to_their_table_and_others_to_logs(store, take):
    take(
        log(
            "ingero.fleet.cost",
            {
                "cost.node_id": "n3",
                "cost.gpu_seconds": 12.5,
                "cost.amount": 0.04,
                "cost.currency": "USD",
            },
        )
    )
    take(
        log(
            "ingero.fleet.episode",
            {"e.incident_id": "i1", "e.state": "open", "e.start_ns": NOW_NS, "e.node_id": "n3"},
        )
    )
    take(log("something.else", {"k": [1, 2]}))
    assert read(store, "SELECT node_id, gpu_seconds, amount, currency FROM costs") == [
        ("n3", 12.5, 0.04, "USD")
    ]
    assert read(
        store, "SELECT incident_id, state, severity, epoch_ns(start_ts) FROM incidents"
    ) == [("i1", "open", "error", NOW_NS)]
    assert read(store, "SELECT event_name, severity, body, attributes FROM logs") == [
        ("something.else", "error", "text", '{"k":[1,2]}')
    ]


def test_an_empty_request_writes_nothing(store, take):
    take(Export.from_message(Signal.METRICS, ExportMetricsServiceRequest()))
    assert store.counters.written == 0


def test_what_fleet_concludes_arrives_as_verdicts(store, take):
    """The records that Fleet's own nccl processor builds, through the real encoder."""
    from ingero.fleet.processors.collectives.conclusions import Conclusion, VerdictChange
    from ingero.fleet.processors.collectives.verdicts import build_changes, build_verdicts
    from ingero.model.verdicts import Judgement, Slowdown, Verdict, VerdictKind

    slow, waiting = Rank("c1", "n3", 3), Rank("c1", "n1", 1)
    verdict = Verdict(
        slow,
        VerdictKind.CULPRIT,
        "its own work",
        slowdown=Slowdown(1.5, 1.4, 1.6),
        evidence=8.0,
        victims=(waiting,),
        lost_gpu_ns=2_500_000_000,
    )
    change = VerdictChange(None, verdict)
    judgement = Judgement("c1", (verdict,))
    conclusion = Conclusion(judgement, judgement, (), (change,), 1, 1e-6)
    take(build_changes(conclusion, NOW_NS))
    take(build_verdicts(conclusion, NOW_NS))
    found = read(
        store,
        "SELECT cluster_id, node_id, rank, verdict, slowdown, evidence, lost_gpu_seconds, len(victims), severity "
        "FROM verdicts, (SELECT 'warn' AS severity)",
    )
    assert found == [("c1", "n3", 3, "culprit", 1.5, 8.0, 2.5, 1, "warn")]
    assert ("n3", 2.5) in read(
        store,
        "SELECT node_id, value_double FROM events WHERE metric_name = 'ingero_fleet_lost_gpu_seconds'",
    )


def test_fleets_own_cost_and_episode_records_fill_their_columns(store, take):
    paid, unknown = Hardware("aws", "NVIDIA L4"), Hardware("", "")
    charges = [
        CostDelta(CostParties("n3", 3, "n1", paid), 36 * NS_PER_S),
        CostDelta(CostParties("n3", 3, "", unknown), 5 * NS_PER_S),
        CostDelta(CostParties("", -1, "", paid), -2 * NS_PER_S),
    ]
    rates = Rates(parse_model(RatesConfig, {"providers": {"aws": {"NVIDIA L4": 1.0}}}))
    take(build_costs("c1", charges, rates, NOW_NS))
    assert read(
        store,
        "SELECT cluster_id, node_id, rank, victim_node_id, gpu_seconds, round(amount, 9), currency, provider, "
        "gpu_model, "
        "attributed FROM costs ORDER BY gpu_seconds",
    ) == [
        ("c1", "", None, None, -2.0, -0.000555556, "USD", "aws", "NVIDIA L4", "unattributed"),
        ("c1", "n3", 3, None, 5.0, None, None, None, None, "charged"),
        ("c1", "n3", 3, "n1", 36.0, 0.01, "USD", "aws", "NVIDIA L4", "charged"),
    ]
    event = StragglerEvent("e1", 0.3, 0.87, "fleet", "throughput")
    episode = Episode("c1", "n3", event, event, NOW_NS, NOW_NS)
    ended = replace(episode, closed_wall_ns=NOW_NS + NS_PER_S, outcome=Outcome.LOST)
    take(build_episodes([episode, ended]))
    start = to_timestamp(NOW_NS)
    assert read(
        store,
        "SELECT ts, node_id, incident_id, kind, severity, state, score, threshold, dominant_signal, start_ts, end_ts "
        "FROM incidents ORDER BY ts",
    ) == [
        (start, "n3", "e1", "straggler", "error", "open", 0.3, 0.87, "throughput", start, None),
        (
            *(to_timestamp(NOW_NS + NS_PER_S), "n3", "e1", "straggler", "info", "lost"),
            *(0.3, 0.87, "throughput", start, to_timestamp(NOW_NS + NS_PER_S)),
        ),
    ]
    assert read(store, "SELECT count(*) FROM logs") == [(0,)]
