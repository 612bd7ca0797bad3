"""Devices of processes in pods: joined by names and containers, asked again after failures, never made up."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from tests.agent.capture.kubelet import container, devices, pod, run_kubelet

from ingero.agent.capture.assignments import AssignmentFinder
from ingero.agent.capture.discover.identity import Assignment, Pod, ProcessIdentity
from ingero.model.gpu_view import GpuView
from ingero.testing.waiting import wait_until

ID = "5f" * 32
SHOWN = GpuView(("nvidia0",))
ME = ProcessIdentity(
    os.getpid(),
    7,
    container=ID,
    pod=Pod("uid", "train-0", "ml"),
    assignment=Assignment(gpus=SHOWN),
)
GPU_A = devices("nvidia.com/gpu", "GPU-a")
GPU_B = devices("nvidia.com/gpu", "GPU-b")
TWO = pod("ml", "train-0", container("main", GPU_A), container("helper", GPU_B))


@dataclass
class Asking:
    folder: Path
    finder: AssignmentFinder
    found: list = field(default_factory=list)
    notes: list = field(default_factory=list)

    def wait_for_note(self, text):
        def look():
            self.notes += self.finder.pop_notes()
            return any(text in note for note in self.notes)

        wait_until(look)


@pytest.fixture
def asking(tmp_path):
    (tmp_path / "logs").mkdir()
    found = []
    finder = AssignmentFinder(
        tmp_path / "kubelet.sock", found.append, tmp_path / "logs", retries_s=(0.01,)
    )
    yield Asking(tmp_path, finder, found)
    finder.close()


def test_a_process_gets_the_devices_of_the_only_container_that_has_some(asking):
    answer = pod("ml", "train-0", container("log"), container("main", GPU_A))
    other = pod("other", "train-0", container("main", GPU_B))
    with run_kubelet(asking.folder / "kubelet.sock", other + answer):
        asking.finder.ask(ME)
        wait_until(lambda: asking.found)
    (identity,) = asking.found
    assert identity.assignment == Assignment("main", ("nvidia.com/gpu=GPU-a",), SHOWN)
    assert dict(identity.resource) == {
        "container.id": ID,
        "ingero.device.ids": "nvidia.com/gpu=GPU-a",
        "k8s.container.name": "main",
        "k8s.namespace.name": "ml",
        "k8s.pod.name": "train-0",
        "k8s.pod.uid": "uid",
    }


def test_of_several_containers_with_devices_the_log_says_which_it_is(asking):
    with run_kubelet(asking.folder / "kubelet.sock", TWO):
        asking.finder.ask(ME)
        asking.wait_for_note("several of its containers have some")
        assert asking.found == []
        (asking.folder / f"logs/train-0_ml_helper-{ID}.log").touch()
        asking.finder.ask(ME)
        wait_until(lambda: asking.found)
    assert asking.found[0].assignment == Assignment("helper", ("nvidia.com/gpu=GPU-b",), SHOWN)


def test_the_logs_name_counts_before_what_the_process_was_told(asking):
    told = ProcessIdentity(os.getpid(), 7, container=ID, pod=Pod("uid", "my-host", ""))
    with run_kubelet(asking.folder / "kubelet.sock", TWO):
        asking.finder.ask(told)
        asking.wait_for_note("the kubelet has no pod of that name")
        (asking.folder / f"logs/train-0_ml_main-{ID}.log").touch()
        asking.finder.ask(told)
        wait_until(lambda: asking.found)
    assert asking.found[0].pod == Pod("uid", "train-0", "ml")
    assert asking.found[0].assignment.devices == ("nvidia.com/gpu=GPU-a",)


def test_a_kubelet_that_refuses_is_asked_again_until_it_answers(asking):
    asking.finder.ask(ME)
    asking.wait_for_note("there is no")
    with run_kubelet(asking.folder / "kubelet.sock", grpc.StatusCode.UNAVAILABLE) as kubelet:
        wait_until(lambda: kubelet.n_asked >= 2)
        assert asking.found == []
        kubelet.answer = pod("ml", "train-0", container("main", GPU_A))
        wait_until(lambda: asking.found)
        asking.wait_for_note("answers again")
    failures = [note for note in asking.notes if "until the kubelet answers" in note]
    assert len(failures) == 1, asking.notes


def test_a_process_that_ended_is_asked_for_no_longer(asking):
    gone = ProcessIdentity(2**22 - 1, 7, container=ID, pod=Pod("uid", "gone", "ml"))
    asking.finder.ask(gone)
    asking.wait_for_note("there is no")
    with run_kubelet(asking.folder / "kubelet.sock", TWO):
        asking.finder.ask(ME)
        asking.wait_for_note("several of its containers")
    assert not [note for note in asking.notes if "ml/gone" in note]
