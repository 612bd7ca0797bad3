"""What an agent of the existing fleet relies on, against a running collector: one test per point of the checklist.

Point 19 (provider names from a mapping) is tested case by case with the ``provider_lookup`` processor; here it is seen
in a pipeline.
"""

import gzip
import http.client
import json
import re
import socket
import ssl

import grpc
import httpx
import pytest
import trustme
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import (
    OTLPMetricExporter as GrpcMetricExporter,
)
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from tests.e2e.agents import event, find_series, fleet_and_agents, health, sample, told
from tests.support import local_http

from ingero.otlp.codec import decode_export, encode_protobuf
from ingero.otlp.names import Signal
from ingero.testing.fleet import build_fleet_config, run_fleet
from ingero.testing.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def agents():
    config = build_fleet_config(nccl={})
    config["receivers"]["otlp"]["protocols"]["http"]["url_prefixes"] = ["/api"]
    with fleet_and_agents(config) as found:
        yield found


@pytest.fixture(scope="module")
def quick():
    """A collector whose nodes expire after two seconds."""
    config = build_fleet_config({"push_interval": "1s", "ttl_multiplier": 2})
    with fleet_and_agents(config) as found:
        yield found


def settle(agents, cluster, n_nodes=5, score=0.94, **more):
    """Push enough nodes for a quorum; the last answer."""
    for index in range(n_nodes):
        answer = agents.push(health(f"n{index}", score, cluster=cluster, **more), cluster)
    return answer


def test_01_push_over_a_kept_connection_is_answered_200_under_a_prefix_too(agents):
    host, port = agents.fleet.addresses["receivers.otlp http"].split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    connection.connect()
    first_socket = connection.sock
    for path in ("/v1/metrics?cluster_id=p01", "/api/v1/metrics?cluster_id=p01", "/v1/metrics"):
        body = json.dumps(health("n1", cluster="p01"))
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        assert json.loads(answer.read()) in ({}, {"partialSuccess": {}})
        assert connection.sock is first_socket
    connection.close()


def test_02_integers_as_strings_unknown_metrics_and_repeated_names_are_taken(agents):
    body = health("n1", cluster="p02")
    resource = body["resourceMetrics"][0]
    for attribute in resource["resource"]["attributes"]:
        if "intValue" in attribute["value"]:
            attribute["value"]["intValue"] = str(attribute["value"]["intValue"])
    counter = {
        "name": "gpu.cuda.operation.count",
        "unit": "{event}",
        "sum": {"aggregationTemporality": 2, "isMonotonic": True, "dataPoints": []},
    }
    points = [
        {
            "attributes": [{"key": "operation", "value": {"stringValue": op}}],
            "timeUnixNano": at,
            "asInt": n,
        }
        for op, n, at in (("a", 3, "1795230273280661023"), ("b", "4", 1795230273280661023))
    ]
    resource["scopeMetrics"][0]["metrics"] += [
        {**counter, "sum": {**counter["sum"], "dataPoints": [point]}} for point in points
    ]
    resource["scopeMetrics"][0]["metrics"].append({
        "name": "from.the.future",
        "unheardOf": {"a": 1},
    })
    assert agents.push(body, "p02").status_code == 200
    (node,) = agents.admin("nodes", cluster_id="p02")["nodes"]
    assert (node["rank"], node["world_size"]) == (3, 8)
    text = agents.metrics()
    for operation, value in (("a", 3), ("b", 4)):
        assert (
            find_series(
                text, "gpu_cuda_operation_count_total", operation=operation, ingero_cluster_id="p02"
            )
            == value
        )


def test_03_identity_is_the_resources_and_a_different_query_is_counted(agents):
    before = agents.own("ingero_fleet_cluster_mismatch_total") or 0
    agents.push(health("n1", cluster="p03"), "p03-mistaken")
    assert agents.admin("nodes", cluster_id="p03")["total"] == 1
    assert "error" in agents.admin("nodes", cluster_id="p03-mistaken")
    assert agents.own("ingero_fleet_cluster_mismatch_total") == before + 1


