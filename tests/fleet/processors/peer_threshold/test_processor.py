"""The processor between a receiver and an exporter: what passes, what it adds, what it shows."""

import asyncio
from pathlib import Path

import pytest

from ingero.config import parse_model
from ingero.errors import BadDataError, ConfigError, RetryableError
from ingero.fleet.component import (
    AdminRoutes,
    ComponentId,
    HardwareSource,
    PushContext,
    ThresholdSource,
)
from ingero.fleet.consumer import Batch
from ingero.fleet.processors.peer_threshold.config import IngeroConfig
from ingero.fleet.processors.peer_threshold.episode_events import build_episodes
from ingero.fleet.processors.peer_threshold.processor import FACTORY
from ingero.otlp.codec import (
    Export,
    build_gauge,
    build_metrics,
    build_number,
    decode_export,
    decode_protobuf,
    encode_protobuf,
    iter_log_rows,
    iter_points,
    structs,
)
from ingero.otlp.names import Signal
from ingero.testing.host import KeptBatches, ManualHost
from ingero.units import NS_PER_S

SAMPLES = Path(__file__).parents[3] / "data" / "wire_samples"


def sample(name):
    return decode_export((SAMPLES / name).read_bytes(), Signal.METRICS, "application/json")


def health(node, score, state="active", cohort="", cluster="c"):
    attributes = {
        "ingero.node.state": state,
        "ingero.workload_type": "train",
        "ingero.cgroup_path_hash": cohort,
    }
    return build_metrics(
        {"ingero.node.id": node, "ingero.cluster.id": cluster},
        [build_gauge("ingero.node.health_score", [build_number(score, 1, attributes)])],
        "ingero.health",
    )


class Piped:
    """A started processor with what came out of it."""

    def __init__(self, host=None, **config):
        self.host = host or ManualHost()
        self.out = KeptBatches()
        config["quorum"] = {"settle_time": "0s"} | config.get("quorum", {})
        settings = parse_model(IngeroConfig, config)
        self.processor = FACTORY.create(ComponentId("ingero"), settings, Signal.METRICS, self.out)
        asyncio.run(self.processor.start(self.host))

    def push(self, export, hint=""):
        batch = Batch(
            Signal.METRICS, export, self.host.clock.wall_ns(), PushContext(cluster_hint=hint)
        )
        self.processor.consume(batch)
        return batch

    def page(self, name, **query):
        for pages in self.host.find(AdminRoutes):
            for route in pages.admin_routes():
                if route.path.endswith(f"/{name}"):
                    return route.read(query)
        raise AssertionError(name)


@pytest.mark.parametrize("encoding", ["json", "protobuf"])
def test_recorded_push_passes_unchanged_and_names_who_pushed(encoding):
    export = sample("push_active.json")
    if encoding == "protobuf":
        export = decode_protobuf(encode_protobuf(export), Signal.METRICS)
    piped = Piped()
    batch = piped.push(export, hint="prod a")
    assert piped.out.batches == [batch]
    assert batch.export is export
    push = batch.push
    assert (push.cluster_id, push.node_id, push.cohort) == ("prod a", "n1", "8a5edab282632443")
    (node,) = piped.page("nodes", cluster_id="prod a")["nodes"]
    assert (node["score"], node["state"], node["rank"], node["provider"]) == (
        0.94,
        "active",
        3,
        "aws",
    )


def test_recorded_event_after_its_push_opens_an_episode_and_zero_closes_it():
    piped = Piped()
    piped.push(sample("push_straggler.json"))
    piped.push(sample("straggler_event_1.json"))
    (episode,) = piped.page("episodes")["episodes"]
    assert (episode["node_id"], episode["outcome"]) == ("n1", None)
    assert episode["first"]["detection_mode"] == "fleet"
    assert episode["first"]["dominant_signal"] == "throughput"
    piped.push(sample("straggler_event_0.json"))
    (episode,) = piped.page("episodes", cluster_id="prod a")["episodes"]
    assert episode["outcome"] == "resolved"


