"""What a command starts for itself ends with the command, also when that is killed."""

import os
import select
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

FLEET = """
from ingero.sim.local_fleet import EPHEMERAL, SHIPPED_CONFIG, run_local_fleet
started = run_local_fleet(SHIPPED_CONFIG, EPHEMERAL)
"""
ECHO = """
from ingero.cli.commands.replay.echo import run_local_echo
started = run_local_echo()
"""
HOLDER = """
with started:
    print("started", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", [FLEET, ECHO], ids=["fleet", "echo"])
@pytest.mark.parametrize("how", ["killed", "asked to end"])
def test_what_a_command_started_ends_with_it(what, how):
    command = [sys.executable, "-c", f"import sys\n{what}{HOLDER}"]
    with (
        ExitStack() as stack,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder,
    ):
        assert holder.stdout.readline() == b"started\n"
        children = [int(pid) for pid in children_of(holder.pid)]
        assert len(children) == 1
        pidfd = os.pidfd_open(children[0])
        stack.callback(os.close, pidfd)
        if how == "killed":
            holder.send_signal(signal.SIGKILL)
        else:
            holder.stdin.close()
            assert holder.wait(30) == 0
        ended, _, _ = select.select([pidfd], [], [], 30)
        assert ended


def children_of(pid):
    return [
        child
        for tasks in Path(f"/proc/{pid}/task").iterdir()
        for child in (tasks / "children").read_text().split()
    ]
