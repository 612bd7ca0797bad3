"""Tokens that may speak for some clusters, against a running collector."""

import json

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from tests.e2e.agents import fleet_and_agents, health, told

from ingero.otlp.codec import decode_export
from ingero.otlp.names import Signal
from ingero.testing.fleet import build_fleet_config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def agents():
    config = build_fleet_config()
    config["extensions"]["bearertokenauth"] = {
        "tokens": ["free"],
        "cluster_tokens": [{"token": "mine", "clusters": ["a"]}],
    }
    config["service"]["extensions"].append("bearertokenauth")
    for protocol in config["receivers"]["otlp"]["protocols"].values():
        protocol["auth"] = {"authenticator": "bearertokenauth"}
    with fleet_and_agents(config) as found:
        for cluster in ("a", "b"):
            for index in range(5):
                found.push(health(f"n{index}", cluster=cluster), headers=bearer("free"))
        yield found


def bearer(token):
    return {"authorization": f"Bearer {token}"}


def test_a_bound_token_pushes_for_its_cluster_and_is_told_its_threshold(agents):
    answer = agents.push(health("n0", cluster="a"), headers=bearer("mine"))
    assert answer.status_code == 200
    assert told(answer) == (0.89, "true")


def test_a_push_for_another_cluster_is_refused_told_nothing_counted_and_logged(agents):
    for _ in range(3):
        answer = agents.push(health("n0", 0.1, cluster="b"), headers=bearer("mine"))
    assert answer.status_code == 403
    assert told(answer) is None
    assert "'b'" in answer.text
    labels = {"reason": "forbidden_cluster", "transport": "http"}
    assert agents.own("ingero_fleet_receiver_refused_requests_total", **labels) >= 3
    lines = [line for line in agents.fleet.log.splitlines() if "not for this cluster" in line]
    assert 1 <= len(lines) <= 2  # of many pushes, one of each transport that was tried so far
    assert all("cluster=b" in line and "mine" not in line for line in lines)
    (node,) = [n for n in agents.admin("nodes", cluster_id="b")["nodes"] if n["node_id"] == "n0"]
    assert node["score"] == 0.94


def test_one_foreign_resource_among_others_refuses_the_push(agents):
    bodies = [health("n0", cluster=cluster) for cluster in ("a", "b")]
    merged = {"resourceMetrics": [body["resourceMetrics"][0] for body in bodies]}
    assert agents.push(merged, headers=bearer("mine")).status_code == 403


def test_a_hint_of_another_cluster_is_told_no_threshold(agents):
    headers = {**bearer("mine"), "content-type": "text/html"}
    answer = agents.push_raw(b"{}", headers, cluster="b")
    assert answer.status_code == 415
    assert told(answer) is None


@pytest.mark.parametrize("path", ["/v1/logs", "/v1/traces"])
def test_logs_and_spans_of_another_cluster_are_refused_too(agents, path):
    resource = {"attributes": [{"key": "ingero.cluster.id", "value": {"stringValue": "b"}}]}
    body = {
        "/v1/logs": {"resourceLogs": [{"resource": resource, "scopeLogs": [{"logRecords": [{}]}]}]},
        "/v1/traces": {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": [{}]}]}]},
    }[path]
    headers = {**bearer("mine"), "content-type": "application/json"}
    assert agents.push_raw(json.dumps(body).encode(), headers, path=path).status_code == 403
    headers = {**bearer("free"), "content-type": "application/json"}
    assert agents.push_raw(json.dumps(body).encode(), headers, path=path).status_code == 200


def test_grpc_answers_permission_denied(agents):
    body = json.dumps(health("n0", cluster="b")).encode()
    export = decode_export(body, Signal.METRICS, "application/json")
    with grpc.insecure_channel(agents.fleet.addresses["receivers.otlp grpc"]) as channel:
        stub = MetricsServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Export(export.message, timeout=120, metadata=[("authorization", "Bearer mine")])
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
