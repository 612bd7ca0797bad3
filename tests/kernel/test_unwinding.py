"""Native stacks of code without frame pointers are those that the C library's own unwinder, `backtrace`, finds in the program."""

import json
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from scripts.machines.guest.chain import PATHS
from tests.support.compiler import CC

from ingero.agent.capture.kernel.abi import MAX_NATIVE, RETURN_BIT, StackFlag, Stacks
from ingero.agent.capture.kernel.perf import Mapping
from ingero.agent.capture.probes.engine import EngineSettings
from ingero.agent.capture.probes.stacks import RecordedStacks
from ingero.model.events import CudaOp, DriverOp, Source
from ingero.sim.runner import get_program

pytestmark = pytest.mark.kernel

CHAIN = Path(__file__).resolve().parents[1] / "data/stacks/chain.c"
LIBRARY = get_program().parent / "libcudart.so.12"
COMPILERS = {
    "clang": CC,
    "gcc": ("gcc",),
}
BOTH = pytest.mark.parametrize("program", COMPILERS, indirect=True)
N_FIRST = 2  # calls of the first round alone: an event is created, by the runtime and by the driver
INSIDE = ["cudaMalloc", "allocates_memory", "main"]


@pytest.fixture(scope="module")
def program(request, tmp_path_factory):
    compiler = COMPILERS[getattr(request, "param", "clang")]
    if not shutil.which(compiler[0]):
        pytest.skip(f"there is no {compiler[0]}")
    path = tmp_path_factory.mktemp("chain") / "chain"
    subprocess.run(
        [
            *(*compiler, "-O2", "-fomit-frame-pointer", "-fno-optimize-sibling-calls", str(CHAIN)),
            *(str(LIBRARY), f"-Wl,-rpath,{LIBRARY.parent}", "-lpthread", "-o", str(path)),
        ],
        check=True,
    )
    return path


class Chain:
    """The program, an engine with stacks, and what both say of each path."""

    def __init__(self, engine, process):
        self.engine = engine
        self.process = process
        self.stacks = RecordedStacks(engine.maps, engine.stack_copies)
        self.raw = {}
        self.frames = {}

    def ask(self):
        """Let the program make its calls; what it tells of each, by path."""
        print(file=self.process.stdin, flush=True)
        told = {}
        while (line := self.process.stdout.readline()) != "\n":
            name, addresses = json.loads(line)
            told[name] = addresses
        return told

    def read(self):
        """Records of the calls since the last reading, in order of time."""
        calls = []
        keep = {ring: lambda view: calls.append(view.copy()) for ring in ("calls", "kept_calls")}
        self.engine.drain({**keep, "stacks": self.take})
        self.frames |= self.stacks.index.pop_new()
        calls = np.concatenate(calls)
        return calls[np.argsort(calls["header"]["mono_ns"], kind="stable")]

    def take(self, view):
        self.raw |= {int(record["id"]): record.copy() for record in view}
        self.stacks.take(view)

    def describe(self, call):
        """A call's stored frames."""
        (key,) = self.stacks.index.find_hashes(np.array([call["stack_id"]])).tolist()
        return self.frames[key].frames

    def learn(self):
        """Make and read calls until the kernel knows every rule."""
        for _ in range(5000):  # a copy for the same place is made 20 times a second at most
            before = self.engine.state.read_unwinding()
            told = self.ask()
            calls = self.read()
            after = self.engine.state.read_unwinding()
            if after["by_rules"] - before["by_rules"] == len(calls):
                return told, calls
        pytest.fail(f"the kernel does not walk by itself: {after}")


