"""`ingero demo --sim` and `--gpu`: the fault really happens, the real probes see it, and the engine names it.

Here `--gpu` gets the simulator's libcudart: all is as on a device but the library.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, files

import pytest

from ingero.agent.capture.gpu.driver import has_driver
from ingero.recording.queries.explain import explain_file
from ingero.recording.queries.window import Wanted
from ingero.sim.runner import get_program

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

DIAGNOSIS = {
    "incident": ("preemption", "preempted by logrotate"),
    "cold-start": ("lazy_load", "lazy module loading at first launch"),
    "cpu-contention": ("runnable_wait", "waiting for a free CPU"),
    "gpu-steal": ("gpu_sharing", "time slices taken by notebook (pid "),
    "memcpy-bottleneck": ("copy_bound", "host-to-device copies at the speed of pageable memory"),
    "periodic-spike": ("periodic_spike", "something that happens every "),
}


@pytest.mark.live  # what others do to its processor would be one incident more
def test_every_scenario_of_the_simulator_ends_with_its_own_diagnosis_and_no_other(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ingero", "demo", "--sim", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    demos = [line for line in lines if line["type"] == "demo"]
    found = {demo["name"]: [] for demo in demos}
    for line in lines:
        if line["type"] == "incident":
            found[line["demo"]].append((line["rule"], line["causes"][0]["name"]))
    assert found.keys() == DIAGNOSIS.keys()
    for name, (rule, cause) in DIAGNOSIS.items():
        assert len(found[name]) == 1, f"{name}: {found}\n{done.stderr}"
        ((said_rule, said_cause),) = found[name]
        assert (said_rule, said_cause.startswith(cause)) == (rule, True), (name, found[name])
    assert {(demo["form"], demo["synthetic"]) for demo in demos} == {("simulator", False)}


ON_A_GPU = """
import sys
from pathlib import Path
from ingero.cli.commands.demo.live import find_gpu, record_scenario
control, library, path = map(Path, sys.argv[1:])
record_scenario("memcpy-bottleneck", path, find_gpu(library, control))
"""


def record_on_gpu(tmp_path, library):
    control, path = tmp_path / "nvidiactl", tmp_path / "demo.db"
    control.touch()
    done = subprocess.run(
        [sys.executable, "-c", ON_A_GPU, control, library, path],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(tmp_path)},
        check=False,
    )
    return done, path


def test_a_scenario_on_a_gpu_is_recorded_from_the_library_that_was_named(tmp_path):
    done, path = record_on_gpu(tmp_path, get_program().parent / "libcudart.so.12")
    assert done.returncode == 0, done.stderr
    (incident,) = explain_file(path, Wanted()).incidents
    assert incident.rule == "copy_bound"


@pytest.mark.skipif(has_driver(), reason="there is a driver here")
def test_what_nvidia_s_runtime_refuses_is_the_error_and_leaves_no_recording(tmp_path):
    try:
        (library,) = [
            file.locate()
            for file in files("nvidia-cuda-runtime-cu12")
            if file.name == "libcudart.so.12"
        ]
    except PackageNotFoundError:
        pytest.skip("nvidia-cuda-runtime-cu12 is not installed")
    done, path = record_on_gpu(tmp_path, library)
    assert (
        "UnsupportedError: cudaSetDeviceFlags: CUDA driver version is insufficient" in done.stderr
    )
    assert not path.exists()
