"""Whose labels a series shows where a sender, its points and the format want the same name."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_open_metrics,
)
from tests.e2e.prometheus import needs_prometheus, serve_config
from tests.fleet.exporters.scraped import NODE, WALL, Scraped, gauge_export, labelled, series
from tests.fleet.exporters.test_prometheus_native import families
from tests.support import local_http

from ingero.config import parse_model
from ingero.fleet.exporters.prometheus.formats import ExpositionFormat
from ingero.fleet.exporters.prometheusremotewrite.config import RemoteWriteConfig
from ingero.fleet.exporters.prometheusremotewrite.request import RemoteWriteRequest
from ingero.otlp.codec import build_metrics, decode_protobuf, encode_protobuf, structs
from ingero.otlp.codec.build import build_attributes
from ingero.otlp.names import Signal
from ingero.testing.waiting import wait_until

ACCEPTED = {
    "text": {},
    "openmetrics": {"accept": ExpositionFormat.OPEN_METRICS.value},
    "protobuf": {"accept": ExpositionFormat.PROTOBUF.value},
}
WHO = {"ingero_node_id": "n1", "ingero_cluster_id": "c1"}


def distributions(resource=NODE, **attributes):
    """A histogram ``wait``, an exponential one ``lag`` and a summary ``size``, each with these attributes."""
    given = {"time_unix_nano": WALL, "count": 3, "sum": 1.5}
    own = build_attributes(attributes)
    wait = structs.HistogramDataPoint(
        attributes=own, explicit_bounds=[1.0], bucket_counts=[1, 2], **given
    )
    buckets = structs.Buckets(0, [3])
    lag = structs.ExponentialHistogramDataPoint(attributes=own, positive=buckets, **given)
    quantiles = [structs.ValueAtQuantile(0.5, 2.0)]
    size = structs.SummaryDataPoint(attributes=own, quantile_values=quantiles, **given)
    metrics = [
        structs.Metric(name="wait", histogram=structs.Histogram([wait], 2)),
        structs.Metric(name="lag", exponential_histogram=structs.ExponentialHistogram([lag], 2)),
        structs.Metric(name="size", summary=structs.Summary([size])),
    ]
    return build_metrics(resource, metrics, "s")


def written(export, **settings):
    """Labels of each series of a remote write, by name."""
    config = parse_model(RemoteWriteConfig, {"endpoint": "http://localhost:9", **settings})
    found = {}
    for one in RemoteWriteRequest(config).build(export, WALL).timeseries:
        labels = {label.name: label.value for label in one.labels}
        found.setdefault(labels.pop("__name__"), []).append(labels)
    return found


TAKEN = {"le": "quay", "quantile": "high"}
SOURCES = {
    "point": ({}, distributions(**TAKEN)),
    "resource": (
        {"resource_to_telemetry_conversion": {"enabled": True}},
        distributions(NODE | TAKEN),
    ),
    "constant": ({"const_labels": TAKEN}, distributions()),
}


@pytest.mark.parametrize("source", SOURCES)
def test_le_and_quantile_of_a_sender_are_shown_as_exported(source):
    config, export = SOURCES[source]
    page = Scraped(**config)
    found = series(page.scrape(lambda: page.push(export)))
    histogram = WHO | {"exported_le": "quay", "quantile": "high"}
    assert found[labelled("wait_bucket", le="1.0", **histogram)] == 1
    assert found[labelled("wait_bucket", le="+Inf", **histogram)] == 3
    assert found[labelled("wait_sum", **histogram)] == 1.5
    assert found[labelled("lag_count", **histogram)] == 3
    summary = WHO | {"le": "quay", "exported_quantile": "high"}
    assert found[labelled("size", quantile="0.5", **summary)] == 2
    assert found[labelled("size_count", **summary)] == 3


@pytest.mark.parametrize("source", SOURCES)
def test_no_exposition_has_a_label_of_a_sender_in_place_of_its_own(source):
    config, export = SOURCES[source]
    page = Scraped(enable_open_metrics=True, **config)
    text = page.scrape(lambda: page.push(export), headers=ACCEPTED["openmetrics"])
    assert text.count('exported_le="quay"') == text.count("\nwait_") + text.count("\nlag_")
    assert len(list(parse_open_metrics(text))) == 3
    page = Scraped(**config)
    body = page.scrape(lambda: page.push(export), headers=ACCEPTED["protobuf"], is_bytes=True)
    names = {
        name: sorted(label.name for label in family.metric[0].label)
        for name, family in families(body).items()
    }
    assert "exported_le" in names["wait"]
    assert "le" not in names["wait"]
    assert "le" not in names["lag"]
    assert "quantile" not in names["size"]


@pytest.mark.parametrize("source", SOURCES)
def test_a_remote_write_has_the_labels_of_a_scrape(source):
    config, export = SOURCES[source]
    renamed = {"external_labels": config["const_labels"]} if "const_labels" in config else config
    found = written(export, **renamed)
    shown = WHO | {"exported_le": "quay", "quantile": "high"}
    assert found["wait_bucket"] == [shown | {"le": "1.0"}, shown | {"le": "+Inf"}]
    assert found["wait_count"] == [shown]


def test_exported_is_repeated_where_a_sender_has_that_label_too():
    page = Scraped()
    export = distributions(le="quay", exported_le="ship")
    found = series(page.scrape(lambda: page.push(export)))
    labels = WHO | {"exported_exported_le": "quay", "exported_le": "ship"}
    assert labelled("wait_count", **labels) in found


def test_a_gauge_keeps_its_le_beside_a_histogram_with_the_same_attributes():
    page = Scraped()
    pushes = [distributions(le="quay"), gauge_export(le="quay"), distributions(le="quay")]
    found = series(page.scrape(lambda: [page.push(push) for push in pushes]))
    assert found[labelled("a_b", le="quay", **WHO)] == 1.0
    assert sum(name == "wait_count" for name, _ in found) == 1


def test_attributes_that_become_one_label_share_it_in_every_exposition():
    page = Scraped(enable_open_metrics=True)
    export = gauge_export(**{"a.b": "2", "a_b": "1", "a/b": ""})
    for accepted in ACCEPTED.values():
        body = page.scrape(lambda: page.push(export), headers=accepted, is_bytes=True)
        assert body.count(b"2;1") == 1


def as_protobuf(export):
    return decode_protobuf(encode_protobuf(export), Signal.METRICS)


ENCODINGS = pytest.mark.parametrize("encode", [lambda export: export, as_protobuf])
FORGED = {
    "ingero.cluster.id": "c2",
    "ingero.node.id": "n2",
    "job": "other",
    "instance": "9",
    "site": "x",
    "ingero.provider": "aws",
}
SENDER = NODE | {"service.name": "app", "service.instance.id": "7", "ingero.provider": "gcp"}


@ENCODINGS
def test_a_point_replaces_labels_of_its_sender_but_not_those_that_name_it(encode):
    page = Scraped(const_labels={"site": "hel"})
    export = encode(gauge_export(resource=SENDER, **FORGED))
    plain = encode(gauge_export(value=2.0, resource=SENDER))
    pushes = [plain, export, plain, export]
    found = series(page.scrape(lambda: [page.push(push) for push in pushes]))
    who = WHO | {"job": "app", "instance": "7", "site": "hel"}
    exported = {
        "exported_ingero_cluster_id": "c2",
        "exported_ingero_node_id": "n2",
        "exported_job": "other",
        "exported_instance": "9",
        "exported_site": "x",
    }
    shown = {key: value for key, value in found.items() if key[0] == "a_b"}
    assert shown == {
        labelled("a_b", ingero_provider="gcp", **who): 2.0,
        labelled("a_b", ingero_provider="aws", **who, **exported): 1.0,
    }
    remote = written(export, external_labels={"site": "hel"})
    assert remote["a_b"] == [who | exported | {"ingero_provider": "aws"}]


def test_a_point_names_a_node_and_a_job_where_its_sender_names_none():
    page = Scraped()
    export = gauge_export(resource={}, **{"ingero.node.id": "n2", "job": "other"})
    (found,) = series(page.scrape(lambda: page.push(export)))
    assert found == labelled("a_b", ingero_node_id="n2", job="other")


@pytest.mark.parametrize(
    ("resource", "attributes"),
    [
        ({}, {"ingero.cluster.id": "c2"}),
        ({}, {"ingero_cluster_id": "c2"}),
        ({"ingero.cluster_id": "c2"}, {}),
        ({"ingero.cluster.id": b"\xc2"}, {}),
    ],
)
def test_nothing_but_the_resources_cluster_is_shown_as_the_cluster(resource, attributes):
    resource = resource | {"service.name": "app"}
    export = gauge_export(resource=resource, **attributes)
    page = Scraped()
    found = series(page.scrape(lambda: page.push(export)))
    assert len(found) == 2
    remote = [one for ones in written(export).values() for one in ones]
    for labels in [*(dict(labels) for _, labels in found), *remote]:
        assert "ingero_cluster_id" not in labels
    assert any("exported_ingero_cluster_id" in dict(labels) for _, labels in found)


@ENCODINGS
def test_states_of_a_sender_end_each_other_where_a_label_was_renamed(encode):
    page = Scraped()
    pushes = [
        encode(gauge_export(**{"ingero.cluster.id": "c2", "ingero.node.state": state}))
        for state in ("active", "idle")
    ]
    found = series(page.scrape(lambda: [page.push(push) for push in pushes]))
    assert [dict(labels)["ingero_node_state"] for _, labels in found] == ["idle"]


@ENCODINGS
def test_repeated_pushes_of_two_senders_with_renamed_labels_stay_apart(encode):
    pushes = []
    for value in (1.0, 2.0, 3.0):
        for node, factor in (("n1", 1), ("n2", 10)):
            resource, point = NODE | {"ingero.node.id": node}, {"ingero.node.id": "x"}
            pushes.append(encode(gauge_export(value=value * factor, resource=resource, **point)))
    page = Scraped()
    found = series(page.scrape(lambda: [page.push(push) for push in pushes]))
    by_node = {dict(labels)["ingero_node_id"]: value for (_, labels), value in found.items()}
    assert by_node == {"n1": 3.0, "n2": 30.0}


@needs_prometheus
@pytest.mark.slow
def test_a_real_prometheus_takes_each_page_with_such_labels(tmp_path):
    pages = {}
    for path, accepted in ACCEPTED.items():
        page = Scraped(enable_open_metrics=True, const_labels={"quantile": "all"})
        pushes = [distributions(**TAKEN), gauge_export(**{"a.b": "2", "a_b": "1"})]
        body = page.scrape(
            lambda page=page, pushes=pushes: [page.push(push) for push in pushes],
            headers=accepted,
            is_bytes=True,
        )
        pages[f"/{path}"] = (page.content_type, body)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            kind, body = pages[self.path]
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    jobs = [
        {
            "job_name": path[1:],
            "metrics_path": path,
            "scrape_interval": "1s",
            "static_configs": [{"targets": [f"127.0.0.1:{server.server_port}"]}],
        }
        for path in pages
    ]
    native = "--enable-feature=native-histograms"
    try:
        with serve_config(tmp_path, {"scrape_configs": jobs}, native) as prometheus:
            assert wait_until(lambda: prometheus.number("count(up)") == len(pages))
            targets = local_http.get(f"{prometheus.url}/api/v1/targets").json()["data"]
            assert {one["lastError"] for one in targets["activeTargets"]} == {""}
            assert prometheus.number('sum(wait_count{exported_le="quay"})') == 3 * len(pages)
    finally:
        server.shutdown()
        server.server_close()
