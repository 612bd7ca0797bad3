"""An agent in a pid namespace of its own, as a container gives it: the kernel tells of pids that are others there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ingero.sim.runner import get_program

pytestmark = pytest.mark.kernel
INSIDE = "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"
TRACE = sys.executable, "-m", "ingero", "trace", "--no-record", "--json"
SAID = "not the host's pid namespace"
LAST_PID, PID_MAX = Path("/proc/sys/kernel/ns_last_pid"), Path("/proc/sys/kernel/pid_max")


def find_pid_of_nobody() -> int:
    """A pid that the host's counter reaches last: in a new namespace small ones are also those of kernel threads."""
    last, end = int(LAST_PID.read_text()), int(PID_MAX.read_text())
    ahead = ((last + step) % end for step in range(end // 2, end))
    return next(pid for pid in ahead if 300 < pid < end - 300 and not list_used(pid))


def list_used(pid: int) -> list[int]:
    return [near for near in range(pid, pid + 300) if Path(f"/proc/{near}").exists()]


def test_processes_of_other_numbers_are_not_named_and_that_is_said(tmp_path):
    workload = get_program()
    script = f"""
        echo {find_pid_of_nobody()} >{LAST_PID}
        "$@" >{tmp_path}/out 2>{tmp_path}/err &
        until grep -q "{SAID}" {tmp_path}/err; do sleep 0.1; done
        {workload} train steps=100 >{tmp_path}/account
        wait
    """
    command = [*INSIDE, "sh", "-c", script, "sh", *TRACE, "--duration", "4s"]
    subprocess.run(command, check=True, timeout=60)
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    own = json.loads((tmp_path / "account").read_text())["pid"]
    assert own not in {line["pid"] for line in lines if line["type"] == "counts"}
    assert [line for line in lines if line["type"] == "process"] == []


@pytest.mark.parametrize("chosen", [("--pid", "1"), ("--", "true")])
def test_processes_cannot_be_chosen_by_numbers_that_the_kernel_does_not_mean(chosen):
    done = subprocess.run(
        [*INSIDE, *TRACE, *chosen], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3
    assert "cannot be chosen by their pid" in done.stderr
    assert "--pid=host" in done.stderr
