"""`ingero demo --gpu`: each fault really happens on a device, and is what the engine names first."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.kernel, pytest.mark.slow]

RULE = {
    "incident": "preemption",
    "cold-start": "lazy_load",
    "cpu-contention": "runnable_wait",
    "gpu-steal": "gpu_sharing",
    "memcpy-bottleneck": "copy_bound",
    "periodic-spike": "periodic_spike",
}


@pytest.mark.parametrize("name", sorted(RULE))
def test_scenario_on_a_device_ends_with_its_own_diagnosis_first(tmp_path, name):
    done = subprocess.run(
        [sys.executable, "-m", "ingero", "demo", name, "--gpu", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(tmp_path)},
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    (demo,) = [line for line in lines if line["type"] == "demo"]
    assert (demo["form"], demo["synthetic"]) == ("gpu", False)
    rules = [line["rule"] for line in lines if line["type"] == "incident"]
    assert rules[:1] == [RULE[name]], rules
