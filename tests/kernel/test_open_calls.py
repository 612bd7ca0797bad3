"""A call that has not returned is recorded with what it was called with, how long it lasted and where it was made."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.support.compiler import CC
from tests.support.interpreters import find_interpreters

from ingero.agent.capture.kernel.abi import Stacks
from ingero.agent.capture.open_calls import MIN_AGE_NS, OpenCalls
from ingero.agent.capture.probes.engine import EngineSettings
from ingero.agent.capture.stack_keeper import StackKeeper
from ingero.model.events import CudaOp, DriverOp, EventFlag, Source
from ingero.recording.store.event_loader import LoadFilter
from ingero.recording.store.reader import load_recording
from ingero.sim.runner import SimSettings, Simulation, get_program
from ingero.telemetry.clock import SystemClock
from ingero.units import NS_PER_S

pytestmark = pytest.mark.kernel

INGERO = (sys.executable, "-m", "ingero")
PLAIN = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
HANGS = Path(__file__).resolve().parents[1] / "data/stacks/hangs.py"
LIBRARY = get_program().parent / "libcudart.so.12"
FOREVER = {"GPUSIM_KERNEL_NS": str(3600 * NS_PER_S)}
PYTHONS = find_interpreters()
LINES = HANGS.read_text().splitlines()


def line_of(text):
    """The number of the one line that holds this."""
    (number,) = [i for i, line in enumerate(LINES, 1) if text in line]
    return number


class Seen:
    """An observer of stacks and rows."""

    def __init__(self):
        self.stacks = {}

    def on_stacks(self, stacks):
        self.stacks |= {key: stack.frames for key, stack in stacks.items()}


class Looker:
    """An engine, and what it reads of calls in flight."""

    def __init__(self, engine):
        self.engine, self.seen = engine, Seen()
        self.keeper = StackKeeper(engine, [self.seen])
        self.calls = OpenCalls(engine, self.keeper)

    def wait_for(self, pid, *ops):
        """Until a process is in calls of these operations, outermost first."""
        while True:
            flying = self.engine.state.read_in_flight()
            mine = flying[flying["pid"] == pid]
            if {int(op) for op in mine["frame"]["op"]} >= set(ops):
                return

    def rows(self, pid, after_ns=2 * MIN_AGE_NS):
        """Rows of a process's calls, looked at so long after now, and their frames."""
        now_ns = SystemClock().mono_ns() + after_ns
        self.calls.read_due_stacks(now_ns)
        keys, counts = self.engine.state.read_counts()
        open_now = self.calls.read_open(now_ns, lambda pid: 77)
        rows = [
            event
            for _, events in self.calls.build(open_now, keys, counts, 5)
            for event in events
            if event["pid"] == pid
        ]
        return [(row, self.seen.stacks.get(int(row["stack_hash"]), ())) for row in rows]


@pytest.fixture
def looker(start_engine):
    looker = Looker(start_engine(EngineSettings(host_probes=(), stacks=Stacks.NOTABLE)))
    yield looker
    looker.keeper.close()


def python_frames(frames):
    return [(f["pfn"], f["pf"], f.get("pl")) for f in frames if "pf" in f]


@pytest.mark.parametrize("python", PYTHONS, ids=lambda python: str(python.program))
def test_waiting_python_code_is_named_by_function_file_and_line(looker, python):
    command = [str(python.program), str(HANGS), str(LIBRARY)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=PLAIN | FOREVER
    ) as process:
        try:
            assert process.stdout.readline() == "waiting\n"
            looker.wait_for(process.pid, CudaOp.DEVICE_SYNC, CudaOp.STREAM_SYNC)
            looker.keeper.examine(process.pid)
            rows = {int(row["op"]): (row, frames) for row, frames in looker.rows(process.pid)}
        finally:
            process.kill()
    row, frames = rows[CudaOp.DEVICE_SYNC]
    assert row["tid"] != process.pid == row["pid"]
    step = "Trainer.step" if python.minor >= 11 else "step"
    assert python_frames(frames)[:4] == [
        (step, str(HANGS), line_of("return lib.cudaDeviceSynchronize()")),
        *[(step, str(HANGS), line_of("return self.step(depth - 1)"))] * 3,
    ]
    row, frames = rows[CudaOp.STREAM_SYNC]
    assert row["tid"] == process.pid
    assert python_frames(frames) == [
        ("watch", str(HANGS), line_of("    lib.cudaStreamSynchronize(None)")),
        ("<module>", str(HANGS), line_of("watch() if")),
    ]


def test_a_call_inside_of_another_is_a_row_of_its_own_and_both_have_their_callers(looker):
    with Simulation(SimSettings("leak", device={"CONTEXT_NS": 3600 * NS_PER_S})) as simulation:
        (pid,) = simulation.pids
        looker.wait_for(pid, CudaOp.MALLOC, DriverOp.MEM_ALLOC)
        rows = looker.rows(pid)
    (outer, outer_frames), (inner, inner_frames) = sorted(rows, key=lambda item: item[0]["source"])
    assert (outer["source"], outer["op"]) == (Source.CUDA, CudaOp.MALLOC)
    assert (inner["source"], inner["op"]) == (Source.DRIVER, DriverOp.MEM_ALLOC)
    assert int(outer["flags"]) == EventFlag.IN_FLIGHT
    assert int(inner["flags"]) == EventFlag.IN_FLIGHT | EventFlag.NESTED
    assert outer["arg0"] == inner["arg0"] == 8 << 20
    assert outer["cgroup_id"] == 77
    assert outer["duration_ns"] > inner["duration_ns"] > MIN_AGE_NS
    names = [frame.get("s", "").partition("+")[0] for frame in outer_frames]
    assert names[:2] == ["leak", "main"]
    assert names[-1] == "_start"
    # The return address of the runtime's call is the kernel's own; what stands there in truth is known.
    assert inner_frames[0]["s"].startswith("cudaMalloc+")
    assert inner_frames[1:] == outer_frames


