"""What a scraper sees, checked by promtool and read by prometheus_client's parser."""

import asyncio
import json
import shutil
import subprocess

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_open_metrics,
)
from tests.fleet.exporters.scraped import (
    NODE,
    SAMPLES,
    WALL,
    Scraped,
    gauge_export,
    labelled,
    sample,
    series,
)
from tests.support import local_http

from ingero.config import parse_model
from ingero.fleet.exporters.prometheus.config import PrometheusConfig
from ingero.fleet.exporters.prometheus.intake import SeriesIntake
from ingero.fleet.exporters.prometheus.series import SeriesStore
from ingero.otlp.codec import (
    build_gauge,
    build_metrics,
    build_number,
    build_sum,
    decode_export,
    decode_protobuf,
    encode_json,
    encode_protobuf,
    merge_exports,
    structs,
)
from ingero.otlp.codec.build import build_attributes
from ingero.otlp.names import Signal
from ingero.units import NS_PER_S

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed"
)


@pytest.mark.parametrize("encoding", ["json", "protobuf"])
def test_recorded_push_is_shown_under_the_nodes_name(encoding):
    export = sample("push_active.json")
    if encoding == "protobuf":
        export = decode_protobuf(encode_protobuf(export), Signal.METRICS)
    scraped = Scraped()
    found = series(scraped.scrape(lambda: scraped.push(export)))
    key = labelled(
        "ingero_node_health_score_ratio",
        ingero_cluster_id="prod a",
        ingero_node_id="n1",
        ingero_node_rank="3",
        ingero_provider="aws",
        ingero_world_size="8",
        ingero_node_state="active",
        ingero_workload_type="unknown",
        ingero_cgroup_path_hash="8a5edab282632443",
    )
    assert found[key] == 0.94


@pytest.mark.parametrize("suffix", ["count", "total"])
def test_a_metric_that_nobody_described_says_so_and_a_gauge_with_a_suffix_of_others_has_no_type(
    suffix,
):
    scraped = Scraped()
    text = scraped.scrape(lambda: scraped.push(gauge_export(f"node.{suffix}", 4.0)))
    assert (
        f"# HELP node_{suffix} node.{suffix}, which its sender did not describe.\n"
        f"# TYPE node_{suffix} untyped\n" in text
    )


@needs_promtool
def test_promtool_finds_nothing_wrong_with_hostile_names():
    scraped = Scraped()
    hostile = {"ingero.node.id": 'n"}\n{evil="1', "ingero.cluster.id": "c\\\u2028\x00\ud7ff"}
    exports = [
        sample("push_active.json"),
        sample("straggler_event_1.json"),
        gauge_export(resource=hostile),
        gauge_export("requests", 3.0, "s"),
        build_metrics(NODE, [build_sum("jobs", [build_number(4, WALL)])], "s"),
        _histogram([1, 2, 3], 2),
    ]
    text = scraped.scrape(lambda: [scraped.push(export) for export in exports])
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text.encode(), capture_output=True, check=False
    )
    complaints = [
        line
        for line in (checked.stdout + checked.stderr).decode().splitlines()
        # Style advice about names that senders chose.
        if "no help text" not in line and "should" not in line
    ]
    assert complaints == []
    names = {
        value
        for (_, labels), value in [(k, dict(k[1]).get("ingero_node_id")) for k in series(text)]
    }
    assert 'n"}\n{evil="1' in names


def _histogram(counts, temporality, total=6.0):
    point = structs.HistogramDataPoint(
        time_unix_nano=WALL,
        count=sum(counts),
        sum=total,
        explicit_bounds=[0.1, 1.0],
        bucket_counts=counts,
    )
    metric = structs.Metric(
        name="wait",
        unit="s",
        histogram=structs.Histogram([point], aggregation_temporality=temporality),
    )
    return build_metrics(NODE, [metric], "s")


def test_histogram_buckets_are_cumulative_and_end_with_infinity():
    scraped = Scraped()
    found = series(scraped.scrape(lambda: scraped.push(_histogram([1, 2, 3], 2))))
    node = {"ingero_node_id": "n1", "ingero_cluster_id": "c1"}
    assert found[labelled("wait_seconds_bucket", le="0.1", **node)] == 1
    assert found[labelled("wait_seconds_bucket", le="1.0", **node)] == 3
    assert found[labelled("wait_seconds_bucket", le="+Inf", **node)] == 6
    assert found[labelled("wait_seconds_count", **node)] == 6
    assert found[labelled("wait_seconds_sum", **node)] == 6.0


