"""The whole collector under bad input, restart and a real Prometheus."""

import gzip
import json

import pytest
from tests.e2e.agents import JSON, find_series, fleet_and_agents, health, told

from ingero.testing.fleet import build_fleet_config

pytestmark = pytest.mark.slow
MIB = 1 << 20


@pytest.fixture(scope="module")
def agents():
    config = build_fleet_config({"max_expected_nodes": 500, "max_clusters": 50}, nccl={})
    config["receivers"]["otlp"]["protocols"]["http"]["max_request_body_size"] = "1MiB"
    with fleet_and_agents(config) as found:
        yield found


def quorum(agents, cluster):
    for index in range(5):
        answer = agents.push(health(f"n{index}", cluster=cluster), cluster)
    return told(answer)


def count_refused(agents):
    """Requests that were answered with an error, whatever the reason."""
    name = "ingero_fleet_receiver_refused_requests_total"
    text = agents.metrics("service.telemetry.metrics")
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    assert lines
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


PROTOBUF = {"content-type": "application/x-protobuf"}
GZIP = {**JSON, "content-encoding": "gzip"}


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", JSON, 400),
        (b"[]", JSON, 400),
        (b'{"resourceMetrics": 7}', JSON, 400),
        (b'{"resourceMetrics":' * 2000, JSON, 400),
        (b"\xff\xfe\x00", JSON, 400),
        (b"\x0a\xff\xff\xff\xff", PROTOBUF, 400),
        (b"not gzip", GZIP, 400),
        (b"{}", {"content-type": "text/html"}, 415),
        (b"{}", {}, 415),
        (b"{}", {**JSON, "content-encoding": "br"}, 415),
        (b" " * (2 * MIB), JSON, 413),
        (gzip.compress(b" " * (64 * MIB)), GZIP, 413),
        (gzip.compress(gzip.compress(b" " * (64 * MIB))), GZIP, 400),
    ],
    ids=[
        "cut-json", "list", "number", "deep", "not-utf8", "cut-protobuf", "not-gzip", "html",
        "no-type", "brotli", "large", "bomb", "nested-bomb",
    ],
)  # fmt: skip
def test_bad_body_is_a_4xx_with_a_reason_a_count_and_no_harm_to_others(
    agents, content, headers, status
):
    before_bytes, before_refused = agents.fleet_rss_bytes, count_refused(agents)
    assert quorum(agents, "bystander") == (0.89, "true")
    answer = agents.push_raw(content, headers)
    assert answer.status_code == status
    if headers.get("content-type") == "application/json":
        assert answer.json()["message"]
    assert count_refused(agents) == before_refused + 1
    assert quorum(agents, "bystander") == (0.89, "true")
    assert agents.fleet_rss_bytes - before_bytes < 40 * MIB


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        ("NaN", "not_finite"),
        ("Infinity", "not_finite"),
        (2.5, "out_of_range"),
        (-1, "out_of_range"),
    ],
)
def test_score_that_is_none_is_taken_off_the_push_and_told(agents, score, reason):
    assert quorum(agents, "scores") == (0.89, "true")
    name = "ingero_fleet_scores_dropped_total"
    before = agents.own(name, reason=reason) or 0
    answer = agents.push(health("n0", score, cluster="scores"), "scores")
    assert answer.status_code == 200
    assert int(answer.json()["partialSuccess"]["rejectedDataPoints"]) == 1
    assert "health score" in answer.json()["partialSuccess"]["errorMessage"]
    assert agents.own(name, reason=reason) == before + 1
    assert told(answer) == (0.89, "true")


HOSTILE = [
    'c"} 1\nfake{a="',
    "c\r\nX-Ingero-Threshold: 0.5",
    "../../etc/passwd",
    "<script>alert(1)</script>",
    "\u202eevil\u0000",
    "%00%0a",
    "'; DROP TABLE nodes; --",
    "🦖" * 60,
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_cluster_name_is_only_a_name(agents, name):
    assert quorum(agents, name) == (0.89, "true")
    assert agents.threshold(cluster_id=name).json() == {"threshold": 0.89, "quorum_met": True}
    assert agents.admin("nodes", cluster_id=name)["total"] == 5
    text = agents.metrics()
    assert (
        find_series(
            text, "ingero_node_health_score_ratio", ingero_cluster_id=name, ingero_node_id="n0"
        )
        == 0.94
    )
    assert "\nfake{" not in text


def test_name_that_is_too_long_is_refused_and_told(agents):
    answer = agents.push(health("n", cluster="x" * 300))
    assert int(answer.json()["partialSuccess"]["rejectedDataPoints"]) == 1
    assert told(answer) is None


def test_name_that_is_no_text_is_a_400(agents):
    body = json.dumps(health("n", cluster="SURROGATE")).replace("SURROGATE", "\\ud800")
    assert agents.push_raw(body.encode()).status_code in {200, 400}
    assert agents.admin("clusters")["total"] >= 0
    assert agents.client.get(agents.fleet.url("exporters.prometheus", "/metrics")).is_success


def test_ten_thousand_nodes_over_the_cap_are_refused_in_bounded_memory():
    config = build_fleet_config({"max_expected_nodes": 500})
    with fleet_and_agents(config) as agents:
        assert quorum(agents, "known") == (0.89, "true")
        before_bytes = agents.fleet_rss_bytes
        for start in range(0, 10_000, 100):
            bodies = [health(f"flood{start + i}", cluster="flood") for i in range(100)]
            merged = {"resourceMetrics": [body["resourceMetrics"][0] for body in bodies]}
            assert agents.push(merged).status_code == 200
        assert agents.admin("nodes", cluster_id="flood")["total"] == 500
        dropped = agents.own("ingero_fleet_scores_dropped_total", reason="node_cap")
        assert dropped == 10_000 - 500
        series = agents.metrics()
        assert series.count('ingero_node_health_score_ratio{ingero_node_id="flood') <= 500
        assert 'ingero_node_id="flood9999"' not in series
        assert agents.fleet_rss_bytes - before_bytes < 120 * MIB
        assert quorum(agents, "known") == (0.89, "true")


def test_restarted_collector_tells_thresholds_again_when_each_agent_has_pushed_once():
    config = build_fleet_config()
    with fleet_and_agents(config) as agents:
        for index in range(50):
            answer = agents.push(health(f"n{index}", cluster="r"), "r")
        before = told(answer)
    with fleet_and_agents(config) as agents:
        answers = [told(agents.push(health(f"n{index}", cluster="r"), "r")) for index in range(50)]
    assert before == (0.89, "true")
    assert answers[:4] == [None] * 4
    assert answers[4:] == [before] * 46
