"""The program that `ingero trace -- PROGRAM` runs, where a runtime is linked into it: its first call counts."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
from tests.kernel.test_discovery import identity_of
from tests.support.compiler import CC

from ingero.agent.capture import probed_files
from ingero.agent.capture.discovery import Discovery, Watch
from ingero.agent.capture.kernel.perf import PerfEvents
from ingero.agent.capture.stack_keeper import StackKeeper
from ingero.telemetry.clock import SystemClock
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_MS

pytestmark = pytest.mark.kernel

CALLS = 13
# Calls at once, and ends.
PROGRAM = f"""
__attribute__((noinline)) int cudaMalloc(void **block, unsigned long size)
{{
	__asm__ volatile("" ::: "memory");
	*block = (void *)size;
	return 0;
}}
int main(void)
{{
	void *block;

	for (int i = 0; i < {CALLS}; i++)
		cudaMalloc(&block, 64);
	return 0;
}}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("program")
    source, built = folder / "program.c", folder / "allocating"
    source.write_text(PROGRAM)
    subprocess.run([*CC, str(source), "-o", str(built)], check=True)
    return built


@pytest.fixture
def discovery(start_engine):
    engine = start_engine(attach=False)
    with contextlib.closing(PerfEvents()) as events:
        found = Discovery(
            engine, StackKeeper(engine, []), Watch(engine), lambda pid: None, events, SystemClock()
        )
        with contextlib.closing(found):
            yield engine, found


@pytest.mark.parametrize(
    "command",
    [
        ["{program}"],
        ["allocating"],
        ["nice", "-n", "1", "env", "A=1", "allocating"],
        ["sh", "-c", "cd / && '{program}'; true"],
    ],
)
def test_the_first_call_of_a_traced_program_is_seen(program, command):
    command = [word.format(program=program) for word in command]
    run = subprocess.run(
        [sys.executable, "-m", "ingero", "trace", "--no-record", "--json", "--no-io", "--", *command],
        env=dict(os.environ) | {"PATH": f"{program.parent}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    counts = [line for line in lines if line["type"] == "counts" and line["op"] == "cudaMalloc"]
    assert [line["seen"] for line in counts] == [CALLS], run.stderr


def test_a_program_keeps_its_probes_no_longer_than_its_process(program, discovery, monkeypatch):
    monkeypatch.setattr(probed_files, "IDLE_NS", 200 * NS_PER_MS)
    monkeypatch.setattr(probed_files, "_CHECK_NS", 50 * NS_PER_MS)
    engine, found = discovery
    file = identity_of(program)
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as process:
        found.probe_program(program, process.pid)
        target = engine.find_target(file)
        assert target.libraries == ("cudart",)
        found.start()
        process.communicate()
    wait_until(lambda: not engine.is_attached(file))


@pytest.mark.parametrize("kind", ["script", "empty", "folder", "missing", "fifo"])
def test_a_program_that_is_no_elf_file_is_no_failure(discovery, tmp_path, kind):
    engine, found = discovery
    path = tmp_path / "program"
    match kind:
        case "script":
            path.write_text("#!/bin/sh\nexit 0\n")
        case "empty":
            path.touch()
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
    found.probe_program(path, os.getpid())
    assert engine.targets == ()
    assert found.unprobed == ()