def test_deltas_add_up():
    scraped = Scraped()
    delta = build_metrics(NODE, [build_sum("jobs", [build_number(4, WALL)], unit="")], "s")
    delta.tree.resource_metrics[0].scope_metrics[0].metrics[0].sum.aggregation_temporality = 1
    pushes = [delta, delta, _histogram([1, 2, 3], 1), _histogram([1, 0, 0], 1, total=0.05)]
    found = series(scraped.scrape(lambda: [scraped.push(push) for push in pushes]))
    node = {"ingero_node_id": "n1", "ingero_cluster_id": "c1"}
    assert found[labelled("jobs_total", **node)] == 8
    assert found[labelled("wait_seconds_bucket", le="0.1", **node)] == 2
    assert found[labelled("wait_seconds_sum", **node)] == pytest.approx(6.05)


def test_latest_point_wins_whatever_order_its_attributes_come_in():
    scraped = Scraped()
    pushes = [gauge_export(value=1.0, x="1", y="2"), gauge_export(value=2.0, y="2", x="1")]
    found = series(scraped.scrape(lambda: [scraped.push(push) for push in pushes]))
    assert list(found.values()) == [2.0]


def test_new_event_ids_make_no_new_series():
    scraped = Scraped()
    pushes = []
    for index in range(5):
        body = json.loads((SAMPLES / "straggler_event_1.json").read_text())
        metric = body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"][0]
        attributes = metric["gauge"]["dataPoints"][0]["attributes"]
        next(a for a in attributes if a["key"] == "ingero.event.id")["value"] = {
            "stringValue": f"id-{index}"
        }
        pushes.append(decode_export(json.dumps(body).encode(), Signal.METRICS, "application/json"))
    found = series(scraped.scrape(lambda: [scraped.push(push) for push in pushes]))
    assert len(found) == 1


def test_series_disappears_after_its_expiry_and_its_place_is_free_again():
    scraped = Scraped(metric_expiration="5m", max_series=2)
    old = [gauge_export(x="1"), gauge_export(x="2")]

    def later():
        for push in old:
            scraped.push(push)
        scraped.host.advance(NS_PER_S)
        scraped.host.clock.advance(301 * NS_PER_S)
        scraped.push(gauge_export("a.c", x="3"))  # refused: the store is still full
        scraped.host.advance(NS_PER_S)

    assert series(scraped.scrape(later)) == {}
    assert (
        scraped.host.read("ingero_fleet_prometheus_refused_points_total", exporter="prometheus")
        == 1
    )
    text = scraped.scrape(lambda: scraped.push(gauge_export("a.d", x="4")))
    assert list(series(text)) == [
        labelled("a_d", x="4", ingero_node_id="n1", ingero_cluster_id="c1")
    ]


def test_known_labels_of_a_new_node_are_refused_too_when_the_store_is_full():
    scraped = Scraped(max_series=1)
    other = {"ingero.node.id": "n2", "ingero.cluster.id": "c1"}
    pushes = [gauge_export(x="1"), gauge_export(x="1", resource=other)]
    found = series(scraped.scrape(lambda: [scraped.push(push) for push in pushes]))
    assert [dict(labels)["ingero_node_id"] for _, labels in found] == ["n1"]


def test_same_name_as_two_types_keeps_the_first_and_counts_the_other():
    scraped = Scraped(add_metric_suffixes=False)
    counter = build_metrics(NODE, [build_sum("jobs", [build_number(4, WALL)])], "s")
    found = series(
        scraped.scrape(
            lambda: [scraped.push(gauge_export("jobs")), scraped.push(counter)],
            lambda: scraped.host.advance(NS_PER_S),
        )
    )
    assert list(found.values()) == [1.0]
    assert (
        scraped.host.read("ingero_fleet_prometheus_conflicting_points_total", exporter="prometheus")
        == 1
    )


def test_service_attributes_become_job_instance_and_target_info():
    scraped = Scraped()
    resource = {
        "service.name": "trainer",
        "service.namespace": "ml",
        "service.instance.id": "7",
        "host.name": "h",
    }
    found = series(scraped.scrape(lambda: scraped.push(gauge_export(resource=resource))))
    assert found == {
        labelled("a_b", job="ml/trainer", instance="7"): 1.0,
        labelled("target_info", job="ml/trainer", instance="7", host_name="h"): 1.0,
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"namespace": "site"},
            labelled("site_a_b_seconds", ingero_node_id="n1", ingero_cluster_id="c1"),
        ),
        (
            {"add_metric_suffixes": False},
            labelled("a_b", ingero_node_id="n1", ingero_cluster_id="c1"),
        ),
        (
            {"const_labels": {"dc": "x"}},
            labelled("a_b_seconds", dc="x", ingero_node_id="n1", ingero_cluster_id="c1"),
        ),
        (
            {"resource_constant_labels": {"included": ["*"], "excluded": ["*.cluster.*"]}},
            labelled("a_b_seconds", ingero_node_id="n1", zone="z"),
        ),
        (
            {"resource_to_telemetry_conversion": {"enabled": True}},
            labelled("a_b_seconds", ingero_node_id="n1", ingero_cluster_id="c1", zone="z"),
        ),
        (
            {"drop_attributes": ["ingero.none"]},
            labelled("a_b_seconds", ingero_node_id="n1", ingero_cluster_id="c1"),
        ),
    ],
)
def test_setting_changes_names_and_labels(config, expected):
    scraped = Scraped(**config)
    export = gauge_export(unit="s", resource={**NODE, "zone": "z"})
    assert list(series(scraped.scrape(lambda: scraped.push(export)))) == [expected]


