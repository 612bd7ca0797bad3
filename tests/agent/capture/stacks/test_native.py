"""Native frames against what other tools say of the same files. Needs no root."""

import ctypes
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile
from tests.support.compiler import CC

from ingero.agent.capture.discover.processes import open_file
from ingero.agent.capture.kernel.demangle import demangle
from ingero.agent.capture.stacks.memory import Region, iter_regions
from ingero.agent.capture.stacks.native import ProcessCode, SymbolFiles, _PerfMap
from ingero.agent.capture.stacks.resolver import hash_frames
from ingero.agent.capture.stacks.symbols import Symbols
from ingero.errors import BadDataError
from ingero.sim.runner import get_program

WORKLOAD = get_program()
LIBC = next(region.path for region in iter_regions(os.getpid()) if "/libc.so" in region.path)


def open_symbols(path, *folder):
    """For as long as the test lasts."""
    opened = open_file(path)
    symbols = Symbols(opened.fd, *folder)
    symbols.opened = opened
    return symbols


def functions_of(path):
    with Path(path).open("rb") as file:
        elf = ELFFile(file)
        table = elf.get_section_by_name(".symtab") or elf.get_section_by_name(".dynsym")
        for symbol in table.iter_symbols():
            is_function = symbol["st_info"]["type"] in {"STT_FUNC", "STT_LOOS"}
            if is_function and symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_size"]:
                yield symbol.name, symbol["st_value"], symbol["st_size"]


@pytest.mark.parametrize("path", [WORKLOAD, LIBC], ids=str)
def test_an_address_inside_a_function_has_one_of_its_names(path, tmp_path):
    symbols = open_symbols(path, tmp_path)  # no debug files
    known = list(functions_of(path))
    by_place = {}
    for name, value, size in known:
        by_place.setdefault((value, size), set()).add(name)
    starts = np.array(sorted({value for _, value, _ in known}))
    for (value, size), names in by_place.items():
        found = symbols.find_function(value)
        assert found is not None
        assert found[1] == 0
        following = starts[np.searchsorted(starts, value, side="right") :][:1]
        if not len(following) or following[0] >= value + size:  # no function begins inside it
            largest = max(s for v, s in by_place if v == value)
            assert symbols.find_function(value + largest - 1)[1] == largest - 1
            if sum(v == value for v, _ in by_place) == 1:
                assert found[0] in names
    with Path(path).open("rb") as file:
        note = ELFFile(file).get_section_by_name(".note.gnu.build-id")
        assert symbols.build_id == (next(note.iter_notes())["n_desc"] if note else "")
    assert symbols.find_function(1) is None
    symbols.close()


def test_a_function_without_a_size_ends_where_the_next_begins(tmp_path):
    # The first function of an arm64 program is written in assembly, and glibc 2.28 gives it no size.
    path = WORKLOAD.parents[1] / "aarch64/workload"
    with path.open("rb") as file:
        table = ELFFile(file).get_section_by_name(".dynsym")
        (start,) = table.get_symbol_by_name("_start")
    assert start["st_size"] == 0
    begin = start["st_value"]
    following, name = min((at, name) for name, at, _ in functions_of(path) if at > begin)
    symbols = open_symbols(path, tmp_path)
    last = following - begin - 1
    assert symbols.find_function(begin + last) == ("_start", last)
    assert symbols.find_function(following) == (name, 0)
    symbols.close()


def test_our_own_functions_are_found_in_memory_also_after_a_later_load(tmp_path):
    files = SymbolFiles()
    code = ProcessCode(os.getpid(), files)
    qsort = ctypes.cast(ctypes.CDLL(None)["qsort"], ctypes.c_void_p).value
    (frame,) = code.describe([qsort])
    assert (frame.symbol, frame.distance, frame.path) == ("qsort", 0, LIBC)
    # A library that is loaded when the code has read what is mapped.
    copy = tmp_path / "libcuda_later.so.1"
    shutil.copy(WORKLOAD.parent / "libcuda.so.1", copy)
    launch = ctypes.cast(ctypes.CDLL(str(copy))["cuLaunchKernel"], ctypes.c_void_p).value
    first, later = code.describe([qsort, launch + 5])
    assert first.symbol == "qsort"
    assert (later.symbol, later.distance, later.path) == ("cuLaunchKernel", 5, str(copy)), later
    files.close()


def test_a_chain_ends_at_the_first_address_that_is_no_code():
    files = SymbolFiles()
    code = ProcessCode(os.getpid(), files)
    qsort = ctypes.cast(ctypes.CDLL(None)["qsort"], ctypes.c_void_p).value
    assert len(code.describe([qsort, 0x1234, qsort])) == 1
    assert code.describe([0]) == []
    files.close()


