"""Kubernetes' own scheduler and node controller: what they make of the taint, beside no kubelet."""

import subprocess
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
from tests.remediation.kubernetes.real_server import FOLDER, ended
from tests.remediation.kubernetes.small_server import ADMIN
from tests.remediation.kubernetes.test_kubernetes import RECORD
from tests.support.ports import free_port

from ingero.testing.waiting import wait_until

PROGRAMS = {
    # No kubelet reports, so the controller must not take the nodes for lost ones.
    "kube-controller-manager": ["--controllers=nodelifecycle", "--node-monitor-grace-period=3h"],
    "kube-scheduler": [],
}
PODS = "/api/v1/namespaces/default/pods"


@pytest.fixture
def controllers(api, tmp_path):
    """The scheduler and the controller, on the real server."""
    if not hasattr(api.server, "authority"):
        pytest.skip("only a real server has a scheduler")
    with ExitStack() as stack:
        for name, flags in PROGRAMS.items():
            stack.enter_context(run(name, flags, api.kubeconfig(ADMIN), tmp_path))
        yield api
        delete_pods(api.server)


@contextmanager
def run(name, flags, kubeconfig, folder):
    port = free_port()
    command = [
        FOLDER / name, "--kubeconfig", kubeconfig, "--leader-elect=false", "--port=0",
        f"--secure-port={port}", "--bind-address=127.0.0.1", f"--cert-dir={folder}/{name}", *flags,
    ]  # fmt: skip
    with (
        (folder / f"{name}.log").open("wb") as log,
        ended(subprocess.Popen(command, stdout=log, stderr=log)),
    ):
        yield


def create_pod(server, name, node="", tolerates=False):
    toleration = {"key": "ingero.io/culprit", "operator": "Exists"}
    spec = {
        "containers": [{"name": "c", "image": "none"}],
        **({"nodeName": node} if node else {}),
        **({"tolerations": [toleration]} if tolerates else {}),
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    assert server.post(PODS, pod).status_code == 201


def find_pods(server):
    """Pods by name: their node, and whether they are to end."""
    found = server.client.get(PODS).json()["items"]
    return {
        one["metadata"]["name"]: (
            one["spec"].get("nodeName", ""),
            "deletionTimestamp" in one["metadata"],
        )
        for one in found
    }


def delete_pods(server):
    for name in find_pods(server):
        server.client.request("DELETE", f"{PODS}/{name}", json={"gracePeriodSeconds": 0})


def test_new_pods_go_elsewhere_and_those_that_run_stay_until_it_is_given_back(controllers):
    server, actuator = controllers.server, controllers.actuator()
    create_pod(server, "before", node="n1")
    for name in ("n1", "n2", "n3"):
        actuator.apply(replace(RECORD, target=name))
    for number in range(4):
        create_pod(server, f"new-{number}")
    create_pod(server, "tolerant", tolerates=True)
    pods = wait_until(
        lambda: all(one for one, _ in find_pods(server).values()) and find_pods(server)
    )
    assert pods["before"] == ("n1", False)
    assert {pods[f"new-{number}"] for number in range(4)} == {("n4", False)}
    actuator.apply(replace(RECORD, target="n4", action_id="a4444444444"))
    create_pod(server, "waits")
    create_pod(server, "goes", tolerates=True)
    wait_until(lambda: find_pods(server)["goes"][0])
    assert find_pods(server)["waits"] == ("", False)
    actuator.reverse(replace(RECORD, target="n2"))
    wait_until(lambda: find_pods(server)["waits"][0] == "n2", 60)


def test_no_execute_evicts_what_does_not_tolerate_it(controllers):
    server, actuator = controllers.server, controllers.actuator(taint="NoExecute")
    create_pod(server, "trains", node="n1")
    create_pod(server, "tolerant", node="n1", tolerates=True)
    create_pod(server, "elsewhere", node="n2")
    actuator.apply(RECORD)
    wait_until(lambda: find_pods(server)["trains"][1], 60)
    pods = find_pods(server)
    assert pods == {
        "trains": ("n1", True), "tolerant": ("n1", False), "elsewhere": ("n2", False),
    }  # fmt: skip


def test_a_cordon_and_its_undoing_are_followed_by_the_controllers_own_taint(controllers):
    actuator = controllers.actuator(taint="", condition="", cordon=True)
    actuator.apply(RECORD)
    wait_until(lambda: "node.kubernetes.io/unschedulable" in actuator.read_nodes()["n1"].state)
    assert actuator.read_nodes()["n1"].mark == RECORD.action_id
    actuator.reverse(RECORD)
    wait_until(lambda: actuator.read_nodes()["n1"].in_service)
