"""Which GPUs a process is shown, out of its root folder and environment."""

import os
import subprocess
import sys

import pytest

from ingero.agent.capture.discover import identity
from ingero.agent.capture.discover.gpu_views import read_gpu_view
from ingero.model.gpu_view import UNKNOWN, GpuView


def show(tmp_path, *names):
    for name in names:
        node = tmp_path / "root/dev" / name
        node.parent.mkdir(parents=True, exist_ok=True)
        node.touch()
    return tmp_path


def test_device_nodes_are_those_of_devices_and_mig_instances(tmp_path):
    others = ("nvidiactl", "nvidia-uvm", "nvidia-modeset", "null", "nvidia-caps/other")
    folder = show(tmp_path, *others, "nvidia1", "nvidia0", "nvidia-caps/nvidia-cap2")
    view = read_gpu_view(folder, {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert view == GpuView(("nvidia-caps/nvidia-cap2", "nvidia0", "nvidia1"), "1", "PCI_BUS_ID")


def test_a_choice_of_no_device_is_not_no_choice(tmp_path):
    folder = show(tmp_path, "nvidia0")
    assert read_gpu_view(folder, {}) == GpuView(("nvidia0",))
    assert read_gpu_view(folder, {"CUDA_VISIBLE_DEVICES": ""}) == GpuView(("nvidia0",), "")


def test_a_process_that_is_gone_or_may_not_be_read_shares_with_nobody(tmp_path):
    assert read_gpu_view(tmp_path, {}) == UNKNOWN
    assert read_gpu_view(show(tmp_path, "nvidia0"), None) == UNKNOWN


def test_an_environment_that_may_not_be_read_is_no_environment_without_a_choice(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(identity, "_read_environment", refuse)
    assert identity.read_identity(os.getpid()).assignment.gpus == UNKNOWN


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("number", [0, 3])
def test_a_process_in_a_folder_of_devices_of_its_own_is_shown_those(number):
    script = f"mount -t tmpfs none /dev && touch /dev/nvidia{number} && echo ready >&2 && exec {sys.executable} -c 'input()'"
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"CUDA_VISIBLE_DEVICES": "0", "PATH": os.environ["PATH"]},
    ) as process:
        try:
            assert process.stderr.readline() == b"ready\n"
            found = identity.read_identity(process.pid)
        finally:
            process.communicate(b"\n")
    assert found.assignment.gpus == GpuView((f"nvidia{number}",), "0")
