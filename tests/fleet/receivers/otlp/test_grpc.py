"""OTLP/gRPC over real channels."""

import threading

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2_grpc import LogsServiceStub
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from tests.fleet.receivers.otlp.requests import Questions
from tests.support.grpc_channels import watch_channel

from ingero.errors import IngeroError, PermanentError, RetryableError
from ingero.fleet.component import PushAnswerer, QuestionSource
from ingero.otlp.codec import build_gauge, build_metrics, build_number
from ingero.otlp.names import Signal
from ingero.telemetry.log import read_fields
from ingero.testing.waiting import wait_until

ACCEPTED = "otelcol_receiver_accepted_metric_points_total"


def push(node="n1", cluster="c1", score=0.9):
    resource = {"ingero.node.id": node, "ingero.cluster.id": cluster}
    points = [build_number(score, 1, {"ingero.node.state": "active"})]
    metric = build_gauge("ingero.node.health_score", points)
    return build_metrics(resource, [metric], "ingero.health").message


@pytest.fixture
def dial():
    channels = []

    def open_channel(running, credentials=None, options=()):
        target = str(running.grpc)
        if credentials is None:
            channel = grpc.insecure_channel(target, options)
        else:
            channel = grpc.secure_channel(target, credentials, options)
        channels.append(channel)
        return channel

    yield open_channel
    for channel in channels:
        channel.close()


def refusal(call, *arguments, **options):
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, timeout=120, **options)
    return caught.value


def retry_delay(error):
    metadata = dict(error.trailing_metadata())
    if "grpc-status-details-bin" not in metadata:
        return None
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    assert status.code == error.code().value[0]
    retry = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(retry)
    return retry.retry_delay.seconds


def test_a_push_is_answered_with_the_threshold_in_both_metadata(serve, dial):
    running = serve(grpc={})
    export = MetricsServiceStub(dial(running)).Export
    response, call = export.with_call(push(), timeout=120)
    assert not response.HasField("partial_success")
    expected = {("ingero-threshold", "0.900000"), ("ingero-quorum-met", "false")}
    assert set(call.initial_metadata()) >= expected
    assert set(call.trailing_metadata()) >= expected
    assert running.count(ACCEPTED, "grpc") == 1


def test_the_node_that_is_asked_reads_the_question_in_both_metadata(serve, dial):
    offers = [("i", PushAnswerer, None), ("nccl", QuestionSource, Questions("c1", "n1"))]
    running = serve(grpc={}, offers=offers)
    _, call = MetricsServiceStub(dial(running)).Export.with_call(push(), timeout=120)
    question = ("ingero-diagnose", "id=1&job=%0D%0A")
    assert question in set(call.initial_metadata())
    assert question in set(call.trailing_metadata())


def test_no_threshold_means_neither_key(serve, dial):
    running = serve(grpc={})
    export = MetricsServiceStub(dial(running)).Export
    _, call = export.with_call(ExportMetricsServiceRequest(), timeout=120)
    keys = {key for key, _ in (*call.initial_metadata(), *call.trailing_metadata())}
    assert not [key for key in keys if key.startswith("ingero")]


def test_all_three_services_are_served(serve, dial):
    running = serve(grpc={})
    channel = dial(running)
    spans = ExportTraceServiceRequest()
    spans.resource_spans.add().scope_spans.add().spans.add().name = "s"
    TraceServiceStub(channel).Export(spans, timeout=120)
    logs = ExportLogsServiceRequest()
    logs.resource_logs.add().scope_logs.add().log_records.add().severity_text = "INFO"
    LogsServiceStub(channel).Export(logs, timeout=120)
    MetricsServiceStub(channel).Export(push(), timeout=120)
    signals = [batch.signal for batch in running.cluster.batches]
    assert signals == [Signal.TRACES, Signal.LOGS, Signal.METRICS]
    assert running.count("otelcol_receiver_accepted_spans_total", "grpc") == 1


def test_the_hint_comes_from_metadata(serve, dial):
    running = serve(grpc={})
    export = MetricsServiceStub(dial(running)).Export
    export(push(), metadata=[("ingero.cluster.id", "hinted")], timeout=120)
    assert running.cluster.batches[0].push.cluster_hint == "hinted"


def test_malformed_protobuf_is_invalid_argument_and_carries_the_threshold(serve, dial):
    running = serve(grpc={})
    channel = dial(running)
    MetricsServiceStub(channel).Export(push(), timeout=120)
    raw = channel.unary_unary(
        "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export", bytes, bytes
    )
    error = refusal(raw, b"\xff\xff", metadata=[("ingero.cluster.id", "c1")])
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ("ingero-threshold", "0.900000") in set(error.initial_metadata())
    assert ("ingero-threshold", "0.900000") in set(error.trailing_metadata())
    assert running.refused("bad_body", "grpc") == 1