def test_a_stopped_process_can_be_asked_too(looker):
    with Simulation(SimSettings("hang")) as simulation:
        (pid,) = simulation.pids
        looker.wait_for(pid, CudaOp.DEVICE_SYNC)
        os.kill(pid, signal.SIGSTOP)
        ((_, frames),) = looker.rows(pid)
        os.kill(pid, signal.SIGCONT)
    assert frames[0]["s"].startswith("hang+")


def test_a_call_is_asked_for_its_stack_only_when_it_has_lasted_a_second(looker):
    with Simulation(SimSettings("hang")) as simulation:
        (pid,) = simulation.pids
        looker.wait_for(pid, CudaOp.DEVICE_SYNC)
        ((young, _),) = looker.rows(pid, -MIN_AGE_NS)
        ((old, _),) = looker.rows(pid)
    assert young["stack_hash"] == 0 != old["stack_hash"]


def run(*arguments, program=("hang",)):
    """Trace until the workload waits, then do something to it; the JSON lines."""
    command = [*INGERO, "trace", "--json", *map(str, arguments), "--", str(get_program()), *program]
    return subprocess.Popen(
        command, env=PLAIN, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_until_it_waits(tracer):
    """The pid of the workload, once it sleeps inside of its call."""
    while tracer.stderr.readline() != "hanging\n":
        pass
    children = Path(f"/proc/{tracer.pid}/task/{tracer.pid}/children")
    while True:
        for child in children.read_text().split():
            if Path(f"/proc/{child}/syscall").read_text().split()[0] in {"230", "115"}:
                return int(child)


@pytest.mark.parametrize(
    ("options", "has_stack"), [((), True), (("--stack",), True), (("--no-stack",), False)]
)
def test_a_trace_that_ends_first_stores_the_call_and_its_stack(tmp_path, options, has_stack):
    database = tmp_path / "r.db"
    with run("--db", database, *options) as tracer:
        pid = wait_until_it_waits(tracer)
        tracer.send_signal(signal.SIGINT)
        lines = list(map(json.loads, tracer.communicate()[0].splitlines()))
    (line,) = [line for line in lines if line.get("in_flight") is True]
    assert (line["type"], line["op"], line["pid"]) == ("event", "cudaDeviceSync", pid)
    assert ("stack" in line) == has_stack
    recording = load_recording(database, LoadFilter(has_extras=True))
    (row,) = recording.events[(recording.events["flags"] & EventFlag.IN_FLIGHT) != 0]
    assert (row["pid"], row["source"], row["op"], row["weight"]) == (
        pid,
        Source.CUDA,
        CudaOp.DEVICE_SYNC,
        1,
    )
    assert row["duration_ns"] == line["duration_ns"] > 0
    assert bool(row["stack_hash"]) == has_stack
    # Nobody counted it: the exact counts do not know it, and the books of its source still balance.
    counted = recording.aggregates[recording.aggregates["pid"] == pid]
    assert (Source.CUDA, CudaOp.DEVICE_SYNC) not in counted[["source", "op"]].tolist()
    books = recording.coverage  # of all minutes: a row may be in the minute before its count
    for source in np.unique(books["source"]):
        mine = books[books["source"] == source]
        n_seen, *parts = (mine[name].sum() for name in ("seen", "stored", "sampled_out", "lost"))
        assert n_seen == sum(parts)


def test_a_process_that_is_killed_in_a_call_leaves_a_row_of_it(tmp_path):
    database = tmp_path / "r.db"
    with run("--db", database) as tracer:
        pid = wait_until_it_waits(tracer)
        os.kill(pid, signal.SIGKILL)
        lines = list(map(json.loads, tracer.communicate()[0].splitlines()))
    (line,) = [line for line in lines if line.get("in_flight") is True]
    assert (line["op"], line["pid"], line["process_name"]) == ("cudaDeviceSync", pid, "workload")
    events = load_recording(database).events
    (row,) = events[(events["flags"] & EventFlag.IN_FLIGHT) != 0]
    (ended,) = events[
        (events["pid"] == pid) & (events["source"] == Source.HOST) & (events["op"] == 6)
    ]
    assert abs(int(row["start_ns"] + row["duration_ns"]) - int(ended["start_ns"])) < NS_PER_S
    assert lines[-2]["in_flight"] == []


# Its second thread becomes another program, which takes the process's pid: no thread with that tid ends.
BECOMER = """
#include <pthread.h>
#include <unistd.h>
__attribute__((noinline)) int cudaDeviceSynchronize(void)
{
	return execl("/bin/cat", "cat", (char *)0);
}
static void *run(void *unused)
{
	cudaDeviceSynchronize();
	return unused;
}
int main(void)
{
	pthread_t thread;

	pthread_create(&thread, 0, run, 0);
	return pthread_join(thread, 0);
}
"""


def test_a_thread_that_becomes_another_program_is_in_no_call(start_engine, target_of, tmp_path):
    (tmp_path / "becomer.c").write_text(BECOMER)
    program = tmp_path / "becomer"
    subprocess.run([*CC, tmp_path / "becomer.c", "-lpthread", "-o", program], check=True)
    engine = start_engine(EngineSettings(host_probes=("process",)), attach=False)
    assert engine.attach(target_of(program))
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(b"it is cat\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"it is cat\n"
        keys, counts = engine.state.read_counts()
        assert counts["entered"][keys["pid"] == process.pid].tolist() == [1]
        flying = engine.state.read_in_flight()
        assert flying["tid"][flying["pid"] == process.pid].tolist() == []
        process.stdin.close()
