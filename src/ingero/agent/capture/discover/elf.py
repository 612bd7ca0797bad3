"""File offsets of named functions in an ELF file, dynamic or static.

A shared library is asked name by name through its GNU hash table, which takes the same time whatever the file's size.
Functions that are not exported, such as those of a runtime that was linked in, are looked for in ``.symtab`` where the
file kept it (11 ms for the 214 041 symbols of PyTorch 2.13.0's ``libtorch_cuda.so``, of whose 66 MB of names 1 % are
read). Only what is needed is read, with pread(): a file that is cut short meanwhile costs an error, where a map would
cost the process. Sources: System V gABI, ELF-64 object file format and "Dynamic Section"; the hash table as glibc's
``elf/dl-lookup.c`` (2.41, ``do_lookup_x``) reads it.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.agent.capture.kernel.elf import read_headers
from ingero.errors import BadDataError
from ingero.model.arrays import Records

_SYMBOL: Final = np.dtype([
    ("name", "<u4"),
    ("info", "u1"),
    ("other", "u1"),
    ("section", "<u2"),
    ("value", "<u8"),
    ("size", "<u8"),
])  # Elf64_Sym
_ONE_SYMBOL: Final = struct.Struct("<IBBHQQ")
_FUNCTIONS: Final = (2, 10)  # STT_FUNC, STT_GNU_IFUNC
_HEAD_BYTES: Final = (
    65_536  # the loader's tables come first: most are in here, and need no further call
)
_LOAD: Final = 1
_DYNAMIC: Final = 2
_SYMTAB: Final = 2
_DYNSYM: Final = 11
_NEEDED: Final = 1
_STRTAB: Final = 5
_DYNAMIC_SYMTAB: Final = 6
_STRTAB_BYTES: Final = 10
_GNU_HASH: Final = 0x6FFF_FEF5
_MAX_LINKS: Final = 65_536  # of one chain of the hash table
_MAX_SYMBOLS: Final = (
    16 << 20
)  # a table of 400 MB: more than any file has, and room for all of them
_NEAR_BYTES: Final = 4096  # names that lie closer than this are read together
_MAX_NAME_CHARS: Final = 4096


class FileBytes:
    """An open file that is read where it is sliced.

    Args:
        fd: A descriptor, which stays the caller's.
        head_bytes: So many of its first bytes are read now and kept.
    """

    def __init__(self, fd: int, head_bytes: int = _HEAD_BYTES) -> None:
        self._fd = fd
        self._size = os.fstat(fd).st_size
        self._head = os.pread(fd, head_bytes, 0)
        self.n_read = len(self._head)
        """Bytes read so far."""

    def __len__(self) -> int:
        """Size of the file when it was looked at."""
        return self._size

    def __getitem__(self, part: slice) -> bytes:
        """The bytes between two offsets; fewer where the file ends."""
        start, stop, _ = part.indices(self._size)
        if stop <= len(self._head):
            return self._head[start:stop]
        data = b""
        while start + len(data) < stop:
            more = os.pread(self._fd, stop - start - len(data), start + len(data))
            if not more:
                break
            data = data + more if data else more
        self.n_read += len(data)
        return data

    def read(self, offset: int, n_bytes: int) -> bytes:
        """Exactly so many bytes.

        Raises:
            BadDataError: They lie outside the file.
        """
        data = self[offset : offset + n_bytes]
        if len(data) != n_bytes:
            raise BadDataError("an ELF table lies outside the file")
        return data


class ElfFile:
    """An ELF file that is asked for what it defines and needs.

    Args:
        file: The file; it is read when something is asked.

    Raises:
        BadDataError: Not a 64-bit little-endian ELF file, or cut short; also of every method.
        OSError: It cannot be read; also of every method.
    """

    def __init__(self, file: FileBytes) -> None:
        self._file = file
        self._sections, segments = read_headers(file)
        self._loads = _Loads(segments)
        self._dynamic = _read_dynamic(file, segments, self._loads)

    def find_functions(self, names: Collection[str]) -> dict[str, int]:
        """File offsets of those functions that the file defines, exported or not."""
        return {**self.find_local(names), **self.find_exported(names)}

    def find_exported(self, names: Collection[str]) -> dict[str, int]:
        """File offsets of those functions that other files can call, in the order of the names."""
        dynamic = self._dynamic
        if dynamic is None or not dynamic.hash_offset:
            return self._search(_DYNSYM, names)
        table = _HashTable(self._file, dynamic)
        return self._place((name, table.find(name)) for name in names)

    def find_local(self, names: Collection[str]) -> dict[str, int]:
        """File offsets of those functions that ``.symtab`` names: also what was linked in, and is not exported."""
        return self._search(_SYMTAB, names)

    def needs_library(self, prefix: str) -> bool:
        """Whether the file asks the loader for a library whose name begins so."""
        dynamic = self._dynamic
        return dynamic is not None and any(
            dynamic.read_name(self._file, place).startswith(prefix.encode())
            for place in dynamic.needed
        )

    def find_sections(self, names: Collection[str]) -> tuple[tuple[int, int], ...]:
        """Begin and end of the named sections, as linked; those that the file has."""
        offsets = ((int(one["address"]), int(one["size"])) for one in self._sections)
        return tuple(
            (address, address + size)
            for name, (address, size) in zip(self._read_section_names(), offsets, strict=False)
            if name in names
        )

    def find_address(self, offset: int) -> int:
        """Where a byte of the file is loaded, as linked.

        Raises:
            BadDataError: It is not loaded.
        """
        return self._loads.find_address(offset)

    def get_offset(self, address: int) -> int:
        """Where in the file the byte at an address lies.

        Raises:
            BadDataError: Nowhere.
        """
        offset = self._loads.find_offset(address)
        if offset is None:
            raise BadDataError(f"the file has nothing at {address:#x}")
        return offset

    def find_section_names(self) -> frozenset[str]:
        """Names of the file's sections; a stripped file has them too."""
        return frozenset(self._read_section_names())

    def _read_section_names(self) -> list[str]:
        """A name for each section; none where the file keeps none."""
        (index,) = struct.unpack("<H", self._file.read(62, 2))  # e_shstrndx
        if index >= len(self._sections):
            return []
        names = self._sections[index]
        text = self._file.read(int(names["offset"]), int(names["size"]))
        return [
            text[int(start) :].partition(b"\0")[0].decode("ascii", "replace")
            for start in self._sections["name"]
        ]

    def _search(self, kind: int, names: Collection[str]) -> dict[str, int]:
        """Functions by the tables of one kind, one symbol after another."""
        sections = self._sections
        is_it = (sections["type"] == kind) & (sections["link"] < len(sections))
        found: dict[str, int] = {}
        for symbols in sections[is_it]:
            pairs = _search(self._file, symbols, sections[symbols["link"]], names)
            found = {**self._place(pairs), **found}
        return found

    def _place(self, pairs: Iterable[tuple[str, int | None]]) -> dict[str, int]:
        """File offsets of functions by their addresses; of one that is there twice the first."""
        found: dict[str, int] = {}
        for name, address in pairs:
            offset = self._loads.find_offset(address) if address else None
            if offset is not None:
                found.setdefault(name, offset)
        return found


