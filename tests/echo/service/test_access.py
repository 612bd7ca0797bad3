"""Who may do what: bearers, tenants, pace, rotation, drain."""

import asyncio
import gzip
import logging
import socket
import threading
import time
from hashlib import sha256

import cramjam
import grpc
import pytest
import zstandard
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import (
    OTLPMetricExporter as GrpcMetricExporter,
)
from opentelemetry.exporter.otlp.proto.http.metric_exporter import (
    OTLPMetricExporter as HttpMetricExporter,
)
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from tests.echo.service.conftest import (
    ALL,
    ONE,
    TWO,
    ask,
    collectives,
    gauge,
    health,
    metrics,
    push,
    resource,
    result,
    sql,
)
from tests.serving.otlp.http2 import Client
from tests.support import local_http

from ingero.config.acl import AclEntry
from ingero.errors import ConfigError
from ingero.otlp.names import Signal

NOBODY = "nobody-" + "d" * 28


def get(echo, path, token=None, **headers):
    if token:
        headers["authorization"] = f"Bearer {token}"
    return local_http.get(f"{echo.url}{path}", headers=headers)


# Tenants.

PROBES = [
    "SELECT DISTINCT cluster_id FROM {table}",
    "SELECT cluster_id FROM {table} UNION SELECT cluster_id FROM {table}",
    "WITH a AS (SELECT * FROM {table}) SELECT DISTINCT a.cluster_id FROM a, {table} b",
    "SELECT cluster_id FROM {table} WHERE true OR cluster_id = 'c2'",
    "SELECT max(cluster_id) FROM {table}",
]


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("table", ["events", "collectives", "nodes"])
def test_sql_sees_the_bearers_rows_and_no_others(site, probe, table):
    answer = sql(site, probe.format(table=table), ONE).json()
    assert answer["rows"]
    assert {value for row in answer["rows"] for value in row} == {"c1"}
    assert answer["window"]["cluster_id"] is None


@pytest.mark.parametrize("token", [ONE, TWO])
def test_no_tool_shows_the_other_tenants_rows(site, token):
    own, other = ("c1", "c2") if token == ONE else ("c2", "c1")
    for tool in local_http.get(
        f"{site.url}/api/v2/tools/list", headers={"authorization": f"Bearer {token}"}
    ).json()["tools"]:
        extra = {
            "fleet.cluster.node_detail": {"node_id": f"{other}-n3"},
            "fleet.cluster.run_analysis": {"sql": "SELECT * FROM events"},
        }
        answer = ask(site, tool["name"], extra.get(tool["name"], {}), token)
        assert answer.status_code == 200
        assert f'"{other}' not in answer.text.replace(f'"node_id":"{other}-n3"', ""), tool["name"]
        foreign = ask(
            site, tool["name"], {**extra.get(tool["name"], {}), "cluster_id": other}, token
        )
        absent = ask(
            site, tool["name"], {**extra.get(tool["name"], {}), "cluster_id": "nosuch"}, token
        )
        assert foreign.status_code == absent.status_code == 403
        assert (
            foreign.json()
            == absent.json()
            == {
                "error": "this bearer may not read that cluster",
                "code": "tenant_scoped_bearer_refused",
            }
        )
    assert {
        row["cluster_id"] for row in result(site, "fleet.cluster.summary", token=token)["rows"]
    } == {own}


def test_counts_are_the_tenants_own(site):
    everything = result(site, "fleet.cluster.summary")["coverage"]["n_rows"]
    mine = result(site, "fleet.cluster.summary", token=ONE)["coverage"]["n_rows"]
    theirs = result(site, "fleet.cluster.summary", token=TWO)["coverage"]["n_rows"]
    assert mine + theirs == everything
    assert mine == theirs == 45


def test_the_api_document_and_the_tool_list_are_the_same_for_every_tenant(site):
    for path in ("/api/v2/openapi.json", "/api/v2/tools/list"):
        assert get(site, path, ONE).content == get(site, path, TWO).content


def test_a_tenant_writes_its_own_cluster_and_a_refused_request_leaves_nothing(open_echo):
    echo = open_echo()
    now_ns = time.time_ns()
    mixed = metrics([
        (resource("c1", "n1"), [gauge("m", 1.0, now_ns)]),
        (resource("c2", "n2"), [gauge("m", 1.0, now_ns)]),
    ])
    assert (
        push(echo, metrics([(resource("c1", "n1"), [gauge("m", 1.0, now_ns)])]), ONE).status_code
        == 200
    )
    for export, signal in ((mixed, Signal.METRICS), (collectives("c2", now_ns), Signal.LOGS)):
        refused = push(echo, export, ONE, signal)
        assert refused.status_code == 403
    assert sql(echo, "SELECT count(*), count(DISTINCT cluster_id) FROM events").json()["rows"] == [
        [1, 1]
    ]
    assert echo.service.counters.refused_acl == 2


