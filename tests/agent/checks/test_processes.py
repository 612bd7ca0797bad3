"""`ingero check` lists who uses CUDA and NCCL now, and says of whose calls only the driver's part is seen. No root."""

import contextlib
import subprocess

import pytest
from tests.static_runtime import build_with_static_runtime

from ingero.agent.capture.kernel.perf import Mapping
from ingero.agent.capture.probes.targets import is_library
from ingero.agent.checks.processes import find_active
from ingero.sim.runner import get_program


@pytest.fixture
def start():
    """Start processes that wait for their standard input to end."""
    with contextlib.ExitStack() as stack:

        def start_one(*arguments):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            process = stack.enter_context(subprocess.Popen(list(map(str, arguments)), **pipes))
            stack.callback(process.kill)
            return process

        yield start_one


def find(process):
    (found,) = [one for one in find_active() if one.pid == process.pid]
    return found


def test_a_process_is_listed_with_its_libraries_and_their_versions(start):
    program = get_program()
    process = start(program, "sync", "gate=1")
    names = {"libcuda.so.1": "1", "libcudart.so.12": "12", "libnccl.so.2": "2"}
    while process.poll() is None:  # until the loader has them all
        found = [one for one in find_active() if one.pid == process.pid]
        if found and len(found[0].libraries) == len(names):
            break
    found = find(process)
    assert found.name == "workload"
    assert {library.path: library.version for library in found.libraries} == {
        str(program.parent / name): version for name, version in names.items()
    }
    assert {library.problem for library in found.libraries} == {""}
    assert found.hidden_runtimes == ()


@pytest.mark.slow
@pytest.mark.parametrize("is_stripped", [True, False])
def test_a_runtime_that_is_linked_in_without_its_names_is_said_to_be_hidden(
    tmp_path, start, is_stripped
):
    program = build_with_static_runtime(tmp_path, is_stripped=is_stripped)
    process = start(program, get_program().parent / "libcuda.so.1")
    assert process.stdout.readline() == "ready\n"
    found = find(process)
    paths = [library.path for library in found.libraries]
    assert str(get_program().parent / "libcuda.so.1") in paths
    assert (str(program) in paths) is not is_stripped
    assert found.hidden_runtimes == ((str(program),) if is_stripped else ())


@pytest.mark.parametrize(
    ("name", "is_ours"),
    [
        ("libnccl.so.2.28.9", True), ("libcudart-d0da41ae.so.11.0", True), ("libcuda.so.1", True),
        ("libnccl-1a2b3c4d.so.2.28.9", True), ("libnccl-tuner-1a2b3c4d.so", False), ("libnccl-env.so", False),
        ("libnccl-profiler-ingero.so", False), ("libnccl-net.so", False), ("libc.so.6", False),
    ],
)  # fmt: skip
def test_a_plug_in_of_nccl_is_no_library_of_it(name, is_ours):
    assert is_library(Mapping(1, 0, 0, (0, 0), 0, f"/usr/lib/{name}")) is is_ours
