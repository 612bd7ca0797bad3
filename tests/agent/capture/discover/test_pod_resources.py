"""What the kubelet answers over a real Unix socket, and how failures of it are told."""

import grpc
import pytest
from tests.agent.capture.kubelet import claim, container, devices, pod, run_kubelet

from ingero.agent.capture.discover.pod_resources import (
    ContainerDevices,
    ContainerName,
    find_container_name,
    list_containers,
)
from ingero.errors import UnsupportedError

ID = "5f" * 32
TRAIN = pod(
    "ml", "train-0",
    container("main", devices("nvidia.com/gpu", "GPU-b", "GPU-a"), devices("rdma/hca", "mlx5_0")),
    container("log"),
)  # fmt: skip
CLAIMED = pod("ml", "infer", container("server", claim("gpu.nvidia.com", "node-1", "gpu-3")))


def test_containers_and_their_devices_are_read_with_whatever_else_is_said(tmp_path):
    socket = tmp_path / "kubelet.sock"
    with run_kubelet(socket, TRAIN + CLAIMED):
        assert list_containers(socket) == [
            ContainerDevices(
                "ml", "train-0", "main",
                ("nvidia.com/gpu=GPU-b", "nvidia.com/gpu=GPU-a", "rdma/hca=mlx5_0"),
            ),
            ContainerDevices("ml", "train-0", "log"),
            ContainerDevices("ml", "infer", "server", ("gpu.nvidia.com=node-1/gpu-3",)),
        ]  # fmt: skip


def test_no_socket_a_refusal_and_nonsense_are_each_told_with_their_reason(tmp_path):
    socket = tmp_path / "kubelet.sock"
    with pytest.raises(UnsupportedError, match="there is no"):
        list_containers(socket)
    with run_kubelet(socket, grpc.StatusCode.RESOURCE_EXHAUSTED) as kubelet:
        with pytest.raises(UnsupportedError, match="RESOURCE_EXHAUSTED: rejected by rate limit"):
            list_containers(socket)
        kubelet.answer = b"\x0a\xff"
        with pytest.raises(UnsupportedError, match="INTERNAL"):
            list_containers(socket)
    socket.unlink(missing_ok=True)
    socket.touch()
    with pytest.raises(UnsupportedError, match="UNAVAILABLE"):
        list_containers(socket)


def test_a_container_is_named_by_its_logs_file(tmp_path):
    for name in (f"train-0_ml_main-{ID}.log", f"train-0_ml_log-{'6a' * 32}.log", "stray.log"):
        (tmp_path / name).touch()
    assert find_container_name(ID, tmp_path) == ContainerName("train-0", "ml", "main")
    assert find_container_name("7b" * 32, tmp_path) is None
    assert find_container_name(ID, tmp_path / "gone") is None