def test_04_protobuf_gzip_and_real_sdk_exporters_are_taken(agents):
    export = decode_export(
        json.dumps(health("n1", cluster="p04")).encode(), Signal.METRICS, "application/json"
    )
    body = gzip.compress(encode_protobuf(export))
    headers = {"content-type": "application/x-protobuf", "content-encoding": "gzip"}
    answer = agents.push_raw(body, headers, "p04")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/x-protobuf"
    assert agents.admin("nodes", cluster_id="p04")["total"] == 1

    spans = OTLPSpanExporter(endpoint=agents.fleet.url("receivers.otlp http", "/v1/traces"))
    tracing = TracerProvider(resource=Resource({"service.name": "ingero"}))
    tracing.add_span_processor(SimpleSpanProcessor(spans))
    with tracing.get_tracer("t").start_as_current_span("ingero.detection.straggler"):
        pass
    tracing.shutdown()
    taken = wait_until(
        lambda: agents.own("otelcol_receiver_accepted_spans_total", transport="http")
    )
    assert taken == 1

    endpoint = agents.fleet.addresses["receivers.otlp grpc"]
    reader = PeriodicExportingMetricReader(
        GrpcMetricExporter(endpoint=endpoint, insecure=True), export_interval_millis=3_600_000
    )
    resource = Resource({"ingero.node.id": "sdk", "ingero.cluster.id": "p04"})
    provider = MeterProvider([reader], resource=resource)
    provider.get_meter("ingero.health").create_gauge("ingero.node.health_score", "1").set(
        0.9, {"ingero.node.state": "active"}
    )
    assert provider.force_flush()
    provider.shutdown()
    nodes = agents.admin("nodes", cluster_id="p04")["nodes"]
    assert {node["node_id"]: node["score"] for node in nodes} == {"n1": 0.94, "sdk": 0.9}

    trace = {"resourceSpans": [{"scopeSpans": [{"spans": [{
        "traceId": "0" * 31 + "1", "spanId": "0" * 15 + "1", "name": "infer.outlier.2x", "kind": 1,
        "startTimeUnixNano": "1", "endTimeUnixNano": "2"}]}]}]}  # fmt: skip
    assert agents.push_raw(json.dumps(trace), path="/v1/traces").status_code == 200


def test_05_only_active_nodes_vote_and_silent_ones_expire(agents, quick):
    settle(agents, "p05", state="calibrating")
    answer = settle(agents, "p05", n_nodes=4)
    assert told(answer) is None
    assert told(agents.push(health("n4", cluster="p05"), "p05")) == (0.89, "true")
    settle(quick, "p05")
    assert quick.admin("nodes", cluster_id="p05")["total"] == 5
    wait_until(lambda: "error" in quick.admin("nodes", cluster_id="p05"))


def test_06_both_headers_are_on_every_answer_errors_and_events_included(agents):
    assert told(agents.push(health("n0", cluster="p06"), "p06")) is None
    settle(agents, "p06")
    answers = {
        200: agents.push(event("n0", 1, cluster="p06"), "p06"),
        400: agents.push_raw(b"{", cluster="p06"),
        404: agents.push_raw(b"{}", path="/nowhere", cluster="p06"),
        415: agents.push_raw(b"{}", {"content-type": "text/plain"}, cluster="p06"),
    }
    assert {status: (a.status_code, told(a)) for status, a in answers.items()} == {
        status: (status, (0.89, "true")) for status in answers
    }
    assert told(agents.push_raw(b"{")) is None


def test_06_grpc_answers_carry_the_same_in_metadata(agents):
    settle(agents, "p06-grpc")
    export = decode_export(
        json.dumps(health("n0", cluster="p06-grpc")).encode(), Signal.METRICS, "application/json"
    )
    with grpc.insecure_channel(agents.fleet.addresses["receivers.otlp grpc"]) as channel:
        stub = MetricsServiceStub(channel)
        _, call = stub.Export.with_call(export.message, timeout=120)
        known = dict(call.initial_metadata())
        export = decode_export(
            json.dumps(health("n0", cluster="p06-new")).encode(), Signal.METRICS, "application/json"
        )
        _, call = stub.Export.with_call(export.message, timeout=120)
        unknown = dict(call.initial_metadata())
    assert (known["ingero-threshold"], known["ingero-quorum-met"]) == ("0.890000", "true")
    assert not {"ingero-threshold", "ingero-quorum-met"} & unknown.keys()


@pytest.mark.parametrize("score", [0.2, 0.5, 0.999, 1.0])
def test_07_threshold_is_a_decimal_that_agents_accept_whatever_the_scores(agents, score):
    answer = settle(agents, f"p07-{score}", score=score)
    text = answer.headers["x-ingero-threshold"]
    assert re.fullmatch(r"0\.\d{6}", text)
    assert 0.1 <= float(text) <= 0.99


