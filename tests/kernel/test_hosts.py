"""Namespaces of runs that last stay when another run begins; those of a killed run go."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ingero.sim.cluster.cleanup import open_cleanup
from ingero.sim.cluster.hosts import open_cluster

pytestmark = pytest.mark.kernel
# What removes them is a process of its own, which is killed together with the run.
RUN = """
import sys
from ingero.sim.cluster.cleanup import open_cleanup
from ingero.sim.cluster.hosts import open_cluster
with open_cleanup() as cleanup, open_cluster(1, cleanup):
    print("up", flush=True)
    sys.stdin.readline()
"""


def namespaces_of(pid):
    return sorted(path.name for path in Path("/run/netns").glob(f"ingero-{pid}-*"))


def test_another_run_removes_what_a_killed_one_left_and_nothing_of_one_that_lasts(tmp_path):
    program = tmp_path / "run.py"
    program.write_text(RUN)
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    # The command line does not say whose it is.
    options |= {
        "executable": sys.executable,
        "env": {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    }
    lasting = subprocess.Popen(["run", program], **options)
    killed = subprocess.Popen(["run", program], **options, process_group=0)
    with lasting, killed:
        assert (lasting.stdout.readline(), killed.stdout.readline()) == ("up\n", "up\n")
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
        assert namespaces_of(killed.pid)
        with open_cleanup() as cleanup, open_cluster(1, cleanup):
            left = [namespaces_of(one.pid) for one in (lasting, killed)]
        assert left == [[f"ingero-{lasting.pid}-0"], []]
        lasting.stdin.write("\n")
    assert not namespaces_of(lasting.pid)
    assert not [*Path("/run").glob(f"ingero-hosts.{lasting.pid}")]