def with_logs(piped, following):
    """The same processor in a logs pipeline."""
    settings = parse_model(IngeroConfig, {})
    logs = FACTORY.create(ComponentId("ingero"), settings, Signal.LOGS, following)
    asyncio.run(logs.start(piped.host))
    return logs


def test_an_episodes_beginning_and_end_are_records_in_the_logs_pipeline():
    piped, out = Piped(), KeptBatches()
    with_logs(piped, out)
    piped.push(sample("push_straggler.json"))
    piped.push(sample("straggler_event_1.json"))
    piped.push(sample("straggler_event_1.json"))
    piped.host.advance(NS_PER_S)
    piped.push(sample("straggler_event_0.json"))
    piped.host.advance(NS_PER_S)
    began, ended = (row for batch in out.batches for row in iter_log_rows(batch.export))
    assert began.event_name == "ingero.episode"
    assert began.resource["ingero.cluster.id"] == "prod a"
    facts = {name.removeprefix("ingero.episode."): v for name, v in began.attributes.items()}
    assert (facts["ingero.node.id"], facts["state"], facts["kind"]) == ("n1", "open", "straggler")
    assert facts["dominant_signal"] == "throughput"
    assert facts["score"] < facts["threshold"]
    assert began.severity_text == "ERROR"
    assert ended.attributes["ingero.episode.state"] == "resolved"
    assert ended.severity_text == "INFO"
    for name in ("incident_id", "start_ns"):
        assert ended.attributes[f"ingero.episode.{name}"] == facts[name]
    assert ended.attributes["ingero.episode.end_ns"] >= facts["start_ns"]
    assert ended.attributes["ingero.episode.n_events"] == 2


def test_logs_pass_and_news_that_the_pipeline_refuses_is_counted():
    class Refusing:
        def consume(self, batch):
            raise RetryableError("full")

    piped = Piped()
    logs = with_logs(piped, Refusing())
    batch = Batch(Signal.LOGS, build_episodes([]), 0)
    with pytest.raises(RetryableError):
        logs.consume(batch)
    piped.push(sample("push_straggler.json"))
    piped.push(sample("straggler_event_1.json"))
    piped.host.advance(NS_PER_S)
    assert piped.host.read("ingero_fleet_reports_lost_total") == 1


def test_without_a_logs_pipeline_no_news_is_kept():
    piped = Piped()
    piped.push(sample("push_straggler.json"))
    piped.push(sample("straggler_event_1.json"))
    piped.host.advance(NS_PER_S)
    assert not piped.processor._registry.notifications


def test_news_that_nobody_fetches_is_bounded_and_counted(monkeypatch):
    monkeypatch.setattr("ingero.fleet.processors.peer_threshold.notifications.MAX_NOTIFICATIONS", 3)
    piped, out = Piped(), KeptBatches()
    with_logs(piped, out)
    piped.push(sample("push_straggler.json"))
    for _ in range(3):
        piped.push(sample("straggler_event_1.json"))
        piped.push(sample("straggler_event_0.json"))
    piped.host.advance(NS_PER_S)
    told = [row for batch in out.batches for row in iter_log_rows(batch.export)]
    states = [row.attributes["ingero.episode.state"] for row in told]
    assert states == ["resolved", "open", "resolved"]
    assert piped.host.read("ingero_fleet_reports_lost_total") == 3


def test_hardware_is_what_the_node_said_last_and_forgotten_with_it():
    piped = Piped()
    piped.push(sample("push_active.json"))
    (source,) = piped.host.find(HardwareSource)
    assert source.find_hardware("prod a", "n1") == ("aws", "NVIDIA H100 80GB HBM3")
    assert source.find_hardware("prod a", "n2") is None
    piped.host.advance(60 * NS_PER_S)
    assert source.find_hardware("prod a", "n1") is None


