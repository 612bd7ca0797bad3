"""A job in a pod: what leaves the node about its ranks says which devices the kubelet gave to their container.

The cgroup, the agent, its probes and the gRPC on a Unix socket are real; the kubelet is a server of its protocol.
"""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from tests.agent.capture.becoming import become_next, running_rank_0
from tests.agent.capture.kubelet import container, devices, pod, run_kubelet

from ingero.agent.capture.discover.cgroups import seen_cgroups
from ingero.agent.capture.kernel.abi import ProcessEvent
from ingero.agent.capture.processes import TracedProcesses
from ingero.sim.runner import SimSettings, Simulation, get_program
from ingero.testing.waiting import wait_until
from ingero.wire.collectives import read_collectives
from ingero.wire.progress import read_progress

pytestmark = [pytest.mark.kernel, pytest.mark.slow]
INGERO = (sys.executable, "-m", "ingero")
POD, CONTAINER = "0b1d8ed1-5b1c-4c51-9f3a-1f0c1a2b3c4d", "5f" * 32
TRAIN = pod("ml", "train-0", container("main", devices("nvidia.com/gpu", "GPU-a", "GPU-b")))
EXPECTED = {
    "container.id": CONTAINER,
    "ingero.device.ids": "nvidia.com/gpu=GPU-a,nvidia.com/gpu=GPU-b",
    "k8s.container.name": "main",
    "k8s.namespace.name": "ml",
    "k8s.pod.name": "train-0",
    "k8s.pod.uid": POD,
}


@pytest.fixture
def cgroup():
    """A cgroup as the kubelet makes one for a container."""
    root = seen_cgroups().find_root()
    if root is None:
        pytest.skip("cgroup version 2 is not mounted")
    top = root / f"kubepods-test-{os.getpid()}"
    folders = [top, top / f"pod{POD}", top / f"pod{POD}" / CONTAINER]
    try:
        folders[-1].mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    yield folders[-1]
    for folder in reversed(folders):
        folder.rmdir()


def test_what_is_pushed_about_a_rank_in_a_pod_has_its_devices(collector, cgroup, tmp_path):
    socket = tmp_path / "kubelet.sock"
    agent = subprocess.Popen(
        [
            *INGERO, "fleet-push", "--json", "--kubelet-socket", str(socket),
            "--fleet-endpoint", f"127.0.0.1:{collector.port}", "--fleet-insecure",
            "--fleet-cluster-id", "c", "--fleet-node-id", "n",
            "--fleet-push-interval", "1s", "--fleet-protocol", "http/protobuf",
            "--fleet-persist-path", str(tmp_path / "baseline.json"),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        collector.wait_for(1)  # the probes wait
        program = tmp_path / "in_the_pod"
        program.write_text(
            f"#!/bin/sh\necho $$ > {cgroup}/cgroup.procs\n"
            f'POD_NAME=train-0 POD_NAMESPACE=ml exec {get_program()} "$@"\n'
        )
        program.chmod(0o755)
        settings = SimSettings("ranks", {"steps": 20_000, "wait_us": 1_000_000}, 2, program=program)
        with run_kubelet(socket, TRAIN), Simulation(settings):
            wait_until(lambda: EXPECTED in find_resources(collector, read_runs), 60)
        wait_until(lambda: EXPECTED in find_resources(collector, read_gone), 60)
    finally:
        agent.send_signal(signal.SIGTERM)
        _, err = agent.communicate(timeout=120)
    assert agent.returncode == 0, err
    assert "without devices" not in err


def test_an_answer_about_a_process_that_became_another_rank_leaves_it_that_rank(cgroup, tmp_path):
    socket = tmp_path / "kubelet.sock"
    traced = TracedProcesses(None, (), socket)
    met = []
    try:
        with running_rank_0(POD_NAME="train-0", POD_NAMESPACE="ml") as process:
            (cgroup / "cgroup.procs").write_text(str(process.pid))
            traced.meet(process.pid)  # nobody answers yet
            become_next(process)
            record = (process.pid, ProcessEvent.EXEC)
            traced.on_records(np.array([record], dtype=[("pid", "<u4"), ("event", "<u4")]))
            with run_kubelet(socket, TRAIN):
                wait_until(lambda: met.extend(traced.pop_met()) or len(met) == 3, 60)
    finally:
        traced.close()
    assert [(one.place.rank, one.assignment.container) for one in met] == [
        (0, ""),
        (1, ""),
        (1, "main"),
    ]
    assert dict(met[-1].resource) == EXPECTED


def read_runs(export):
    return read_collectives(export).runs


def read_gone(export):
    return [one for one in read_progress(export).found if one.is_gone]


def find_resources(collector, read):
    """Of the ranks in the pod, in the order in which they were pushed."""
    found = [dict(one.rank.resource) for export in collector.logs for one in read(export)]
    return [one for one in found if one.get("container.id") == CONTAINER]
