"""Every switch of one thread for a while: what stopped it, and nothing of other processes."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.support.holders import HOLDERS

from ingero.agent.capture.discover.processes import is_stopped
from ingero.agent.capture.probes.engine import Engine, EngineSettings
from ingero.agent.diagnosis.switches import watch_switches
from ingero.telemetry.clock import SystemClock
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_S

pytestmark = pytest.mark.kernel
SPIN = "print('spins', flush=True)\nwhile True: pass"


READ = """
import mmap, os, sys, time
room = mmap.mmap(-1, 16 << 20)
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_DIRECT)
os.pwrite(file, room, 0)
def read(took_s):
    began = time.monotonic()
    while time.monotonic() - began < took_s:
        os.preadv(file, [room], 0)
    return time.monotonic() - began
"""
"""Reads past the page cache, each long beside what it waits for a processor when others want one too."""


LOADER = (
    READ
    + """
ready, done = os.pipe()
if os.fork() == 0:
    while True:
        time.sleep(float(sys.argv[2]) * read(0.05))
        os.write(done, b".")
print("loads", flush=True)
while True:
    os.read(ready, 1)
"""
)


EPOCHS = (
    READ
    + """
print("loads", flush=True)
while True:
    child = os.fork()
    if child == 0:
        read(1.2)
        os._exit(0)
    os.waitpid(child, 0)
"""
)


def has_watched_enough(start_ns, now_ns):
    return now_ns - start_ns >= 3 * NS_PER_S


class Started(SystemClock):
    """Says when the probes are loaded: the first time that somebody asks for the time."""

    def __init__(self):
        self.n_asked = 0

    def mono_ns(self):
        self.n_asked += 1
        return super().mono_ns()


@pytest.mark.parametrize("holder", HOLDERS)
def test_time_that_a_process_was_stopped_is_told(holder):
    clock, stop, found = Started(), threading.Event(), []
    with (
        subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) as process,
        holder(process) as (hold, release),
    ):
        process.stdout.readline()
        thread = threading.Thread(
            target=lambda: found.append(
                watch_switches(clock, process.pid, process.pid, stop, lambda *_: False)
            )
        )
        thread.start()
        n_stops = 0
        while thread.is_alive():
            hold()
            wait_until(lambda: is_stopped(process.pid))
            thread.join(0.05)
            release()
            thread.join(0.05)
            n_stops += clock.n_asked >= 1
            if n_stops > 8:
                stop.set()
    (look,) = found
    assert 0.2 < look.times.stopped_ns / (look.end_ns - look.start_ns) < 0.8
    assert look.times.n_lost == 0
    assert look.times.faults_ns == 0
    assert look.times.io_ns == 0


def watch_program(program, *arguments):
    """What is seen of a program of Python in three seconds, from its first line on."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0) as process:
        try:
            process.stdout.readline()
            return watch_switches(
                SystemClock(), process.pid, process.pid, threading.Event(), has_watched_enough
            )
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("idle", [0, 1])
def test_a_wait_for_a_child_that_reads_is_told_unless_the_child_is_idle_too(tmp_path, idle):
    look = watch_program(LOADER, tmp_path / "data", idle)
    assert look.times.io_ns == 0
    assert (look.times.worker_io_ns > 0) == (not idle)
    assert look.times.worker_io_ns <= look.end_ns - look.start_ns


def test_a_wait_for_children_that_read_one_after_the_other_is_told(tmp_path):
    look = watch_program(EPOCHS, tmp_path / "data")
    assert 0 < look.times.worker_io_ns <= look.end_ns - look.start_ns


def count_programs():
    files = Path("/proc/self/fdinfo").iterdir()
    return sum("prog_type" in file.read_text() for file in files if file.exists())


@pytest.mark.parametrize("probes_calls", [False, True])
def test_programs_of_calls_are_loaded_only_to_probe_calls(probes_calls):
    before = count_programs()
    with Engine(EngineSettings(host_probes=("sched",), probes_calls=probes_calls)) as engine:
        assert (count_programs() > before) == probes_calls
        engine.start_host_probes()
        assert not engine.missing
        assert "off_cpus" in engine.rings
        assert count_programs() > before