def test_an_oversized_message_is_resource_exhausted_without_retry(serve, dial):
    running = serve(grpc={"max_recv_msg_size_mib": 1})
    export = MetricsServiceStub(dial(running)).Export
    error = refusal(export, push(node="x" * (2 << 20)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert retry_delay(error) is None
    assert export(push(), timeout=120) is not None


def test_a_compressed_bomb_is_refused(serve, dial):
    running = serve(grpc={"max_recv_msg_size_mib": 1})
    export = MetricsServiceStub(dial(running)).Export
    error = refusal(export, push(node="x" * (64 << 20)), compression=grpc.Compression.Gzip)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert running.cluster.batches == []


def test_compressed_messages_are_taken(serve, dial):
    running = serve(grpc={})
    export = MetricsServiceStub(dial(running)).Export
    export(push(), compression=grpc.Compression.Gzip, timeout=120)
    assert len(running.cluster.batches) == 1


@pytest.mark.parametrize(
    ("reason", "code", "delay"),
    [
        (RetryableError("full", retry_after_ns=3_000_000_000), grpc.StatusCode.UNAVAILABLE, 3),
        (RetryableError("full"), grpc.StatusCode.UNAVAILABLE, 2),
        (PermanentError("never"), grpc.StatusCode.INTERNAL, None),
    ],
)
def test_a_refusal_by_the_pipeline_reaches_the_sender(serve, dial, reason, code, delay):
    running = serve(grpc={})
    running.cluster.raises = reason
    error = refusal(MetricsServiceStub(dial(running)).Export, push())
    assert (error.code(), error.details()) == (code, reason.message)
    assert retry_delay(error) == delay
    assert running.count("otelcol_receiver_refused_metric_points_total", "grpc") == 1


def test_too_many_calls_are_resource_exhausted_with_retry_info(serve, dial):
    running = serve(grpc={"max_in_flight": 1})
    channel = dial(running)
    export = MetricsServiceStub(channel).Export
    release = threading.Event()

    def never_sent():
        release.wait(120)
        yield push()

    streamed = channel.stream_unary(
        "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
        ExportMetricsServiceRequest.SerializeToString,
        ExportMetricsServiceResponse.FromString,
    )
    first = streamed.future(never_sent(), timeout=120)
    wait_until(lambda: running._receiver._grpc._shared.n_in_flight == 1)
    error = refusal(export, push())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert retry_delay(error) == 2
    assert running.refused("overloaded", "grpc") == 1
    release.set()
    assert first.result() is not None
    assert len(running.cluster.batches) == 1
    export(push(), timeout=120)


def test_a_stopping_service_is_unavailable_with_retry_info(serve, dial):
    running = serve(grpc={})
    running.host.draining = True
    error = refusal(MetricsServiceStub(dial(running)).Export, push())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert retry_delay(error) == 2


def test_a_signal_without_a_pipeline_is_unimplemented(serve, dial):
    running = serve(grpc={}, signals=(Signal.METRICS,))
    error = refusal(LogsServiceStub(dial(running)).Export, ExportLogsServiceRequest())
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "no pipeline takes logs" in error.details()


def test_items_that_a_processor_dropped_are_told(serve, dial):
    running = serve(grpc={})
    running.cluster.rejects = 1
    partial = MetricsServiceStub(dial(running)).Export(push(), timeout=120).partial_success
    assert (partial.rejected_data_points, partial.error_message) == (1, "they were bad")


def test_a_push_whose_token_cannot_be_checked_now_is_asked_to_come_again(serve, dial, tokens):
    running = serve(grpc={"auth": {"authenticator": "bearertokenauth"}}, offers=tokens)
    metadata = [("authorization", "Bearer later")]
    error = refusal(MetricsServiceStub(dial(running)).Export, push(), metadata=metadata)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "grpc-status-details-bin" in dict(error.trailing_metadata())
    assert not running.cluster.batches


def test_a_push_without_the_token_learns_nothing(serve, dial, tokens, caplog):
    running = serve(grpc={"auth": {"authenticator": "bearertokenauth"}}, offers=tokens)
    export = MetricsServiceStub(dial(running)).Export
    export(push(), metadata=[("authorization", "Bearer sesame")], timeout=120)
    assert running.cluster.batches[0].push.auth_subject == "agents"
    metadata = [("ingero.cluster.id", "c1"), ("authorization", "Bearer x")]
    error = refusal(export, push(), metadata=metadata)
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    keys = {key for key, _ in (*error.initial_metadata(), *error.trailing_metadata())}
    assert not [key for key in keys if key.startswith("ingero")]
    (line,) = [one for one in caplog.records if "credentials" in one.getMessage()]
    assert read_fields(line) == {"peer": "127.0.0.1", "cluster_hint": "c1"}


def test_a_port_that_is_taken_is_named(serve):
    running = serve(grpc={})
    with pytest.raises(IngeroError, match=str(running.grpc)):
        serve(grpc={"endpoint": str(running.grpc)})


def test_the_port_may_be_of_ipv6(serve, dial, tokens, caplog):
    settings = {"endpoint": "[::1]:0", "auth": {"authenticator": "bearertokenauth"}}
    running = serve(grpc=settings, offers=tokens)
    error = refusal(MetricsServiceStub(dial(running)).Export, push())
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    (line,) = [one for one in caplog.records if "credentials" in one.getMessage()]
    assert read_fields(line)["peer"] == "::1"


def test_connections_are_renewed_at_their_age(serve, dial):
    settings = {"max_connection_age": "50ms", "max_connection_age_grace": "1s"}
    running = serve(grpc={"keepalive": {"server_parameters": settings}})
    channel = dial(running)
    seen = []
    export = MetricsServiceStub(channel).Export
    ready, idle = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.IDLE
    with watch_channel(channel, seen.append):
        while ready not in seen or idle not in seen[seen.index(ready) :]:
            export(push(), wait_for_ready=True, timeout=120)
    assert running.cluster.batches
