"""The symbol search agrees with pyelftools on every file, and refuses what is no ELF file. No root."""

import sys
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from ingero.agent.discover.elf import find_functions
from ingero.errors import BadDataError
from ingero.gpusim.runner import get_program


def by_pyelftools(path):
    found = {}
    with Path(path).open("rb") as file:
        elf = ELFFile(file)
        loads = [s.header for s in elf.iter_segments("PT_LOAD")]
        tables = [elf.get_section_by_name(name) for name in (".dynsym", ".symtab")]
        for symbol in (s for table in tables if table for s in table.iter_symbols()):
            is_function = symbol["st_info"]["type"] in {"STT_FUNC", "STT_LOOS"}
            if not is_function or symbol["st_shndx"] == "SHN_UNDEF" or not symbol["st_value"]:
                continue
            inside = [h for h in loads if 0 <= symbol["st_value"] - h["p_vaddr"] < h["p_filesz"]]
            for load in inside:
                offset = symbol["st_value"] - load["p_vaddr"] + load["p_offset"]
                found.setdefault(symbol.name, set()).add(offset)
    return found


FILES = [*sorted(get_program().parent.iterdir()), Path(sys.executable).resolve()]
FILES += [Path(p) for p in Path("/proc/self/maps").read_text().split() if p.endswith("libc.so.6")][
    :1
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_function_is_where_pyelftools_says(path):
    theirs = by_pyelftools(path)
    ours = find_functions(path, theirs)
    assert ours.keys() == theirs.keys()
    for name, offset in ours.items():
        assert offset in theirs[name], name


def test_a_file_that_only_imports_a_function_does_not_define_it():
    assert find_functions(get_program(), ["cudaMalloc", "ncclAllReduce"]) == {}


def test_a_file_without_any_marker_is_left_alone():
    library = get_program().parent / "libcudart.so.12"
    assert find_functions(library, ["cudaMalloc"], ["ncclCommInitRank"]) == {}
    assert set(find_functions(library, ["cudaMalloc"], ["x", "cudaLaunchKernel"])) == {"cudaMalloc"}


@pytest.mark.parametrize(
    "data",
    [b"#!/bin/sh\n" * 20, b"\x7fELF" + bytes(60), b"\x7fELF\x01\x01" + bytes(80), b"\x7fELF"],
    ids=["script", "no class", "32-bit", "cut short"],
)
def test_what_is_no_elf_file_is_refused(tmp_path, data):
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(BadDataError):
        find_functions(path, ["cudaMalloc"])


def test_tables_outside_the_file_are_refused(tmp_path):
    whole = (get_program().parent / "libcudart.so.12").read_bytes()
    path = tmp_path / "cut"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadDataError, match="outside"):
        find_functions(path, ["cudaMalloc"])
