"""Libraries that are hard to catch.

Mapped as NVIDIA's are, deleted at once, in two containers, for want of a descriptor.
"""

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from functools import partial
from importlib.metadata import files
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from ingero.agent.capture import discovery as discovery_module
from ingero.agent.capture.discover.processes import iter_mappings, open_file, open_mapped
from ingero.agent.capture.discovery import Discovery, Watch
from ingero.agent.capture.file_queue import MappedFile
from ingero.agent.capture.kernel.perf import Mapping, PerfEvents
from ingero.agent.capture.probes.engine import EngineSettings
from ingero.agent.capture.session import TraceSession, TraceSettings
from ingero.agent.capture.stack_keeper import StackKeeper
from ingero.model.events import CudaOp, DriverOp, Source
from ingero.sim.runner import get_program
from ingero.telemetry.clock import SystemClock
from ingero.testing.waiting import wait_until

MNT_DETACH = 2

pytestmark = pytest.mark.kernel

ROOT = Path(__file__).resolve().parents[2]
PLAIN = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
CALLS = 23
LOADER = """
import ctypes, os, sys
path, is_deleted = sys.argv[1], sys.argv[2] == "deleted"
library = ctypes.CDLL(path)
if is_deleted:
    os.unlink(path)
print("loaded", flush=True)
sys.stdin.readline()
out = ctypes.c_void_p()
for _ in range(int(sys.argv[4])):
    getattr(library, sys.argv[3])(ctypes.byref(out), ctypes.c_uint64(64))
"""


CALLER = """
import ctypes, sys, time
function = getattr(ctypes.CDLL(sys.argv[1]), sys.argv[3])
while True:
    function(ctypes.byref(ctypes.c_void_p()), ctypes.c_uint64(64))
    time.sleep(0.01)
"""


@pytest.fixture
def load():
    """Start processes that load a library, say so, and call it after a line on their standard input."""
    with contextlib.ExitStack() as stack:

        def start(path, how="kept", function="cudaMalloc", script=LOADER):
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", script, str(path), how, function, str(CALLS)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )
            )  # fmt: skip
            stack.callback(process.kill)
            return process

        yield start


class Totals:
    """An observer that keeps the last totals."""

    def __init__(self):
        self.last = None

    def on_process(self, identity):
        pass

    def on_events(self, ring, records, events):
        pass

    def on_totals(self, totals):
        self.last = totals

    def seen(self, pid, op=CudaOp.MALLOC, source=Source.CUDA):
        keys, counts = self.last.all_keys, self.last.all_counts
        is_it = (keys["pid"] == pid) & (keys["source"] == source) & (keys["op"] == op)
        return int(counts["seen"][is_it].sum())


def trace(start, file):
    """Trace a process that waits, let it go on once its library is probed, and count its calls."""
    totals, (pid,) = trace_in_turn([(start, file)])
    return totals, pid


def trace_in_turn(starts):
    """The same for several in one trace, each started when the one before has ended; the totals, and whose calls they are."""
    totals, pids, following = Totals(), [], iter(starts)
    settings = TraceSettings(engine=EngineSettings(host_probes=("process",)))
    with TraceSession(settings, [totals]) as session:
        process, file, is_gone = None, None, False

        def is_over():
            nonlocal process, file, is_gone
            if process is not None and process.poll() is None:
                if not is_gone and session.engine.is_attached(file):
                    is_gone = True
                    process.stdin.write("go\n")
                    process.stdin.flush()
                return False
            start, file = next(following, (None, None))
            if start is None:
                return True
            process, is_gone = start(), False
            pids.append(process.pid)
            return False

        session.run(is_over)
    return totals, pids


def identity_of(path):
    with open_file(path) as opened:
        return opened.file


@pytest.fixture(scope="session")
def as_nvidia_links(tmp_path_factory):
    """The simulator's runtime with NVIDIA's layout: the first segment is executable, segments are aligned to 2 MiB."""
    folder = tmp_path_factory.mktemp("linked")
    zig = [sys.executable, "-m", "ziglang"]
    sources = [ROOT / "gpusim" / name for name in ("cuda.c", "cudart.c")]
    flags = ["-std=gnu11", "-O1", "-fPIC", "-fno-sanitize=all"]
    for source in sources:
        subprocess.run(
            [*zig, "cc", *flags, "-c", str(source), "-o", str(folder / f"{source.stem}.o")],
            check=True,
        )
    path = folder / "libcudart.so.12"
    layout = ["--no-rosegment", "-z", "max-page-size=0x200000", "-z", "noseparate-code"]
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    subprocess.run(
        [*zig, "ld.lld", "-shared", *layout, "--hash-style=gnu", *objects, "-o", str(path)],
        check=True,
    )
    with path.open("rb") as file:
        loads = [segment.header for segment in ELFFile(file).iter_segments("PT_LOAD")]
    assert loads[0]["p_offset"] == 0
    assert loads[0]["p_flags"] == 5  # readable and executable
    assert {load["p_align"] for load in loads} == {0x200000}
    return path


