"""What Fleet's own code says of a verdict, a cost and an episode, over the wire into Echo's columns.

Every one of them.
"""

import json

import pytest

from ingero.config import parse_model
from ingero.echo.ingest.origin import to_timestamp
from ingero.echo.schema.tables import COSTS, INCIDENTS, VERDICTS
from ingero.fleet.component import Hardware
from ingero.fleet.processors.collectives.conclusions import Conclusion, VerdictChange
from ingero.fleet.processors.collectives.costs import CostDelta, CostParties, build_costs
from ingero.fleet.processors.collectives.rates import Rates, RatesConfig
from ingero.fleet.processors.collectives.verdicts import build_changes
from ingero.fleet.processors.peer_threshold.episode_events import build_episodes
from ingero.fleet.processors.peer_threshold.episodes import Episode, Outcome, StragglerEvent
from ingero.fleet.processors.peer_threshold.notifications import ClusterEvent, EventKind
from ingero.model.collectives import Rank
from ingero.model.verdicts import Judgement, Slowdown, Verdict, VerdictKind
from ingero.otlp.codec import build_attributes, build_logs, decode_export, encode_json, structs
from ingero.otlp.codec import encode_protobuf as to_protobuf
from ingero.otlp.names import ContentType, Signal
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S
from ingero.wire.log_records import LogSeverity, build_record

NOW_NS = ManualClock().wall_ns()
NOW = to_timestamp(NOW_NS)
ENCODERS = {ContentType.PROTOBUF: to_protobuf, ContentType.JSON: encode_json}


@pytest.fixture(params=list(ENCODERS))
def send(request, take):
    def send(export):
        taken = take(decode_export(ENCODERS[request.param](export), Signal.LOGS, request.param))
        assert taken.rows.outcome.n_refused == 0

    return send


def rows_of(store, table):
    """Rows in order of time as mappings, their attributes read."""
    with store.open_reader(5 * NS_PER_S) as reader:
        found = reader.rows(f"SELECT {', '.join(table.names)} FROM {table.name} ORDER BY ts")
        assert reader.rows("SELECT count(*) FROM logs") == [(0,)]
    rows = [dict(zip(table.names, row, strict=True)) for row in found]
    return [row | {"attributes": json.loads(row["attributes"])} for row in rows]


def test_every_field_of_a_verdict_arrives(store, send):
    slow, waiting = Rank("c1", "n3", 3, job="j"), Rank("c1", "n1", 1)
    verdict = Verdict(
        slow,
        VerdictKind.CULPRIT,
        "its own work",
        slowdown=Slowdown(1.5, 1.4, 1.6),
        evidence=8.5,
        victims=(waiting,),
        lost_gpu_ns=2_500_000_000,
    )
    judgement = Judgement("c1", (verdict,))
    changes = (VerdictChange(VerdictKind.DRAG, verdict),)
    send(build_changes(Conclusion(judgement, judgement, (), changes, 1, 1e-6), NOW_NS))
    (row,) = rows_of(store, VERDICTS)
    attributes = row.pop("attributes")
    assert row == {
        "ts": NOW,
        "cluster_id": "c1",
        "node_id": "n3",
        "rank": 3,
        "worker": "rank 3 of job j",
        "comm": None,
        "verdict": "culprit",
        "slowdown": 1.5,
        "evidence": 8.5,
        "lost_gpu_seconds": 2.5,
        "victims": ["rank 1"],
        "before": "drag",
        "summary": "rank 3 of job j on n3: culprit (was drag), 1.50 times its peers; its own work",
    }
    assert attributes["ingero.verdict.reason"] == "its own work"
    assert attributes["ingero.rank.job"] == "j"


def test_every_field_of_a_cost_arrives(store, send):
    charge = CostDelta(CostParties("n3", 3, "n1", Hardware("aws", "NVIDIA L4")), 36 * NS_PER_S)
    rates = Rates(parse_model(RatesConfig, {"providers": {"aws": {"NVIDIA L4": 1.0}}}))
    send(build_costs("c1", [charge], rates, NOW_NS))
    (row,) = rows_of(store, COSTS)
    assert row.pop("attributes")
    assert row == {
        "ts": NOW,
        "cluster_id": "c1",
        "node_id": "n3",
        "rank": 3,
        "victim_node_id": "n1",
        "gpu_seconds": 36.0,
        "amount": pytest.approx(0.01),
        "currency": "USD",
        "provider": "aws",
        "gpu_model": "NVIDIA L4",
        "attributed": "charged",
    }


