"""Every command of the guide for Kubernetes, on a cluster of one node: `make test-kubernetes-guide`, minutes and PyPI.

What this cluster has not: policies that are enforced, a registry (images are given to containerd), an operator, and where the
machine lacks a capability that `privileged` gives, privileged pods.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from tests.deploy.charts import HELM
from tests.deploy.kubernetes_node import CGROUPS, GROUP, KubernetesNode, is_there
from tests.deploy.site import copy_checkout, read_guide
from tests.support.capabilities import has_all_capabilities

from ingero.agent.collectives.plugin import NAME, find_plugin
from ingero.testing.waiting import wait_until

IMAGES = os.environ.get("INGERO_KUBERNETES_IMAGES", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("images"),
    pytest.mark.skipif(
        not IMAGES or HELM is None or not is_there(),
        reason="INGERO_KUBERNETES_IMAGES names no images for a cluster: `make test-kubernetes-guide` makes them",
    ),
]
STORAGE = """
kind: StorageClass
apiVersion: storage.k8s.io/v1
metadata: {name: encrypted-gp3}
provisioner: kubernetes.io/no-provisioner
---
kind: PersistentVolume
apiVersion: v1
metadata: {name: disk}
spec:
  storageClassName: encrypted-gp3
  capacity: {storage: 50Gi}
  accessModes: [ReadWriteOnce]
  hostPath: {path: FOLDER}
"""
JOB = """
kind: Pod
apiVersion: v1
metadata: {name: train-0, labels: {job: train}}
spec:
  automountServiceAccountToken: false
  restartPolicy: Never
  containers:
    - name: trainer
      image: registry.example/ingero:0.1.0
      imagePullPolicy: Never
      args: [sim, run, ranks, --ranks, "4", steps=100000000, slow_rank=2, slow_us=20000]
      resources: {limits: {cpu: 200m, memory: 1Gi}}
"""
LOOK = """
import json, sys
from ingero.agent.capture.discover.identity import read_identity
from ingero.agent.capture.discover.processes import iter_pids
from ingero.agent.diagnosis.counters import CounterFiles
found = []
for pid in iter_pids():
    identity = read_identity(pid, n_reads=1)
    if identity is not None and identity.pod.uid == sys.argv[1]:
        reading = CounterFiles().read(pid, 0)
        found.append([identity.name, identity.cgroup, identity.container, reading and min((
            [quota.n_processors, reading.throttled[quota.cgroup].n_periods] for quota in reading.quotas
        ), default=None)])
print(json.dumps(found))
"""
POD = "k8s.pod.uid"


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kubernetes")
    checkout = copy_checkout(folder / "checkout")
    disk = folder / "disk"
    disk.mkdir()
    os.chown(disk, 65532, 65532)
    with KubernetesNode(folder, Path(IMAGES), checkout) as node:
        node.run(f"kubectl apply --filename - <<'END'{STORAGE.replace('FOLDER', str(disk))}END")
        yield node


def read_blocks(heading=""):
    """Commands below a heading of the guide, each on one line."""
    return "\n".join(read_guide(heading, "kubernetes")).replace("\\\n", "").splitlines()


def allow(command):
    """A command of the guide, with what this machine lacks taken away."""
    if command.startswith("helm install ingero ") and not has_all_capabilities():
        return f"{command} --set privileged=false"
    return command


def find_pod(node, name):
    return next(one for one in node.get("pods") if one["metadata"]["name"].startswith(name))


def count_pods(node, name):
    return sum(one["metadata"]["name"].startswith(name) for one in node.get("pods"))


@pytest.fixture
def plug_in_folder():
    """The folder of this machine that the guide names for NCCL's plug-in; gone afterwards."""
    (path,) = {
        line.rpartition("hostPath=")[2] for line in read_blocks("The agent") if "hostPath=" in line
    }
    folder = Path(path)
    assert not folder.exists()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_every_command_of_the_guide_works_in_its_order(node, plug_in_folder):
    commands = [allow(one) for one in read_blocks()]
    at = next(i for i, one in enumerate(commands) if "port-forward" in one)
    said = node.run("\n".join(commands[:at]))
    assert said.count("STATUS: deployed") == 3
    assert "cgroups         known of every process" in said
    assert "pod resources   the kubelet answers: 3 containers, 0 devices" in said

    node.run(f"kubectl apply --namespace ingero --filename - <<'END'{JOB}END")
    forward, curl = commands[at:]

    def find_verdicts():
        answer = node.run(f"{forward}\ntrap 'kill $!' EXIT\n{curl}")
        return answer if '"culprit"' in answer else None

    verdicts = wait_until(find_verdicts, 600)
    uid = find_pod(node, "train-0")["metadata"]["uid"]
    assert uid in verdicts

    # What the agent's container finds of another pod's processes.
    found = json.loads(
        node.run(
            f"kubectl exec --namespace ingero daemonset/ingero --container agent -- python3 -c '{LOOK}' {uid}"
        )
    )
    ranks = [one for one in found if one[3] is not None]
    assert len(ranks) >= 4
    for _, cgroup, container, (n_processors, _) in ranks:
        assert cgroup.startswith(f"/{GROUP}/kubepods/")
        assert f"/pod{uid}/{container}" in cgroup
        assert n_processors == 0.2
        assert (CGROUPS / "cpu" / cgroup.lstrip("/")).is_dir()
    assert max(throttled for *_, (_, throttled) in ranks) > 0

    for command in read_blocks("Fleet"):
        node.run(command)
    wait_until(lambda: node.is_ready("deploy/ingero-fleet"), 300)
    config = next(
        one for one in node.get("configmaps") if "ingero-fleet" in one["metadata"]["name"]
    )
    assert re.search(r"alarm_slowdown: 0\.2\b", config["data"]["fleet.yaml"])

    for command in read_blocks("The remediator"):
        node.run(command)
        if "rollout status" in command:
            # To `logs` and `exec` a pod that ends is still its deployment's.
            wait_until(lambda: count_pods(node, "ingero-fleet") == 1, 180)
    logs = node.run("kubectl --namespace ingero logs deploy/ingero-fleet --container remediator")
    assert "mode dry-run" in logs
    assert "HTTP Request" not in logs
    for one in node.get("pods"):
        for status in one["status"]["containerStatuses"]:
            assert status["restartCount"] == 0, (one["metadata"]["name"], status)

    copy = plug_in_folder / NAME
    assert not copy.exists()
    for command in read_blocks("The agent"):
        node.run(command)
    wait_until(copy.exists, 300)
    assert copy.read_bytes() == find_plugin().read_bytes()
    ready = "wait --for condition=Ready --timeout 5m pod --selector app.kubernetes.io/name=ingero"
    node.run(f"kubectl --namespace ingero {ready}")