class _Loads:
    """Which part of the file lies at which address."""

    def __init__(self, segments: Records) -> None:
        loads = segments[segments["type"] == _LOAD]
        columns = (loads[name].tolist() for name in ("address", "file_size", "offset"))
        self._parts = [
            (start, start + size, offset) for start, size, offset in zip(*columns, strict=True)
        ]

    def find_offset(self, address: int) -> int | None:
        """Offset in the file of an address; None when it has no bytes there."""
        inside = (
            int(address - start + at) for start, end, at in self._parts if start <= address < end
        )
        return next(inside, None)

    def find_address(self, offset: int) -> int:
        """Address of a byte of the file."""
        for start, end, at in self._parts:
            if at <= offset < at + end - start:
                return int(offset - at + start)
        raise BadDataError(f"byte {offset:#x} of the file is not loaded")


@dataclass(frozen=True, slots=True)
class _Dynamic:
    """Where the loader's tables lie in the file; 0 where there is none."""

    hash_offset: int
    symbols_offset: int
    strings_offset: int
    strings_bytes: int
    needed: tuple[int, ...]

    def read_name(self, file: FileBytes, place: int) -> bytes:
        """A string of the string table."""
        end = min(place + _MAX_NAME_CHARS, self.strings_bytes)
        start = self.strings_offset
        return file[start + place : start + end].partition(b"\0")[0]


def _read_dynamic(file: FileBytes, segments: Records, loads: _Loads) -> _Dynamic | None:
    parts = segments[segments["type"] == _DYNAMIC]
    if not len(parts) or not parts[0]["file_size"]:
        return None
    n_entries = int(parts[0]["file_size"]) // 16
    data = file.read(int(parts[0]["offset"]), n_entries * 16)
    values: dict[int, int] = {}
    needed = []
    for tag, value in struct.iter_unpack("<qQ", data):
        if tag == 0:
            break
        if tag == _NEEDED:
            needed.append(value)
        values.setdefault(tag, value)
    offsets = [
        loads.find_offset(values[tag]) if tag in values else None
        for tag in (_GNU_HASH, _DYNAMIC_SYMTAB, _STRTAB)
    ]
    is_whole = None not in offsets and _STRTAB_BYTES in values
    return _Dynamic(
        (offsets[0] or 0) if is_whole else 0,
        offsets[1] or 0,
        offsets[2] or 0,
        values.get(_STRTAB_BYTES, 0),
        tuple(needed),
    )


@functools.cache
def _gnu_hash(name: str) -> int:
    value = 5381
    for byte in name.encode():
        value = (value * 33 + byte) & 0xFFFF_FFFF
    return value