def test_a_stripped_file_is_named_from_its_debug_file_by_build_id(tmp_path):
    source = tmp_path / "one.c"
    source.write_text("static int __attribute__((noinline)) hidden(int a) { return a * 3; }\n"
                      "int shown(int a) { return hidden(a) + 1; }\n")  # fmt: skip
    full, stripped = tmp_path / "full.so", tmp_path / "stripped.so"
    for path, *options in (full,), (stripped, "-s"):
        subprocess.run(
            [
                *(*CC, "-shared", "-nostdlib", "-fPIC", "-O1"),
                *("-Wl,--build-id=0x" + "ab12" * 10, *options, str(source), "-o", str(path)),
            ],
            check=True,
        )
    hidden = next(value for name, value, _ in functions_of(full) if name == "hidden")
    build_id = open_symbols(full).build_id
    assert build_id == "ab12" * 10
    bare = open_symbols(stripped, tmp_path / "debug")
    assert bare.build_id == build_id
    assert bare.find_function(hidden) is None
    beside = tmp_path / "debug" / build_id[:2] / f"{build_id[2:]}.debug"
    beside.parent.mkdir(parents=True)
    shutil.copy(full, beside)
    assert open_symbols(stripped, tmp_path / "debug").find_function(hidden) == ("hidden", 0)


def test_functions_of_a_just_in_time_compiler_come_from_its_perf_map():
    import mmap

    with mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as code:
        address = ctypes.addressof(ctypes.c_char.from_buffer(code))
        path = Path(f"/tmp/perf-{os.getpid()}.map")
        path.write_text(
            f"{address + 16:x} 20 py::forward:/job/train.py\n{address + 64:x} 8 other\n"
        )
        try:
            files = SymbolFiles()
            first, inside, outside = ProcessCode(os.getpid(), files).describe([
                address + 16,
                address + 20,
                address + 61,
            ])
            assert (first.symbol, first.distance) == ("py::forward:/job/train.py", 0)
            assert (inside.symbol, inside.distance) == ("py::forward:/job/train.py", 4)
            assert outside.symbol == ""
        finally:
            path.unlink()


@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_a_perf_map_is_not_waited_for():
    with subprocess.Popen(["sleep", "60"]) as process:
        path = Path(f"/tmp/perf-{process.pid}.map")
        os.mkfifo(path)
        try:
            assert _PerfMap(process.pid).find(0x1000) == ("", 0)
        finally:
            path.unlink()
            process.kill()


def test_c_names_stay_and_cpp_names_are_read():
    assert demangle("cudaMalloc") == "cudaMalloc"
    assert demangle("_ZN2at6native4mul_ERNS_6TensorERKS1_") == (
        "at::native::mul_(at::Tensor&, at::Tensor const&)"
    )
    assert demangle("_Znonsense") == "_Znonsense"


def test_files_that_are_no_elf_files_are_refused(tmp_path):
    empty, text = tmp_path / "empty", tmp_path / "text"
    empty.touch()
    text.write_text("#!/bin/sh\n" * 20)
    for path in empty, text:
        with pytest.raises(BadDataError):
            open_symbols(path)


def region_of(path):
    return Region(0, 0, 0, is_code=True, file=("0:0", path.stat().st_ino), path=str(path))


def test_a_library_that_is_cut_short_and_written_again_costs_its_names_meanwhile_and_nothing_else(
    tmp_path,
):
    path = tmp_path / "libcuda.so.1"
    shutil.copy(WORKLOAD.parent / "libcuda.so.1", path)
    whole = path.read_bytes()
    _, value, _ = next(one for one in functions_of(path) if one[0] == "cuLaunchKernel")
    with SymbolFiles() as files:
        symbols = files.find(os.getpid(), region_of(path))
        assert symbols.find_function(value) == ("cuLaunchKernel", 0)
        path.write_bytes(whole[:4])  # the same inode
        assert symbols.find_function(value) is None
        assert symbols.find_rule(value) is None
        assert files.find(os.getpid(), region_of(path)) is None
        path.write_bytes(whole)
        again = files.find(os.getpid(), region_of(path))
        assert again.find_function(value) == ("cuLaunchKernel", 0)
        assert again.find_rule(value) is not None
        assert files.find(os.getpid(), region_of(path)) is again


def count_open(path):
    """How often this process has a file open; what other tests left open may be closed at any moment."""
    own = path.stat()
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += os.path.samestat(fd.stat(), own)
    return found


def test_a_file_is_opened_once_and_closed_at_the_end():
    before = count_open(Path(LIBC))
    with SymbolFiles() as files:
        assert files.find(os.getpid(), region_of(Path(LIBC))) is not None
        assert files.find(os.getpid(), region_of(Path(LIBC))) is not None
        assert count_open(Path(LIBC)) == before + 1
    assert count_open(Path(LIBC)) == before


def test_a_process_that_ended_takes_no_names_away_from_the_others():
    with SymbolFiles() as files, subprocess.Popen(["sleep", "60"]) as process:
        process.kill()
        process.wait()
        assert files.find(process.pid, region_of(Path(LIBC))) is None
        assert files.find(os.getpid(), region_of(Path(LIBC))) is not None


def test_the_stored_hash_is_fnv_1a_over_what_the_frames_say():
    assert hash_frames(()) == 0xCBF29CE484222325 - (1 << 64)
    # Symbol, file, Python file, Python function, each with its NUL, then the line in four bytes.
    data = b"f+0x1\0lib.so\0a.py\0g\0\x07\0\0\0"
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) % (1 << 64)
    frame = {"s": "f+0x1", "f": "lib.so", "pf": "a.py", "pfn": "g", "pl": 7}
    assert hash_frames((frame,)) % (1 << 64) == value
    assert hash_frames((frame,)) != hash_frames(({**frame, "pl": 8},))