@pytest.mark.parametrize("score", [0.0, 0.02, 0.05])
def test_07_threshold_is_omitted_where_the_lowest_that_agents_accept_would_flag_equal_scores(
    agents, score
):
    assert told(settle(agents, f"p07-{score}", score=score)) is None
    page = agents.threshold(cluster_id=f"p07-{score}").json()
    assert page == {"threshold": 0, "quorum_met": False}


def test_08_without_quorum_the_last_good_value_is_told_for_a_while_and_then_nothing(quick):
    answer = settle(quick, "p08")
    assert told(answer) == (0.89, "true")

    def push_one():
        return told(quick.push(health("n0", cluster="p08"), "p08"))

    wait_until(lambda: push_one() == (0.89, "false"))
    wait_until(lambda: push_one() is None)
    assert quick.threshold(cluster_id="p08").json() == {"threshold": 0, "quorum_met": False}


def test_09_equal_scores_make_no_straggler(agents):
    answer = settle(agents, "p09", n_nodes=50)
    assert told(answer)[0] < 0.94
    assert agents.admin("nodes", cluster_id="p09", straggling="true")["total"] == 0


def test_10_two_cohorts_in_bodies_are_told_two_thresholds(agents):
    settle(agents, "p10", cohort="aaaaaaaaaaaaaaaa")
    for index in range(5):
        body = health(f"m{index}", 0.5, cluster="p10", cohort="bbbbbbbbbbbbbbbb")
        low = agents.push(body, "p10")
    high = agents.push(health("n0", cluster="p10", cohort="aaaaaaaaaaaaaaaa"), "p10")
    assert told(high) == (0.89, "true")
    assert told(low) == (0.45, "true")


def test_11_hashes_of_one_node_each_fall_back_to_the_cluster(agents):
    for index in range(5):
        answer = agents.push(health(f"n{index}", cluster="p11", cohort=f"{index:016x}"), "p11")
    assert told(answer) == (0.89, "true")
    for index in range(5):
        answer = agents.push(health(f"n{index}", cluster="p11-empty", cohort=""), "p11-empty")
    assert told(answer) == (0.89, "true")


def test_12_get_tells_the_same_and_an_unknown_cluster_is_a_cold_start(agents):
    settle(agents, "p12 a")
    url = agents.fleet.url(
        "extensions.ingero_threshold agents", "/api/v1/threshold?cluster_id=p12+a"
    )
    assert agents.client.get(url).json() == {"threshold": 0.89, "quorum_met": True}
    for cluster in ("p12 nobody",):
        answer = agents.threshold(cluster_id=cluster)
        assert (answer.status_code, answer.text) == (200, '{"threshold":0,"quorum_met":false}')
    assert agents.threshold().status_code == 400
    assert agents.threshold(cluster_id="x" * 300).status_code == 400


def test_13_overload_is_answered_429_with_a_small_whole_number_of_seconds():
    config = build_fleet_config()
    config["receivers"]["otlp"]["protocols"]["http"]["max_in_flight"] = 1
    with fleet_and_agents(config) as agents:
        host, port = agents.fleet.addresses["receivers.otlp http"].split(":")
        with socket.create_connection((host, int(port)), timeout=120) as slow:
            slow.sendall(
                b"POST /v1/metrics HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100000\r\n\r\n{"
            )
            answer = wait_until(lambda: find_overloaded(agents))
        assert answer.status_code in {429, 503}
        assert 1 <= int(answer.headers["retry-after"]) <= 10
        wait_until(lambda: agents.push(health("n", cluster="p13")).status_code == 200)


def find_overloaded(agents):
    answer = agents.push(health("n", cluster="p13"))
    return answer if answer.status_code != 200 else None


def test_14_nothing_is_ever_redirected(agents):
    for path in ("/v1/metrics/", "//v1/metrics", "/", "/V1/metrics", "/v1"):
        answer = agents.push_raw(json.dumps(health("n", cluster="p14")), path=path)
        assert not answer.is_redirect
        assert answer.status_code in {404, 405}
    assert agents.client.get(agents.push_url).status_code == 405