@contextmanager
def run(engine, program):
    with subprocess.Popen(
        [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        chain = Chain(engine, process)
        yield chain
        chain.stacks.close()


@pytest.fixture
def engine(start_engine):
    return start_engine(EngineSettings(host_probes=(), stacks=Stacks.ALL, keep_first=1 << 20))


@pytest.fixture
def chain(engine, program):
    with run(engine, program) as chain:
        yield chain


def of_runtime(calls):
    """The one call of each path, in the program's order."""
    is_it = np.isin(calls["op"], [CudaOp.STREAM_SYNC, CudaOp.MALLOC, CudaOp.EVENT_RECORD])
    return calls[is_it & (calls["source"] == Source.CUDA)]


def of_driver(calls):
    """The one call that was made inside another."""
    return calls[(calls["source"] == Source.DRIVER) & (calls["op"] == DriverOp.MEM_ALLOC)]


def names_of(frames):
    return [frame.get("s", "").split("+")[0] for frame in frames]


def native_of(chain, call):
    record = chain.raw[int(call["stack_id"])]
    return record["native"][: record["n_native"]].tolist()


@BOTH
def test_every_return_address_is_the_one_that_backtrace_finds(chain):
    told, calls = chain.learn()
    assert list(told) == list(PATHS)
    for (name, addresses), call in zip(told.items(), of_runtime(calls), strict=True):
        record = chain.raw[int(call["stack_id"])]
        assert record["flags"] == StackFlag.UNWOUND | StackFlag.NO_PYTHON, name
        # The first is where the probed call returns to, in the function that asked for the backtrace before.
        assert native_of(chain, call)[2 if name == "entry" else 1 :] == addresses, name
        names = [n for n in names_of(chain.describe(call)) if n in PATHS[name]]
        assert names == PATHS[name]
    (call,) = of_driver(calls)
    assert native_of(chain, call)[2:] == told["driver"]
    assert names_of(chain.describe(call))[:3] == INSIDE
    # Rules by the address itself are for where threads were and where one was interrupted; all others are of calls.
    rules, _ = chain.engine.maps["unwind_rules"].read_all(np.dtype("<u8,<u8"), np.dtype("V8"))
    at = {key for key in rules["f1"].tolist() if not key & RETURN_BIT}
    assert len(at - {native_of(chain, call)[0] for call in calls} - set(told["signal"])) <= N_FIRST


@BOTH
def test_a_first_stack_comes_from_its_copy_and_is_the_whole_one(chain):
    told = chain.ask()
    every = chain.read()
    calls = of_runtime(every)
    (call,) = of_driver(every)
    assert chain.raw[int(call["stack_id"])]["flags"] & StackFlag.COPIED
    assert names_of(chain.describe(call))[:3] == INSIDE
    copied = [
        (name, call)
        for name, call in zip(told, calls, strict=True)
        if chain.raw[int(call["stack_id"])]["flags"] & StackFlag.COPIED
    ]
    assert len(copied) >= 5
    for name, call in copied:
        frames = chain.describe(call)
        names = [n for n in names_of(frames) if n in PATHS[name]]
        if name == "deep":  # 41 frames of 2 KB: more than is copied
            assert names_of(frames)[-1] == "[more native frames]"
            assert names == PATHS[name][: len(names)]
            assert len(names) > 7
        else:
            assert names == PATHS[name], name
            assert names_of(frames)[-1] in {"_start", "clone", "__clone3", "__clone", "clone3", ""}
    # What was not copied says that it is by frame pointer, and lacks the callers.
    others = [call for call in calls if call["stack_id"] not in {c["stack_id"] for _, c in copied}]
    for call in others:
        assert names_of(chain.describe(call))[-1] == "[callers by frame pointer]"
    counts = chain.engine.state.read_unwinding()
    assert counts["copied"] + counts["by_frame_pointer"] + counts["by_rules"] == len(every)
    assert counts["copies_lost"] == 0


def test_frame_pointers_do_not_find_these_callers(engine, program):
    with run(engine, program) as chain:
        due = chain.engine.maps["copies_due"]  # the next one in 292 years
        never = (1 << 63).to_bytes(8, "little") * due.n_values
        due.update(bytes(4), never)
        told = chain.ask()
        calls = of_runtime(chain.read())
        counts = engine.state.read_unwinding()
        assert (counts["copied"], counts["by_rules"]) == (0, 0)
        for name, call in zip(told, calls, strict=True):
            assert names_of(chain.describe(call))[-1] == "[callers by frame pointer]"
            assert native_of(chain, call)[1:] != told[name]


def test_a_program_that_was_deleted_is_unwound(engine, program, tmp_path):
    copy = tmp_path / "gone"
    shutil.copy(program, copy)
    with run(engine, copy) as chain:
        copy.unlink()
        told, calls = chain.learn()
        for name, call in zip(told, of_runtime(calls), strict=True):
            names = [n for n in names_of(chain.describe(call)) if n in PATHS[name]]
            assert names == PATHS[name]


def test_a_process_that_ended_is_said_to_have(engine, program):
    with run(engine, program) as chain:
        chain.ask()
        chain.process.stdin.close()
        chain.process.wait()
        (call, *_) = of_runtime(chain.read())
        assert names_of(chain.describe(call)) == ["[the process ended before its stack was read]"]


def test_copies_that_do_not_fit_are_counted_and_the_stack_is_by_frame_pointer(
    start_engine, program
):
    settings = EngineSettings(host_probes=(), stacks=Stacks.ALL, copies_bytes=4096)
    engine = start_engine(settings)
    with run(engine, program) as chain:
        told = chain.ask()
        calls = chain.read()
    counts = engine.state.read_unwinding()
    assert len(of_runtime(calls)) == len(told)
    assert counts["copies_lost"] >= 5
    assert counts["copied"] == 0
    assert counts["by_frame_pointer"] == len(calls)


def test_rules_are_forgotten_when_something_else_is_mapped_there(chain):
    chain.learn()
    keys, _ = chain.engine.maps["unwind_rules"].read_all(np.dtype("<u8,<u8"), np.dtype("V8"))
    addresses = keys["f1"] & np.uint64((1 << 63) - 1)
    middle = int(np.median(addresses))
    inside = (addresses >= middle) & (addresses <= middle + 4096)
    assert 0 < inside.sum() < len(addresses)
    chain.stacks.on_mapping(
        Mapping(chain.process.pid, middle, middle + 4096, (0, 0), 1, "/somewhere/else.so")
    )
    left, _ = chain.engine.maps["unwind_rules"].read_all(np.dtype("<u8,<u8"), np.dtype("V8"))
    assert len(left) == len(addresses) - inside.sum()
    before = chain.engine.state.read_unwinding()["by_rules"]
    chain.ask()
    chain.read()
    assert chain.engine.state.read_unwinding()["by_rules"] < before + len(PATHS) + 1
    chain.learn()  # and learned again


def test_stacks_of_more_frames_than_fit_are_cut_and_say_so(engine, tmp_path):
    source, path = tmp_path / "deep.c", tmp_path / "deep"
    source.write_text(
        "#include <stdio.h>\nint cudaStreamSynchronize(void *);\n"
        "__attribute__((noinline)) int deep(int n)\n"
        "{ volatile int k = n; return (n ? deep(n - 1) : cudaStreamSynchronize(0)) + k; }\n"
        'int main(void) { puts("ready"); fflush(stdout);\n'
        "  while (getchar() != EOF) { deep(300); puts(\"\"); fflush(stdout); } }\n"
    )  # fmt: skip
    subprocess.run(
        [
            *(*COMPILERS["clang"], "-O2", "-fomit-frame-pointer", "-fno-optimize-sibling-calls"),
            *(str(source), str(LIBRARY), f"-Wl,-rpath,{LIBRARY.parent}", "-o", str(path)),
        ],
        check=True,
    )
    with run(engine, path) as chain:
        _, calls = chain.learn()
        (call,) = of_runtime(calls)
        record = chain.raw[int(call["stack_id"])]
        assert record["n_native"] == MAX_NATIVE
        assert record["flags"] & StackFlag.NATIVE_CUT
        names = names_of(chain.describe(call))
        assert names == ["deep"] * MAX_NATIVE + ["[more native frames]"]
