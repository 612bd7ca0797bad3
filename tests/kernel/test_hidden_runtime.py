"""A trace names the processes of which it sees the driver's calls only.

Their runtime is linked in, its names stripped.
"""

import contextlib
import json
import subprocess
import sys

import pytest
from tests.static_runtime import build_library_with_static_runtime, build_with_static_runtime

from ingero.agent.capture.discover.processes import iter_mappings
from ingero.agent.capture.discovery import Discovery, Watch
from ingero.agent.capture.file_queue import MappedFile
from ingero.agent.capture.kernel.perf import PerfEvents
from ingero.agent.capture.stack_keeper import StackKeeper
from ingero.model.recording import HIDDEN_RUNTIME
from ingero.sim.runner import get_program
from ingero.telemetry.clock import SystemClock

pytestmark = [pytest.mark.kernel, pytest.mark.slow]


def takewhile_through(text, lines):
    """Lines up to the first that holds a text, and that one."""
    for line in lines:
        yield line
        if text in line:
            return


@pytest.mark.parametrize("is_stripped", [True, False])
def test_a_process_with_a_hidden_runtime_is_named_while_it_is_traced(tmp_path, is_stripped):
    program = build_with_static_runtime(tmp_path, is_stripped=is_stripped)
    driver = get_program().parent / "libcuda.so.1"
    command = [sys.executable, "-m", "ingero", "trace", "--no-record", "--json", "--no-io"]
    with subprocess.Popen(
        [*command, "--", str(program), str(driver)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as tracer:
        # It waits for its input meanwhile; what it prints goes to standard error, beside JSON.
        seen = iter(tracer.stderr.readline, "")
        errors = "".join(takewhile_through("names stripped" if is_stripped else "ready", seen))
        rest, more = tracer.communicate("go\n", timeout=120)
    errors += more
    (coverage,) = [
        line for line in map(json.loads, rest.splitlines()) if line["type"] == "coverage"
    ]
    named = [one["path"] for one in coverage["unprobed"]]
    assert (str(program) in named) is is_stripped, errors
    assert (f"only the driver's calls are seen: {program} of pid" in errors) is is_stripped
    assert "calls are missing" not in errors


def test_hidden_runtimes_of_nvidia_s_libraries_are_in_the_coverage_alone(tmp_path):
    libraries = [
        build_library_with_static_runtime(tmp_path, name, is_stripped=True)
        for name in ("libtraining.so", "libcublasLt.so.13")
    ]
    script = (
        "import ctypes, sys, time\n"
        "loaded = [ctypes.CDLL(path) for path in sys.argv[1:]]\n"
        "print('ready', file=sys.stderr, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    driver = get_program().parent / "libcuda.so.1"
    command = [sys.executable, "-m", "ingero", "trace", "--no-record", "--json", "--no-io", "--"]
    with subprocess.Popen(
        [*command, sys.executable, "-c", script, *map(str, libraries), str(driver)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as tracer:
        seen = iter(tracer.stderr.readline, "")
        errors = "".join(takewhile_through("libtraining.so", seen))
        rest, more = tracer.communicate("go\n", timeout=120)
    coverage = json.loads(rest.splitlines()[-2])
    assert {one["path"] for one in coverage["unprobed"]} == set(map(str, libraries))
    assert {one["reason"] for one in coverage["unprobed"]} == {HIDDEN_RUNTIME}
    assert "only the driver's calls are seen" in HIDDEN_RUNTIME
    assert "libcublasLt" not in errors + more


@pytest.mark.parametrize("is_program_last", [True, False])
def test_a_hidden_runtime_stays_named_in_whatever_order_files_are_examined(
    tmp_path, start_engine, is_program_last
):
    program = build_with_static_runtime(tmp_path, is_stripped=True)
    driver = get_program().parent / "libcuda.so.1"
    engine = start_engine(attach=False)
    with (
        subprocess.Popen(
            [program, driver], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
        contextlib.closing(PerfEvents()) as events,
    ):
        process.stdout.readline()
        both = [
            one for one in iter_mappings(process.pid) if one.path in {str(program), str(driver)}
        ]
        both.sort(key=lambda one: one.path == str(program), reverse=not is_program_last)
        discovery = Discovery(
            engine, StackKeeper(engine, []), Watch(engine), lambda pid: None, events, SystemClock()
        )
        for mapping in both:
            discovery.examine(MappedFile(mapping))
        discovery.close()
        assert len(both) == 2
        assert [(one.pid, one.path) for one in discovery.unprobed] == [(process.pid, str(program))]


def test_a_runtime_in_a_library_that_is_loaded_after_the_driver_is_probed_or_named(
    tmp_path, start_engine
):
    named, hidden = (
        build_library_with_static_runtime(tmp_path, name, is_stripped=is_stripped)
        for name, is_stripped in (("libnamed.so", False), ("libhidden.so", True))
    )
    script = (
        "import ctypes, sys\n"
        "for path in sys.argv[1:]:\n"
        "    loaded = ctypes.CDLL(path)\n"
        "    print(flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    driver = get_program().parent / "libcuda.so.1"
    engine = start_engine(attach=False)
    with (
        subprocess.Popen(
            [sys.executable, "-c", script, driver, named, hidden],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
        contextlib.closing(PerfEvents()) as events,
        contextlib.closing(
            Discovery(
                engine,
                StackKeeper(engine, []),
                Watch(engine),
                lambda pid: None,
                events,
                SystemClock(),
            )
        ) as discovery,
    ):
        for path in (driver, named, hidden):
            process.stdout.readline()
            for mapping in iter_mappings(process.pid):
                if mapping.path == str(path):
                    discovery.examine(MappedFile(mapping))
            print("go", file=process.stdin, flush=True)
        assert [one.path for one in engine.targets] == [str(driver), str(named)]
        assert [(one.pid, one.path) for one in discovery.unprobed] == [(process.pid, str(hidden))]