class _HashTable:
    """The GNU hash table of a file, which holds what it defines and nothing else."""

    def __init__(self, file: FileBytes, dynamic: _Dynamic) -> None:
        self._file, self._dynamic = file, dynamic
        head = struct.unpack("<4I", file.read(dynamic.hash_offset, 16))
        self._n_buckets, self._first, self._n_words, self._shift = head
        self._words_at = dynamic.hash_offset + 16
        self._buckets_at = self._words_at + 8 * self._n_words
        self._chains_at = self._buckets_at + 4 * self._n_buckets

    def find(self, name: str) -> int | None:
        """Address of a function that the file defines."""
        if not self._n_buckets or not self._n_words:
            return None
        value = _gnu_hash(name)
        word_at = self._words_at + 8 * (value // 64 % self._n_words)
        (word,) = struct.unpack("<Q", self._file.read(word_at, 8))
        if not word >> (value % 64) & word >> ((value >> self._shift) % 64) & 1:
            return None
        bucket_at = self._buckets_at + 4 * (value % self._n_buckets)
        (index,) = struct.unpack("<I", self._file.read(bucket_at, 4))
        if index < self._first:
            return None
        return self._follow(index, value, name.encode())

    def _follow(self, index: int, value: int, name: bytes) -> int | None:
        for place in range(index, index + _MAX_LINKS):
            at = self._chains_at + 4 * (place - self._first)
            (link,) = struct.unpack("<I", self._file.read(at, 4))
            if link | 1 == value | 1:
                address = self._read_symbol(place, name)
                if address:
                    return address
            if link & 1:
                return None
        raise BadDataError("a chain of the ELF hash table has no end")

    def _read_symbol(self, index: int, name: bytes) -> int | None:
        at = self._dynamic.symbols_offset + index * _SYMBOL.itemsize
        place, info, _, section, value, _ = _ONE_SYMBOL.unpack(
            self._file.read(at, _SYMBOL.itemsize)
        )
        if info & 0xF not in _FUNCTIONS or not section:
            return None
        if self._dynamic.read_name(self._file, place) != name:
            return None
        return int(value)


def _search(
    file: FileBytes, symbols: np.void, strings: np.void, names: Collection[str]
) -> Iterator[tuple[str, int]]:
    """Name and address of wanted functions in a table that has no index; in the table's order.

    Most names are ruled out without reading them: a name ends before the next one begins, unless the linker let them
    share an end, and then it is longer still. So one whose next is further away than the longest wanted name cannot be
    wanted.
    """
    wanted = {name.encode(): name for name in names}
    longest = max(map(len, wanted), default=0) + 1
    start, n_bytes = int(strings["offset"]), int(strings["size"])
    table = read_symbols(file, symbols)
    offsets = np.sort(table["name"]).astype(np.int64)  # np.unique() is slower by a factor of 60
    if len(offsets) and offsets[-1] >= n_bytes:
        raise BadDataError("the names of an ELF file lie outside it")
    lengths = np.diff(offsets, append=n_bytes)  # 0 for the first of two that share a name
    short = offsets[(lengths > 0) & (lengths <= longest)]
    found = {
        place: wanted[text]
        for place, text in _read_names(file, short, start, start + n_bytes, longest)
        if text in wanted
    }
    if not found:
        return
    table = table[np.isin(table["name"], np.fromiter(found, np.uint32, len(found)))]
    is_function = np.isin(table["info"] & 0xF, _FUNCTIONS) & (table["section"] != 0)
    for symbol in table[is_function & (table["value"] != 0)]:
        yield found[int(symbol["name"])], int(symbol["value"])


def read_symbols(file: FileBytes, symbols: np.void) -> Records:
    """A symbol table, whose rows are ``Elf64_Sym``; empty where the section is.

    Raises:
        BadDataError: It lies outside the file, or is too large.
        OSError: It cannot be read.
    """
    count = int(symbols["size"]) // _SYMBOL.itemsize
    if count > _MAX_SYMBOLS:
        raise BadDataError("a symbol table of an ELF file is too large")
    return np.frombuffer(file.read(int(symbols["offset"]), count * _SYMBOL.itemsize), _SYMBOL)


def _read_names(
    file: FileBytes, offsets: Records, start: int, stop: int, longest: int
) -> Iterator[tuple[int, bytes]]:
    """Place and text of names; neighbours are read together.

    Args:
        file: The file.
        offsets: Where they begin, from ``start``, ascending; shape (n,).
        start: Offset of the string table in the file.
        stop: Offset of its end.
        longest: Bytes of the longest that matters, with the zero after it; more of a name is not given.
    """
    breaks = np.flatnonzero(np.diff(offsets) > _NEAR_BYTES) + 1
    for group in np.split(offsets, breaks):
        if not len(group):
            continue
        first = int(group[0])
        text = file[start + first : min(start + int(group[-1]) + longest, stop)]
        for place in group.tolist():
            yield place, text[place - first : place - first + longest].partition(b"\0")[0]
