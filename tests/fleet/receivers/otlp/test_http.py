"""OTLP/HTTP as agents and SDKs use it: encodings, thresholds, hints, tokens and partial success."""

import json

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from tests.fleet.receivers.otlp.requests import (
    ACCEPTED,
    JSON,
    PROTOBUF,
    REFUSED,
    Questions,
    error_of,
    post,
    push,
)
from tests.support import local_http

from ingero.errors import IngeroError, PermanentError, RetryableError
from ingero.fleet.component import PushAnswer, PushAnswerer, QuestionSource
from ingero.otlp.codec import (
    build_logs,
    build_metrics,
    build_traces,
    decode_export,
    encode_json,
    encode_protobuf,
    structs,
)
from ingero.otlp.names import Signal
from ingero.telemetry.log import read_fields

# The agent, as recorded.


def test_the_recorded_push_is_answered_with_a_threshold_that_knows_it(serve, data_dir, recorded):
    running = serve()
    request = json.loads((data_dir / "wire_samples/request_headers.json").read_text())
    headers = {name: value for name, value in request["headers"] if name != "Host"}
    body = recorded("push_active")
    del headers["Content-Length"]  # of another push of the same kind
    answer = post(running, body, request["path"], headers)
    assert (answer.status_code, answer.json()) == (200, {"partialSuccess": {}})
    assert answer.headers["x-ingero-threshold"] == "0.940000"
    assert answer.headers["x-ingero-quorum-met"] == "false"
    batch = running.cluster.batches[0]
    assert (batch.push.cluster_hint, batch.push.cluster_id) == ("prod a", "prod a")
    assert batch.export.n_items == 10
    assert batch.received_wall_ns == running.host.clock.wall_ns()
    assert running.count(ACCEPTED) == 10


@pytest.mark.parametrize(
    "name", ["push_first_calibrating", "push_straggler", "straggler_event_1", "straggler_event_0"]
)
def test_every_recorded_body_is_taken(serve, recorded, name):
    running = serve()
    answer = post(running, recorded(name), "/v1/metrics?cluster_id=prod+a")
    assert answer.status_code == 200
    assert len(running.cluster.batches) == 1


def test_a_straggler_event_is_answered_with_the_threshold_too(serve, recorded):
    running = serve()
    post(running, recorded("push_active"))
    answer = post(running, recorded("straggler_event_1"))
    assert answer.headers["x-ingero-threshold"] == "0.940000"


def test_both_encodings_and_all_signals_are_taken(serve):
    running = serve()
    spans = build_traces({}, [structs.Span(trace_id="00" * 16, span_id="11" * 8, name="s")], "s")
    logs = build_logs({}, [structs.LogRecord(severity_text="INFO")], "s")
    for export, path in ((push(), "metrics"), (logs, "logs"), (spans, "traces")):
        for encode, headers in ((encode_json, JSON), (encode_protobuf, PROTOBUF)):
            answer = post(running, encode(export), f"/v1/{path}", headers)
            assert answer.status_code == 200
            assert answer.headers["content-type"] == headers["content-type"]
            assert answer.content == (b'{"partialSuccess":{}}' if headers is JSON else b"")
    assert [batch.signal for batch in running.cluster.batches] == [
        Signal.METRICS, Signal.METRICS, Signal.LOGS, Signal.LOGS, Signal.TRACES, Signal.TRACES,
    ]  # fmt: skip
    assert running.count("otelcol_receiver_accepted_log_records_total") == 2
    assert running.count("otelcol_receiver_accepted_spans_total") == 2


def test_no_threshold_means_neither_header(serve):
    answer = post(serve(), encode_json(build_metrics({}, [], "s")))
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("x-ingero")]


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.9900001, 1.0, float("nan"), float("inf"), -1.0])
def test_a_threshold_that_agents_would_reject_is_not_told(serve, threshold):
    class Answerer:
        def answer(self, push):
            return PushAnswer(threshold, quorum_met=True)

    answer = post(serve(offers=[("x", PushAnswerer, Answerer())]), encode_json(push()))
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("x-ingero")]


def test_the_node_that_is_asked_reads_the_question_beside_the_threshold_and_no_other(serve):
    offers = [("i", PushAnswerer, None), ("nccl", QuestionSource, Questions("c1", "n1"))]
    running = serve(offers=offers)
    asked = post(running, encode_json(push("n1", score=0.7)))
    assert asked.headers["x-ingero-diagnose"] == "id=1&job=%0D%0A"
    assert asked.headers["x-ingero-threshold"] == "0.700000"
    assert "x-ingero-diagnose" not in post(running, encode_json(push("n2"))).headers


