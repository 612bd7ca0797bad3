import json

import pytest

from ingero.agent.health.push_body import (
    NodeIdentity,
    PushStatus,
    StragglerMessage,
    build_event,
    build_push,
    encode_agent_json,
)
from ingero.agent.health.signals.machine import State
from ingero.agent.health.signals.node_facts import (
    find_own_cohort,
    hash_cgroup_path,
    parse_gpu_names,
)
from ingero.agent.health.signals.reading import Signals
from ingero.agent.health.transport import TransportSettings
from ingero.errors import ConfigError
from ingero.otlp.client.endpoint import parse_endpoint
from ingero.otlp.codec import iter_points
from ingero.otlp.codec.export import decode_export, encode_protobuf
from ingero.otlp.names import Signal
from ingero.wire.names import DetectionMode, DominantSignal
from ingero.wire.push import ResourceCache, read_push

IDENTITY = NodeIdentity(
    cluster_id="prod a",
    node_id="n1",
    world_size=8,
    rank=3,
    provider="aws",
    gpu_model="NVIDIA H100 80GB HBM3",
    n_gpus=8,
)
COHORT = "8a5edab282632443"


def status(state, mode, score, shares, wall_ns, cohort=COHORT):
    return PushStatus(
        score=score,
        shares=Signals(*shares),
        state=state,
        is_degraded=False,
        mode=mode,
        is_reachable=True,
        cohort=cohort,
        wall_ns=wall_ns,
    )


PUSHES = {
    "push_first_calibrating": status(
        State.CALIBRATING, DetectionMode.NONE, 0.27, (0.0, 0.9, 0.9, 0.9), 1795230270300374601
    ),
    "push_active": status(
        State.ACTIVE,
        DetectionMode.FLEET,
        0.94,
        (0.9999999999999996, 0.9, 0.9, 0.9),
        1795230273280661023,
    ),
    "push_straggler": status(
        State.ACTIVE,
        DetectionMode.FLEET,
        0.41999999999999993,
        (0.29999999999999993, 0.5, 0.9, 0.9),
        1795230276386542555,
    ),
}
EVENTS = {
    "straggler_event_1": StragglerMessage(
        is_straggler=True,
        mode=DetectionMode.FLEET,
        threshold=0.9,
        score=0.41999999999999993,
        dominant=DominantSignal.THROUGHPUT,
        event_id="76b99833-b5c2-424e-bda3-956adbef4bcf",
        wall_ns=1795230276386542555,
    ),
    "straggler_event_0": StragglerMessage(
        is_straggler=False,
        mode=DetectionMode.FLEET,
        threshold=0.9,
        score=0.9699999999999999,
        dominant=DominantSignal.THROUGHPUT,
        event_id="69c4c97b-b393-4be2-b705-b3821e32f143",
        wall_ns=1795230279550519242,
    ),
}


@pytest.mark.parametrize("name", [*PUSHES, *EVENTS])
def test_bodies_say_what_the_existing_agent_says(data_dir, name):
    recorded = json.loads((data_dir / "wire_samples" / f"{name}.json").read_bytes())
    export = (
        build_push(IDENTITY, PUSHES[name])
        if name in PUSHES
        else build_event(IDENTITY, EVENTS[name])
    )
    body = encode_agent_json(export)
    assert json.loads(body) == recorded
    assert b'"timeUnixNano":"' in body
    assert b": " not in body, "compact"


def test_both_encodings_tell_fleet_the_same():
    export = build_push(IDENTITY, PUSHES["push_straggler"])
    pushes = []
    for body, kind in (
        (encode_agent_json(export), "application/json"),
        (encode_protobuf(export), "application/x-protobuf"),
    ):
        pushes += read_push(decode_export(body, Signal.METRICS, kind), ResourceCache())
    assert pushes[0] == pushes[1]
    assert pushes[0].health_score == 0.41999999999999993
    assert (pushes[0].resource.node_id, pushes[0].resource.cluster_id, pushes[0].cohort) == (
        "n1",
        "prod a",
        COHORT,
    )
    assert pushes[0].resource.rank == 3
    assert {push.gpu_model for push in pushes} == {"NVIDIA H100 80GB HBM3"}
    (info,) = [point for point in iter_points(export) if point.name == "ingero.node.info"]
    assert info.attributes["ingero.gpu_count"] == 8


