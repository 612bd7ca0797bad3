"""The offset tables are those of the headers, and of the running interpreters.

Needs no root: the targets are our children.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.interpreters import find_interpreters

from ingero.agent.capture.kernel.abi import NO_OFFSET
from ingero.agent.capture.stacks.interpreter import check_interpreter, find_interpreter
from ingero.agent.capture.stacks.layouts import (
    DEBUG_BYTES,
    DEBUG_COOKIE,
    TABLES,
    get_table,
    parse_debug_offsets,
)
from ingero.agent.capture.stacks.memory import RemoteMemory, iter_regions
from ingero.errors import UnsupportedError

sys.path.append(str(Path(__file__).resolve().parents[4] / "scripts"))
from cpython_offsets import read_offsets

PYTHONS = find_interpreters()


def named(pythons):
    return {"argvalues": pythons, "ids": [str(python.program) for python in pythons]}


@pytest.fixture
def start():
    """Start an interpreter that waits inside a function."""
    processes = []

    def run(python):
        process = subprocess.Popen(
            [python.program, "-c", "def wait():\n print('ready', flush=True)\n input()\nwait()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        processes.append(process)
        assert process.stdout.readline() == b"ready\n"
        return process.pid

    yield run
    for process in processes:
        process.communicate(b"\n")


def find_in(pid):
    memory = RemoteMemory(pid)
    return memory, find_interpreter(memory, list(iter_regions(pid)))


@pytest.mark.parametrize("python", **named([p for p in PYTHONS if p.include]))
def test_a_running_interpreter_is_read_by_the_offsets_of_its_headers(python, start):
    memory, found = find_in(start(python))
    with memory:
        assert found.version == (3, python.minor)
        layout = found.layout
        expected = read_offsets(python.include)
        assert {name: getattr(layout, name) for name in expected} == expected
        optional = ("cframe_frame", "frame_owner", "frame_entry", "code_first")
        assert all(getattr(layout, name) == NO_OFFSET for name in set(optional) - set(expected))
        check_interpreter(memory, found)


@pytest.mark.parametrize(
    "python", **named([p for p in PYTHONS if p.include and p.program.parent != Path("/usr/bin")])
)
def test_offsets_are_the_same_on_both_processors(python):
    """Debian's own headers are for one processor alone; those of pyenv are as their source has them."""
    offsets = read_offsets(python.include, "aarch64")
    assert offsets == read_offsets(python.include)
    if (3, python.minor) in TABLES:
        layout = TABLES[3, python.minor]
        assert {name: getattr(layout, name) for name in offsets} == offsets


@pytest.mark.parametrize("python", **named(PYTHONS))
def test_a_layout_of_another_version_is_refused(python, start):
    memory, found = find_in(start(python))
    with memory:
        check_interpreter(memory, found)
        for version, layout in TABLES.items():
            if version == found.version or {version[1], python.minor} == {9, 10}:
                continue  # these differ only in where the instruction is; exported names tell them apart
            with pytest.raises(UnsupportedError, match="not laid out as CPython"):
                check_interpreter(memory, replace(found, layout=layout))
        with pytest.raises(UnsupportedError, match="not laid out as CPython"):
            check_interpreter(memory, replace(found, runtime=found.runtime + 64))


@pytest.mark.parametrize("python", **named([p for p in PYTHONS if p.minor in {11, 12}]))
def test_of_a_process_that_is_another_program_by_now_no_version_is_named(python, start):
    """The file that it had can be opened as long as anybody has it; of its memory nothing can be read."""
    pid = start(python)
    memory, regions = RemoteMemory(pid), list(iter_regions(pid))
    assert find_interpreter(memory, regions) is not None
    memory.close()
    assert find_interpreter(memory, regions) is None


def test_a_build_without_the_gil_and_an_unknown_version_are_refused():
    words = np.zeros(DEBUG_BYTES // 8, "<u8")
    words[0] = int.from_bytes(DEBUG_COOKIE, "little")
    words[1], words[2] = 0x030E0AF0, 1
    with pytest.raises(UnsupportedError, match=r"CPython 3\.14 without the GIL"):
        parse_debug_offsets(words.tobytes())
    words[1], words[2] = 0x030F0000, 0
    with pytest.raises(UnsupportedError, match=r"offsets of CPython 3\.15 are not known"):
        parse_debug_offsets(words.tobytes())
    words[1], words[8] = 0x030D00F0, 1 << 40
    with pytest.raises(UnsupportedError, match="cannot be"):
        parse_debug_offsets(words.tobytes())
    with pytest.raises(UnsupportedError, match=r"3\.8"):
        get_table((3, 8))


def test_memory_of_a_process_that_is_gone_reads_as_nothing():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(b"here\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"here\n"  # its image is there
        with RemoteMemory(process.pid) as memory:
            somewhere = next(iter_regions(process.pid)).start
            assert memory.read(somewhere, 4) == b"\x7fELF"
            process.communicate()
            assert memory.read(somewhere, 4) == b""
            assert memory.word(somewhere) == 0
            assert list(iter_regions(process.pid)) == []
