"""Independent Fleets behind a real HAProxy with the shipped configuration: a cluster is known in one of them, over HTTP and gRPC."""

import json
import re
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.e2e.agents import health
from tests.support import local_http
from tests.support.ports import free_port

from ingero.agent.health.transport import GrpcTransport, HttpTransport, TransportSettings
from ingero.otlp.client.endpoint import parse_endpoint
from ingero.otlp.codec import decode_export
from ingero.otlp.names import Signal
from ingero.testing.fleet import build_fleet_config, run_fleet
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_S

CONFIG = Path(__file__).parents[2] / "deploy/haproxy/ingero-fleet.cfg"
LISTENS = {
    "4318": "receivers.otlp http",
    "4317": "receivers.otlp grpc",
    "8080": "extensions.ingero_threshold agents",
}
CLUSTERS = [f"cluster-{number}" for number in range(9)]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("haproxy") is None, reason="no haproxy (Debian: haproxy)"),
]


@contextmanager
def run_haproxy(folder, fleets):
    """The shipped configuration with these Fleets and free ports; where it listens, by the port in the file."""
    text, ports = CONFIG.read_text(), {}
    for port, what in LISTENS.items():
        ports[port] = free_port()
        text = text.replace(f"bind :{port}", f"bind 127.0.0.1:{ports[port]}")
        for number, fleet in enumerate(fleets):
            text = text.replace(f" fleet-{number}:{port} ", f" {fleet.addresses[what]} ")
    assert not re.search(r"bind :|fleet-\d:", text)
    file = folder / "haproxy.cfg"
    file.write_text(text)
    log = (folder / "haproxy.log").open("wb")
    process = subprocess.Popen(["haproxy", "-db", "-f", file], stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{ports['8080']}/"
        wait_until(lambda: _answers(url) or process.poll() is not None)
        assert process.poll() is None, (folder / "haproxy.log").read_text()
        yield {port: f"127.0.0.1:{mine}" for port, mine in ports.items()}
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def _answers(url):
    try:
        return local_http.get(url).status_code != 503
    except httpx.TransportError:
        return False


def push(transport, node, cluster):
    body = json.dumps(health(node, 0.9, cluster=cluster)).encode()
    return transport.send(decode_export(body, Signal.METRICS, "application/json"), 1)


def open_transport(kind, address, cluster):
    made = HttpTransport if kind == "http" else GrpcTransport
    endpoint = parse_endpoint(f"http://{address}", is_insecure=True, option="--fleet-endpoint")
    return made(TransportSettings(endpoint=endpoint, cluster_id=cluster, timeout_ns=10 * NS_PER_S))


def known(fleet):
    with local_http.open_client() as client:
        url = fleet.url("extensions.ingero_threshold admin", "/api/v1/admin/clusters")
        return {one["cluster_id"] for one in client.get(url).json()["clusters"]}


def test_a_cluster_is_in_one_fleet_over_both_protocols_and_moves_when_that_ends(tmp_path):
    config = build_fleet_config({"quorum": {"statistical_min": 3}})
    with (
        run_fleet(config) as first,
        run_fleet(config) as second,
        run_haproxy(tmp_path, (first, second)) as proxy,
    ):
        for cluster in CLUSTERS:
            for number, kind in enumerate(("http", "grpc", "http", "grpc")):
                transport = open_transport(
                    kind, proxy["4318" if kind == "http" else "4317"], cluster
                )
                assert push(transport, f"n{number}", cluster).is_taken
                transport.close()
        split = known(first), known(second)
        assert split[0] | split[1] == set(CLUSTERS)
        assert split[0] & split[1] == set()
        assert all(split)
        for cluster in CLUSTERS:
            asked = local_http.get(
                f"http://{proxy['8080']}/api/v1/threshold", params={"cluster_id": cluster}
            )
            assert asked.json()["quorum_met"], (cluster, asked.text)
        first.signal(15)
        assert first.wait() == 0
        moved = min(split[0])
        transport = open_transport("http", proxy["4318"], moved)
        wait_until(lambda: push(transport, "n1", moved).is_taken)
        transport.close()
        assert moved in known(second)