def test_what_is_not_known_has_no_metric():
    alone = NodeIdentity(cluster_id="c", node_id="n")
    export = build_push(
        alone, status(State.ACTIVE, DetectionMode.NONE, 0.5, (0.5, 0.5, None, 0.5), 1, cohort="")
    )
    entry = json.loads(encode_agent_json(export))["resourceMetrics"][0]
    names = [metric["name"] for metric in entry["scopeMetrics"][0]["metrics"]]
    assert "ingero.node.memory_headroom" not in names
    assert "ingero.node.info" not in names
    assert [a["key"] for a in entry["resource"]["attributes"]] == [
        "ingero.node.id",
        "ingero.cluster.id",
    ]


@pytest.mark.parametrize(
    ("text", "is_insecure", "url"),
    [
        ("fleet:4318", True, "http://fleet:4318/v1/metrics"),
        ("fleet:4318", False, "https://fleet:4318/v1/metrics"),
        ("https://fleet:8080/api", True, "https://fleet:8080/api/v1/metrics"),
        ("https://fleet:8080/api//", False, "https://fleet:8080/api/v1/metrics"),
        ("http://fleet/v1/metrics", False, "http://fleet/v1/metrics"),
        ("[::1]:4318", True, "http://[::1]:4318/v1/metrics"),
    ],
)
def test_an_endpoint_becomes_the_url_to_post_to(text, is_insecure, url):
    endpoint = parse_endpoint(text, is_insecure=is_insecure, option="--fleet-endpoint")
    assert endpoint.signal_url(Signal.METRICS) == url  # vector 16
    settings = TransportSettings(endpoint=endpoint, timeout_ns=1, cluster_id="prod a")
    assert settings.query == "?cluster_id=prod+a"


def test_the_grpc_target_follows_from_the_endpoint():
    endpoint = parse_endpoint("http://[::1]:8080/", is_insecure=True, option="o")
    assert endpoint.target == "[::1]:8080"
    assert parse_endpoint("fleet", is_insecure=False, option="o").target == "fleet:443"


@pytest.mark.parametrize(
    "text",
    ["", "://x", "ftp://fleet", "fleet:port", "fleet:99999", "a b:1", "http://f?x=1", "http://u@f"],
)
def test_a_wrong_endpoint_is_refused_by_the_options_name(text):
    with pytest.raises(ConfigError, match="--fleet-endpoint"):
        parse_endpoint(text, is_insecure=True, option="--fleet-endpoint")


@pytest.mark.parametrize(
    ("path", "digest"),
    [("/", "8a5edab282632443"), ("/kubepods.slice/pod-A", "d18f7fc5789b33dd"), ("", "")],
)
def test_the_cohort_is_the_hash_of_the_cgroup_path(path, digest):
    assert hash_cgroup_path(path) == digest  # vector 20


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("12:cpu:/longest/path/here\n0::/v2\n", "/v2"),
        ("12:cpu,cpuacct:/a\n3:memory:/a/b:c\n", "/a/b:c"),
        # In a container, of which each node has another one: the host's path would have the pod's uid.
        ("12:cpu:/\n0::/\n", "/"),
        ("", ""),
    ],
)
def test_the_v2_cgroup_wins_and_else_the_longest(tmp_path, text, path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(text)
    assert find_own_cohort(tmp_path) == hash_cgroup_path(path)


def test_gpu_names_are_counted_and_the_first_is_kept():
    assert parse_gpu_names("NVIDIA L4\nNVIDIA L4\n\n") == ("NVIDIA L4", 2)
    assert parse_gpu_names("") == ("", 0)
