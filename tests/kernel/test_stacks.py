"""Stacks that calls carry are those of the program: its own traceback, function by function and line by line."""

import itertools
import json
import os
import select
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.support.interpreters import find_interpreters

from ingero.agent.capture.kernel.abi import MAX_PYTHON, StackFlag, Stacks
from ingero.agent.capture.probes import stacks
from ingero.agent.capture.probes.engine import EngineSettings
from ingero.agent.capture.probes.stacks import RecordedStacks
from ingero.model.events import CudaOp, Source
from ingero.recording.queries.recording_file import RecordingFile
from ingero.recording.queries.stacks import StacksArgs, read_folded_stacks
from ingero.sim.runner import SimSettings, Simulation, get_program

pytestmark = pytest.mark.kernel

PYTHONS = find_interpreters()
CALLS = Path(__file__).resolve().parents[1] / "data/stacks/calls.py"
LIBRARY = get_program().parent / "libcudart.so.12"
N_CALLS = 22


class Watcher:
    """An engine with stacks, and what it has seen."""

    def __init__(self, engine):
        self.engine = engine
        self.stacks = RecordedStacks(engine.maps, engine.stack_copies)
        self.raw = {}
        self.frames = {}
        self.process = None

    def go_on(self):
        """Let the program go on to its next answer."""
        print(file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "[]\n"

    @contextmanager
    def run(self, *command, find_pid=lambda pid: pid):
        """Start a program, meet it once it is ready, let it go on; yields what it told."""
        with subprocess.Popen(
            [*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            self.process = process
            assert process.stdout.readline() == "ready\n"
            self.stacks.examine(find_pid(process.pid))
            print(file=process.stdin, flush=True)
            yield json.loads(process.stdout.readline())
            print(file=process.stdin, flush=True)

    def read(self, op=CudaOp.STREAM_SYNC):
        """Stored frames of every call, by call, in order of time."""
        calls = []
        self.engine.drain({
            **{ring: lambda view: calls.append(view.copy()) for ring in ("calls", "kept_calls")},
            "stacks": self.take,
        })
        calls = np.concatenate(calls)
        calls = calls[(calls["source"] == Source.CUDA) & (calls["op"] == op)]
        calls = calls[np.argsort(calls["header"]["mono_ns"])]
        self.frames |= self.stacks.index.pop_new()
        hashes = self.stacks.index.find_hashes(calls["stack_id"])
        return calls, [list(self.frames[key].frames) for key in hashes.tolist()]

    def take(self, view):
        self.raw.update({int(record["id"]): record.copy() for record in view})
        self.stacks.take(view)


@pytest.fixture
def watcher(start_engine):
    settings = EngineSettings(host_probes=(), stacks=Stacks.ALL, keep_first=1 << 20)
    watcher = Watcher(start_engine(settings))
    yield watcher
    watcher.stacks.close()


def python_frames(frames):
    return [[f["pfn"], f["pf"], f.get("pl")] for f in frames if "pf" in f]


def find_child(pid):
    """The process that a wrapper started."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[-1])


def check_against_tracebacks(watcher, told):
    calls, frames = watcher.read()
    assert len(calls) == len(told) == N_CALLS
    # Threads and the fork finish in any order: compare as a multiset.
    expected = sorted(traceback[:MAX_PYTHON] for _, traceback in told)
    assert sorted(map(python_frames, frames)) == expected
    cut = [f for f, call in zip(frames, calls, strict=True)
           if watcher.raw[int(call["stack_id"])]["flags"] & StackFlag.PYTHON_CUT]  # fmt: skip
    assert len(cut) == 1
    end = cut[0].index({"s": "[more Python frames]"})
    assert len(python_frames(cut[0][:end])) == MAX_PYTHON
    assert not python_frames(cut[0][end:])
    assert len(set(calls["tid"].tolist())) == 14
    assert watcher.engine.state.read_losses()["stacks_lost"] == 0


@pytest.mark.parametrize("python", PYTHONS, ids=lambda python: str(python.program))
def test_python_frames_are_the_program_s_own_traceback(python, watcher):
    with watcher.run(python.program, CALLS, LIBRARY) as told:
        check_against_tracebacks(watcher, told)
    assert watcher.stacks.refused == {}


@pytest.mark.parametrize("python", PYTHONS, ids=lambda python: str(python.program))
def test_python_frames_are_right_inside_a_pid_namespace(python, watcher):
    command = ("unshare", "--pid", "--fork", python.program, CALLS, LIBRARY)
    with watcher.run(*command, find_pid=find_child) as told:
        check_against_tracebacks(watcher, told)


def test_the_frames_around_a_call_from_c_are_in_their_order(watcher):
    with watcher.run(sys.executable, CALLS, LIBRARY) as told:
        _, frames = watcher.read()
    files = [frame.get("f", frame.get("pfn", "")).split(".")[0] for frame in frames[0]]
    # Without frame pointers: what ctypes calls through, ctypes, the interpreter in whose place Python frames stand.
    assert [file for file, _ in itertools.groupby(files)][:5] == [
        *("libffi", "_ctypes", "call", "<module>", "libc"),
    ]
    assert "__libc_start_main" in {frame.get("s", "").split("@")[0] for frame in frames[0]}
    assert told[0][0] == "plain"


def test_native_frames_of_a_program_with_frame_pointers_lead_to_main(watcher):
    ring = watcher.engine.rings["stacks"]
    poll = select.poll()
    poll.register(ring.fd, select.POLLIN)
    with Simulation(SimSettings("cost", {"launches": 100_000}, 0, {})) as simulation:
        assert poll.poll(10_000)  # a new stack wakes its reader
        ring.drain(watcher.take)
        (first, *_) = watcher.stacks.index.pop_new().values()
        simulation.wait()
    names = [frame.get("s", "").split("+")[0] for frame in first.frames]
    assert "main" in names
    assert {frame["f"] for frame in first.frames[names.index("main") :][:1]} == {"workload"}


def test_a_stack_is_written_once_and_calls_share_it(watcher):
    program = (
        "import ctypes, sys; lib = ctypes.CDLL(sys.argv[1]); print('ready', flush=True); input()\n"
        "for n in (1, 1, 500):\n"
        "    for i in range(n): lib.cudaStreamSynchronize(None)\n"
        "    print('[]', flush=True); input()"
    )
    with watcher.run(sys.executable, "-c", program, LIBRARY):
        (learned,) = watcher.read()[1]  # the kernel is told the rules by which it walks
        watcher.go_on()
        watcher.read()
        watcher.raw.clear()
        watcher.go_on()
        calls, _ = watcher.read()
    assert len(calls) == 500
    assert len(set(calls["stack_id"].tolist())) == 1
    assert python_frames(learned) == [["<module>", "<string>", 3]]
    assert not watcher.raw  # the one call before them has written it


MANY = """
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])
print('ready', flush=True)
input()
kept = [compile('lib.cudaStreamSynchronize(None)', f'part{i}.py', 'exec') for i in range(3000)]
for code in kept:
    exec(code)
print('[]', flush=True)
input()
"""


def test_stacks_that_do_not_fit_are_counted_and_the_calls_are_not_lost(watcher):
    with watcher.run(sys.executable, "-c", MANY, LIBRARY) as _:
        calls = []
        watcher.engine.drain({"kept_calls": lambda view: calls.append(view.copy())})
    calls = np.concatenate(calls)
    without = int((calls["stack_id"] == 0).sum())
    assert (calls["op"] == CudaOp.STREAM_SYNC).sum() >= 3000
    assert without > 1000
    assert watcher.engine.state.read_losses()["stacks_lost"] == without


def test_a_stack_that_was_dropped_to_make_room_is_written_again(watcher, monkeypatch):
    monkeypatch.setattr(stacks, "MAX_STACKS", 8)
    calls = []
    with watcher.run(sys.executable, CALLS, LIBRARY) as told:
        watcher.engine.drain({
            "kept_calls": lambda view: calls.append(view.copy()),
            "stacks": watcher.take,
        })
    (calls,) = calls
    dropped = watcher.stacks.index.find_hashes(calls["stack_id"][:1])
    assert dropped.tolist() == [0]
    known = {int.from_bytes(key.tobytes(), "little")
             for key in watcher.engine.maps["seen_stacks"].read_all(np.dtype("<u8"), np.dtype("u1"))[0]}  # fmt: skip
    assert int(calls["stack_id"][0]) not in known
    assert len(told) == N_CALLS


def test_nothing_is_recorded_without_being_asked(start_engine, read):
    engine = start_engine(EngineSettings(host_probes=()))
    with Simulation(SimSettings("cost", {"launches": 7})) as simulation:
        accounts = simulation.wait()
    seen = read(engine, accounts)
    assert len(seen.records["calls"]) > 0
    assert not seen.records["calls"]["stack_id"].any()
    assert len(seen.records["stacks"]) == 0
    assert os.getpid() not in {int(pid) for pid in seen.keys["pid"]}


WORK = """
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])


