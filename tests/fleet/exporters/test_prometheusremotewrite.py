"""Remote writes: what a Prometheus stores, and what becomes of what it cannot store."""

import asyncio
import json
import math
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import cramjam
import pytest
from tests.e2e.prometheus import each_prometheus, needs_prometheus, serve_config

from ingero.config import parse_model
from ingero.errors import ConfigError
from ingero.fleet.component import ComponentId
from ingero.fleet.consumer import Batch
from ingero.fleet.exporters.prometheusremotewrite.config import RemoteWriteConfig
from ingero.fleet.exporters.prometheusremotewrite.exporter import FACTORY
from ingero.fleet.exporters.prometheusremotewrite.request import (
    _WRITE_REQUEST,
    RemoteWriteRequest,
)
from ingero.otlp.codec import decode_export, encode_protobuf
from ingero.otlp.names import ContentType, Signal
from ingero.testing.host import ManualHost
from ingero.testing.waiting import wait_until

T = 1_767_225_600_000_000_000
RESOURCE = {"ingero.node.id": "n1", "service.name": "agent", "os.type": "linux"}


def kv(values):
    return [{"key": key, "value": {"stringValue": text}} for key, text in values.items()]


def number(value, at_ns=T, **rest):
    return {"timeUnixNano": str(at_ns), "asDouble": value, **rest}


def export(*metrics, resource=None, is_message=False):
    scope = {"metrics": list(metrics)}
    body = {
        "resourceMetrics": [
            {"resource": {"attributes": kv(resource or {})}, "scopeMetrics": [scope]}
        ]
    }
    found = decode_export(json.dumps(body).encode(), Signal.METRICS, ContentType.JSON)
    if is_message:
        found = decode_export(encode_protobuf(found), Signal.METRICS, ContentType.PROTOBUF)
    return found


GAUGE = {"name": "gpu.util", "unit": "1", "gauge": {"dataPoints": [
    number(0.5, attributes=kv({"gpu": "0", "score": "0.1"}))]}}  # fmt: skip
SUM = {
    "name": "calls",
    "sum": {"isMonotonic": True, "aggregationTemporality": 2, "dataPoints": [number(7)]},
}
HISTOGRAM = {"name": "wait", "unit": "s", "histogram": {"aggregationTemporality": 2, "dataPoints": [
    {"timeUnixNano": str(T), "count": "6", "sum": 9.5, "bucketCounts": ["1", "2", "3"], "explicitBounds": [0.1, 1]}]}}  # fmt: skip
DELTA = {
    "name": "d",
    "sum": {"isMonotonic": True, "aggregationTemporality": 1, "dataPoints": [number(1)]},
}
EXPONENTIAL = {"name": "e", "exponentialHistogram": {"aggregationTemporality": 2, "dataPoints": [
    {"timeUnixNano": str(T), "count": "1", "scale": 0}]}}  # fmt: skip


def config(**settings):
    return parse_model(
        RemoteWriteConfig, {"endpoint": "http://localhost:9/api/v1/write", **settings}
    )


def request_of(exported, **settings):
    body = RemoteWriteRequest(config(**settings)).encode(exported, T)
    return _WRITE_REQUEST.FromString(bytes(cramjam.snappy.decompress_raw(body)))


def series(exported, **settings):
    """What a request holds: label text → samples by time in ms."""
    request = request_of(exported, **settings)
    found = {}
    for one in request.timeseries:
        labels = [(label.name, label.value) for label in one.labels]
        assert labels == sorted(labels)
        found[",".join(f"{name}={value}" for name, value in labels)] = [
            (sample.timestamp, sample.value) for sample in one.samples
        ]
    return found


AT = T // 1_000_000


@pytest.mark.parametrize("is_message", [False, True], ids=["json", "protobuf"])
def test_names_labels_and_values_are_those_of_a_scrape(is_message):
    found = series(export(GAUGE, SUM, HISTOGRAM, resource=RESOURCE, is_message=is_message))
    who = "ingero_node_id=n1,job=agent"
    assert found == {
        f"__name__=gpu_util_ratio,gpu=0,{who}": [(AT, 0.5)],
        f"__name__=calls_total,{who}": [(AT, 7.0)],
        f"__name__=wait_seconds_bucket,{who},le=0.1": [(AT, 1.0)],
        f"__name__=wait_seconds_bucket,{who},le=1.0": [(AT, 3.0)],
        f"__name__=wait_seconds_bucket,{who},le=+Inf": [(AT, 6.0)],
        f"__name__=wait_seconds_count,{who}": [(AT, 6.0)],
        f"__name__=wait_seconds_sum,{who}": [(AT, 9.5)],
        "__name__=target_info,ingero_node_id=n1,job=agent,os_type=linux": [(AT, 1.0)],
    }