def test_series_of_cluster_and_cohort_go_down_the_pipeline_each_push_interval():
    piped = Piped()
    for index in range(5):
        piped.push(health(f"n{index}", 0.9, cohort="aa"))
    piped.push(health("idle", 0.0, state="idle"))
    piped.push(health("bad", 0.1))
    piped.push(health("other", 0.1, state="draining"))
    piped.host.advance(NS_PER_S)  # news are told at once
    piped.out.batches.clear()
    piped.host.advance(10 * NS_PER_S)
    (batch,) = piped.out.batches
    found = {
        (point.name, point.attributes.get("cgroup_path_hash")): point.value
        for point in iter_points(batch.export)
    }
    assert found["ingero_fleet_threshold", None] == pytest.approx(0.85)
    assert found["ingero_fleet_cohort_threshold", "aa"] == pytest.approx(0.85)
    assert found["ingero_fleet_active_nodes", None] == 6
    assert found["ingero_fleet_cohort_active_nodes", "aa"] == 5
    assert found["ingero_fleet_idle_nodes", None] == 1
    assert found["ingero_fleet_calibrating_nodes", None] == 0
    assert found["ingero_fleet_other_nodes", None] == 1
    assert found["ingero_fleet_median", None] == pytest.approx(0.9)
    assert found["ingero_fleet_mad", None] == 0
    assert found["ingero_fleet_straggler_count", None] == 1
    assert found["ingero_fleet_cohort_straggler_count", "aa"] == 0
    assert found["ingero_fleet_coverage_low", None] == 1
    assert found["ingero_fleet_panic_mode", None] == 0
    assert found["ingero_fleet_quorum_met", None] == 1
    assert not [name for name, cohort in found if cohort and "_cohort_" not in name]


def test_own_gauges_show_the_same_and_vanish_with_the_cluster():
    piped = Piped(push_interval="1s", ttl_multiplier=2)
    for index in range(5):
        piped.push(health(f"n{index}", 0.9))
    piped.host.advance(NS_PER_S)
    labels = {"cluster_id": "c"}
    assert piped.host.read("ingero_fleet_threshold", **labels) == pytest.approx(0.85)
    assert piped.host.read("ingero_fleet_active_nodes", **labels) == 5
    assert piped.host.read("ingero_fleet_known_nodes") == 5
    piped.host.advance(8 * NS_PER_S)
    assert piped.host.read("ingero_fleet_threshold", **labels) is None
    assert piped.host.read("ingero_fleet_known_clusters") == 0


def test_below_quorum_there_is_no_threshold_series_rather_than_a_zero():
    piped = Piped()
    piped.push(health("n1", 0.9))
    piped.host.advance(2 * NS_PER_S)
    labels = {"cluster_id": "c"}
    assert piped.host.read("ingero_fleet_threshold", **labels) is None
    assert piped.host.read("ingero_fleet_quorum_met", **labels) == 0
    assert piped.host.read("ingero_fleet_active_nodes", **labels) == 1


def test_coverage_is_measured_against_max_expected_nodes():
    piped = Piped(max_expected_nodes=6)
    labels = {"cluster_id": "c"}
    for index in range(5):
        piped.push(health(f"n{index}", 0.9))
    piped.host.advance(NS_PER_S)
    assert piped.host.read("ingero_fleet_coverage_low", **labels) == 0


def test_two_pipelines_share_one_registry_and_one_of_them_reports():
    host = ManualHost()
    first, second = Piped(host), Piped(host)
    for index in range(5):
        (first if index % 2 else second).push(health(f"n{index}", 0.9))
    (source,) = host.find(ThresholdSource)
    assert source.find_answer("c").threshold == pytest.approx(0.85)
    host.advance(NS_PER_S)
    first.out.batches.clear()
    second.out.batches.clear()
    host.advance(10 * NS_PER_S)
    assert (len(first.out.batches), len(second.out.batches)) == (1, 0)


def test_reload_under_a_new_host_keeps_scores_and_moves_the_timers():
    old, new = ManualHost(), ManualHost()
    piped = Piped(old)
    for index in range(5):
        piped.push(health(f"n{index}", 0.9))
    new._shared, new.clock = old._shared, old.clock
    again = Piped(new)
    new.advance(NS_PER_S)
    again.out.batches.clear()
    new.advance(10 * NS_PER_S)
    assert len(again.out.batches) == 1
    (source,) = new.find(ThresholdSource)
    assert source.find_answer("c").quorum_met