def step():
    lib.cudaStreamSynchronize(None)


for _ in sys.stdin:
    step()
"""


def test_a_traced_program_s_stacks_are_printed_and_recorded(tmp_path):
    program, database = tmp_path / "work.py", tmp_path / "trace.db"
    program.write_text(WORK)
    command = [sys.executable, "-m", "ingero", "trace", "--stack", "--json", "--db", str(database)]
    expected = [("step", str(program), 7), ("<module>", str(program), 11)]
    found = []
    with subprocess.Popen(
        [*command, "--", sys.executable, str(program), str(LIBRARY)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as tracer:
        print(file=tracer.stdin, flush=True)
        for line in map(json.loads, tracer.stdout):
            if line["type"] == "coverage":
                counts = line["stacks"]
            if line["type"] != "event" or line["op"] != "cudaStreamSync":
                continue
            # The first calls may come before the interpreter was looked at.
            found = [
                (frame["py_func"], frame["py_file"], frame["py_line"])
                for frame in line["stack"]
                if "py_file" in frame
            ]
            if not found:
                print(file=tracer.stdin, flush=True)
            elif not tracer.stdin.closed:
                tracer.stdin.close()
    assert tracer.returncode == 0
    assert found == expected
    assert counts["copied"] >= 1
    folded = read_folded_stacks(RecordingFile(database), StacksArgs(op="cudaStreamSync")).stacks
    (path,) = [
        stack for stack in folded if any(frame.startswith("step ") for frame in stack.frames)
    ]
    assert path.n_calls == 1
    at = path.frames.index(f"<module> ({program}:11)")
    assert path.frames[at + 1] == f"step ({program}:7)"
    assert path.frames[-1] == "cudaStreamSync"
