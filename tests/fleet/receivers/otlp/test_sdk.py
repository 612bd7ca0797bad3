"""The OpenTelemetry SDK's own exporters push unmodified."""

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetrics
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpans
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.metric_exporter import (
    OTLPMetricExporter as HttpMetrics,
)
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpans
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from ingero.otlp.codec import PointKind, Temporality, encode_json, iter_points

RESOURCE = Resource.create({"ingero.node.id": "n1", "ingero.cluster.id": "c1"})
SPAN_COUNT = "otelcol_receiver_accepted_spans_total"


def metric_exporter(running, kind):
    kind, _, compression = kind.partition("-")
    if kind == "grpc":
        algorithm = grpc.Compression.Gzip if compression else grpc.Compression.NoCompression
        return GrpcMetrics(endpoint=str(running.grpc), insecure=True, compression=algorithm)
    return HttpMetrics(endpoint=running.url(), compression=Compression(compression or "none"))


@pytest.mark.parametrize("kind", ["grpc", "grpc-gzip", "http", "http-gzip", "http-deflate"])
def test_sdk_metrics_arrive_as_points(serve, kind):
    running = serve({}, {})
    reader = PeriodicExportingMetricReader(metric_exporter(running, kind), 3_600_000)
    provider = MeterProvider([reader], RESOURCE)
    meter = provider.get_meter("test", "1.2")
    meter.create_gauge("ingero.node.health_score", "1").set(0.75, {"ingero.node.state": "active"})
    meter.create_counter("launches", "{event}").add(7, {"device": 0})
    meter.create_histogram("wait", "ms").record(12.5)
    assert provider.force_flush()
    provider.shutdown()
    batch = running.cluster.batches[0]
    points = {point.name: point for point in iter_points(batch.export)}
    score = points["ingero.node.health_score"]
    assert (score.kind, score.value, score.unit) == (PointKind.GAUGE, 0.75, "1")
    assert score.attributes == {"ingero.node.state": "active"}
    assert score.resource["ingero.node.id"] == "n1"
    assert score.scope == ("test", "1.2")
    launches = points["launches"]
    assert (launches.kind, launches.value, launches.attributes) == (PointKind.SUM, 7, {"device": 0})
    assert (launches.is_monotonic, launches.temporality) == (True, Temporality.CUMULATIVE)
    wait = points["wait"]
    assert (wait.distribution.count, wait.distribution.sum) == (1, 12.5)
    assert sum(wait.distribution.bucket_counts) == 1
    assert len(wait.distribution.bucket_counts) == len(wait.distribution.bounds) + 1
    assert running.cluster.scores == {("c1", ""): 0.75}


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_sdk_spans_arrive_and_keep_their_ids_in_json(serve, kind):
    running = serve({}, {})
    exporter = (
        GrpcSpans(endpoint=str(running.grpc), insecure=True)
        if kind == "grpc"
        else HttpSpans(endpoint=running.url("/v1/traces"))
    )
    provider = TracerProvider(resource=RESOURCE)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("t").start_as_current_span("ingero.detection.straggler") as span:
        span.add_event("outcome", {"status": "resolved"})
    provider.shutdown()
    assert running.count(SPAN_COUNT, kind) == 1
    export = running.cluster.batches[0].export
    got = export.tree.resource_spans[0].scope_spans[0].spans[0]
    assert got.name == "ingero.detection.straggler"
    assert got.trace_id == f"{span.get_span_context().trace_id:032x}"
    assert f'"spanId":"{span.get_span_context().span_id:016x}"'.encode() in encode_json(export)
