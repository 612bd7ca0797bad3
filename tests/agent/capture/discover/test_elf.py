"""The symbol search agrees with pyelftools on every file, and refuses what is no ELF file. No root."""

import itertools
import struct
import sys
import tempfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from hypothesis import given, settings
from hypothesis import strategies as st

from ingero.agent.capture.discover import elf
from ingero.agent.capture.discover.elf import ElfFile, FileBytes
from ingero.errors import BadDataError
from ingero.sim.runner import get_program


def find_functions(path, names):
    """The functions of a file by its path."""
    with Path(path).open("rb") as file:
        return ElfFile(FileBytes(file.fileno())).find_functions(names)


def by_pyelftools(path):
    found = {}
    with Path(path).open("rb") as file:
        whole = ELFFile(file)
        loads = [s.header for s in whole.iter_segments("PT_LOAD")]
        tables = [whole.get_section_by_name(name) for name in (".dynsym", ".symtab")]
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


def gnu_hash(name):
    """The documented hash of a name, spelled out."""
    value = 5381
    for byte in name.encode():
        value = (value * 33 + byte) & 0xFFFF_FFFF
    return value


def build_library(defined, undefined, *, n_buckets=7, spread=0, is_endless=False):
    """An ELF file with a GNU hash table and no section; its tables lie ``spread`` bytes apart.

    Addresses are offsets, and a function lies at 0x1000 plus its place in ``defined``.
    """
    defined = sorted(defined, key=lambda name: gnu_hash(name) % n_buckets)
    names = [*undefined, *defined]
    text, places = b"\0", []
    for name in names:
        places.append(len(text))
        text += name.encode() + b"\0"
    symbols = bytes(24)
    for name, place in zip(names, places, strict=True):
        is_defined = name in defined
        value = 0x1000 + defined.index(name) if is_defined else 0
        symbols += struct.pack("<IBBHQQ", place, 0x12, 0, 1 if is_defined else 0, value, 1)
    first = 1 + len(undefined)
    buckets, chains = [0] * n_buckets, []
    for index, name in enumerate(defined):
        bucket = gnu_hash(name) % n_buckets
        buckets[bucket] = buckets[bucket] or first + index
        is_last = index + 1 == len(defined) or gnu_hash(defined[index + 1]) % n_buckets != bucket
        chains.append(gnu_hash(name) & ~1 | (is_last and not is_endless))
    word = 0
    for name in defined:
        word |= 1 << gnu_hash(name) % 64 | 1 << (gnu_hash(name) >> 6) % 64
    table = struct.pack("<4IQ", n_buckets, first, 1, 6, word)
    table += struct.pack(f"<{n_buckets}I", *buckets) + struct.pack(f"<{len(chains)}I", *chains)
    if is_endless:
        table += bytes(4 * 70_000)
    at, parts = 0x2000, {}
    for name, data in (("hash", table), ("symbols", symbols), ("strings", text)):
        parts[name] = at, data
        at += len(data) + spread
    tags = [
        (0x6FFFFEF5, parts["hash"][0]), (5, parts["strings"][0]), (6, parts["symbols"][0]),
        (10, len(text)), (0, 0),
    ]  # fmt: skip
    dynamic = b"".join(struct.pack("<qQ", *tag) for tag in tags)
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 64, 0, 0)
    header += struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, at, at, 0x200000)
    header += struct.pack("<IIQQQQQQ", 2, 6, 0x400, 0x400, 0x400, len(dynamic), len(dynamic), 8)
    return {0: header, 0x400: dynamic, **dict(parts.values())}


def write_sparsely(path, parts, size=0):
    with path.open("wb") as file:
        for offset, data in parts.items():
            file.seek(offset)
            file.write(data)
        file.truncate(max(size, file.seek(0, 2)))


def test_a_file_of_any_size_is_asked_name_by_name(tmp_path):
    names = [f"function_{number}" for number in range(500)]
    defined, undefined = [*names, "cudaMalloc", "cuInit"], ["ncclAllReduce", "cudaFree"]
    path = tmp_path / "large"
    write_sparsely(
        path, build_library(defined, undefined, n_buckets=97, spread=64 << 20), 470 << 20
    )
    wanted = ["cudaMalloc", "cuInit", "ncclAllReduce", "cudaFree", "cudaMemcpy", "function_499"]
    with path.open("rb") as file:
        data = FileBytes(file.fileno())
        found = ElfFile(data).find_functions(wanted)
    ordered = sorted(defined, key=lambda name: gnu_hash(name) % 97)
    assert found == {
        name: 0x1000 + ordered.index(name) for name in ("cudaMalloc", "cuInit", "function_499")
    }
    assert data.n_read < 200_000


@given(st.sets(st.text("abcd", min_size=1, max_size=6), max_size=60), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_a_hash_table_holds_what_is_defined_and_nothing_else(names, n_buckets):
    ordered = sorted(names)
    defined, undefined = ordered[::2], ordered[1::2]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "library"
        write_sparsely(path, build_library(defined, undefined, n_buckets=n_buckets))
        found = find_functions(path, [*ordered, "absent", ""])
    assert found.keys() == set(defined)
    assert sorted(found.values()) == [0x1000 + number for number in range(len(defined))]


def test_a_hash_table_without_an_end_is_refused(tmp_path):
    path = tmp_path / "endless"
    write_sparsely(path, build_library(["a"], [], n_buckets=1, is_endless=True))
    # The wanted name has the same bits in the filter and another hash, so that the chain is followed.
    other = next(
        name
        for name in map("".join, itertools.product("abcdefgh", repeat=4))
        if gnu_hash(name) % 64 in bits_of("a") and (gnu_hash(name) >> 6) % 64 in bits_of("a")
    )
    with pytest.raises(BadDataError, match="no end"):
        find_functions(path, [other])


def bits_of(name):
    return {gnu_hash(name) % 64, (gnu_hash(name) >> 6) % 64}


def test_a_library_without_that_table_is_read_symbol_by_symbol(tmp_path):
    library = get_program().parent / "libcudart.so.12"
    whole = library.read_bytes()
    tag = struct.pack("<q", 0x6FFFFEF5)
    path = tmp_path / "plain"
    path.write_bytes(whole.replace(tag, struct.pack("<q", 0x6FFFFEF4)))
    assert whole.count(tag) == 1
    names = ["cudaMalloc", "cudaLaunchKernel", "ncclAllReduce"]
    assert find_functions(path, names) == find_functions(library, names) != {}


@pytest.mark.parametrize("near_bytes", [0, 4096])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_few_names_are_found_wherever_longer_ones_surround_them(path, near_bytes, monkeypatch):
    """The shortest names alone: nearly all others are left out by their length, unread."""
    monkeypatch.setattr(elf, "_NEAR_BYTES", near_bytes)
    theirs = by_pyelftools(path)
    names = sorted(theirs, key=len)[: max(len(theirs) // 10, 3)]
    ours = find_functions(path, names)
    assert ours.keys() == set(names)
    for name, offset in ours.items():
        assert offset in theirs[name], name


def test_a_stripped_file_still_tells_its_sections_and_what_it_needs():
    library = get_program().parent / "libcudart.so.12"
    with library.open("rb") as file:
        asked = ElfFile(FileBytes(file.fileno()))
        assert asked.needs_library("libcuda.so")
        assert not asked.needs_library("libcudart")
        assert {".dynsym", ".text"} <= asked.find_section_names()
