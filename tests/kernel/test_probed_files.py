"""Probes of files that nobody uses any more, and of files that are overwritten in place."""

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.kernel.test_discovery import Totals, identity_of
from tests.static_runtime import build_library_with_static_runtime
from tests.support.compiler import CC
from tests.support.notes import without_others

from ingero.agent.capture import discovery as discovery_module
from ingero.agent.capture import probed_files
from ingero.agent.capture.kernel.perf import UPROBE_TYPE
from ingero.agent.capture.probes.engine import EngineSettings
from ingero.agent.capture.session import TraceSession, TraceSettings
from ingero.config.environment import ProbeMode
from ingero.sim.runner import get_program
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_MS

pytestmark = pytest.mark.kernel

CALLS = 23
CALLER = """
import ctypes, os, sys
library = ctypes.CDLL(sys.argv[1])
out = ctypes.c_void_p()
for line in sys.stdin:
    if line == "fork\\n" and os.fork():
        os._exit(0)
    for _ in range(int(sys.argv[2]) if line == "call\\n" else 0):
        assert library.cudaMalloc(ctypes.byref(out), ctypes.c_uint64(64)) == 0
        assert out.value == 64, out
    print(os.getpid(), flush=True)
"""
BEFORE = """
__attribute__((used)) static void filler(void)
{
	__asm__ volatile(".rept 512\\n nop\\n .endr");
}
int cudaMalloc(void **block, unsigned long size)
{
	*block = (void *)size;
	return 0;
}
"""
# Every call runs through the place where the function was before.
AFTER = """
__attribute__((noinline)) static void slide(void)
{
	__asm__ volatile(".rept 4096\\n nop\\n .endr");
}
int cudaMalloc(void **block, unsigned long size)
{
	slide();
	*block = (void *)size;
	return 0;
}
"""


class Caller:
    """A process that has loaded a library and calls it when it is told to."""

    def __init__(self, process):
        self.process = process
        self.pid = process.pid

    def tell(self, line):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self):
        self.process.stdin.close()
        return self.process.wait()


@pytest.fixture
def load():
    with contextlib.ExitStack() as stack:

        def start(path):
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", CALLER, str(path), str(CALLS)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )
            )  # fmt: skip
            stack.callback(process.kill)
            caller = Caller(process)
            assert caller.tell("load") == str(process.pid)
            return caller

        yield start


class Tracing:
    """A trace in a thread of its own."""

    def __init__(self, mode=ProbeMode.AUTO):
        self.notes = []
        self.totals = Totals()
        engine = EngineSettings(host_probes=("process",), probe_mode=mode)
        self.session = TraceSession(
            TraceSettings(engine=engine), [self.totals], notify=self.notes.append
        )
        self.engine = self.session.engine
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.session.run, args=(self._stop.is_set,))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        self.session.close()

    def wait_for(self, file):
        wait_until(lambda: self.engine.is_attached(file))

    def seen(self, pid):
        return 0 if self.totals.last is None else self.totals.seen(int(pid))


@pytest.fixture
def is_impatient(monkeypatch):
    monkeypatch.setattr(probed_files, "IDLE_NS", 300 * NS_PER_MS)
    monkeypatch.setattr(probed_files, "_CHECK_NS", 100 * NS_PER_MS)