def test_a_library_that_is_linked_as_nvidia_links_is_probed_in_every_process(
    as_nvidia_links, load, tmp_path
):
    # A file of its own each time: what was probed before would hide what is not found now.
    paths = [
        shutil.copy(as_nvidia_links, tmp_path / f"libcudart.so.{number}") for number in range(20)
    ]
    totals, pids = trace_in_turn([(partial(load, path), identity_of(path)) for path in paths])
    assert [totals.seen(pid) for pid in pids] == [CALLS] * 20
    assert not [one for one in totals.last.unprobed if one.pid in pids]


@pytest.mark.slow
def test_nvidia_s_own_runtime_is_probed_in_every_process(load, tmp_path):
    (original,) = [
        file.locate()
        for file in files("nvidia-cuda-runtime-cu12")
        if file.name == "libcudart.so.12"
    ]
    paths = [shutil.copy(original, tmp_path / f"libcudart.so.{number}") for number in range(20)]
    totals, pids = trace_in_turn([(partial(load, path), identity_of(path)) for path in paths])
    assert [totals.seen(pid) for pid in pids] == [CALLS] * 20


FORKER = """
import ctypes, os, sys
library = ctypes.CDLL(sys.argv[1])
sys.stdin.readline()
if child := os.fork():
    os.waitpid(child, 0)
    print(child, flush=True)
    os._exit(0)
for _ in range(int(sys.argv[4])):
    library.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_uint64(64))
"""
REPLACER = """
import ctypes, os, shutil, sys
path = sys.argv[1]
library = ctypes.CDLL(path)
shutil.copy(path, path + ".new")
os.replace(path + ".new", path)
sys.stdin.readline()
for _ in range(int(sys.argv[4])):
    library.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_uint64(64))
"""
PRELOADED = """
import ctypes, os, sys
if "LD_PRELOAD" not in os.environ:
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"LD_PRELOAD": sys.argv[1]})
sys.stdin.readline()
for _ in range(int(sys.argv[4])):
    ctypes.CDLL(None).cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_uint64(64))
"""


def copy_runtime(tmp_path):
    """A copy of NVIDIA's runtime, which nothing has probed yet."""
    (original,) = [f for f in files("nvidia-cuda-runtime-cu12") if f.name == "libcudart.so.12"]
    return Path(shutil.copy(original.locate(), tmp_path))


@pytest.mark.parametrize(
    "script", [REPLACER, PRELOADED], ids=["replaced while mapped", "preloaded"]
)
def test_nvidia_s_runtime_is_probed_however_it_was_loaded(load, tmp_path, script):
    path = copy_runtime(tmp_path)
    totals, pid = trace(lambda: load(path, script=script), identity_of(path))
    assert totals.seen(pid) == CALLS


def test_calls_of_a_child_that_inherited_the_runtime_are_its_own(load, tmp_path):
    path, started = copy_runtime(tmp_path), []
    totals, pid = trace(
        lambda: started.append(load(path, script=FORKER)) or started[0], identity_of(path)
    )
    child = int(started[0].stdout.readline())
    assert (totals.seen(pid), totals.seen(child)) == (0, CALLS)


@pytest.mark.parametrize("is_mapped_otherwise", [True, False])
def test_a_file_that_was_mapped_as_a_whole_is_found_by_the_addresses_it_has_by_now(
    as_nvidia_links, load, tmp_path, start_engine, is_mapped_otherwise
):
    path = Path(shutil.copy(as_nvidia_links, tmp_path))
    process = load(path, "deleted")
    assert process.stdout.readline() == "loaded\n"
    (mapping,) = [one for one in iter_mappings(process.pid) if one.path == str(path)]
    # As perf told of it: the loader's first mapping of the whole file, which later ones have cut.
    end = mapping.end + (0x400000 if is_mapped_otherwise else 0)
    whole = Mapping(process.pid, mapping.start, end, mapping.device, mapping.inode, mapping.path)
    engine = start_engine(attach=False)
    with contextlib.closing(PerfEvents()) as events:
        discovery = Discovery(
            engine, StackKeeper(engine, []), Watch(engine), lambda pid: None, events, SystemClock()
        )
        discovery.examine(MappedFile(whole))
        discovery.close()
    assert discovery.unprobed == ()
    assert [target.path for target in engine.targets] == [str(path)]
    process.communicate("go\n")
    keys, counts = engine.state.read_counts()
    is_it = (keys["pid"] == process.pid) & (keys["source"] == Source.CUDA)
    assert counts["seen"][is_it & (keys["op"] == CudaOp.MALLOC)].tolist() == [CALLS]


