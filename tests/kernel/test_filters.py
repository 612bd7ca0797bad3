"""What nobody asked for is in no ring, table or recording: every source keeps to --pid, --user and --cgroup."""

import contextlib
import json
import os
import select
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ingero.agent.capture.kernel import syscalls
from ingero.agent.capture.kernel.abi import ProcessEvent
from ingero.agent.capture.probes.engine import EngineSettings
from ingero.model.events import IoOp
from ingero.sim.runner import get_program
from ingero.testing.waiting import wait_until

pytestmark = pytest.mark.kernel

PLAIN = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
TRACE = (sys.executable, "-m", "ingero", "trace", "--json")
WRITE = """
import mmap, os, sys
buffer = mmap.mmap(-1, 8192)
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
sys.stdin.readline()
os.write(fd, buffer)
os.fsync(fd)
"""
CONNECT = """
import socket, sys
sys.stdin.readline()
clients = [socket.socket() for _ in range(4)]
for client in clients:
    client.setblocking(False)
    client.connect_ex(("127.0.0.1", int(sys.argv[1])))
print(*(client.getsockname()[1] for client in clients), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def start():
    """Start a Python script that waits for lines on its standard input; it is killed at the end."""
    with contextlib.ExitStack() as stack:

        def start_one(*arguments):
            process = stack.enter_context(
                subprocess.Popen(
                    list(map(str, arguments)), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    text=True, env=PLAIN,
                )
            )  # fmt: skip
            stack.callback(process.kill)
            return process

        yield start_one


def python(script, *arguments):
    return sys.executable, "-c", script, *arguments


def go(process):
    process.stdin.write("go\n")
    process.stdin.flush()


def read_ring(engine, name):
    kept = [engine.rings[name].empty()]
    engine.drain({name: lambda view: kept.append(view.copy())})
    return np.concatenate(kept)


@pytest.fixture(params=["pid", "user"])
def watch(request, start_engine):
    """An engine that watches one process by its pid, or one user."""

    def start_one(probe, pid, uid=None):
        engine = start_engine(
            EngineSettings(host_probes=(probe,), keep_first=1 << 20), attach=False, is_started=False
        )
        if request.param == "pid":
            engine.control.watch_pid(pid)
        else:
            engine.control.watch_uid(os.getuid() if uid is None else uid)
        engine.start_host_probes()
        assert engine.missing == []
        return engine

    start_one.by = request.param
    return start_one


def as_another_user(command):
    return ("setpriv", "--reuid", "65534", "--clear-groups", *command)


def test_block_requests_are_those_of_watched_processes(start, watch, tmp_path):
    if os.major(tmp_path.stat().st_dev) == 0:
        pytest.skip("the temporary folder is not on a block device")
    folder = tmp_path / "theirs"
    folder.mkdir()
    folder.chmod(0o777)
    for parent in (tmp_path, *tmp_path.parents[:3]):
        parent.chmod(0o755)
    stranger = start(*as_another_user(("/usr/bin/env", "python3", "-c", WRITE, folder / "b")))
    ours = start(*python(WRITE, tmp_path / "a"))
    engine = watch("block", ours.pid)
    for process in (stranger, ours):
        process.communicate("go\n")
        assert process.returncode == 0
    records = read_ring(engine, "blocks")
    assert ours.pid in set(records["pid"].tolist())
    if watch.by == "pid":
        assert set(records["pid"].tolist()) == {ours.pid}
    assert stranger.pid not in set(records["pid"].tolist())
    assert {b"kworker" in comm for comm in records["comm"].tolist()} == {False}
    written = records[(records["pid"] == ours.pid) & (records["op"] == IoOp.WRITE)]
    assert written["bytes"].sum() >= 8192
    keys, _ = engine.state.read_counts()
    assert stranger.pid not in keys["pid"].tolist()


@pytest.mark.slow
def test_retransmits_are_those_of_sockets_that_watched_processes_used(start, watch):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        port = listener.getsockname()[1]
        stranger = start(*as_another_user(("/usr/bin/env", "python3", "-c", CONNECT, port)))
        ours = start(*python(CONNECT, port))
        engine = watch("tcp", ours.pid)
        ports = {}
        for process in (stranger, ours):  # theirs are sent again first
            go(process)
            ports[process.pid] = set(map(int, process.stdout.readline().split()))
        told = [read_ring(engine, "retransmits")]
        poll = select.poll()
        poll.register(engine.rings["retransmits"].fd, select.POLLIN)
        while not set(np.concatenate(told)["local_port"].tolist()) & ports[ours.pid]:
            poll.poll(20)
            told.append(read_ring(engine, "retransmits"))
    records = np.concatenate(told)
    here = records[records["remote_port"] == port]
    assert set(here["local_port"].tolist()) <= ports[ours.pid]
    assert set(here["pid"].tolist()) == {ours.pid}
    keys, counts = engine.state.read_counts()
    assert counts["seen"][keys["pid"] == ours.pid].sum() == (records["pid"] == ours.pid).sum()


def test_processes_are_told_of_if_they_are_watched(start, watch):
    script = "import subprocess, sys; sys.stdin.readline(); subprocess.run(['/bin/true'])"
    stranger = start(*as_another_user(("/usr/bin/env", "python3", "-c", script)))
    ours = start(*python(script))
    engine = watch("process", ours.pid)
    for process in (stranger, ours):
        process.communicate("go\n")
    records = read_ring(engine, "processes")
    told = set(records["pid"].tolist()) | set(records["other_pid"].tolist())
    assert ours.pid in told
    assert stranger.pid not in told
    ended = records[records["event"] == ProcessEvent.EXIT]["pid"].tolist()
    assert len([pid for pid in ended if pid == ours.pid]) == 1


def test_a_process_whose_last_threads_end_together_ends_once(start, start_engine):
    engine = start_engine(EngineSettings(host_probes=("process",)), attach=False, is_started=False)
    engine.control.watch_uid(os.getuid())
    engine.start_host_probes()
    (exits,) = (
        loaded.programs["process_exit"]
        for loaded in engine._objects
        if "process_exit" in loaded.programs
    )
    # Threads that end together all find that no other lives on. Here each is seen twice instead.
    again = syscalls.attach_tracing(exits)
    try:
        ended = [start(*python("")) for _ in range(3)]
        for process in ended:
            process.communicate()
    finally:
        os.close(again)
    records = read_ring(engine, "processes")
    told = records[records["event"] == ProcessEvent.EXIT]["pid"].tolist()
    assert [told.count(process.pid) for process in ended] == [1, 1, 1]


@pytest.fixture
def small_group():
    """A memory cgroup that holds 32 MiB; removed at the end."""
    version_1 = Path("/sys/fs/cgroup/memory")
    root, limit = (
        (version_1, "memory.limit_in_bytes")
        if version_1.is_dir()
        else (version_1.parent, "memory.max")
    )
    group = root / f"ingero-oom-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(32 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield group
    group.rmdir()


def test_victims_of_the_oom_killer_are_told_of_if_they_are_watched(start, watch, small_group):
    script = "import sys; sys.stdin.readline(); block = bytearray(b'x') * (256 << 20)"
    stranger = start(*as_another_user(("/usr/bin/env", "python3", "-c", script)))
    ours = start(*python(script))
    engine = watch("oom", ours.pid)
    for process in (stranger, ours):
        (small_group / "cgroup.procs").write_text(str(process.pid))
        process.communicate("go\n")
        assert process.returncode == -signal.SIGKILL
    victims = read_ring(engine, "victims")
    pids = set(victims["pid"].tolist())
    assert ours.pid in pids
    assert stranger.pid not in pids


def test_a_trace_of_one_process_holds_rows_of_nobody_else(start, tmp_path):
    if os.major(tmp_path.stat().st_dev) == 0:
        pytest.skip("the temporary folder is not on a block device")
    database = tmp_path / "t.db"
    noise = (
        "import mmap, os, subprocess, sys\n"
        "fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_DIRECT)\n"
        "while True: os.write(fd, mmap.mmap(-1, 8192)); os.fsync(fd); subprocess.run(['/bin/true'])"
    )
    others = [
        start(*python(noise, tmp_path / "noise")),
        start(get_program(), "train", "steps=100000"),
    ]
    ours = start(get_program(), "train", "gate=1", "steps=50")
    tracer = start(*TRACE, "--db", database, "--pid", ours.pid, "--record-all")
    while json.loads(tracer.stdout.readline()).get("pid") != ours.pid:
        pass
    ours.communicate("go\n")
    out, _ = tracer.communicate()
    assert tracer.returncode == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert {line["pid"] for line in lines if "pid" in line} == {ours.pid}
    with contextlib.closing(sqlite3.connect(database)) as connection:
        for table in ("events", "event_aggregates", "latency_buckets"):
            found = connection.execute(f"SELECT DISTINCT pid FROM {table}").fetchall()
            assert found == [(ours.pid,)], table
        named = {pid for (pid,) in connection.execute("SELECT pid FROM process_names")}
        took = {
            pid for (pid,) in connection.execute("SELECT other_pid FROM events WHERE reason = 1")
        }
    assert all(process.poll() is None for process in others)
    # Who took the CPU is named: that is the answer to why one's own process was slow.
    assert named <= {ours.pid} | took


def test_a_trace_of_named_processes_follows_their_children_and_ends_with_the_last_of_them(start):
    program = get_program()
    script = f"{program} train gate=1 steps=11 <&3 & read line; {program} train steps=7 >&2; exit 0"
    shell = start("/bin/sh", "-c", f"exec 3<&0; {script}")
    children = Path(f"/proc/{shell.pid}/task/{shell.pid}/children")
    early = wait_until(lambda: children.read_text().split())
    wait_until(lambda: Path(f"/proc/{early[0]}/comm").read_text() == "workload\n")
    tracer = subprocess.Popen(
        [*TRACE, "--no-record", "--pid", str(shell.pid)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=PLAIN,
    )  # fmt: skip
    with tracer:
        while json.loads(tracer.stdout.readline()).get("pid") != int(early[0]):
            pass
        shell.communicate("go\ngo\n")
        out, err = tracer.communicate()
    assert tracer.returncode == 0, err
    assert "every process that was to be watched has ended" in err
    launched = {
        line["pid"]
        for line in map(json.loads, out.splitlines())
        if line["type"] == "counts" and line["op"] == "cudaLaunchKernel"
    }
    assert int(early[0]) in launched
    assert len(launched) == 2


def test_a_trace_of_a_process_that_has_ended_by_then_ends(start):
    zombie = start("/bin/true")
    wait_until(lambda: " Z " in Path(f"/proc/{zombie.pid}/stat").read_text())
    done = subprocess.run(
        [*TRACE, "--no-record", "--pid", str(zombie.pid)],
        capture_output=True, text=True, check=True, env=PLAIN,
    )  # fmt: skip
    assert "every process that was to be watched has ended" in done.stderr
