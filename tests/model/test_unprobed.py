"""What is said of files whose calls were not seen, or not as what they are."""

import pytest

from ingero.model.recording import HIDDEN_RUNTIME, NO_CPU_COLLECTIVES, Unprobed, describe_unprobed

WHEELS = "/opt/venv/lib/python3.12/site-packages/nvidia/cu13/lib"


@pytest.mark.parametrize("suffix", ["", "; probed later"])
@pytest.mark.parametrize(
    "path",
    [
        f"{WHEELS}/libcublas.so.13", f"{WHEELS}/libcublasLt.so.13", f"{WHEELS}/libcufft.so.12",
        f"{WHEELS}/libcusolver.so.12", f"{WHEELS}/libcusparse.so.12", f"{WHEELS}/libcurand.so.10",
        f"{WHEELS}/libcufile.so.0", "/usr/local/cuda/lib64/libcusparseLt.so.0.8.1",
        "/usr/lib/x86_64-linux-gnu/libcudnn_ops.so.9", "/usr/local/cuda/lib64/libnppif.so.13",
    ],
)  # fmt: skip
def test_nothing_is_said_of_runtimes_inside_nvidia_s_own_libraries(path, suffix):
    assert describe_unprobed([Unprobed(770, path, HIDDEN_RUNTIME + suffix)]) == []


@pytest.mark.parametrize("path", ["/home/me/simulate", "/home/me/libcustom_kernels.so"])
def test_a_hidden_runtime_of_a_user_s_own_is_seen_as_calls_of_the_driver(path):
    (line,) = describe_unprobed([Unprobed(pid, path, HIDDEN_RUNTIME) for pid in (9, 4)])
    assert line == (
        f"only the driver's calls are seen: {path} of pid 4, 9 (it has a CUDA runtime linked in, names stripped)"
    )


def test_nvidia_s_library_that_could_not_be_read_is_a_loss_all_the_same():
    path = f"{WHEELS}/libcublas.so.13"
    assert describe_unprobed([Unprobed(0, path, "Permission denied")]) == [
        f"not probed, calls are missing: {path} (Permission denied)"
    ]


def test_a_release_of_pytorch_that_is_not_known_costs_the_collectives_of_the_cpu_alone():
    reason = f"{NO_CPU_COLLECTIVES}: it is PyTorch 2.11.0, and known is 2.13.0"
    assert describe_unprobed([Unprobed(7, "/v/libtorch_cpu.so", reason)]) == [
        "collectives on the CPU (Gloo) are not seen: /v/libtorch_cpu.so of pid 7 (it is PyTorch 2.11.0, and known is 2.13.0)"
    ]