def test_a_fault_while_a_file_is_examined_leaves_no_process_that_waited_for_it_unprobed(
    as_nvidia_links, load, tmp_path, start_engine, monkeypatch
):
    path = Path(shutil.copy(as_nvidia_links, tmp_path))
    processes = [load(path), load(path)]
    for process in processes:
        assert process.stdout.readline() == "loaded\n"
    first, second = (
        next(one for one in iter_mappings(process.pid) if one.path == str(path))
        for process in processes
    )
    met, engine = set(), start_engine(attach=False)
    with contextlib.ExitStack() as stack:
        events = stack.enter_context(contextlib.closing(PerfEvents()))
        keeper = StackKeeper(engine, [])
        discovery = Discovery(engine, keeper, Watch(engine), met.add, events, SystemClock())
        stack.callback(discovery.close)

        def fail_while_the_second_comes(opened, mapping):
            monkeypatch.undo()
            discovery.examine(MappedFile(second))
            assert not met
            raise RuntimeError("not foreseen")

        monkeypatch.setattr(discovery_module, "find_targets", fail_while_the_second_comes)
        with pytest.raises(RuntimeError, match="not foreseen"):
            discovery.examine(MappedFile(first))
        discovery.start()
        wait_until(lambda: second.pid in met)
    assert discovery.unprobed == ()


def test_an_open_file_is_probed_after_its_process_and_its_name_are_gone(
    as_nvidia_links, load, tmp_path, start_engine
):
    from ingero.agent.capture.probes.targets import find_target

    path = Path(shutil.copy(as_nvidia_links, tmp_path))
    process = load(path, "deleted")
    process.stdout.readline()
    (mapping,) = [one for one in iter_mappings(process.pid) if one.path == str(path)]
    engine = start_engine(attach=False)
    with open_mapped(mapping) as opened:
        process.kill()
        process.wait()
        target = find_target(opened, str(path))
        assert engine.attach(target, opened.reach)
        assert not engine.attach(target, opened.reach)
    assert engine.is_attached(opened.file)


def test_a_library_that_is_deleted_right_after_it_was_loaded_is_probed(load, tmp_path):
    shutil.copy(get_program().parent / "libcuda.so.1", tmp_path)
    paths = [
        shutil.copy(get_program().parent / "libcudart.so.12", tmp_path / f"libcudart.so.{number}")
        for number in range(10)
    ]
    starts = [(partial(load, path, "deleted"), identity_of(path)) for path in paths]
    totals, pids = trace_in_turn(starts)
    assert [totals.seen(pid) for pid in pids] == [CALLS] * 10


def test_a_library_that_could_not_be_opened_is_told_and_probed_as_soon_as_it_can_be(load, tmp_path):
    path = Path(shutil.copy(get_program().parent / "libcuda.so.1", tmp_path))
    log, other = tmp_path / "stderr", Path(shutil.copy(path, tmp_path / "libcuda.so.2"))
    # Into a file: others work here, and a pipe that nobody reads meanwhile would stop the trace.
    command = [sys.executable, "-m", "ingero", "trace", "--no-record", "--json"]
    earlier = load(other)
    with (
        log.open("w") as stderr,
        (tmp_path / "stdout").open("w+") as output,
        subprocess.Popen(command, stdout=output, stderr=stderr, text=True, env=PLAIN) as tracer,
        (tmp_path / "stdout").open() as lines,
    ):
        try:
            wait_until_told(tracer, lines, earlier, "process")
            limits = resource.prlimit(tracer.pid, resource.RLIMIT_NOFILE)
            try:
                resource.prlimit(
                    tracer.pid,
                    resource.RLIMIT_NOFILE,
                    (find_free_descriptor(tracer.pid), limits[1]),
                )
                process = load(path, function="cuMemAlloc_v2", script=CALLER)
                sentence = f"not probed, calls are missing: {path} of pid {process.pid}"
                wait_until(lambda: tracer.poll() is not None or sentence in log.read_text())
                assert tracer.poll() is None, log.read_text()
            finally:
                resource.prlimit(tracer.pid, resource.RLIMIT_NOFILE, limits)
            wait_until_told(tracer, lines, process, "event", "cuMemAlloc")
        finally:
            tracer.send_signal(signal.SIGINT)
        tracer.wait()
        told = [json.loads(line) for line in lines]
    assert "Too many open files" in log.read_text()
    assert tracer.returncode == 130
    (coverage,) = [line for line in told if line["type"] == "coverage"]
    # Of this process alone: the trace watches the machine, and other tests load what cannot be probed.
    assert not [one for one in coverage["unprobed"] if one["pid"] == process.pid]


