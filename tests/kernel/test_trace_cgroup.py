"""``ingero trace --cgroup``: the processes of one cgroup, wherever version 2 is mounted."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ingero.agent.capture.discover.cgroups import seen_cgroups
from ingero.sim.runner import get_program

pytestmark = pytest.mark.kernel

TRACE = (sys.executable, "-m", "ingero", "trace", "--json", "--no-record")
PLAIN = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}


@pytest.fixture
def cgroups():
    """Two cgroups, one inside the other; removed at the end."""
    root = seen_cgroups().find_root()
    if root is None:
        pytest.skip("cgroup version 2 is not mounted")
    outer = root / f"ingero-test-{os.getpid()}"
    inner = outer / "inner"
    try:
        inner.mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    yield f"/{outer.name}", (root, outer, inner)
    inner.rmdir()
    outer.rmdir()


def test_only_the_processes_of_a_cgroup_and_of_those_below_it_are_traced(cgroups):
    name, folders = cgroups
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": PLAIN}
    with contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(
                subprocess.Popen([get_program(), "sync", "gate=1", f"steps={steps}"], **pipes)
            )
            for steps in (11, 13, 17)
        ]
        for program, folder in zip(programs, folders, strict=True):
            Path(folder, "cgroup.procs").write_text(str(program.pid))
        tracer = stack.enter_context(
            subprocess.Popen([*TRACE, "--cgroup", name], stderr=subprocess.PIPE, **pipes)
        )
        # The libraries are found as the last program's process is.
        met = set()
        while not met >= {program.pid for program in programs[1:]}:
            met.add(json.loads(tracer.stdout.readline()).get("pid"))
        for program in programs:
            program.communicate("go\n")
        tracer.send_signal(signal.SIGINT)
        out, err = tracer.stdout.read(), tracer.stderr.read()
    lines = [json.loads(line) for line in out.splitlines()]
    counts = {
        line["pid"]: line["seen"]
        for line in lines
        if line["type"] == "counts" and line["op"] == "cudaDeviceSync"
    }
    assert counts == {programs[1].pid: 13, programs[2].pid: 17}, err
    assert programs[0].pid not in met | {line.get("pid") for line in lines}


def test_a_cgroup_that_is_not_there_is_named():
    done = subprocess.run(
        [*TRACE, "--cgroup", "/no/such/group"],
        capture_output=True,
        text=True,
        env=PLAIN,
        check=False,
    )
    assert done.returncode == 2
    assert "there is no cgroup '/no/such/group'" in done.stderr