# Bearers.


def test_whoami_says_clusters_and_never_the_key_name(site):
    answer = get(site, "/api/v2/whoami", ONE)
    assert answer.json() == {
        "bearer_id": sha256(ONE.encode()).hexdigest(),
        "cluster_ids": ["c1"],
        "capabilities": {"sql": True, "tools": True, "anomaly": True},
    }
    assert "team-one" not in answer.text
    assert get(site, "/api/v2/whoami", ALL).json()["cluster_ids"] == ["*"]


def test_without_a_good_bearer_only_versions_and_liveness_answer(site):
    for path in (
        "/api/v2/whoami",
        "/api/v2/tools/list",
        "/api/v2/openapi.json",
        "/metrics",
        "/mcp",
        "/",
        "/nosuch",
    ):
        missing, wrong = get(site, path), get(site, path, NOBODY)
        assert (missing.status_code, missing.json()["code"]) == (401, "missing_bearer"), path
        assert (wrong.status_code, wrong.json()["code"]) == (401, "invalid_bearer"), path
        assert wrong.headers["www-authenticate"].startswith("Bearer")
    assert get(site, "/api/versions").json()["preferred"] == "v2"
    assert get(site, "/api/v2/health").json() == {"status": "ok"}
    assert get(site, "/api/v2/health", ONE).json()["version"].startswith("v")
    assert get(site, "/api/v2/health", NOBODY).status_code == 401