def test_15_mutual_tls_takes_who_has_a_certificate_and_nobody_else(tmp_path):
    authority = trustme.CA()
    server, pair = authority.issue_cert("127.0.0.1"), authority.issue_cert("agent@site")
    server.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    server.private_key_pem.write_to_path(tmp_path / "key.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    tls = {
        "cert_file": str(tmp_path / "cert.pem"),
        "key_file": str(tmp_path / "key.pem"),
        "client_ca_file": str(tmp_path / "ca.pem"),
    }
    config = build_fleet_config()
    config["receivers"]["otlp"]["protocols"]["http"]["tls"] = tls
    with run_fleet(config) as fleet:
        url = f"https://{fleet.addresses['receivers.otlp http']}/v1/metrics"
        known, anonymous = ssl.create_default_context(), ssl.create_default_context()
        for context in (known, anonymous):
            authority.configure_trust(context)
        pair.configure_cert(known)
        body = health("n", cluster="p15")
        assert local_http.post(url, json=body, verify=known).status_code == 200
        with pytest.raises(httpx.TransportError):
            local_http.post(url, json=body, verify=anonymous)
        old = ssl.create_default_context()
        authority.configure_trust(old)
        pair.configure_cert(old)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert local_http.post(url, json=body, verify=old).status_code == 200


def test_16_many_events_with_new_ids_are_one_episode(agents, quick):
    agents.push(health("n1", 0.4, cluster="p16"), "p16")
    for index in range(5):
        body = json.dumps(event("n1", 1, cluster="p16")).replace("76b99833", f"{index:08d}")
        assert agents.push_raw(body, cluster="p16").status_code == 200
    (episode,) = agents.admin("episodes", cluster_id="p16")["episodes"]
    assert (episode["events"], episode["outcome"]) == (5, None)
    agents.push(event("n1", 0, cluster="p16"), "p16")
    assert agents.admin("episodes", cluster_id="p16")["episodes"][0]["outcome"] == "resolved"
    agents.push(event("n1", 1, cluster="p16"), "p16")
    agents.push(health("n1", 0.0, cluster="p16", state="idle"), "p16")
    outcomes = [e["outcome"] for e in agents.admin("episodes", cluster_id="p16")["episodes"]]
    assert outcomes == ["state_change", "resolved"]
    settle(quick, "p16")
    quick.push(event("n1", 1, cluster="p16"), "p16")

    def keep_one():
        quick.push(health("n0", cluster="p16"), "p16")
        return quick.admin("episodes", cluster_id="p16")["episodes"][0]["outcome"] == "lost"

    wait_until(keep_one)


def test_17_sums_without_a_start_time_are_counters_that_may_fall_back(agents):
    def total(value):
        body = health("n1", cluster="p17")
        body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"].append({
            "name": "ingero.node.cuda_kernel_launch_total",
            "unit": "1",
            "sum": {
                "aggregationTemporality": 2,
                "isMonotonic": True,
                "dataPoints": [{"timeUnixNano": "1795230273280661023", "asInt": value}],
            },
        })
        assert agents.push(body, "p17").status_code == 200
        return find_series(
            agents.metrics(), "ingero_node_cuda_kernel_launch_total", ingero_cluster_id="p17"
        )

    assert [total(15), total(20), total(5)] == [15, 20, 5]


def nccl_push(node, duration_ms, rank, comm):
    attributes = [
        {"key": "nccl.op_type", "value": {"stringValue": "ncclAllReduce"}},
        {"key": "nccl.comm_id_hash", "value": {"stringValue": comm}},
        {"key": "nccl.rank", "value": {"intValue": rank}},
        {"key": "nccl.nranks", "value": {"intValue": 0}},
    ]
    metrics = [
        {
            "name": name,
            "unit": unit,
            "gauge": {
                "dataPoints": [{"attributes": attributes, "timeUnixNano": "51840000000", **value}]
            },
        }
        for name, unit, value in (
            ("nccl.collective.duration_ms", "ms", {"asDouble": duration_ms}),
            ("nccl.collective.bytes", "By", {"asInt": 1024}),
            ("nccl.collective.duration_ms", "ms", {"asDouble": duration_ms}),
        )
    ]
    resource = {
        "attributes": [
            {"key": "service.name", "value": {"stringValue": "ingero"}},
            {"key": "ingero.node.id", "value": {"stringValue": node}},
            {"key": "ingero.cluster.id", "value": {"stringValue": "p18"}},
        ]
    }
    scope = {"scope": {"name": "ingero"}, "metrics": metrics}
    return {"resourceMetrics": [{"resource": resource, "scopeMetrics": [scope]}]}


