"""File offsets of named functions in an ELF file, dynamic or static, with one pass over the raw tables."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ingero.agent.kernel.elf import read_headers

_SYMBOL: Final = np.dtype([
    ("name", "<u4"),
    ("info", "u1"),
    ("other", "u1"),
    ("section", "<u2"),
    ("value", "<u8"),
    ("size", "<u8"),
])  # Elf64_Sym
_TYPE_FUNC: Final = 2
_TYPE_IFUNC: Final = 10
_SYMBOL_TABLES: Final = (11, 2)  # SHT_DYNSYM, SHT_SYMTAB
_LOAD: Final = 1

Table = npt.NDArray[Any]


def find_functions(
    path: Path | str, names: Collection[str], markers: Collection[str] = ()
) -> dict[str, int]:
    """File offsets of those functions that the file defines.

    Args:
        path: The file.
        names: Symbols to look for.
        markers: A file that names none of these is left alone, which saves the search.

    Raises:
        BadDataError: Not a 64-bit little-endian ELF file.
        OSError: It cannot be read.
        ValueError: It is empty.
    """
    found: dict[str, int] = {}
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        sections, segments = read_headers(data)
        loads = segments[segments["type"] == _LOAD]
        has_symbols = np.isin(sections["type"], _SYMBOL_TABLES) & (sections["link"] < len(sections))
        for symbols in sections[has_symbols]:
            tables = symbols, sections[symbols["link"]]
            for name, address in _search(data, tables, names, markers):
                offset = _file_offset(address, loads)
                if offset is not None:
                    found.setdefault(name, offset)
    return found


def _search(
    data: mmap.mmap,
    tables: tuple[np.void, np.void],
    names: Collection[str],
    markers: Collection[str],
) -> Iterator[tuple[str, int]]:
    symbols, strings = tables
    start = int(strings["offset"])
    end = start + int(strings["size"])
    if markers and all(data.find(m.encode() + b"\0", start, end) < 0 for m in markers):
        return
    offset, count = int(symbols["offset"]), int(symbols["size"]) // _SYMBOL.itemsize
    # A copy: a view would keep the map from closing.
    table = np.frombuffer(data[offset : offset + count * _SYMBOL.itemsize], _SYMBOL)
    kinds = table["info"] & 0xF
    is_function = (kinds == _TYPE_FUNC) | (kinds == _TYPE_IFUNC)
    table = table[is_function & (table["section"] != 0) & (table["value"] != 0)]
    table = table[np.argsort(table["name"], kind="stable")]
    text = data[start:end]
    for name in names:
        value = _find_value(text, table, name)
        if value is not None:
            yield name, value


def _find_value(text: bytes, table: Table, name: str) -> int | None:
    """Address of a symbol; the string table may also hold its name as the end of a longer string."""
    wanted = name.encode() + b"\0"
    position = text.find(wanted)
    while position >= 0:
        index = int(np.searchsorted(table["name"], position))
        if index < len(table) and table["name"][index] == position:
            return int(table["value"][index])
        position = text.find(wanted, position + 1)
    return None


def _file_offset(address: int, loads: Table) -> int | None:
    inside = loads[
        (loads["address"] <= address) & (address < loads["address"] + loads["file_size"])
    ]
    return address - int(inside[0]["address"]) + int(inside[0]["offset"]) if len(inside) else None
