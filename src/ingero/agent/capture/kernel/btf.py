"""NumPy dtypes and enumerations out of an object's BTF, so that record layouts are written once, in C.

Source: Documentation/bpf/btf.rst of Linux 6.13.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ingero.agent.capture.kernel.elf import find_section
from ingero.errors import BadDataError

_MAGIC: Final = 0xEB9F
_INT, _ARRAY, _STRUCT, _ENUM, _ENUM64 = 1, 3, 4, 6, 19
_MODIFIERS: Final = frozenset({8, 9, 10, 11, 18})  # typedef, volatile, const, restrict, type tag
_TRAILER_BYTES: Final = {1: 4, 3: 12, 14: 4, 17: 4}
_MEMBER_BYTES: Final = {4: 12, 5: 12, 6: 8, 13: 8, 15: 12, 19: 12}
_SIGNED: Final = 1


@dataclass(frozen=True, slots=True)
class _Type:
    name: str
    kind: int
    size_or_type: int
    n_members: int
    payload: bytes


class Btf:
    """The types of one object.

    Args:
        data: The contents of a ``.BTF`` section.
    """

    def __init__(self, data: bytes) -> None:
        magic, _version, _flags, header = struct.unpack_from("<HBBI", data)
        if magic != _MAGIC:
            raise BadDataError("not little-endian BTF")
        type_off, type_len, str_off, _str_len = struct.unpack_from("<IIII", data, 8)
        self._strings = data[header + str_off :]
        self._types: list[_Type] = [_Type("void", 0, 0, 0, b"")]
        position, end = header + type_off, header + type_off + type_len
        while position < end:
            name, info, size = struct.unpack_from("<III", data, position)
            kind, n_members = info >> 24 & 0x1F, info & 0xFFFF
            n_bytes = _TRAILER_BYTES.get(kind, 0) + n_members * _MEMBER_BYTES.get(kind, 0)
            payload = data[position + 12 : position + 12 + n_bytes]
            self._types.append(_Type(self._name(name), kind, size, n_members, payload))
            position += 12 + n_bytes

    def _name(self, offset: int) -> str:
        return self._strings[offset : self._strings.index(b"\0", offset)].decode()

    def _get(self, name: str, kinds: tuple[int, ...]) -> _Type:
        for candidate in self._types:
            if candidate.name == name and candidate.kind in kinds:
                return candidate
        raise BadDataError(f"the object's BTF has no {name!r}")

    def build_dtype(self, struct_name: str) -> np.dtype[Any]:
        """The dtype of a structure; padding named ``reserved`` is left out but keeps its place."""
        return self._dtype(self._get(struct_name, (_STRUCT,)))

    def build_enum(self, name: str) -> dict[str, int]:
        """Names and values of an enumeration."""
        found = self._get(name, (_ENUM, _ENUM64))
        if found.kind == _ENUM:
            return {self._name(n): v for n, v in struct.iter_unpack("<Ii", found.payload)}
        return {
            self._name(n): lo | hi << 32 for n, lo, hi in struct.iter_unpack("<III", found.payload)
        }

    def _dtype(self, found: _Type) -> np.dtype[Any]:
        while found.kind in _MODIFIERS:
            found = self._types[found.size_or_type]
        if found.kind == _INT:
            is_signed = found.payload[3] & _SIGNED
            return np.dtype(f"<{'i' if is_signed else 'u'}{found.size_or_type}")
        if found.kind in {_ENUM, _ENUM64}:
            return np.dtype(f"<u{found.size_or_type}")
        if found.kind == _ARRAY:
            element, _index, length = struct.unpack("<III", found.payload)
            inner = self._types[element]
            if inner.name == "char":
                return np.dtype(f"S{length}")
            return np.dtype((self._dtype(inner), (length,)))
        if found.kind == _STRUCT:
            return self._struct(found)
        raise BadDataError(f"a record holds a field of BTF kind {found.kind}")

    def _struct(self, found: _Type) -> np.dtype[Any]:
        names, formats, offsets = [], [], []
        for name_off, type_id, bits in struct.iter_unpack("<III", found.payload):
            name = self._name(name_off)
            if name == "reserved":
                continue
            names.append(name)
            formats.append(self._dtype(self._types[type_id]))
            offsets.append((bits & 0xFFFFFF) // 8)
        return np.dtype({
            "names": names,
            "formats": formats,
            "offsets": offsets,
            "itemsize": found.size_or_type,
        })


def read_btf(path: Path) -> Btf:
    """The BTF of a compiled object."""
    section = find_section(path.read_bytes(), ".BTF")
    if section is None:
        raise BadDataError(f"{path} carries no BTF")
    return Btf(section)