def test_settings_change_names_and_labels():
    settings = {
        "namespace": "x", "external_labels": {"cluster": "c"}, "add_metric_suffixes": False,
        "target_info": {"enabled": False}, "resource_to_telemetry_conversion": {"enabled": True},
        "drop_attributes": ["gpu"],
    }  # fmt: skip
    assert list(series(export(GAUGE, resource={"os.type": "linux"}), **settings)) == [
        "__name__=x_gpu_util,cluster=c,os_type=linux,score=0.1"
    ]


def test_samples_of_a_series_are_in_order_and_an_ended_series_is_marked():
    points = [
        number(2, T + 2_000_000),
        number(1, T),
        {"timeUnixNano": str(T + 5_000_000), "flags": 1},
    ]
    found = series(export({"name": "g", "gauge": {"dataPoints": points}}))["__name__=g"]
    assert [at for at, _ in found] == [AT, AT + 2, AT + 5]
    assert [value for _, value in found[:2]] == [1.0, 2.0]
    assert math.isnan(found[2][1])
    assert struct.pack("<d", found[2][1]) == struct.pack("<Q", 0x7FF0000000000002)


@pytest.mark.parametrize(
    ("settings", "description"),
    [
        ({"wal": {}}, "remote_write_queue.storage"),
        ({"compression": "gzip"}, "snappy only"),
        ({"endpoint": "localhost:9090"}, "is not an http or https URL"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(settings, description):
    with pytest.raises(ConfigError, match=description):
        config(**settings)


class Receiver:
    """Answers as told, then with 204; keeps requests."""

    def __init__(self, answers=()):
        self.answers, self.taken, self.changed = list(answers), [], threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                status = receiver.answers.pop(0) if receiver.answers else 204
                with receiver.changed:
                    receiver.taken.append((status, dict(self.headers), body))
                    receiver.changed.notify_all()
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/api/v1/write"


def send(url, *exports, **more):
    """Start the exporter, hand it batches, end it; the host, to read counters from."""
    host = ManualHost()
    settings = config(
        endpoint=url,
        retry_on_failure={"initial_interval": "1ms", "max_interval": "1ms"},
        timeout="5s",
        **more,
    )

    async def scenario():
        exporter = FACTORY.create(ComponentId("prometheusremotewrite"), settings)
        await exporter.start(host)
        for one in exports:
            exporter.consume(Batch(Signal.METRICS, one, T))
        host.draining = True
        await exporter.stop()

    asyncio.run(scenario())
    return lambda name: host.read(name, exporter="prometheusremotewrite")


def test_a_failing_receiver_is_asked_again_and_a_refusing_one_is_not():
    receiver = Receiver([500, 503, 204, 400])
    try:
        read = send(receiver.url, export(SUM), export(GAUGE))
    finally:
        receiver.server.shutdown()
        receiver.server.server_close()
    assert [status for status, _, _ in receiver.taken] == [500, 503, 204, 400]
    assert read("otelcol_exporter_sent_metric_points_total") == 1
    assert read("otelcol_exporter_send_failed_metric_points_total") == 1
    headers = receiver.taken[0][1]
    assert headers["Content-Encoding"] == "snappy"
    assert headers["Content-Type"] == "application/x-protobuf"
    assert headers["X-Prometheus-Remote-Write-Version"] == "0.1.0"


def test_what_the_protocol_cannot_hold_is_counted_once():
    receiver = Receiver([503])
    try:
        read = send(receiver.url, export(SUM, DELTA, EXPONENTIAL), export(DELTA))
    finally:
        receiver.server.shutdown()
        receiver.server.server_close()
    assert len(receiver.taken) == 2, "a request without a sample was sent"
    assert read("ingero_fleet_exporter_rejected_items_total") == 3


TRACE = "0af7651916cd43dd8448eb211c80319c"
SEEN = {"timeUnixNano": str(T), "asDouble": 0.5, "traceId": TRACE, "spanId": "b7ad6b7169203331"}
SEEN_SUM = {**SUM, "sum": {**SUM["sum"], "dataPoints": [{**number(7), "exemplars": [SEEN]}]}}
SEEN_HISTOGRAM = {**HISTOGRAM, "histogram": {"aggregationTemporality": 2, "dataPoints": [
    {**HISTOGRAM["histogram"]["dataPoints"][0], "exemplars": [SEEN, {**SEEN, "asDouble": 0.7}]}]}}  # fmt: skip
NATIVE = {"name": "e", "unit": "s", "exponentialHistogram": {"aggregationTemporality": 2, "dataPoints": [
    {"timeUnixNano": str(T), "count": "10", "sum": 20.0, "scale": 1, "zeroCount": "1", "exemplars": [SEEN],
     "positive": {"offset": 1, "bucketCounts": ["4", "0", "5"]}}]}}  # fmt: skip


@pytest.mark.parametrize("is_message", [False, True], ids=["json", "protobuf"])
def test_exemplars_and_native_histograms_are_written_as_prometheus_has_them(is_message):
    exported = export(SEEN_SUM, SEEN_HISTOGRAM, NATIVE, is_message=is_message)
    found = {}
    for one in request_of(exported, send_native_histograms=True).timeseries:
        labels = {label.name: label.value for label in one.labels}
        found[labels["__name__"], labels.get("le", "")] = one
    seen = {
        key: [({pair.name: pair.value for pair in e.labels}, e.value, e.timestamp) for e in one.exemplars]
        for key, one in found.items()
        if one.exemplars
    }  # fmt: skip
    ids = {"trace_id": TRACE, "span_id": "b7ad6b7169203331"}
    assert seen == {
        ("calls_total", ""): [(ids, 0.5, AT)],
        ("wait_seconds_bucket", "1.0"): [(ids, 0.7, AT)],
        ("e_seconds", ""): [(ids, 0.5, AT)],
    }
    native = found["e_seconds", ""]
    assert not native.samples
    (one,) = native.histograms
    assert (one.count_int, one.sum, one.schema, one.zero_count_int) == (10, 20.0, 1, 1)
    assert [(span.offset, span.length) for span in one.positive_spans] == [(2, 1), (1, 1)]
    assert (list(one.positive_deltas), one.timestamp) == ([4, 1], AT)
    plain = request_of(exported, send_exemplars=False).timeseries
    assert not any(one.exemplars or one.histograms for one in plain)
    assert len(plain) == len(found) - 1


@each_prometheus
@pytest.mark.slow
def test_a_real_prometheus_keeps_written_quantiles_and_traces(binary, tmp_path):
    text = json.dumps([SEEN_SUM, NATIVE]).replace(str(T), str(time.time_ns()))
    flags = (
        "--web.enable-remote-write-receiver",
        "--enable-feature=native-histograms,exemplar-storage",
    )
    with serve_config(tmp_path, {}, *flags, binary=binary) as prometheus:
        url = f"{prometheus.url}/api/v1/write"
        read = send(url, export(*json.loads(text)), send_native_histograms=True)
        assert read("otelcol_exporter_sent_metric_points_total") == 2
        assert wait_until(lambda: prometheus.number("histogram_count(e_seconds)")) == 10
        # The fourth of ten observations is in the bucket above the one around zero, from 2 ** 0.5 to 2.
        assert 2**0.5 < prometheus.number("histogram_quantile(0.4, e_seconds)") <= 2
        (labels, value) = prometheus.exemplars("calls_total")["calls_total"][0]
        assert (labels["trace_id"], value) == (TRACE, 0.5)


@needs_prometheus
@pytest.mark.slow
def test_a_real_prometheus_stores_what_is_written(tmp_path):
    now_ns = time.time_ns()
    text = json.dumps([GAUGE, SUM, HISTOGRAM]).replace(str(T), str(now_ns))
    with serve_config(tmp_path, {}, "--web.enable-remote-write-receiver") as prometheus:
        read = send(f"{prometheus.url}/api/v1/write", export(*json.loads(text), resource=RESOURCE))
        assert read("otelcol_exporter_sent_metric_points_total") == 3
        assert (
            wait_until(lambda: prometheus.number('gpu_util_ratio{ingero_node_id="n1",gpu="0"}'))
            == 0.5
        )
        assert prometheus.number("calls_total") == 7
        assert prometheus.number('wait_seconds_bucket{le="1.0"}') == 3
        assert prometheus.number("wait_seconds_sum") == 9.5
        assert (
            prometheus.number("gpu_util_ratio * on (job) group_left (os_type) target_info") == 0.5
        )
        assert prometheus.number("histogram_quantile(0.5, wait_seconds_bucket)") == 1.0
