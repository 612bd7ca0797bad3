"""What ``ingero trace`` keeps of root, and that this is enough for libraries that are loaded later."""

import contextlib
import json
import os
import pwd
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ingero.agent.capture.kernel.capabilities import Capability
from ingero.agent.capture.probes.modes import choose_way
from ingero.config.environment import PROBE_MODE, ProbeMode, read_probe_mode
from ingero.sim.runner import get_program
from ingero.testing.waiting import wait_until

pytestmark = pytest.mark.kernel

NOBODY = pwd.getpwnam("nobody")
TRACE = (sys.executable, "-m", "ingero", "trace", "--json", "--no-record")
MODE = choose_way(read_probe_mode()).mode
PLAIN = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", PROBE_MODE: MODE}
BY_EVENTS = {Capability.SYS_ADMIN} if MODE is ProbeMode.EVENT else set()
LEAST = BY_EVENTS | {
    Capability.BPF,
    Capability.PERFMON,
    Capability.SYS_PTRACE,
    Capability.CHECKPOINT_RESTORE,
    Capability.DAC_READ_SEARCH,
    Capability.IPC_LOCK,
}


def mask_of(capabilities):
    return sum(1 << capability for capability in capabilities)


def status_of(folder):
    lines = (line.partition(":") for line in Path(folder, "status").read_text().splitlines())
    return {name: text.split() for name, _, text in lines}


def children_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.fixture
def start():
    """Start a process with pipes; it is killed at the end of the test if it still runs."""
    with contextlib.ExitStack() as stack:

        def start_one(arguments, env=None):
            process = stack.enter_context(
                subprocess.Popen(
                    list(map(str, arguments)), env=env or PLAIN, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )
            )  # fmt: skip
            stack.callback(process.kill)
            return process

        yield start_one


def read_until(stream, text):
    while text not in (line := stream.readline()):
        assert line
    return line


