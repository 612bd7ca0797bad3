"""A command's own Fleet ends with the command, also when that is killed."""

import os
import select
import signal
import subprocess
import sys

import pytest

HOLDER = """
import sys
from pathlib import Path
from ingero.cli.local_fleet import EPHEMERAL, SHIPPED_CONFIG, run_local_fleet
with run_local_fleet(SHIPPED_CONFIG, EPHEMERAL):
    print(Path("/proc/thread-self/children").read_text(), flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_fleet_ends_with_a_command_that_was_killed():
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        (fleet,) = map(int, holder.stdout.readline().split())
        pidfd = os.pidfd_open(fleet)
        holder.send_signal(signal.SIGKILL)
        ended, _, _ = select.select([pidfd], [], [], 30)
        os.close(pidfd)
    assert ended