def test_18_collective_gauges_dated_1970_without_rank_or_communicator_are_tolerated(agents):
    for rank, duration in enumerate((10.0, 10.2, 2.0)):
        assert agents.push(nccl_push(f"n{rank}", duration, rank, "00000000000000aa")).is_success
        assert agents.push(nccl_push(f"z{rank}", duration, 0, "0000000000000000")).is_success

    def find_lag():
        return find_series(
            agents.metrics(), "nccl_collective_peer_lag_ms_milliseconds", node_id="n2"
        )

    assert wait_until(find_lag) == pytest.approx(8.1)
    text = agents.metrics()
    assert find_series(text, "nccl_collective_duration_ms_milliseconds", ingero_node_id="z0") == 10
    assert find_series(text, "nccl_collective_peer_lag_ms_milliseconds", node_id="z0") is None


def test_19_provider_that_the_agent_names_is_kept(agents):
    agents.push(health("n1", cluster="p19"), "p19")
    (node,) = agents.admin("nodes", cluster_id="p19")["nodes"]
    assert node["provider"] == "aws"
    name = "ingero_node_health_score_ratio"
    assert (
        find_series(agents.metrics(), name, ingero_cluster_id="p19", ingero_provider="aws") == 0.94
    )


def test_19_mapping_names_the_provider_of_an_agent_that_does_not():
    config = build_fleet_config()
    config["processors"]["provider_lookup"] = {"rules": [{"provider": "gcp", "nodes": ["n*"]}]}
    for pipeline in config["service"]["pipelines"].values():
        pipeline["processors"] = ["provider_lookup", *pipeline.get("processors", [])]
    with fleet_and_agents(config) as found:
        found.push(health("n1", cluster="m19"), "m19")
        (node,) = found.admin("nodes", cluster_id="m19")["nodes"]
        assert node["provider"] == "gcp"


def test_20_fleet_series_are_on_both_ports_and_agents_keep_their_resource_as_labels(quick):
    def push_and_find():
        settle(quick, "p20")
        text = quick.metrics()
        names = ("threshold", "active_nodes", "median", "mad", "coverage_low", "straggler_count")
        found = {
            name: find_series(text, f"ingero_fleet_{name}", cluster_id="p20") for name in names
        }
        cohort = {"cluster_id": "p20", "cgroup_path_hash": "8a5edab282632443"}
        found["cohort"] = find_series(text, "ingero_fleet_cohort_active_nodes", **cohort)
        return None if None in found.values() else found

    found = wait_until(push_and_find)
    assert found["threshold"] == pytest.approx(0.89)
    assert (found["active_nodes"], found["straggler_count"], found["mad"]) == (5, 0, 0)
    assert wait_until(lambda: quick.own("ingero_fleet_active_nodes", cluster_id="p20") == 5)
    labels = {"ingero_node_id": "n0", "ingero_cluster_id": "p20", "ingero_node_rank": "3"}
    assert find_series(quick.metrics(), "ingero_node_health_score_ratio", **labels) == 0.94


def test_21_first_push_of_an_agent_does_not_pollute(agents):
    first = sample("push_first_calibrating.json")
    scores = [
        metric["gauge"]["dataPoints"][0]["asDouble"]
        for metric in first["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
        if metric["name"] == "ingero.node.health_score"
    ]
    assert scores == [pytest.approx(0.27)]
    settle(agents, "p21")
    for index in range(20):
        body = health(
            f"new{index}",
            0.27,
            cluster="p21",
            state="calibrating",
            name="push_first_calibrating.json",
        )
        answer = agents.push(body, "p21")
    assert told(answer) == (0.89, "true")


def test_vector_30_median_957_mad_012_k_2_is_9214():
    """Without a least margin the documented formula gives 0.9214176, told rounded down."""
    config = build_fleet_config({"threshold": {"min_margin": 0.0}})
    with fleet_and_agents(config) as agents:
        for index, score in enumerate((0.957, 0.945, 0.969, 0.945, 0.969)):
            answer = agents.push(health(f"n{index}", score, cluster="v30"), "v30")
        assert told(answer) == (0.921417, "true")