def build(folder, name, code):
    source, library = folder / f"{name}.c", folder / f"{name}.so"
    source.write_text(code)
    subprocess.run([*CC, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return library.read_bytes()


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("versions")
    return build(folder, "before", BEFORE), build(folder, "after", AFTER)


def overwrite(path, data):
    """As ``cp`` does it."""
    with path.open("wb") as file:
        file.write(data)


def has_remover():
    """Whether a process is still removing probes by perf events."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(UPROBE_TYPE) in command.read_text(errors="replace"):
                return True
    return False


@pytest.mark.parametrize("mode", [mode for mode in ProbeMode if mode is not ProbeMode.AUTO])
def test_a_program_that_loads_an_overwritten_library_runs_and_is_seen(
    load, tmp_path, versions, mode
):
    library = tmp_path / "libcudart.so.12"
    overwrite(library, versions[0])
    file = identity_of(library)
    with Tracing(mode) as tracing:
        first = load(library)
        tracing.wait_for(file)
        before = tracing.engine.find_target(file)
        first.tell("call")
        assert first.end() == 0
        overwrite(library, versions[1])
        assert identity_of(library) == file
        wait_until(lambda: tracing.engine.find_target(file) is None and not has_remover())
        second = load(library)
        tracing.wait_for(file)
        assert tracing.engine.find_target(file).probes != before.probes
        assert second.tell("call") == str(second.pid)
        assert second.end() == 0
        wait_until(lambda: tracing.seen(second.pid) == CALLS)
        assert tracing.seen(first.pid) == CALLS
        wait_until(lambda: any("was changed in place" in note for note in tracing.notes))


def test_a_process_that_goes_on_with_what_was_written_again_is_probed_again(
    load, tmp_path, versions
):
    library = tmp_path / "libcudart.so.12"
    overwrite(library, versions[0])
    file = identity_of(library)
    with Tracing() as tracing:
        caller = load(library)
        tracing.wait_for(file)
        target = tracing.engine.find_target(file)
        with library.open("r+b") as same:  # not made shorter: its process would end by SIGBUS
            same.write(versions[0])
        wait_until(lambda: tracing.engine.find_target(file) is not target)
        tracing.wait_for(file)
        caller.tell("call")
        assert caller.end() == 0
        wait_until(lambda: tracing.seen(caller.pid) == CALLS)


def test_a_file_whose_mode_alone_is_changed_keeps_its_probes(load, tmp_path, versions):
    library = tmp_path / "libcudart.so.12"
    overwrite(library, versions[0])
    file = identity_of(library)
    with Tracing() as tracing:
        first = load(library)
        tracing.wait_for(file)
        attached = tracing.engine._attached[file]
        time.sleep(0.02)
        library.chmod(0o755)
        second = load(library)
        for caller in (first, second):
            caller.tell("call")
            assert caller.end() == 0
        wait_until(lambda: tracing.seen(second.pid) == CALLS)
        assert tracing.seen(first.pid) == CALLS
        assert tracing.engine._attached[file] is attached


@pytest.mark.parametrize("mode", [mode for mode in ProbeMode if mode is not ProbeMode.AUTO])
def test_a_volume_can_be_taken_off_once_no_process_uses_its_libraries(
    load, tmp_path, versions, is_impatient, mode
):
    library = tmp_path / "libcudart.so.12"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"volume", os.fsencode(tmp_path), b"tmpfs", 0, None):
        pytest.skip(f"nothing can be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        overwrite(library, versions[0])
        file = identity_of(library)
        with Tracing(mode) as tracing:
            for _ in range(2):
                caller = load(library)
                tracing.wait_for(file)
                caller.tell("call")
                assert caller.end() == 0
                wait_until(lambda: not tracing.engine.is_attached(file))
                wait_until(lambda pid=caller.pid: tracing.seen(pid) == CALLS)
            # In the mode of events another process removes them, one by one.
            wait_until(lambda: libc.umount2(os.fsencode(tmp_path), 0) == 0)
            assert without_others(tracing.notes, tmp_path) == []
    finally:
        libc.umount2(os.fsencode(tmp_path), 2)


def test_a_library_stays_probed_as_long_as_a_child_uses_it(load, tmp_path, versions, is_impatient):
    library = tmp_path / "libcudart.so.12"
    overwrite(library, versions[0])
    file = identity_of(library)
    with Tracing() as tracing:
        caller = load(library)
        tracing.wait_for(file)
        target = tracing.engine.find_target(file)
        child = caller.tell("fork")
        assert caller.process.wait() == 0
        time.sleep(1.5)
        assert tracing.engine.find_target(file) is target
        assert caller.tell("call") == child
        wait_until(lambda: tracing.seen(child) == CALLS)
        caller.process.stdin.close()
        wait_until(lambda: not tracing.engine.is_attached(file))


def test_a_file_that_was_asked_for_by_name_stays_probed(tmp_path, versions, is_impatient):
    library = tmp_path / "libcudart.so.12"
    overwrite(library, versions[0])
    settings = TraceSettings(
        engine=EngineSettings(host_probes=("process",)), files=(library,), duration_ns=10**9
    )
    with TraceSession(settings, []) as session:
        session.run()
        assert session.engine.is_attached(identity_of(library))


@pytest.mark.slow
def test_a_runtime_that_is_linked_into_a_library_of_any_name_is_probed(tmp_path):
    library = build_library_with_static_runtime(tmp_path)
    driver = shutil.copy(get_program().parent / "libcuda.so.1", tmp_path)
    script = (
        "import ctypes, sys\n"
        "library = ctypes.CDLL(sys.argv[1])\n"
        "driver = ctypes.CDLL(sys.argv[2])\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "print(library.allocate(), flush=True)\n"
        "sys.stdin.readline()\n"
    )
    file = identity_of(library)
    with (
        Tracing() as tracing,
        subprocess.Popen(
            [sys.executable, "-c", script, str(library), str(driver)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        process.stdout.readline()
        tracing.wait_for(file)
        process.stdin.write("go\n")
        process.stdin.flush()
        assert (
            process.stdout.readline().strip() == "1"
        )  # without a device: it was called, and failed
        process.communicate("end\n")
        wait_until(lambda: tracing.seen(process.pid) == 1)
        assert tracing.session._discovery.unprobed == ()


@pytest.mark.parametrize("deed", ["deleted", "linked", "written"])
def test_probes_stay_while_a_file_is_examined_unless_it_is_written(
    load, tmp_path, versions, monkeypatch, deed
):
    library = tmp_path / "libcudart.so.12"
    overwrite(library, versions[0])
    file = identity_of(library)
    examined = threading.Event()
    attached = []

    def act_meanwhile(opened, mapping):
        yield from find_targets(opened, mapping)
        if mapping.path != str(library):  # of another program of this machine
            return
        attached.append(tracing.engine.is_attached(file))
        if deed == "deleted":
            library.unlink()
        elif deed == "linked":
            (tmp_path / "other").hardlink_to(library)
        else:
            status = library.stat()
            with library.open("r+b") as same:
                same.write(versions[0])
            os.utime(library, ns=(status.st_atime_ns, status.st_mtime_ns))
            (tmp_path / "other").hardlink_to(library)
        monkeypatch.undo()
        examined.set()

    find_targets = discovery_module.find_targets
    with Tracing() as tracing:
        detached = []
        detach = tracing.engine.detach
        monkeypatch.setattr(discovery_module, "find_targets", act_meanwhile)
        tracing.engine.detach = lambda one: (detached.append(one), detach(one))
        caller = load(library)
        assert examined.wait(10)
        tracing.wait_for(file)
        caller.tell("call")
        if deed == "written":
            wait_until(lambda: file in detached)
        else:
            wait_until(lambda: tracing.seen(caller.pid) == CALLS)
            assert file not in detached
    assert attached == [True]