def test_every_answer_has_a_request_id_and_a_usable_one_is_kept(site):
    for path in ("/api/versions", "/nosuch", "/api/v1/anything"):
        assert len(get(site, path).headers["x-request-id"]) == 32
    assert (
        get(site, "/api/versions", **{"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    )
    assert len(get(site, "/api/versions", **{"x-request-id": "a b"}).headers["x-request-id"]) == 32


def test_version_one_is_gone_and_says_where_to_go(site):
    answer = get(site, "/api/v1/tools")
    assert answer.status_code == 410
    assert answer.json().keys() == {"error", "code", "removed_version", "preferred", "docs"}
    assert (answer.json()["code"], answer.json()["preferred"]) == ("gone", "v2")


def test_unknown_tools_paths_methods_and_bodies_have_their_codes(site):
    def post(path, content, kind="application/json"):
        headers = {"authorization": f"Bearer {ALL}", "content-type": kind}
        return local_http.post(f"{site.url}{path}", content=content, headers=headers)

    tool = "/api/v2/tools/fleet.cluster.summary"
    for answer, status, code in (
        (post("/api/v2/tools/fleet.nosuch", b"{}"), 404, "tool_not_found"),
        (get(site, "/api/v2/nosuch", ALL), 404, "not_found"),
        (get(site, tool, ALL), 405, "method_not_allowed"),
        (post(tool, b"{", "application/json"), 400, "invalid_arguments"),
        (post(tool, b'{"arguments":{}}'), 400, "invalid_arguments"),
        (post(tool, b"{}", "text/plain"), 415, "unsupported_media_type"),
        (post(tool, b" " * (2 << 20)), 413, "body_too_large"),
        (post("/api/v2/sql", b'{"sql":"DROP TABLE events"}'), 400, "sql_not_read_only"),
        (post("/api/v2/sql", b'{"sql":"SELECT getenv(1)"}'), 400, "sql_function_not_allowed"),
        (post("/api/v2/sql", b'{"sql":"SELEC 1"}'), 400, "sql_syntax"),
    ):
        assert (answer.status_code, answer.json()["code"]) == (status, code)


def test_a_bearer_is_slowed_down_alone(open_echo):
    echo = open_echo(rate_per_second=0.001, rate_burst=5)
    codes = [get(echo, "/api/v2/whoami", ONE).status_code for _ in range(6)]
    assert codes == [200] * 5 + [429]
    slowed = get(echo, "/api/v2/whoami", ONE)
    assert slowed.json()["code"] == "rate_limited"
    assert int(slowed.headers["retry-after"]) >= 1
    assert get(echo, "/api/v2/whoami", TWO).status_code == 200
    assert get(echo, "/api/versions").status_code == 200


def test_rotation_takes_the_new_token_and_keeps_the_old_for_its_grace(open_echo):
    echo = open_echo()
    fresh = "new-" + "e" * 28
    echo.bearers[0] = AclEntry("operator", fresh, None)
    echo.reload()
    assert get(echo, "/api/v2/whoami", fresh).status_code == 200
    assert get(echo, "/api/v2/whoami", ALL).status_code == 200


def test_a_broken_token_file_keeps_the_old_bearers(open_echo, caplog):
    echo = open_echo()

    def broken():
        raise ConfigError("line 3: allowed_clusters: is empty")

    echo.service.access._load_tokens = broken
    with caplog.at_level(logging.ERROR):
        echo.reload()
    assert "line 3" in caplog.text
    assert get(echo, "/api/v2/whoami", ONE).status_code == 200


def test_the_audit_line_has_the_digest_and_never_the_token(open_echo, caplog):
    echo = open_echo()
    with caplog.at_level(logging.INFO, logger="ingero.echo.audit"):
        get(echo, "/api/v2/whoami", ONE)
        get(echo, "/api/v2/whoami", NOBODY)
        get(echo, "/api/versions")  # a line is written after its answer: before the next one's
    lines = [r.fields for r in caplog.records if r.name == "ingero.echo.audit"]
    assert [(one["status"], one["bearer_key_name"]) for one in lines[:2]] == [
        (200, "team-one"),
        (401, ""),
    ]
    assert lines[0]["bearer_hash"] == sha256(ONE.encode()).hexdigest()
    assert lines[0].keys() >= {"source_ip", "method", "path", "latency_ms", "request_id"}
    assert ONE not in caplog.text
    assert NOBODY not in caplog.text


def test_metrics_have_closed_labels_and_no_tenants_name(site):
    assert get(site, "/api/v2/whoami", ONE).status_code == 200
    text = get(site, "/metrics", ALL).text
    lines = [line for line in text.splitlines() if line.startswith("ingero_echo_requests_total")]
    names = {
        part.partition("=")[0]
        for line in lines
        for part in line[line.index("{") + 1 : line.index("}")].split(",")
    }
    assert names == {"handler", "status_class", "api_version"}
    assert "c1" not in text
    assert "team-one" not in text
    written = next(
        line for line in text.splitlines() if 'ingero_echo_rows_total{outcome="written"}' in line
    )
    assert float(written.split()[-1]) == 2 * (45 + 160)


# Life.


def test_draining_refuses_what_is_new_and_finishes_what_is_in_flight(open_echo):
    echo = open_echo()
    started, release = threading.Event(), threading.Event()
    ask_now = echo.service.executor.ask_now

    def slowly(*args):
        started.set()
        release.wait(120)
        return ask_now(*args)

    echo.service.executor.ask_now = slowly
    answers = []
    asking = threading.Thread(target=lambda: answers.append(ask(echo, "fleet.cluster.summary")))
    asking.start()
    assert started.wait(120)

    async def drain():
        echo.service.counters.draining = True
        draining = asyncio.create_task(echo.service.listeners.api.drain(20 * 10**9))
        await asyncio.sleep(0)
        return draining

    echo.call(drain())
    refused = get(echo, "/api/v2/whoami", ONE)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert push(echo, health("c1", time.time_ns())).status_code == 503
    release.set()
    asking.join(120)
    assert answers[0].status_code == 200


def test_health_needs_no_bearer_and_readiness_follows_the_disk(open_echo):
    echo = open_echo(min_free_space="1MiB")
    base = f"http://127.0.0.1:{echo.at.health.port}"
    assert local_http.get(f"{base}/healthz").json() == {"status": "ok"}
    assert local_http.get(f"{base}/readyz").status_code == 200
    echo.service.store._read_free_bytes = lambda: 0
    echo.service.store._free_read_ns -= 10**12
    assert local_http.get(f"{base}/readyz").status_code == 503
    assert local_http.get(f"{base}/healthz").json() == {"status": "read_only"}
    refused = push(echo, health("c1", time.time_ns()))
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "30")


def test_two_hundred_slow_clients_do_not_stop_a_fast_one(open_echo):
    echo = open_echo()
    slow = []
    try:
        for port, path in (
            (echo.at.mcp.port, "/api/v2/sql"),
            (echo.at.otlp_http.port, "/v1/metrics"),
        ):
            for _ in range(100):
                link = socket.create_connection(("127.0.0.1", port))
                link.sendall(
                    f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TWO}\r\n"
                    "content-type: application/json\r\ncontent-length: 1000\r\n\r\n{".encode()
                )
                slow.append(link)
        assert push(echo, health("c1", time.time_ns()), ONE).status_code == 200
        assert result(echo, "fleet.cluster.summary", token=ONE)["rows"][0]["n_nodes"] == 6
    finally:
        for link in slow:
            link.close()


def test_one_tenants_slow_sql_stops_neither_its_tools_nor_anothers_sql(open_echo):
    echo = open_echo(sql_workers=2)
    started, release = threading.Event(), threading.Event()
    run_sql = echo.service.executor._run_sql

    def slowly(sql, span, *rest):
        if "c2" in span.params:
            started.set()
            release.wait(120)
        return run_sql(sql, span, *rest)

    echo.service.executor._run_sql = slowly
    answers = []

    def ask_slowly():
        answers.append(sql(echo, "SELECT 1", TWO).json()["rows"])

    asking = [threading.Thread(target=ask_slowly) for _ in range(6)]
    for thread in asking:
        thread.start()
    assert started.wait(120)
    assert sql(echo, "SELECT 2", ONE).json()["rows"] == [[2]]
    assert ask(echo, "fleet.cluster.summary", token=TWO).status_code == 200
    assert answers == []
    release.set()
    for thread in asking:
        thread.join(120)
    assert answers == [[[1]]] * 6


# Real exporters and TLS.


def emit(exporter, value):
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000)
    who = Resource({"ingero.cluster.id": "c1", "ingero.node.id": "n1"})
    provider = MeterProvider(resource=who, metric_readers=[reader])
    provider.get_meter("t").create_gauge("from_sdk").set(value)
    provider.shutdown()


