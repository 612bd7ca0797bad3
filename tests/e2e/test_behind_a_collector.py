"""Agents that push to a collector of another make, which passes on to Fleet: its answers have no threshold, so agents ask for it."""

import json
import subprocess
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.deploy.site import run_program, wait_for_page
from tests.e2e.agents import Agents, health
from tests.e2e.test_collectives import job
from tests.support import local_http
from tests.support.ports import free_port

from ingero.otlp.codec import encode_protobuf
from ingero.otlp.codec.export import decode_export
from ingero.otlp.names import Signal
from ingero.testing.fleet import build_fleet_config, run_fleet
from ingero.testing.waiting import wait_until
from ingero.wire.collectives import build_collectives

ROTEL = Path(__file__).parents[2] / ".cache/rotel/rotel-agent"
PROTOBUF = {"content-type": "application/x-protobuf"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ROTEL.exists(), reason="no Rotel: scripts/install_rotel"),
]


@contextmanager
def run_rotel(folder, fleet, protocol):
    """A Rotel that passes metrics and logs on to Fleet over this protocol; where it takes OTLP over HTTP."""
    ports = {name: free_port() for name in ("grpc", "http")}
    command = [ROTEL, "start", "--pid-file", folder / "pid", "--log-file", folder / "rotel.log"]
    for name, port in ports.items():
        command += [f"--otlp-{name}-endpoint", f"127.0.0.1:{port}"]
    command += [
        "--exporter",
        "otlp",
        "--otlp-exporter-protocol",
        protocol,
        "--batch-timeout",
        "50ms",
    ]
    command += ["--otlp-exporter-compression", "gzip"]
    command += ["--otlp-exporter-endpoint", fleet.url(f"receivers.otlp {protocol}", "")]
    with (folder / "out").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        url = f"http://127.0.0.1:{ports['http']}"

        def answers():
            try:
                return local_http.get(url).status_code
            except httpx.TransportError:
                assert process.poll() is None, (folder / "out").read_text()

        wait_until(answers)
        yield url
    finally:
        process.terminate()
        process.wait(120)


@pytest.fixture
def site(tmp_path, request):
    protocol = getattr(request, "param", "http")
    config = build_fleet_config(
        {"quorum": {"statistical_min": 3}}, {"judge_interval": "100ms", "reorder_window": "100ms"}
    )
    with run_fleet(config) as fleet, run_rotel(tmp_path, fleet, protocol) as rotel:
        agents = Agents(fleet)
        yield agents, rotel
        agents.client.close()


def push(rotel, path, body):
    answer = local_http.post(f"{rotel}{path}", content=body, headers=PROTOBUF)
    assert answer.status_code == 200
    assert "x-ingero-threshold" not in answer.headers


def find_nodes(agents):
    return {node["node_id"] for node in agents.admin("nodes", cluster_id="job")["nodes"]}


def test_an_agent_behind_a_collector_takes_fleets_threshold_by_asking_for_it(site, tmp_path):
    agents, rotel = site
    for node in range(4):
        scores = json.dumps(health(f"node{node}", 0.9, cluster="job")).encode()
        export = decode_export(scores, Signal.METRICS, "application/json")
        push(rotel, "/v1/metrics", encode_protobuf(export))
    wait_until(lambda: agents.threshold(cluster_id="job").json()["quorum_met"])
    started = run_program(
        tmp_path, "agent", "ingero", "fleet-push", "--stub", "--fleet-insecure",
        "--fleet-endpoint", rotel, "--fleet-threshold-url", agents.fleet.url("extensions.ingero_threshold agents", ""),
        "--fleet-cluster-id", "job", "--fleet-node-id", "stub", "--fleet-push-interval", "1s",
        "--fleet-persist-path", tmp_path / "baseline.json", "--prometheus", "127.0.0.1:0",
    )  # fmt: skip
    with started as (process, log):
        page = f"http://{wait_for_page(process, log)}/metrics"
        mode = 'ingero_agent_detection_mode{detection_mode="fleet"} 1'
        wait_until(lambda: mode in local_http.get(page).text, 60)
        # The answer to its question may be there before its first push, which takes the way through the collector.
        wait_until(lambda: "stub" in find_nodes(agents))
    assert find_nodes(agents) == {*(f"node{node}" for node in range(4)), "stub"}


@pytest.mark.parametrize("site", ["http", "grpc"], indirect=True)
def test_collectives_through_a_collector_name_the_culprit(site):
    agents, rotel = site
    for run in job(slow=5):
        push(
            rotel, "/v1/logs", encode_protobuf(build_collectives([run], 1_795_230_273_280_661_023))
        )

    def find_culprit():
        found = agents.client.get(
            agents.fleet.url("extensions.ingero_threshold admin", "/api/v1/admin/findings"),
            params={"cluster_id": "job"},
        )
        return found.status_code == 200 and [
            one["node_id"] for one in found.json()["findings"] if one["verdict"] == "culprit"
        ]

    assert wait_until(find_culprit, 60) == ["node5"]