def test_question_is_sent_without_a_threshold_and_never_to_an_unknown_sender(serve, tokens):
    class Silent:
        def answer(self, push):
            return None

    offers = [
        ("i", PushAnswerer, Silent()),
        ("nccl", QuestionSource, Questions("c1", "n1")),
        *tokens[:1],
    ]
    running = serve({"auth": {"authenticator": "bearertokenauth"}}, offers=offers)
    body = encode_json(push("n1"))
    known = post(running, body, headers={**JSON, "authorization": "Bearer sesame"})
    assert known.headers["x-ingero-diagnose"] == "id=1&job=%0D%0A"
    assert "x-ingero-threshold" not in known.headers
    assert "x-ingero-diagnose" not in post(running, body).headers


def test_two_cohorts_get_two_thresholds_from_the_body(serve):
    running = serve()
    one = post(running, encode_json(push("a", score=0.7, cohort="11")))
    two = post(running, encode_json(push("b", score=0.8, cohort="22")))
    assert [r.headers["x-ingero-threshold"] for r in (one, two)] == ["0.700000", "0.800000"]


def test_errors_carry_the_threshold_of_the_hinted_cluster(serve):
    running = serve()
    post(running, encode_json(push(score=0.5)))
    hinted = "?cluster_id=c1"
    answers = [
        post(running, b"{", f"/v1/metrics{hinted}"),
        post(running, b"", f"/v1/metrics{hinted}", {"content-type": "text/plain"}),
        post(running, b"", f"/nowhere{hinted}"),
        local_http.get(running.url(f"/v1/metrics{hinted}")),
        post(running, b"{", headers={**JSON, "ingero.cluster.id": "c1"}),
    ]
    assert [answer.status_code for answer in answers] == [400, 415, 404, 405, 400]
    assert {answer.headers["x-ingero-threshold"] for answer in answers} == {"0.500000"}
    running.host.draining = True
    answer = post(running, encode_json(push()), f"/v1/metrics{hinted}")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.headers["x-ingero-threshold"] == "0.500000"


def test_the_resource_wins_over_the_hint(serve):
    running = serve()
    post(running, encode_json(push(cluster="c1", score=0.5)))
    answer = post(running, encode_json(push(cluster="c2", score=0.6)), "/v1/metrics?cluster_id=c1")
    assert answer.headers["x-ingero-threshold"] == "0.600000"
    assert running.cluster.batches[1].push.cluster_hint == "c1"


@pytest.mark.parametrize(
    ("query", "hint"),
    [
        ("cluster_id=prod+a", "prod a"),
        ("cluster_id=prod%20a%2Fb", "prod a/b"),
        ("x=1&cluster_id=c", "c"),
        ("x=1", ""),
        ("cluster_id=", ""),
        ("cluster_id=%ff%00", "\ufffd\0"),
        ("cluster_id=" + "x" * 2000, ""),
    ],
)
def test_the_hint_is_read_from_the_query(serve, query, hint):
    running = serve()
    assert post(running, encode_json(push()), f"/v1/metrics?{query}").status_code == 200
    assert running.cluster.batches[0].push.cluster_hint == hint


def test_a_configured_prefix_is_served_beside_the_plain_paths(serve):
    running = serve({"url_prefixes": ["/api/"]})
    for path in ("/v1/metrics", "/api/v1/metrics"):
        assert post(running, encode_json(push()), path).status_code == 200
    assert post(running, encode_json(push()), "/other/v1/metrics").status_code == 404


def test_configured_paths_replace_the_plain_ones(serve):
    running = serve({"metrics_url_path": "/in"})
    assert post(running, encode_json(push()), "/in").status_code == 200
    assert post(running, encode_json(push()), "/v1/metrics").status_code == 404


def test_nothing_is_ever_redirected(serve):
    running = serve()
    for path in ("/v1/metrics/", "//v1/metrics", "/V1/metrics", "/"):
        assert post(running, encode_json(push()), path).status_code == 404


def test_one_connection_serves_many_pushes(serve):
    running = serve()
    with local_http.open_client() as client:
        for _ in range(20):
            answer = client.post(running.url(), content=encode_json(push()), headers=JSON)
            assert answer.status_code == 200
            assert "connection" not in answer.headers
    closing = serve({"keep_alives_enabled": False})
    assert post(closing, encode_json(push())).headers["connection"] == "close"


# What the pipeline says.


