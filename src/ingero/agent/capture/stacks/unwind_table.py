"""Unwind tables: how to get from an address in a file to the caller of the function around it.

The table that the linker sorted (``.eh_frame_hdr``) leads to the one entry that is wanted, and only that is read: the
tables of CUDA's libraries have hundreds of thousands. pyelftools reads all of a table first; the tests hold this module
to it, address by address.

Source: DWARF 5 section 6.4; Linux Standard Base Core 5.0, chapter 10.6 (``.eh_frame``, ``.eh_frame_hdr``); of the
letters in an augmentation LLVM's and GNU's sources (``B``: return addresses are signed by the second key, ``G``: stack
slots are tagged, both of arm64).
"""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np

from ingero.agent.capture.kernel.elf import ElfData, read_machine
from ingero.agent.capture.stacks.cfi import Common, Cursor
from ingero.agent.capture.stacks.registers import Registers, find_registers
from ingero.agent.capture.stacks.rules import UnwindRule, build_rule
from ingero.errors import BadDataError
from ingero.model.arrays import Records

Data = bytes | mmap.mmap

_LOAD, _EH_FRAME = 1, 0x6474E550  # PT_LOAD, PT_GNU_EH_FRAME
_MAX_ENTRY_BYTES: Final = 1 << 16
_OMITTED: Final = 0xFF
_SORTED: Final = 0x3B  # the table's own numbers: relative to its begin, four bytes, signed


class UnwindTable:
    """The unwind table of one file.

    Args:
        data: The file.
        segments: Its segments, as `ingero.agent.capture.kernel.elf.read_headers` gives them.

    Raises:
        BadDataError: It has none that can be searched.
    """

    def __init__(self, data: ElfData, segments: Records) -> None:
        registers = find_registers(read_machine(data))
        if registers is None:
            raise BadDataError("the file is of a processor that is not unwound")
        self._data = data
        self._registers = registers
        self._loads = segments[segments["type"] == _LOAD]
        found = segments[segments["type"] == _EH_FRAME]
        if not len(found):
            raise BadDataError("the file has no unwind table")
        self._origin = int(found[0]["address"])
        header = Cursor(self._read(self._origin, 32), self._origin)
        version, frame, count, table = (header.byte() for _ in range(4))
        if version != 1 or table != _SORTED or _OMITTED in {frame, count}:
            raise BadDataError("the file's unwind table is not sorted")
        header.pointer(frame)
        n_entries = header.pointer(count)
        if n_entries * 8 > len(data):
            raise BadDataError("an unwind table lies outside the file")
        entries = self._read(self._origin + header.at, n_entries * 8)
        if len(entries) != n_entries * 8:
            raise BadDataError("an unwind table lies outside the file")
        pairs = np.frombuffer(entries, "<i4").reshape(-1, 2)
        self._starts, self._places = pairs[:, 0], pairs[:, 1]
        self._common: dict[int, Common] = {}
        self._rules: dict[int, UnwindRule | None] = {}

    def _read(self, address: int, n_bytes: int) -> bytes:
        """Bytes at an address as linked; fewer at the end of a segment."""
        for load in self._loads:
            inside = address - int(load["address"])
            if 0 <= inside < int(load["file_size"]):
                begin = int(load["offset"]) + inside
                end = min(begin + n_bytes, int(load["offset"]) + int(load["file_size"]))
                return bytes(self._data[begin:end])
        return b""

    def find_rule(self, address: int) -> UnwindRule | None:
        """The rule at an address as linked; None where no function is known or its entry is damaged.

        A form that a rule cannot express is of the kind `UnwindKind.UNKNOWN`.
        """
        if address not in self._rules:
            try:
                self._rules[address] = self._search(address)
            except BadDataError:
                self._rules[address] = None
        return self._rules[address]

    def find_function(self, address: int) -> tuple[int, int]:
        """Begin and end of the function, or of the part of one, around an address, as linked.

        Raises:
            BadDataError: None is known, or its entry is damaged.
        """
        found = self._locate(address)
        if found is None:
            raise BadDataError(f"the unwind table knows no function at {address:#x}")
        _, _, begin, end = found
        return begin, end

    def _search(self, address: int) -> UnwindRule | None:
        found = self._locate(address)
        if found is None:
            return None
        entry, common, begin, _ = found
        if common.has_size:
            entry.block()
        return build_rule(common, entry.data[entry.at :], address - begin, address)

    def _locate(self, address: int) -> tuple[Cursor, Common, int, int] | None:
        """The entry of an address, read up to what follows its range; None where there is none."""
        inside = address - self._origin
        i = int(np.searchsorted(self._starts, inside, side="right")) - 1
        if i < 0:
            return None
        place = self._origin + int(self._places[i])
        entry = self._open(place)
        common = self._find_common(place + 4 - entry.fixed("<I"))
        begin = entry.pointer(common.encoding)
        length = entry.pointer(common.encoding & 0x0F)
        if not begin <= address < begin + length:
            return None
        return entry, common, begin, begin + length

    def _open(self, place: int) -> Cursor:
        """An entry without its length."""
        length = Cursor(self._read(place, 4)).fixed("<I")
        if not 4 <= length <= _MAX_ENTRY_BYTES:
            raise BadDataError("an unwind table has an entry without a sensible length")
        data = self._read(place + 4, length)
        if len(data) != length:
            raise BadDataError("an unwind table ends inside an entry")
        return Cursor(data, place + 4)

    def _find_common(self, place: int) -> Common:
        if place not in self._common:
            self._common[place] = _read_common(self._open(place), self._registers)
        return self._common[place]


def _read_common(entry: Cursor, registers: Registers) -> Common:
    if entry.fixed("<I"):
        raise BadDataError("an unwind table points to an entry that is not a common one")
    version, augmentation = entry.byte(), entry.text()
    if version not in {1, 3} or augmentation.strip(b"zRPLSBG"):
        raise BadDataError(f"an unwind table is of version {version}, {augmentation!r}")
    code_align, data_align = entry.unsigned(), entry.signed()
    if (entry.byte() if version == 1 else entry.unsigned()) != registers.address:
        raise BadDataError("an unwind table is of another machine")
    encoding = 0
    if augmentation.startswith(b"z"):
        extra = Cursor(entry.block())
        for letter in augmentation.decode()[1:]:
            if letter == "R":
                encoding = extra.byte()
            elif letter == "L":
                extra.byte()
            elif letter == "P":
                extra.pointer(extra.byte() & 0x0F)
    return Common(
        code_align, data_align, encoding, b"S" in augmentation, augmentation.startswith(b"z"),
        entry.data[entry.at :], registers,
    )  # fmt: skip