def test_timestamps_are_shown_when_asked_for_and_1970_becomes_arrival():
    scraped = Scraped(send_timestamps=True)
    boot_time = build_metrics(NODE, [build_gauge("a", [build_number(1.0, 5_000)], "")], "s")
    text = scraped.scrape(lambda: scraped.push(boot_time))
    assert text.splitlines()[-1].endswith(f" {WALL // 1_000_000}")


def test_open_metrics_is_spoken_to_who_asks_for_it():
    scraped = Scraped(enable_open_metrics=True)
    jobs = build_metrics(NODE, [build_sum("jobs", [build_number(4, WALL)], unit="")], "s")
    text = scraped.scrape(
        lambda: [scraped.push(jobs), scraped.push(_histogram([1, 2, 3], 2))],
        headers={"accept": "application/openmetrics-text; version=1.0.0"},
    )
    assert scraped.content_type.startswith("application/openmetrics-text")
    families = {family.name: family for family in parse_open_metrics(text)}
    assert families["jobs"].type == "counter"
    assert families["jobs"].samples[0].value == 4
    assert families["wait_seconds"].type == "histogram"


def test_stale_marker_removes_the_series():
    scraped = Scraped()
    stale = gauge_export()
    stale.tree.resource_metrics[0].scope_metrics[0].metrics[0].gauge.data_points[0].flags = 1
    assert series(scraped.scrape(lambda: [scraped.push(gauge_export()), scraped.push(stale)])) == {}


def test_other_paths_and_methods_are_refused():
    scraped = Scraped()

    async def run():
        await scraped.exporter.start(scraped.host)
        try:
            base = f"http://{scraped.host.announced['']}"
            async with local_http.open_async_client() as client:
                return (
                    (await client.get(f"{base}/")).status_code,
                    (await client.post(f"{base}/metrics")).status_code,
                    (await client.head(f"{base}/metrics")).status_code,
                )
        finally:
            await scraped.exporter.stop()

    assert asyncio.run(run()) == (404, 405, 200)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("resource", "attributes", "name"),
    [
        ({"ingero.x": "v" * 1025}, {}, "ok"),
        ({"no.label": "v" * 70_000}, {}, "ok"),
        ({f"ingero.x{number}": "v" for number in range(65)}, {}, "ok"),
        ({}, {"x": "v" * 1025}, "ok"),
        ({}, {"n" * 257: "v"}, "ok"),
        ({}, {f"x{number}": "v" for number in range(65)}, "ok"),
        ({}, {}, "n" * 257),
    ],
)
def test_labels_and_names_that_are_too_long_or_too_many_are_refused_and_counted(
    resource, attributes, name, as_json
):
    gauge = build_gauge(name, [build_number(1.0, WALL, attributes)])
    export = build_metrics(NODE | resource, [gauge, build_gauge("other", [])], "t")
    body = encode_json(export) if as_json else encode_protobuf(export)
    kind = "application/json" if as_json else "application/x-protobuf"
    page = Scraped()
    large = decode_export(body, Signal.METRICS, kind)
    text = page.scrape(lambda: page.push(large), lambda: page.push(gauge_export()))
    assert len(series(text)) == 1
    assert len(max(text.splitlines(), key=len)) < 1000
    counted = [
        page.host.read(f"ingero_fleet_prometheus_{what}_points_total", exporter="prometheus")
        for what in ("oversized", "unsupported")
    ]
    assert sum(counted) == 1


@pytest.mark.parametrize(
    ("bounds", "counts", "is_shown"),
    [
        ([1.0, 2.0, 3.0], [1, 2], False),
        ([2.0, 1.0], [1, 2, 3], False),
        ([1.0, float("nan")], [1, 2, 3], False),
        ([1.0, 2.0], [1, 2, 3], True),
        ([1.0, 2.0], [1, 2, 4], False),
        ([], [], True),
        ([float(bound) for bound in range(4096)], [6] + [0] * 4096, True),
        ([float(bound) for bound in range(4097)], [6] + [0] * 4097, False),
    ],
)
def test_histogram_whose_buckets_do_not_fit_its_bounds_or_its_count_is_refused(
    bounds, counts, is_shown
):
    point = structs.HistogramDataPoint(
        count=6, sum=3.0, bucket_counts=counts, explicit_bounds=bounds, time_unix_nano=WALL
    )
    metric = structs.Metric(name="h", histogram=structs.Histogram([point], 2))
    export = build_metrics(NODE, [metric], "t")
    page = Scraped()
    found = series(page.scrape(lambda: page.push(export)))
    assert bool(found) == is_shown
    name = "ingero_fleet_prometheus_unsupported_points_total"
    assert page.host.read(name, exporter="prometheus") == (not is_shown)


