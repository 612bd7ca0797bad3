"""The headers of an ELF file as arrays.

Our own because it lies on the way from a process loading a library to the first counted call: pyelftools takes 5 ms for
what takes 0.1 ms here (``tests/agent/capture/discover`` holds it to pyelftools). Source: System V gABI, ELF-64 object
file format.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import numpy as np

from ingero.errors import BadDataError
from ingero.model.arrays import Records

_HEADER: Final = np.dtype([
    ("magic", "S4"), ("class", "u1"), ("data", "u1"), ("version", "u1"), ("rest", "V9"), ("type", "<u2"),
    ("machine", "<u2"), ("version2", "<u4"), ("entry", "<u8"), ("phoff", "<u8"), ("shoff", "<u8"), ("flags", "<u4"),
    ("ehsize", "<u2"), ("phentsize", "<u2"), ("phnum", "<u2"), ("shentsize", "<u2"), ("shnum", "<u2"),
    ("shstrndx", "<u2"),
])  # fmt: skip
SECTION: Final = np.dtype([
    ("name", "<u4"), ("type", "<u4"), ("flags", "<u8"), ("address", "<u8"), ("offset", "<u8"), ("size", "<u8"),
    ("link", "<u4"), ("info", "<u4"), ("align", "<u8"), ("entry_size", "<u8"),
])  # fmt: skip
SEGMENT: Final = np.dtype([
    ("type", "<u4"), ("flags", "<u4"), ("offset", "<u8"), ("address", "<u8"), ("physical", "<u8"), ("file_size", "<u8"),
    ("memory_size", "<u8"), ("align", "<u8"),
])  # fmt: skip
_CLASS_64: Final = 2
_LITTLE_ENDIAN: Final = 1


class ElfData(Protocol):
    """Bytes of a file, wherever they are: in memory, mapped, or read when they are sliced."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, part: slice, /) -> bytes:
        """Those between two offsets."""
        ...


def read_headers(data: ElfData) -> tuple[Records, Records]:
    """Section and segment headers; copies, so the file may be closed.

    Raises:
        BadDataError: Not a 64-bit little-endian ELF file, or cut short.
    """
    if len(data) < _HEADER.itemsize:
        raise BadDataError("too short for an ELF file")
    header = np.frombuffer(bytes(data[: _HEADER.itemsize]), _HEADER)[0]
    if (header["magic"], header["class"], header["data"]) != (
        b"\x7fELF",
        _CLASS_64,
        _LITTLE_ENDIAN,
    ):
        raise BadDataError("not a 64-bit little-endian ELF file")
    return (
        _read_table(data, int(header["shoff"]), int(header["shnum"]), SECTION),
        _read_table(data, int(header["phoff"]), int(header["phnum"]), SEGMENT),
    )


def read_machine(data: ElfData) -> int:
    """``e_machine``: the kind of processor that a file with valid headers is for."""
    return int.from_bytes(data[18:20], "little")


def _read_table(data: ElfData, offset: int, count: int, dtype: np.dtype[Any]) -> Records:
    end = offset + count * dtype.itemsize
    if end > len(data):
        raise BadDataError("an ELF table lies outside the file")
    return np.frombuffer(bytes(data[offset:end]), dtype)


def find_section(data: bytes, name: str) -> bytes | None:
    """Contents of a section, or None when the file has none of that name."""
    sections, _ = read_headers(data)
    shstrndx = int(np.frombuffer(data[: _HEADER.itemsize], _HEADER)[0]["shstrndx"])
    strings = int(sections[shstrndx]["offset"])
    for section in sections:
        start = strings + int(section["name"])
        if data[start : data.index(b"\0", start)] == name.encode():
            return data[int(section["offset"]) : int(section["offset"]) + int(section["size"])]
    return None