@pytest.fixture
def workload():
    """The simulator's program where every user may run it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        shutil.copytree(get_program().parent, folder, dirs_exist_ok=True)
        yield Path(folder) / get_program().name


def test_every_thread_of_a_trace_keeps_what_probing_needs_and_no_more(start, workload):
    environment = PLAIN | {"SUDO_UID": str(NOBODY.pw_uid), "SUDO_GID": str(NOBODY.pw_gid)}
    tracer = start([*TRACE, "--", workload, "hang"], env=environment)
    read_until(tracer.stderr, "hanging")
    tasks = [status_of(task) for task in Path(f"/proc/{tracer.pid}/task").iterdir()]
    assert len(tasks) > 1
    kept = mask_of(LEAST | {Capability.KILL})
    for task in tasks:
        for name in ("CapEff", "CapPrm", "CapBnd"):
            assert int(task[name][0], 16) == kept, (task["Name"], name)
        assert (task["CapInh"], task["NoNewPrivs"]) == (["0" * 16], ["1"])
    (child,) = children_of(tracer.pid)
    program = status_of(f"/proc/{child}")
    assert set(program["Uid"]) == {str(NOBODY.pw_uid)}
    assert int(program["CapEff"][0], 16) == 0
    # A PROGRAM may be one that is setuid: it is run as if there was no trace.
    assert program["NoNewPrivs"] == ["0"]
    tracer.send_signal(signal.SIGINT)
    out, err = tracer.communicate()
    assert tracer.returncode == 130, err
    assert json.loads(out.splitlines()[-1])["type"] == "incidents"
    assert not Path(f"/proc/{child}").exists()


def test_a_program_run_by_root_itself_keeps_its_privileges(start):
    script = (
        "import sys; print([l for l in open('/proc/self/status') if l.startswith('CapEff')][0])"
    )
    tracer = start([*TRACE, "--", sys.executable, "-c", script])
    _, err = tracer.communicate()
    assert int(read_mask(err), 16) == int(status_of("/proc/self")["CapEff"][0], 16)


def read_mask(text):
    return next(line.split()[1] for line in text.splitlines() if line.startswith("CapEff"))


def test_a_library_in_another_user_s_own_namespace_is_found_after_privileges_are_dropped(start):
    folder, hidden = get_program().parent, "/mnt"
    # Only this mount namespace sees the copies, and only their owner may pass the folder or read the files.
    script = (
        f"mount -t tmpfs -o mode=700,uid={NOBODY.pw_uid} none {hidden}; cp {folder}/* {hidden}/;"
        f" chown {NOBODY.pw_uid} {hidden}/*; chmod 500 {hidden}/*; echo ready; read line;"
        f" exec setpriv --reuid {NOBODY.pw_uid} --clear-groups {hidden}/workload sync gate=1 steps=53"
    )
    place = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
    target = start(["unshare", "--mount", "/bin/sh", "-c", script], env=PLAIN | place)
    read_until(target.stdout, "ready")
    tracer = start([*TRACE, "--pid", target.pid])
    target.stdin.write("go\n")
    target.stdin.flush()
    met = json.loads(read_until(tracer.stdout, '"process"'))
    out, err = target.communicate("go\n")
    assert target.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["pid"] == target.pid
    tracer.send_signal(signal.SIGINT)
    told, err = tracer.stdout.read(), tracer.stderr.read()
    assert (met["pid"], met["rank"], met["world_size"]) == (target.pid, 3, 8)
    lines = [json.loads(text) for text in told.splitlines()]
    (count,) = [one for one in lines if one["type"] == "counts" and one["op"] == "cudaDeviceSync"]
    # It runs on while its other libraries are probed.
    assert 0 < count["seen"] <= 53, err


def as_nobody_with(*names):
    # The last because the interpreter may lie in root's home.
    kept = ",".join(f"+{name}" for name in (*names, "dac_read_search"))
    return (
        *("setpriv", "--reuid", NOBODY.pw_uid, "--clear-groups"),
        *("--inh-caps", kept, "--ambient-caps", kept, "--bounding-set", f"-all,{kept}"),
    )


@pytest.mark.parametrize("names", [("bpf", "perfmon"), ("sys_admin",)], ids="-".join)
def test_without_root_two_capabilities_or_what_stood_for_them_are_enough_for_one_s_own_program(
    start, names
):
    able = as_nobody_with(*{*names, *(one.name.lower() for one in BY_EVENTS)})
    tracer = start([*able, *TRACE, "--", get_program(), "sync", "steps=7"])
    out, err = tracer.communicate()
    assert tracer.returncode == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    (count,) = [one for one in lines if one["type"] == "counts" and one["op"] == "cudaDeviceSync"]
    assert count["seen"] == 7


def test_perf_events_without_the_capability_that_they_need_are_refused_before_anything_runs(start):
    able, by_events = as_nobody_with("bpf", "perfmon"), PLAIN | {PROBE_MODE: ProbeMode.EVENT}
    tracer = start([*able, *TRACE, "--", get_program(), "sync", "steps=7"], env=by_events)
    out, err = tracer.communicate()
    assert (tracer.returncode, out) == (3, "")
    assert "grant CAP_SYS_ADMIN" in err
    report = start([*able, sys.executable, "-m", "ingero", "check", "--json"], env=by_events)
    checks = json.loads(report.communicate()[0])["checks"]
    (engine,) = [one for one in checks if one["name"] == "probe engine"]
    assert (engine["pass"], engine["optional"]) == (False, False)
    assert "CAP_SYS_ADMIN" in engine["recommendation"]


# By perf events the kernel takes 0.1 s for each probe of a process that was killed, one after another.
@pytest.mark.timeout(400)
def test_a_program_and_what_it_simulates_end_with_a_tracer_that_is_killed(start):
    tracer = start([*TRACE, "--", sys.executable, "-m", "ingero", "sim", "run", "hang"])
    held = wait_until(lambda: children_of(tracer.pid))
    simulated = wait_until(lambda: children_of(held[0]))
    ends = [os.pidfd_open(int(pid)) for pid in (*held, *simulated)]
    tracer.kill()
    for end in ends:
        select.select([end], [], [])  # the test's timeout is the limit
        os.close(end)