def test_the_sdks_exporters_are_stored_over_both_transports(open_echo):
    echo = open_echo()
    headers = {"authorization": f"Bearer {ONE}"}
    emit(
        HttpMetricExporter(
            f"http://127.0.0.1:{echo.at.otlp_http.port}/v1/metrics", headers=headers
        ),
        1.5,
    )
    emit(
        GrpcMetricExporter(f"127.0.0.1:{echo.at.otlp_grpc.port}", insecure=True, headers=headers),
        2.5,
    )
    answer = sql(echo, "SELECT value_double FROM events WHERE metric_name = 'from_sdk' ORDER BY 1")
    assert answer.json()["rows"] == [[1.5], [2.5]]


def test_grpc_refuses_as_otlp_says(open_echo):
    echo = open_echo()
    with grpc.insecure_channel(f"127.0.0.1:{echo.at.otlp_grpc.port}") as channel:
        call = channel.unary_unary(
            "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
        )
        body = health("c2", time.time_ns()).message.SerializeToString()

        def refused(payload, token):
            with pytest.raises(grpc.RpcError) as raised:
                call(payload, metadata=(("authorization", f"Bearer {token}"),), timeout=120)
            return raised.value

        assert refused(body, NOBODY).code() is grpc.StatusCode.UNAUTHENTICATED
        assert refused(body, ONE).code() is grpc.StatusCode.PERMISSION_DENIED
        assert refused(b"\xff\xff", ONE).code() is grpc.StatusCode.INVALID_ARGUMENT
        echo.service.store._read_free_bytes = lambda: 0
        echo.service.store._free_read_ns -= 10**12
        full = refused(body, TWO)
        assert full.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "grpc-status-details-bin" in dict(full.trailing_metadata())


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "snappy"])
def test_grpc_takes_what_collectors_compress_with(open_echo, encoding):
    compress = {
        "gzip": gzip.compress,
        "zstd": zstandard.compress,
        "snappy": lambda body: bytes(cramjam.snappy.compress(body)),
    }[encoding]
    echo = open_echo()
    body = compress(health("c1", time.time_ns()).message.SerializeToString())

    async def export(payload):
        client = await Client.connect(echo.at.otlp_grpc)
        try:
            client.call(1, payload, flag=1, grpc_encoding=encoding, authorization=f"Bearer {ONE}")
            return await client.status(1)
        finally:
            await client.leave()

    assert asyncio.run(export(body)) == 0
    assert asyncio.run(export(body[:-5])) == 3
    assert sql(echo, "SELECT count(*) > 0 FROM events").json()["rows"] == [[True]]