def test_report_that_the_pipeline_refuses_is_counted():
    piped = Piped()
    piped.push(health("n1", 0.9))

    class Refusing:
        def consume(self, batch):
            raise RetryableError("full")

    host = ManualHost()
    refused = FACTORY.create(
        ComponentId("ingero"), parse_model(IngeroConfig, {}), Signal.METRICS, Refusing()
    )
    asyncio.run(refused.start(host))
    with pytest.raises(RetryableError):
        refused.consume(Batch(Signal.METRICS, health("n1", 0.9), 0))
    host.advance(10 * NS_PER_S)
    assert host.read("ingero_fleet_reports_lost_total") == 1


def test_pages_are_paged_and_say_what_is_wrong_with_a_query():
    piped = Piped()
    for index in range(7):
        piped.push(health(f"n{index}", 0.9 if index else 0.2, cohort="aa"))
    page = piped.page("nodes", cluster_id="c", offset="5", limit="10")
    assert (page["total"], [n["node_id"] for n in page["nodes"]]) == (7, ["n5", "n6"])
    page = piped.page("nodes", cluster_id="c", straggling="true")
    assert [n["node_id"] for n in page["nodes"]] == ["n0"]
    (cohort,) = piped.page("cohorts", cluster_id="c")["cohorts"]
    assert (cohort["known_nodes"], cohort["bar_of"]) == (7, "cohort")
    (cluster,) = piped.page("clusters")["clusters"]
    assert (cluster["cluster_id"], cluster["active_nodes"]) == ("c", 7)
    with pytest.raises(BadDataError, match="cluster_id is missing"):
        piped.page("nodes")
    with pytest.raises(BadDataError, match="limit"):
        piped.page("nodes", cluster_id="c", limit="1001")
    with pytest.raises(BadDataError, match="offset"):
        piped.page("nodes", cluster_id="c", offset="-1")
    with pytest.raises(KeyError):
        piped.page("nodes", cluster_id="nobody")


def test_own_gauges_are_current_right_after_a_push():
    piped = Piped()
    for index in range(7):
        piped.push(health(f"n{index}", 0.9))
    assert piped.host.read("ingero_fleet_known_nodes") == 7
    assert piped.host.read("ingero_fleet_active_nodes", cluster_id="c") == 7


def test_admin_counts_are_whole_numbers_and_what_a_node_says_is_shown_as_it_said_it():
    piped = Piped()
    for index in range(6):
        piped.push(health(f"n{index}", 0.9))
    piped.push(health("odd", 0.9, state="draining"))
    (cluster,) = piped.page("clusters")["clusters"]
    assert type(cluster["active_nodes"]) is int
    assert (cluster["active_nodes"], cluster["other_nodes"], cluster["panic_mode"]) == (6, 1, False)
    nodes = {node["node_id"]: node for node in piped.page("nodes", cluster_id="c")["nodes"]}
    assert (nodes["odd"]["state"], nodes["odd"]["state_as_sent"]) == ("other", "draining")
    assert nodes["n0"]["workload_type"] == "train", "also of a node without a cgroup hash"
    piped.push(health("odd", 0.9))
    nodes = {node["node_id"]: node for node in piped.page("nodes", cluster_id="c")["nodes"]}
    assert nodes["odd"]["state_as_sent"] == "active"


def test_a_node_that_a_cap_refused_is_passed_to_nobody():
    piped = Piped(max_expected_nodes=3)
    for index in range(5):
        batch = piped.push(health(f"n{index}", 0.9))
    seen = {
        point.resource["ingero.node.id"]
        for b in piped.out.batches
        for point in iter_points(b.export)
    }
    assert seen == {"n0", "n1", "n2"}
    assert (batch.push.n_rejected, piped.host.read("ingero_fleet_refused_points_total")) == (1, 2)
    assert "max_expected_nodes" in batch.push.rejected_why


def test_of_a_gateways_push_only_the_refused_nodes_are_dropped():
    piped = Piped(max_expected_nodes=2)
    entries = [health(f"n{index}", 0.9).tree.resource_metrics[0] for index in range(4)]
    both = Export.from_tree(Signal.METRICS, structs.MetricsRequest(entries))
    batch = piped.push(decode_protobuf(encode_protobuf(both), Signal.METRICS))
    (passed,) = piped.out.batches
    assert [p.resource["ingero.node.id"] for p in iter_points(passed.export)] == ["n0", "n1"]
    assert batch.push.n_rejected == 2


