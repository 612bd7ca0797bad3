"""The demos' device: NVIDIA's own compiler takes its kernel, the simulator obeys it, and what fails is named."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest

from ingero.agent.capture.gpu.driver import has_driver
from ingero.errors import UnsupportedError
from ingero.sim.programs.device import PTX
from ingero.sim.programs.program import PROGRAMS
from ingero.sim.programs.runtime import (
    Runtime,
    check_device,
    find_runtime,
    iter_runtimes,
)
from ingero.sim.runner import get_program

# Probes see every process of the machine: these calls must not run beside the tests that count calls.
pytestmark = pytest.mark.xdist_group("kernel")
SIMULATOR = str(get_program().parent / "libcudart.so.12")

RUN = """
import json, sys, time
from ingero.sim.programs.device import Device
from ingero.errors import UnsupportedError
device = Device(sys.argv[1])
device.prepare()
device.load(2)
began = time.monotonic()
device.launch(5, 0.004)
device.synchronise()
waited_s = time.monotonic() - began
try:
    device.allocate(1 << 50)
except UnsupportedError as error:
    print(json.dumps({"waited_s": waited_s, "error": error.message, "hint": error.hint}))
"""


def run(*command, **settings):
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **settings},
        input="\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def find_library(package, name):
    try:
        (path,) = [str(file.locate()) for file in files(package) if file.name == name]
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    return path


# sm_75 and later are what both CUDA 12 and 13 compile for.
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_nvidia_s_assembler_takes_the_kernel(tmp_path, arch):
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("ptxas is not installed (pip install nvidia-cuda-nvcc)")
    (tmp_path / "work.ptx").write_bytes(PTX)
    done = subprocess.run(
        [ptxas, "--warning-as-error", "-arch", arch, "-o", tmp_path / "out", tmp_path / "work.ptx"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "is not defined for option 'gpu-name'" in done.stderr:
        pytest.skip(f"this ptxas does not know {arch}")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out").read_bytes().startswith(b"\x7fELF")


def test_a_kernel_takes_as_long_as_it_is_asked_for_and_a_failed_call_is_named():
    # At the simulator's own pace one of the kernels would last for a minute.
    done = run("-c", RUN, SIMULATOR, GPUSIM_KERNEL_NS=str(60 * 10**9))
    told = json.loads(done.stdout)
    assert told["waited_s"] >= 5 * 0.004
    assert told["error"] == "cudaMalloc: out of memory (2)"
    assert told["hint"] == "free some of the device's memory"


@pytest.mark.skipif(has_driver(), reason="there is a driver here")
@pytest.mark.parametrize(
    ("package", "name"),
    [("nvidia-cuda-runtime-cu12", "libcudart.so.12"), ("nvidia-cuda-runtime", "libcudart.so.13")],
)
@pytest.mark.parametrize(
    ("scenario", "call"), [("gpu-steal", "cudaSetDeviceFlags"), ("cold-start", "cudaMalloc")]
)
def test_nvidia_s_runtime_says_itself_what_is_missing(package, name, scenario, call):
    library = find_library(package, name)
    done = run("-m", "ingero.sim.programs.program", scenario, library)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["error"] == (
        f"{call}: CUDA driver version is insufficient for CUDA runtime version (35)"
    )
    assert "install a newer driver" in told["hint"]
    assert (done.returncode, done.stderr) == (3, "")


def test_memory_that_costs_nothing_to_map_is_refused_as_a_spike():
    # The simulator maps at no cost unless it is told to.
    done = run("-m", "ingero.sim.programs.program", "periodic-spike", SIMULATOR)
    told = json.loads(done.stdout)
    assert "too little to be a spike" in told["error"]
    assert "to map 2048 MiB takes" in told["error"]  # a quarter of the simulator's 8 GiB


def test_every_simulated_setting_is_one_of_the_simulator_s():
    described = (Path(__file__).parents[3] / "gpusim/sim.h").read_text()
    settings = {key for program in PROGRAMS.values() for key in program.settings}
    assert settings <= set(re.findall(r"\b[A-Z_]{4,}\b", described))


def test_the_newest_runtime_that_loads_kernels_is_taken_and_what_is_none_is_passed_over(tmp_path):
    text = tmp_path / "libcudart.so.13"
    text.write_text("not a library")
    assert find_runtime([str(text), SIMULATOR]) == SIMULATOR
    other = str(get_program().parent / "libcuda.so.1")
    with pytest.raises(UnsupportedError) as caught:
        find_runtime([str(text), other])
    assert f"{text} cannot be loaded" in caught.value.message
    assert f"{other} is no libcudart" in caught.value.message
    with pytest.raises(UnsupportedError, match="no libcudart was found") as caught:
        find_runtime([])
    assert "pip install 'nvidia-cuda-runtime-cu12>=12.8'" in caught.value.hint


@pytest.mark.parametrize(
    ("version", "driver", "is_taken"),
    [
        ((12, 9), (12, 2), True),
        ((13, 0), (12, 9), False),
        ((12, 9), (13, 0), True),
        ((12, 9), (0, 0), True),
    ],
)
def test_a_driver_takes_runtimes_of_its_own_major_version_and_older_ones(version, driver, is_taken):
    assert Runtime("libcudart.so", version, driver).is_taken() is is_taken


def test_runtimes_of_this_python_s_environment_are_found():
    installed = find_library("nvidia-cuda-runtime-cu12", "libcudart.so.12")
    assert any(Path(path).exists() and Path(path).samefile(installed) for path in iter_runtimes())


def test_no_device_is_said_before_anything_is_looked_for(tmp_path):
    control = tmp_path / "nvidiactl"
    with pytest.raises(UnsupportedError, match="no NVIDIA device here") as caught:
        check_device(control)
    assert "--sim" in caught.value.hint
    control.touch()
    check_device(control)