def wait_until_told(tracer, lines, process, kind, op=None):
    """Read a trace's output, a growing file, until it has a line of this kind about a process."""
    text = ""

    def read_line():
        nonlocal text
        text += lines.readline()
        if not text.endswith("\n"):
            assert tracer.poll() is None, "the trace ended"
            return ""
        whole, text = text, ""
        return whole

    line = {}
    while (line.get("type"), line.get("pid"), line.get("op")) != (kind, process.pid, op):
        line = json.loads(wait_until(read_line))


def find_free_descriptor(pid):
    """The lowest number of a descriptor that a process has not open, of many looks: some it has only for a moment."""
    folder = Path(f"/proc/{pid}/fd")
    lowest = []
    for _ in range(2000):
        taken = {int(entry.name) for entry in folder.iterdir()}
        lowest.append(min(set(range(len(taken) + 1)) - taken))
    return min(lowest)


def test_what_could_not_be_probed_is_in_the_output_the_recording_and_the_explanation(
    tmp_path, load
):
    database, path = tmp_path / "t.db", tmp_path / "libcuda.so.1"
    path.write_bytes(
        b"\x7fELF" + bytes(60)
    )  # as a library for another machine is none we can look into
    script = (
        "import mmap, sys; file = open(sys.argv[1], 'rb');"
        "memory = mmap.mmap(file.fileno(), 64, prot=mmap.PROT_READ | mmap.PROT_EXEC);"
        "print(sys.stdin.readline())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        wait_until(lambda: str(path) in Path(f"/proc/{process.pid}/maps").read_text())
        run = subprocess.run(
            [
                *(sys.executable, "-m", "ingero", "trace", "--json", "--db", str(database)),
                *("--pid", str(process.pid), "--duration", "1s"),
            ],
            capture_output=True, text=True, check=True, env=PLAIN,
        )  # fmt: skip
        process.communicate(b"go\n")
    coverage = json.loads(run.stdout.splitlines()[-2])
    (told,) = coverage["unprobed"]
    assert (told["pid"], told["path"]) == (process.pid, str(path))
    assert "not a 64-bit" in told["reason"]
    sentence = f"not probed, calls are missing: {path} of pid {process.pid}"
    assert sentence in run.stderr
    with contextlib.closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT pid, path, until FROM unprobed").fetchall()
    assert rows == [(process.pid, str(path), 0)]
    explained = subprocess.run(
        [sys.executable, "-m", "ingero", "explain", "--db", str(database)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert sentence in explained


def test_calls_in_two_containers_of_one_image_are_counted_once(tmp_path, load):
    lower = tmp_path / "lower"
    lower.mkdir()
    shutil.copy(get_program().parent / "libcuda.so.1", lower)
    mounts = []
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        for name in ("one", "two"):
            merged, upper, work = (tmp_path / f"{name}-{part}" for part in ("m", "u", "w"))
            for folder in (merged, upper, work):
                folder.mkdir()
            options = f"lowerdir={lower},upperdir={upper},workdir={work}".encode()
            if libc.mount(b"overlay", str(merged).encode(), b"overlay", 0, options):
                pytest.skip(f"no overlay can be mounted here: {os.strerror(ctypes.get_errno())}")
            mounts.append(merged)
        totals = Totals()
        settings = TraceSettings(engine=EngineSettings(host_probes=("process",)))
        with TraceSession(settings, [totals]) as session:
            processes = [load(path / "libcuda.so.1", function="cuMemAlloc_v2") for path in mounts]
            for process in processes:
                process.stdout.readline()
            one, two = (identity_of(path / "libcuda.so.1") for path in mounts)
            assert one == two
            wait_until(lambda: session.engine.is_attached(one))
            # Both were looked at: the later one cannot be probed again after this.
            session._discovery.scan([process.pid for process in processes])
            for process in processes:
                process.communicate("go\n")
            session.run(lambda: all(process.poll() is not None for process in processes))
        for process in processes:
            assert totals.seen(process.pid, DriverOp.MEM_ALLOC, Source.DRIVER) == CALLS
    finally:
        for merged in mounts:
            libc.umount2(
                str(merged).encode(), MNT_DETACH
            )  # a process that ends may still have it open