def panic(piped):
    for score in (0.9, 0.45):
        for index in range(6):
            piped.push(health(f"n{index}", score))
        piped.host.advance(NS_PER_S)


def test_panic_is_one_record_a_line_and_a_page_and_so_is_its_end(caplog):
    caplog.set_level("INFO", "ingero.fleet")
    piped, out = Piped(), KeptBatches()
    with_logs(piped, out)
    panic(piped)
    for index in range(6):
        piped.push(health(f"n{index}", 0.9))
    piped.host.advance(NS_PER_S)
    began, ended = (row for batch in out.batches for row in iter_log_rows(batch.export))
    assert (began.event_name, began.severity_text) == ("ingero.episode", "ERROR")
    assert "ingero.node.id" not in began.attributes
    kinds = [row.attributes["ingero.episode.kind"] for row in (began, ended)]
    states = [row.attributes["ingero.episode.state"] for row in (began, ended)]
    assert (kinds, states) == (["panic"] * 2, ["open", "resolved"])
    ids = {row.attributes["ingero.episode.incident_id"] for row in (began, ended)}
    assert len(ids) == 1
    lines = [(record.getMessage().split(":")[0], record.fields) for record in caplog.records]
    assert [text for text, _ in lines] == ["quorum gained", "panic began", "panic ended"]
    assert lines[1][1]["cluster"] == "c"
    assert (lines[1][1]["under_threshold"], lines[1][1]["active_nodes"]) == (4, 6)
    events = piped.page("events", cluster_id="c")["events"]
    assert [(e["kind"], e["state"]) for e in events] == [
        ("panic", "ended"),
        ("panic", "began"),
        ("quorum", "began"),
    ]


def test_the_series_that_names_a_straggler_is_there_while_its_episode_lasts():
    piped = Piped()
    piped.push(sample("push_straggler.json"))
    piped.push(sample("straggler_event_1.json"))
    piped.host.advance(2 * NS_PER_S)
    labels = {"cluster_id": "prod a", "node_id": "n1"}
    assert piped.host.read("ingero_fleet_straggler", **labels) == 1

    def last():
        points = [p for b in piped.out.batches for p in iter_points(b.export)]
        return [p for p in points if p.name == "ingero_fleet_straggler"][-1]

    assert (last().value, last().is_stale, last().attributes) == (1, False, labels)
    piped.push(sample("straggler_event_0.json"))
    piped.host.advance(2 * NS_PER_S)
    assert piped.host.read("ingero_fleet_straggler", **labels) is None
    assert last().is_stale


@pytest.mark.parametrize(
    "config",
    [
        {"threshold": {"k": 0.5}},
        {"threshold": {"k": 4.5}},
        {"threshold": {"ema_alpha": 0}},
        {"threshold": {"ema_alpha": 1.1}},
        {"threshold": {"min_margin": -0.1}},
        {"quorum": {"statistical_min": 0}},
        {"quorum": {"coverage_fraction": 1.5}},
        {"push_interval": "900ms"},
        {"ttl_multiplier": 1},
        {"max_expected_nodes": 0},
        {"recompute_min_interval": "1ms"},
    ],
)
def test_setting_out_of_its_documented_range_is_refused(config):
    with pytest.raises(ConfigError):
        parse_model(IngeroConfig, config)


def test_documented_defaults():
    config = parse_model(IngeroConfig, {})
    assert (config.threshold.k, config.threshold.ema_alpha, config.threshold.min_margin) == (
        2.0,
        0.2,
        0.05,
    )
    assert (config.quorum.statistical_min, config.quorum.coverage_fraction) == (5, 0.8)
    assert (config.push_interval, config.ttl_multiplier) == (10 * NS_PER_S, 5)
    assert (config.max_expected_nodes, config.recompute_min_interval) == (10_000, NS_PER_S // 5)