def test_every_field_of_an_episode_arrives(store, send):
    event = StragglerEvent("e1", 0.3, 0.87, "fleet", "throughput")
    end_ns = NOW_NS + NS_PER_S
    send(
        build_episodes([
            Episode("c1", "n3", event, event, NOW_NS, NOW_NS, 4, True),
            Episode("c2", "n4", event, event, NOW_NS, NOW_NS, 9, False, end_ns, Outcome.LOST),
        ])
    )
    began, ended = rows_of(store, INCIDENTS)
    attributes = began.pop("attributes")
    assert began == {
        "ts": NOW,
        "cluster_id": "c1",
        "node_id": "n3",
        "incident_id": "e1",
        "kind": "straggler",
        "severity": "error",
        "state": "open",
        "summary": "n3 is a straggler, score 0.300 under 0.870, throughput",
        "score": 0.3,
        "threshold": 0.87,
        "dominant_signal": "throughput",
        "start_ts": NOW,
        "end_ts": None,
    }
    assert attributes["ingero.episode.n_events"] == 4
    assert attributes["ingero.episode.in_panic"] is True
    names = ("ts", "cluster_id", "severity", "state", "start_ts", "end_ts")
    end = to_timestamp(end_ns)
    assert [ended[name] for name in names] == [end, "c2", "info", "lost", NOW, end]


def test_a_panic_arrives_with_what_fell(store, send):
    values = {"active_nodes": 9, "under_threshold": 7, "median": 0.5, "threshold": 0.75}
    send(build_episodes([ClusterEvent(EventKind.PANIC, "c1", NOW_NS, is_on=True, values=values)]))
    (row,) = rows_of(store, INCIDENTS)
    assert (row["node_id"], row["kind"], row["state"]) == ("", "panic", "open")
    assert (row["score"], row["threshold"], row["start_ts"]) == (0.5, 0.75, NOW)
    assert row["attributes"]["ingero.episode.active_nodes"] == 9
    assert row["attributes"]["ingero.episode.under_threshold"] == 7


def told_by_others(event_name, attributes):
    record = build_record(event_name, attributes, LogSeverity.WARN, "text", NOW_NS)
    return build_logs({"ingero.cluster.id": "c1", "ingero.node.id": "agent"}, [record], "acme")


@pytest.mark.parametrize("value", [2500, 2500.0])
def test_milliseconds_are_milliseconds_also_as_an_integer(store, send, value):
    send(told_by_others("acme.verdict", {"acme.lost_gpu_ms": value}))
    assert [row["lost_gpu_seconds"] for row in rows_of(store, VERDICTS)] == [2.5]


def test_names_of_other_senders_are_found_by_their_last_word(store, send):
    said = {
        "a.verdict": "culprit",
        "a.evidence": 3.0,
        "a.lost_gpu_seconds": 4.5,
        "a.comm": "ab",
        "a.rank": 2,
        "a.summary": "is slow",
        "a.node_id": "n7",
    }
    send(told_by_others("acme.verdict", said))
    (row,) = rows_of(store, VERDICTS)
    names = ("verdict", "evidence", "lost_gpu_seconds", "comm", "rank", "summary", "node_id")
    assert [row[name] for name in names] == list(said.values())
    said = {"b.severity": "critical", "b.start_wall_ns": NOW_NS, "b.end_ts": NOW_NS + 1000}
    send(told_by_others("acme.incident", said))
    (row,) = rows_of(store, INCIDENTS)
    assert (row["severity"], row["start_ts"], row["node_id"]) == ("critical", NOW, "agent")
    assert row["end_ts"] == to_timestamp(NOW_NS + 1000)
    assert row["summary"] == "text"


def test_the_exact_name_goes_before_a_like_one(store, send):
    said = {"ingero.verdict.kind": "drag", "ingero.verdict.slowdown": 1.5}
    send(told_by_others("ingero.verdict", said | {"x.kind": "other", "x.slowdown": 9.0}))
    (row,) = rows_of(store, VERDICTS)
    assert (row["verdict"], row["slowdown"]) == ("drag", 1.5)


def test_a_body_that_is_no_text_is_the_summary_as_json(store, send):
    record = build_record("ingero.verdict", {}, LogSeverity.INFO, "", NOW_NS)
    record.body = structs.AnyValue(kvlist_value=structs.KeyValueList(build_attributes({"a": 1})))
    send(build_logs({"ingero.cluster.id": "c1"}, [record], "acme"))
    assert [row["summary"] for row in rows_of(store, VERDICTS)] == ['{"body":{"a":1}}']
