"""``ingero trace`` as a user runs it: a real process, real probes, JSON lines and a recording."""

import contextlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
from itertools import dropwhile
from pathlib import Path

import pytest
from tests.support.compiler import CC
from tests.support.unprivileged import AS_UNPRIVILEGED

from ingero.agent.capture import file_queue
from ingero.agent.capture.discover.processes import open_file
from ingero.agent.capture.probes.engine import EngineSettings
from ingero.agent.capture.session import TraceSession, TraceSettings
from ingero.model.events import CudaOp, EventFlag, NcclOp, OffCpuReason, Source
from ingero.recording.store.event_loader import LoadFilter
from ingero.recording.store.reader import load_recording
from ingero.sim.runner import get_program
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_S

pytestmark = pytest.mark.kernel

ROOT = Path(__file__).resolve().parents[2]
INGERO = (sys.executable, "-m", "ingero")
PLAIN = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}

TWICE = """
import ctypes, os, sys, time
library = ctypes.CDLL(sys.argv[1])
for _ in range(20):
    library.cudaFree(None)
    time.sleep(0.1)
if os.environ["RANK"] == "0":
    os.environ["RANK"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv])
"""


def run(*arguments, env=None):
    return subprocess.run(
        [*INGERO, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=env or PLAIN,
        check=False,
    )


def lines_of(result):
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return {
        kind: [line for line in lines if line["type"] == kind]
        for kind in ("event", "process", "counts", "coverage")
    }


def test_a_program_is_run_traced_and_recorded(tmp_path):
    database = tmp_path / "trace.db"
    told = lines_of(
        run("trace", "--json", "--db", database, "--node", "n1", "--",
            *INGERO, "sim", "run", "ranks", "--ranks", 2, "steps=7", "count=1009", "wait_us=300000", "--json")
    )  # fmt: skip
    reduced = [line for line in told["event"] if line["op"] == "ncclAllReduce"]
    assert len(reduced) == 14
    for rank in (0, 1):
        mine = [line for line in reduced if line["rank"] == rank]
        assert [line["seq"] for line in mine] == list(range(1, 8))
        assert {line["comm_rank"] for line in mine} == {rank}
        assert {line["nranks"] for line in mine} == {2}
        assert {line["bytes"] for line in mine} == {4036}
        assert {line["gpu_id"] for line in mine} == {rank}
    assert len({line["comm_hash"] for line in reduced}) == 1
    ranks = {line["rank"]: line for line in told["process"] if "rank" in line}
    assert {line["launcher"] for line in ranks.values()} == {"torchrun"}
    (coverage,) = told["coverage"]
    assert coverage["seen"] == coverage["emitted"] + coverage["sampled"] + coverage["lost"] > 0
    assert coverage["lost"] == 0

    recording = load_recording(database, LoadFilter(has_extras=True))
    assert recording.nodes == ("n1",)
    stored = recording.events[
        (recording.events["source"] == Source.NCCL) & (recording.events["op"] == NcclOp.ALL_REDUCE)
    ]
    assert sorted(stored["arg2"].tolist()) == sorted([*range(1, 8)] * 2)
    assert {f"{int(h) & (1 << 64) - 1:#018x}" for h in stored["arg1"]} == {reduced[0]["comm_hash"]}
    assert {int(v) for v in stored["arg3"]} == {2, 1 << 32 | 2}
    assert {place.rank for place in recording.ranks.values()} >= {0, 1}
    is_launch = (recording.aggregates["source"] == Source.CUDA) & (
        recording.aggregates["op"] == CudaOp.LAUNCH_KERNEL
    )
    assert recording.aggregates["count"][is_launch].sum() == 2 * 7 * 20
    assert (
        recording.coverage["seen"].sum()
        == (
            recording.coverage["stored"]
            + recording.coverage["sampled_out"]
            + recording.coverage["lost"]
        ).sum()
    )
    nested = recording.events[recording.events["source"] == Source.DRIVER]
    assert (nested["flags"] & EventFlag.NESTED).all()


def test_a_process_that_becomes_another_program_is_asked_again_who_it_is(tmp_path):
    script = tmp_path / "twice.py"
    script.write_text(TWICE)
    library = get_program().parent / "libcudart.so.12"
    told = lines_of(
        run("trace", "--json", "--db", tmp_path / "trace.db", "--", sys.executable, script, library,
            env=PLAIN | {"RANK": "0", "WORLD_SIZE": "2"})
    )  # fmt: skip
    of_ranks = [line for line in told["process"] if "rank" in line]
    assert [line["rank"] for line in of_ranks] == [0, 1]
    assert len({line["pid"] for line in of_ranks}) == 1
    ranks = [line.get("rank") for line in told["event"] if line["op"] == "cudaFree"]
    # What a process calls before it was asked who it is has no rank: on a busy machine its first call.
    asked = list(dropwhile(lambda rank: rank is None, ranks))
    assert len(asked) >= len(ranks) - 2, ranks
    assert (set(asked), asked) == ({0, 1}, sorted(asked, key=str)), ranks


def test_the_program_s_own_output_is_kept_apart_and_its_end_ends_the_trace():
    result = run("trace", "--json", "--no-record", "--", "/bin/sh", "-c", "echo to stdout")
    assert result.returncode == 0
    assert "to stdout" in result.stderr
    assert all(json.loads(line) for line in result.stdout.splitlines())


def test_a_program_that_does_not_exist_is_named():
    result = run("trace", "--no-record", "--", "/no/such/program")
    assert result.returncode == 1
    assert "/no/such/program" in result.stderr


def test_a_reader_that_closes_the_pipe_ends_the_trace_quietly():
    command = [*INGERO, "trace", "--json", "--no-record", "--", str(get_program()), "storm"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=PLAIN, **pipes) as tracer:
        assert json.loads(tracer.stdout.readline())["type"] in {"process", "event"}
        tracer.stdout.close()
        assert tracer.wait() == 0
        assert "Traceback" not in tracer.stderr.read()


def is_sleeping(pid):
    """Whether a process is inside clock_nanosleep (system call 230; 115 on arm64)."""
    return Path(f"/proc/{pid}/syscall").read_text().split()[0] in {"230", "115"}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_trace_and_its_program_with_the_last_counts(number, status):
    command = [*INGERO, "trace", "--json", "--no-record", "--", str(get_program()), "hang"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=PLAIN, **pipes) as tracer:
        while (line := tracer.stderr.readline()) != "hanging\n":
            assert line.startswith("without NVML")
        children = Path(f"/proc/{tracer.pid}/task/{tracer.pid}/children").read_text().split()
        wait_until(lambda: any(is_sleeping(child) for child in children))
        tracer.send_signal(number)
        out, _ = tracer.communicate()
    assert tracer.returncode == status
    last = json.loads(out.splitlines()[-2])
    assert last["type"] == "coverage"
    (flying,) = [call for call in last["in_flight"] if call["op"] == "cudaDeviceSync"]
    assert not Path(f"/proc/{flying['pid']}").exists()


def test_the_recording_and_the_program_belong_to_the_invoking_user(tmp_path):
    user = pwd.getpwnam("nobody")
    tmp_path.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, user.pw_uid, user.pw_gid)
    environment = PLAIN | {
        "SUDO_UID": str(user.pw_uid),
        "SUDO_GID": str(user.pw_gid),
        "SUDO_USER": "nobody",
    }
    database = home / ".ingero" / "trace.db"
    result = run("trace", "--db", database, "--", "/usr/bin/id", "-u", env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == str(user.pw_uid)
    for path in (database.parent, *database.parent.iterdir()):
        assert path.stat().st_uid == user.pw_uid, path


def test_without_root_the_reason_and_the_next_step_are_said():
    run = subprocess.run(
        [*AS_UNPRIVILEGED, sys.executable, "-m", "ingero", "trace", "--no-record"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 3
    assert "needs root" in run.stderr
    assert "sudo" in run.stderr


@pytest.fixture
def start():
    """Start processes that wait for a line on their standard input; pipes and processes end with the test."""
    with contextlib.ExitStack() as stack:

        def start_one(arguments):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            return stack.enter_context(subprocess.Popen(arguments, **pipes))

        yield start_one


class Collector:
    """An observer that notes processes and, for one operation, records."""

    def __init__(self):
        self.identities, self.calls, self.totals = {}, [], []

    def on_process(self, identity):
        self.identities[identity.pid] = identity

    def on_events(self, ring, records, events):
        self.calls.extend((ring, event) for event in events)

    def on_totals(self, totals):
        self.totals.append(totals)


def identity_of(path):
    with open_file(path) as opened:
        return opened.file


def trace_until_exit(process, collector, libraries=(), own_copy=None):
    """Trace until the process ends; it gets one line at the start and, if it waits there, one when its libraries are probed.

    ``own_copy`` is the path of a library that only the process sees.
    """
    settings = TraceSettings(
        engine=EngineSettings(host_probes=("process", "sched"), keep_first=1 << 20),
        pids=(process.pid,),  # others on this machine use GPUs too
    )
    files = [identity_of(library) for library in libraries]
    lines = ["go\n"] * (2 if files or own_copy else 1)
    with TraceSession(settings, [collector]) as session:
        maps = Path(f"/proc/{process.pid}/maps")

        def is_ready():
            if own_copy is not None:
                return any(target.path == str(own_copy) for target in session.engine.targets)
            # Others may use the same libraries: that they are probed says nothing of this process.
            mapped = files and libraries[-1].name in maps.read_text()
            return mapped and all(session.engine.is_attached(file) for file in files)

        def is_over():
            if lines and (len(lines) == 2 or not (files or own_copy) or is_ready()):
                process.stdin.write(lines.pop())
                process.stdin.flush()
            return process.poll() is not None

        session.run(is_over)
        return session.engine.targets


def test_a_later_process_with_its_own_copy_in_other_namespaces_is_traced(
    tmp_path, start, monkeypatch
):
    # The kernel tells of the library; nothing is left to the next look at all processes.
    monkeypatch.setattr(file_queue, "RESCAN_NS", 3600 * NS_PER_S)
    # A private tmpfs that only the new mount namespace sees, with its own copy of every library.
    folder, hidden = get_program().parent, tmp_path / "hidden"
    hidden.mkdir()
    script = (
        f"read line; mount -t tmpfs none {hidden}; cp {folder}/* {hidden}/; "
        f"exec {hidden}/workload sync gate=1 steps=997"
    )
    process = start(
        ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "/bin/sh", "-c", script],
    )  # fmt: skip
    collector = Collector()
    trace_until_exit(process, collector, own_copy=hidden / "libcudart.so.12")
    account = json.loads(process.stdout.read())
    assert account["pid"] < 10  # it lives in a pid namespace of its own
    assert not any(hidden.iterdir())
    last = collector.totals[-1]
    waits = (last.keys["source"] == Source.CUDA) & (last.keys["op"] == CudaOp.DEVICE_SYNC)
    assert last.counts["seen"][waits].sum() == 997


def test_a_library_that_was_deleted_after_it_was_loaded_is_found(tmp_path, start):
    copy = tmp_path / "lib"
    shutil.copytree(get_program().parent, copy)
    process = start(
        [str(copy / "workload"), "sync", "gate=1", "steps=53"],
    )  # fmt: skip
    maps = Path(f"/proc/{process.pid}/maps")
    wait_until(lambda: "libnccl" in maps.read_text())
    shutil.rmtree(copy)
    collector = Collector()
    trace_until_exit(process, collector)
    last = collector.totals[-1]
    waits = (last.keys["source"] == Source.CUDA) & (last.keys["op"] == CudaOp.DEVICE_SYNC)
    assert last.counts["seen"][waits].sum() == 53


def test_a_runtime_linked_into_the_program_is_found(tmp_path, start):
    program = tmp_path / "all_in_one"
    sources = [
        str(ROOT / "gpusim" / name) for name in ("workload.c", "cuda.c", "cudart.c", "nccl.c")
    ]
    compiler = [*CC, "-std=gnu11", "-O1"]
    subprocess.run([*compiler, *sources, "-lpthread", "-o", str(program)], check=True)
    process = start(
        ["/bin/sh", "-c", f"read line; exec {program} sync gate=1 steps=61"],
    )  # fmt: skip
    collector = Collector()
    targets = trace_until_exit(process, collector, [program])
    assert {target.libraries for target in targets if target.path == str(program)} == {
        ("cudart", "cuda", "nccl")
    }
    last = collector.totals[-1]
    waits = (last.keys["source"] == Source.CUDA) & (last.keys["op"] == CudaOp.DEVICE_SYNC)
    assert last.counts["seen"][waits].sum() == 61


def test_off_cpu_spans_tell_sleep_from_preemption(start):
    process = start(
        ["/bin/sh", "-c", f"read line; GPUSIM_KERNEL_NS=3000000 exec {get_program()} sync gate=1 steps=59"],
    )  # fmt: skip
    collector = Collector()
    folder = get_program().parent
    names = ("libcuda.so.1", "libcudart.so.12", "libnccl.so.2")
    trace_until_exit(process, collector, [folder / name for name in names])
    account = json.loads(process.stdout.read())
    spans = [
        event
        for ring, event in collector.calls
        if ring == "off_cpus" and event["pid"] == account["pid"]
    ]
    sleeps = [event for event in spans if event["reason"] == OffCpuReason.SLEEP]
    waits = [
        event for ring, event in collector.calls
        if ring == "kept_calls" and event["source"] == Source.CUDA and event["op"] == CudaOp.DEVICE_SYNC
    ]  # fmt: skip
    assert len(sleeps) >= 59 // 2
    # Every wait of the simulator is one sleep, inside it.
    inside = [
        any(w["start_ns"] <= s["start_ns"] and s["start_ns"] + s["duration_ns"] <= w["start_ns"] + w["duration_ns"] for w in waits)
        for s in sleeps
    ]  # fmt: skip
    assert sum(inside) >= len(waits) // 2
    for event in spans:
        assert 0 <= event["wait_ns"] <= event["duration_ns"]
        if event["reason"] == OffCpuReason.PREEMPTED:
            assert event["wait_ns"] == event["duration_ns"]
