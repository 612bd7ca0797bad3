"""`ingero demo --sim`: the fault really happens, the real probes see it, and the engine names it."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

DIAGNOSIS = {
    "incident": ("preemption", "preempted by logrotate"),
    "cold-start": ("lazy_load", "lazy module loading at first launch"),
    "cpu-contention": ("runnable_wait", "waiting for a free CPU"),
    "gpu-steal": ("gpu_sharing", "time slices taken by notebook (pid "),
    "memcpy-bottleneck": ("copy_bound", "host-to-device copies at the speed of pageable memory"),
    "periodic-spike": ("periodic_spike", "something that happens every "),
}


def test_every_scenario_of_the_simulator_ends_with_its_own_diagnosis_and_no_other(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ingero", "demo", "--sim", "--json"],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    found = {
        demo["name"]: [(i["rule"], i["causes"][0]["name"]) for i in demo["incidents"]]
        for demo in told["demos"]
    }
    assert found.keys() == DIAGNOSIS.keys()
    for name, (rule, cause) in DIAGNOSIS.items():
        ((said_rule, said_cause),) = found[name]
        assert (said_rule, said_cause.startswith(cause)) == (rule, True), (name, found[name])
    assert not any(demo["synthetic"] for demo in told["demos"])
