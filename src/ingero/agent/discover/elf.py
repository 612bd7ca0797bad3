"""File offsets of named functions in an ELF file, dynamic or static, with one pass over the raw tables."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from ingero.errors import BadDataError

_SYMBOL: Final = np.dtype([
    ("name", "<u4"),
    ("info", "u1"),
    ("other", "u1"),
    ("section", "<u2"),
    ("value", "<u8"),
    ("size", "<u8"),
])  # Elf64_Sym
_Span = tuple[int, int]  # offset and size in bytes
_TYPE_FUNC: Final = 2
_TYPE_IFUNC: Final = 10
_TABLES: Final = (".dynsym", ".symtab")


def find_functions(path: Path | str, names: Collection[str], marker: str = "") -> dict[str, int]:
    """File offsets of those functions that the file defines.

    Args:
        path: The file.
        names: Symbols to look for.
        marker: A symbol without which the file is left alone; saves the search in large files.

    Raises:
        BadDataError: Not a 64-bit little-endian ELF file.
        OSError: It cannot be read.
    """
    found: dict[str, int] = {}
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        try:
            elf = ELFFile(file)
            if elf.elfclass != 64 or not elf.little_endian:
                raise BadDataError(f"{path} is not a 64-bit little-endian ELF file")
            loads = [
                (s["p_vaddr"], s["p_filesz"], s["p_offset"]) for s in elf.iter_segments("PT_LOAD")
            ]
            spans = list(_iter_tables(elf))
        except ELFError as error:
            raise BadDataError(f"{path} is not an ELF file: {error}") from error
        for symbols, strings in spans:
            for name, address in _search(data, (symbols, strings), names, marker):
                offset = _file_offset(address, loads)
                if offset is not None:
                    found.setdefault(name, offset)
    return found


def _iter_tables(elf: ELFFile) -> Iterator[tuple[_Span, _Span]]:
    """Where each symbol table and its strings lie in the file."""
    for name in _TABLES:
        section = elf.get_section_by_name(name)
        if section is not None:
            strings = elf.get_section(section["sh_link"])
            yield (
                (section["sh_offset"], section["sh_size"]),
                (strings["sh_offset"], strings["sh_size"]),
            )


def _search(
    data: mmap.mmap, tables: tuple[_Span, _Span], names: Collection[str], marker: str
) -> Iterator[tuple[str, int]]:
    (offset, size), (start, n_bytes) = tables
    end = start + n_bytes
    if marker and data.find(marker.encode() + b"\0", start, end) < 0:
        return
    # A copy: a view would keep the map from closing.
    table = np.frombuffer(
        data[offset : offset + size // _SYMBOL.itemsize * _SYMBOL.itemsize], _SYMBOL
    )
    kinds = table["info"] & 0xF
    is_function = (kinds == _TYPE_FUNC) | (kinds == _TYPE_IFUNC)
    table = table[is_function & (table["section"] != 0) & (table["value"] != 0)]
    table = table[np.argsort(table["name"], kind="stable")]
    for name in names:
        yield from ((name, value) for value in _values_of(data, table, name, (start, end)))


def _values_of(
    data: mmap.mmap, table: npt.NDArray[Any], name: str, span: tuple[int, int]
) -> Iterator[int]:
    """Addresses of the symbols called ``name``; a string table may hold it as the end of a longer string."""
    start, end = span
    text = name.encode() + b"\0"
    position = data.find(text, start, end)
    while position >= 0:
        index = int(np.searchsorted(table["name"], position - start))
        if index < len(table) and table["name"][index] == position - start:
            yield int(table["value"][index])
            return
        position = data.find(text, position + 1, end)


def _file_offset(address: int, loads: list[tuple[int, int, int]]) -> int | None:
    for virtual, size, offset in loads:
        if virtual <= address < virtual + size:
            return address - virtual + offset
    return None