def test_summary_of_more_quantiles_than_a_histogram_may_have_buckets_is_refused():
    quantiles = [structs.ValueAtQuantile(at / 5000, 1.0) for at in range(4097)]
    point = structs.SummaryDataPoint(count=6, quantile_values=quantiles, time_unix_nano=WALL)
    export = build_metrics(NODE, [structs.Metric(name="s", summary=structs.Summary([point]))], "t")
    page = Scraped()
    assert series(page.scrape(lambda: page.push(export))) == {}


class Kept:
    """What an exporter keeps of senders, points and names."""

    def __init__(self, max_series):
        self.store = SeriesStore(max_series)
        config = parse_model(PrometheusConfig, {"endpoint": "127.0.0.1:0"})
        self.intake = SeriesIntake(self.store, config)

    def push(self, export):
        message = decode_protobuf(encode_protobuf(export), Signal.METRICS)
        self.intake.apply(message, 1, WALL)

    def count(self):
        store = self.store
        sets = (store._resources, store._attributes)
        return (*map(len, sets), *(len(one._aliases) for one in sets), len(store.families))


def _sender(number, **more):
    return NODE | {"ingero.node.id": f"n{number}", "service.name": "app", **more}


def test_a_full_exporter_keeps_nothing_of_new_senders_points_and_names():
    kept = Kept(max_series=2)
    kept.push(gauge_export(resource=_sender(0)))
    before = kept.count()
    for number in range(1, 4):
        kept.push(gauge_export(resource=_sender(number)))
        kept.push(gauge_export(resource=_sender(0), x=str(number)))
        kept.push(gauge_export(resource=_sender(0), **{"ingero.node.id": str(number)}))
        kept.push(gauge_export(name=f"other{number}", resource=_sender(0)))
        one, two = _histogram([1, 2, 3], 2), gauge_export(resource=NODE)
        kept.push(merge_exports([one, two]))
    assert kept.count() == before
    assert kept.store.n_refused == 3 * 6
    assert kept.store.n_series == 2
    kept.push(gauge_export(value=7.0, resource=_sender(0)))
    assert list(kept.store.families["a_b"].values) == [7.0]


def test_a_full_exporter_finds_what_it_shows_in_another_spelling():
    kept = Kept(max_series=1)
    kept.push(gauge_export(x="1", y="2", **{"ingero.node.id": "n9"}))
    kept.push(gauge_export(value=7.0, y="2", x="1", **{"ingero.node.id": "n9"}))
    assert list(kept.store.families["a_b"].values) == [7.0]
    assert kept.store.n_refused == 0


def test_long_spellings_of_the_same_labels_do_not_fill_the_memory():
    kept = Kept(max_series=10)
    for number in range(300):
        pad = f"{number}:".ljust(60_000, "x")
        kept.push(gauge_export(resource=NODE | {"no.label": pad}))
    aliases = kept.store._resources._aliases
    assert sum(map(len, aliases)) < 8 << 20


def test_label_sets_without_a_series_go_and_their_numbers_are_used_again_without_a_mistake():
    kept = Kept(max_series=100_000)
    nothing = build_metrics({}, [build_gauge("!", [build_number(1.0, WALL)])], "s")
    for number in range(3000):
        resource = structs.Resource(build_attributes(NODE | {"ingero.node.id": f"gone{number}"}))
        nothing.tree.resource_metrics[0].resource = resource
        kept.push(nothing)
        if number % 100 == 0:
            kept.push(gauge_export(value=number, resource=_sender(0), **{"ingero.node.id": "x"}))
            kept.push(gauge_export(value=-number, resource=_sender(number + 1)))
    assert len(kept.store._resources) < 1000
    family = kept.store.families["a_b"]
    found = {kept.store.labels_of(key): family.values[row] for key, row in family.rows.items()}
    own = 'ingero_cluster_id="c1",ingero_node_id="n0",job="app",exported_ingero_node_id="x"'
    assert found.pop(own) == 2900
    assert found == {
        f'ingero_cluster_id="c1",ingero_node_id="n{number + 1}",job="app"': -number
        for number in range(0, 3000, 100)
    }