@pytest.mark.parametrize(
    ("refusal", "status", "code", "retry_after"),
    [
        (RetryableError("queue full"), 503, 14, "2"),
        (RetryableError("queue full", retry_after_ns=4_200_000_000), 503, 14, "5"),
        (RetryableError("queue full", retry_after_ns=10**12), 503, 14, "10"),
        (RetryableError("queue full", retry_after_ns=0), 503, 14, "1"),
        (PermanentError("not ever"), 500, 13, None),
    ],
)
def test_a_refusal_by_the_pipeline_reaches_the_sender(serve, refusal, status, code, retry_after):
    running = serve()
    running.cluster.raises = refusal
    answer = post(running, encode_json(push()))
    assert answer.status_code == status
    assert error_of(answer) == (code, refusal.message)
    assert answer.headers.get("retry-after") == retry_after
    assert (running.count(REFUSED), running.count(ACCEPTED)) == (1, 0)


def test_items_that_a_processor_dropped_are_told_as_partial_success(serve):
    running = serve()
    running.cluster.rejects = 1
    answer = post(running, encode_json(push()))
    assert answer.json() == {
        "partialSuccess": {"rejectedDataPoints": "1", "errorMessage": "they were bad"}
    }
    answer = post(running, encode_protobuf(push()), headers=PROTOBUF)
    partial = ExportMetricsServiceResponse.FromString(answer.content).partial_success
    assert (partial.rejected_data_points, partial.error_message) == (1, "they were bad")
    assert (running.count(REFUSED), running.count(ACCEPTED)) == (2, 0)


# Who may push.


def test_a_push_whose_token_cannot_be_checked_now_is_asked_to_come_again(serve, tokens):
    running = serve({"auth": {"authenticator": "bearertokenauth"}}, offers=tokens)
    headers = {**JSON, "authorization": "Bearer later"}
    answer = post(running, encode_json(push()), "/v1/metrics?cluster_id=c1", headers=headers)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
    assert "x-ingero-threshold" not in answer.headers
    assert not running.cluster.batches
    assert running.refused("overloaded") == 1


def test_a_push_without_the_token_learns_nothing(serve, tokens, caplog):
    running = serve({"auth": {"authenticator": "bearertokenauth"}}, offers=tokens)
    body = encode_json(push())
    good = {**JSON, "authorization": "Bearer sesame"}
    answer = post(running, body, headers=good)
    assert (answer.status_code, answer.headers["x-ingero-threshold"]) == (200, "0.900000")
    assert running.cluster.batches[0].push.auth_subject == "agents"
    for given in (None, "Bearer x", "sesame"):
        headers = JSON if given is None else {**JSON, "authorization": given}
        answer = post(running, body, "/v1/metrics?cluster_id=c1", headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert "x-ingero-threshold" not in answer.headers
    assert len(running.cluster.batches) == 1
    assert running.refused("unauthenticated") == 3
    (line,) = [one for one in caplog.records if "credentials" in one.getMessage()]
    assert read_fields(line) == {"peer": "127.0.0.1", "cluster_hint": "c1"}
    assert "x-ingero-threshold" not in post(running, b"", "/nowhere?cluster_id=c1").headers


def test_a_named_extension_that_is_not_there_stops_the_start(serve):
    with pytest.raises(IngeroError, match="'bearertokenauth'"):
        serve({"auth": {"authenticator": "bearertokenauth"}}, offers=[("x", PushAnswerer, None)])


def test_a_named_middleware_alone_is_asked(serve):
    class Fixed:
        def answer(self, push):
            return PushAnswer(0.123456, quorum_met=True)

    offers = [("ingero_threshold", PushAnswerer, None), ("other", PushAnswerer, Fixed())]
    running = serve({"middlewares": [{"id": "other"}]}, offers=offers)
    answer = post(running, encode_json(push()))
    assert answer.headers["x-ingero-threshold"] == "0.123456"
    assert answer.headers["x-ingero-quorum-met"] == "true"


# What hostile senders put into a good body.


def test_hostile_names_and_numbers_pass_through_as_data(serve):
    running = serve()
    name = 'a"\\\n\r\t\0<script>\u202e😀' + "x" * 10_000
    answer = post(running, encode_json(push(name, name, float("nan"))))
    assert answer.status_code == 200
    assert not [key for key in answer.headers if key.startswith("x-ingero")]
    export = running.cluster.batches[0].export
    again = decode_export(encode_json(export), Signal.METRICS, "application/json")
    assert again.tree.resource_metrics[0].resource == export.tree.resource_metrics[0].resource
