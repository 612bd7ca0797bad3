"""What a look of the remediator at a large Kubernetes costs: 5 000 nodes as a GPU cluster has them, in a small server."""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import yaml
from tests.remediation.kubernetes.conftest import build_node
from tests.remediation.kubernetes.small_server import ADMIN, run_small_server
from tests.remediation.kubernetes.test_kubernetes import RECORD

from ingero.model.collectives import Rank
from ingero.remediation.actuators.kubernetes import KubernetesActuator
from ingero.remediation.kubernetes_config import KubernetesConfig
from ingero.telemetry.clock import SystemClock

SAYS = "A look at 5 000 nodes of Kubernetes: the list, and what is asked until the next"
N_NODES = 5000


def run() -> Iterator[str]:
    """Lines as they are known."""
    arguments = [sys.executable, "-m", "benchmarks.kubernetes_nodes", str(N_NODES)]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as server,
    ):
        assert server.stdout is not None
        said = json.loads(server.stdout.readline())
        actuator = connect(Path(folder), said["url"])
        size = said["node_bytes"]
        yield f"a node is {size / 1000:.0f} KB: a list of {N_NODES} is {size * N_NODES / 1e6:.0f} MB"
        for what in ("the list", "a look in between, without findings"):
            yield f"{what}: {measure(actuator.read_nodes)}"
        name = actuator.find_target(Rank("c", "node00001", 0), actuator.read_nodes())
        actuator.watch([name])
        actuator.apply(replace(RECORD, target=name))
        yield f"a look in between, with one action: {measure(actuator.read_nodes)}"
        actuator.close()
        server.communicate("")


def measure(look):
    """Time of one look on the wall and of the processor."""
    began_s, cpu_s = time.monotonic(), time.process_time()
    look()
    wall_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    return f"{wall_s:.3f} s, of which {cpu_s:.3f} s of the remediator's processor"


def connect(folder, url):
    """An actuator on this server."""
    file = folder / "kubeconfig"
    content = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": ADMIN}}],
    }
    file.write_text(yaml.safe_dump(content))
    return KubernetesActuator(KubernetesConfig(kubeconfig=str(file), timeout="60s"), SystemClock())


def build_large_node(name, chance):
    """A node as its kubelet, GPU Operator and 50 images leave it."""
    node = build_node(name)
    features = [f"nvidia.com/gpu.feature-{number}" for number in range(40)]
    fields = {"f:metadata": {"f:labels": {f"f:{one}": {} for one in features[:20]}}}
    node["metadata"]["labels"] |= dict.fromkeys(features, "true")
    node["metadata"]["annotations"] = {f"site/{number}": "x" * 60 for number in range(8)}
    node["metadata"]["managedFields"] = [
        {"manager": f"m{number}", "operation": "Update", "fieldsType": "FieldsV1", "fieldsV1": fields}
        for number in range(3)
    ]  # fmt: skip
    node["status"]["images"] = [
        {
            "names": [
                f"registry.example.com/team/project/image-{number}@sha256:{chance.randbytes(32).hex()}",
                f"registry.example.com/team/project/image-{number}:v1",
            ],
            "sizeBytes": 123_456_789,
        }
        for number in range(50)
    ]
    return node


def serve(n_nodes):
    """Serve until standard input ends, as a process of its own."""
    chance = random.Random(1)
    with run_small_server() as server:
        for number in range(n_nodes):
            server.create(build_large_node(f"node{number:05}", chance))
        size = len(json.dumps(server.nodes["node00000"]))
        print(json.dumps({"url": server.url, "node_bytes": size}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
