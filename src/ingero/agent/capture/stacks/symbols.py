"""The symbols of an ELF file, by name and by address, and its unwind table.

The full table where the file has one, else that of its debug file (found by build id), else the exported names. The
file may be changed or cut short at any time by whom it belongs to: nothing of it is mapped, where that would end us.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from ingero.agent.capture.discover.elf import FileBytes, read_symbols
from ingero.agent.capture.discover.processes import OpenFile, open_file
from ingero.agent.capture.kernel.demangle import demangle
from ingero.agent.capture.kernel.elf import read_headers
from ingero.agent.capture.stacks.rules import UnwindRule
from ingero.agent.capture.stacks.unwind_table import UnwindTable
from ingero.closing import Closing
from ingero.errors import BadDataError
from ingero.model.arrays import Records

_FUNCTION: Final = np.dtype([("value", "<u8"), ("size", "<u8"), ("name", "<u4")])
_FUNCTIONS: Final = (2, 10)  # STT_FUNC, STT_GNU_IFUNC
_SYMTAB, _DYNSYM, _NOTE = 2, 11, 7
_LOAD, _EXECUTABLE = 1, 1  # PT_LOAD, PF_X
_BUILD_ID: Final = 3  # NT_GNU_BUILD_ID
_DEBUG_FOLDER: Final = Path("/usr/lib/debug/.build-id")
_NAME_BYTES: Final = 4096
_MAX_STRINGS_BYTES: Final = 256 << 20
_NOTE_BYTES: Final = 4096


class Symbols(Closing):
    """What a file calls its functions.

    Args:
        fd: The file; the descriptor stays the caller's, who closes it after this.
        debug_folder: Where debug files lie by build id.

    Raises:
        BadDataError: Not a 64-bit little-endian ELF file, or a damaged one.
        OSError: It cannot be read.
    """

    def __init__(self, fd: int, debug_folder: Path = _DEBUG_FOLDER) -> None:
        self._data = FileBytes(fd, 0)
        self._sections, self._segments = read_headers(self._data)
        segments = self._segments
        is_code = (segments["type"] == _LOAD) & (segments["flags"] & _EXECUTABLE != 0)
        self._loads = segments[is_code]
        self._unwind: UnwindTable | None = None
        self._is_unwind_read = False
        self._debug: OpenFile | None = None
        self.build_id = self._read_build_id()
        self._names, self._names_start, self._names_end = self._data, 0, 0
        self._functions = np.empty(0, _FUNCTION)
        try:
            self._choose(debug_folder)
        except BaseException:
            self.close()
            raise

    def _choose(self, debug_folder: Path) -> None:
        """Take the fullest table there is."""
        data, sections = self._data, self._sections
        if not (sections["type"] == _SYMTAB).any() and self.build_id:
            beside = debug_folder / self.build_id[:2] / f"{self.build_id[2:]}.debug"
            try:
                self._debug = open_file(beside)
                debug = FileBytes(self._debug.fd, 0)
                sections, _ = read_headers(debug)
                data = debug
            except (OSError, BadDataError):
                pass
        for kind in (_SYMTAB, _DYNSYM):
            for symbols in sections[sections["type"] == kind]:
                self._take(data, symbols, sections)
            if len(self._functions):
                return

    def _take(self, data: FileBytes, symbols: np.void, sections: Records) -> None:
        table = read_symbols(data, symbols)
        strings = sections[int(symbols["link"]) % len(sections)]
        is_function = np.isin(table["info"] & 0xF, _FUNCTIONS) & (table["section"] != 0)
        table = table[is_function & (table["value"] != 0)]
        # Of several names for one address a sized one, of these an exported one, of these the first in the table.
        is_global = table["info"] >> 4 != 0
        order = np.lexsort((
            *(np.arange(len(table))[::-1], is_global, table["size"] > 0, table["value"]),
        ))
        functions = np.empty(len(table), _FUNCTION)
        functions["value"], functions["size"] = table["value"][order], table["size"][order]
        functions["name"] = table["name"][order]
        self._functions = functions
        self._names, self._names_start = data, int(strings["offset"])
        self._names_end = self._names_start + int(strings["size"])

    def _read_build_id(self) -> str:
        for section in self._sections[self._sections["type"] == _NOTE]:
            start, n_bytes = int(section["offset"]), min(int(section["size"]), _NOTE_BYTES)
            note = self._data[start : start + n_bytes]
            if note[12:16] == b"GNU\0" and int.from_bytes(note[8:12], "little") == _BUILD_ID:
                return note[16 : 16 + int.from_bytes(note[4:8], "little")].hex()
        return ""

    def find_bias(self, start: int, offset: int) -> int | None:
        """What to add to an address in the file to get the one in memory, for a mapping of its code at ``start``.

        Only code is looked at: a page may hold the end of one segment and the begin of the next, and is then mapped for
        both.

        Args:
            start: Where the mapping begins.
            offset: Where in the file it begins.
        """
        for load in self._loads:
            begin = int(load["offset"]) & -mmap.PAGESIZE
            if begin <= offset < int(load["offset"]) + int(load["file_size"]):
                return start - (int(load["address"]) - int(load["offset"]) + offset)
        return None

    def find_function(self, address: int) -> tuple[str, int] | None:
        """Name and distance from its begin of the function around an address in the file, as linked."""
        i = int(np.searchsorted(self._functions["value"], np.uint64(address), side="right")) - 1
        if i < 0:
            return None
        found = self._functions[i]
        distance = address - int(found["value"])
        # Written in assembly it may have no size, as the `_start` of arm64: then it ends where the next begins.
        following = self._functions["value"][i + 1 : i + 2].tolist()
        size = int(found["size"]) or (following[0] - int(found["value"]) if following else 1)
        if distance >= size:
            return None
        start = self._names_start + int(found["name"])
        try:
            text = self._names[start : min(start + _NAME_BYTES, self._names_end)]
        except OSError:
            return None
        if not text:  # the file was cut short
            return None
        return demangle(text.split(b"\0", 1)[0].decode("utf-8", "replace")), distance

    def find_rule(self, address: int) -> UnwindRule | None:
        """How to get from an address in the file, as linked, to the caller; None where the file does not tell."""
        with contextlib.suppress(BadDataError, OSError):
            if not self._is_unwind_read:
                self._is_unwind_read = True
                self._unwind = UnwindTable(self._data, self._segments)
            return self._unwind.find_rule(address) if self._unwind else None
        return None

    def find_exported(self, *names: str) -> dict[str, int]:
        """Addresses, as linked, of exported symbols; those that the file does not define are left out.

        Raises:
            BadDataError: The file is damaged.
            OSError: It cannot be read.
        """
        return dict(self._iter_exported(names))

    def _iter_exported(self, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
        for symbols in self._sections[self._sections["type"] == _DYNSYM]:
            strings = self._sections[int(symbols["link"]) % len(self._sections)]
            if strings["size"] > _MAX_STRINGS_BYTES:
                raise BadDataError("the names of an ELF file are too long")
            text = self._data.read(int(strings["offset"]), int(strings["size"]))
            table = read_symbols(self._data, symbols)
            table = table[(table["section"] != 0) & (table["value"] != 0)]
            for name in names:
                at = (b"\0" + text).find(b"\0" + name.encode() + b"\0")
                is_it = table["name"] == at
                if at >= 0 and is_it.any():
                    yield name, int(table["value"][is_it][0])

    def close(self) -> None:
        """Let go of the debug file; safe to call twice."""
        if self._debug is not None:
            self._debug.close()
