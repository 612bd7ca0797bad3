"""Which line an instruction belongs to, from a code object's line table.

Sources: CPython ``Objects/lnotab_notes.txt`` (3.9 and 3.10), ``Objects/locations.md`` (3.11 to 3.14). Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Final

_NO_LINE: Final = -128
_CODE_NONE: Final = 15
_CODE_LONG: Final = 14
_CODE_NO_COLUMNS: Final = 13
_CODE_ONE_LINE: Final = 10


class TableKind(enum.Enum):
    """How a table is written."""

    LNOTAB = "3.9"
    LINES = "3.10"
    LOCATIONS = "3.11"


def find_line(kind: TableKind, table: bytes, first_line: int, offset: int) -> int | None:
    """The line of the instruction at an offset.

    Args:
        kind: How the table is written.
        table: ``co_lnotab`` or ``co_linetable``.
        first_line: ``co_firstlineno``.
        offset: In bytes from the first instruction; negative before it.

    Returns:
        None where the compiler gave the instruction no line, or the table ends before it.
    """
    if offset < 0:
        return first_line
    if kind is TableKind.LNOTAB:
        return _find_in_lnotab(table, first_line, offset)
    spans = _iter_lines if kind is TableKind.LINES else _iter_locations
    end = 0
    for n_bytes, line in spans(table, first_line):
        end += n_bytes
        if offset < end:
            return line
    return None


def _find_in_lnotab(table: bytes, first_line: int, offset: int) -> int:
    line, address = first_line, 0
    for i in range(0, len(table) - 1, 2):
        address += table[i]
        if address > offset:
            break
        line += _signed(table[i + 1])
    return line


def _iter_lines(table: bytes, first_line: int) -> Iterator[tuple[int, int | None]]:
    """Bytes of code and their line, one span after another (PEP 626)."""
    line = first_line
    for i in range(0, len(table) - 1, 2):
        delta = _signed(table[i + 1])
        if delta == _NO_LINE:
            yield table[i], None
        else:
            line += delta
            yield table[i], line


def _iter_locations(table: bytes, first_line: int) -> Iterator[tuple[int, int | None]]:
    """Bytes of code and their line, one entry after another (PEP 657)."""
    line, at = first_line, 0
    while at < len(table):
        head = table[at]
        at += 1
        n_bytes = ((head & 7) + 1) * 2
        code = head >> 3 & 15
        if code == _CODE_NONE:
            yield n_bytes, None
        else:
            if code in {_CODE_LONG, _CODE_NO_COLUMNS}:
                delta = _read_varint(table, at)
                line += -(delta >> 1) if delta & 1 else delta >> 1
            elif code >= _CODE_ONE_LINE:
                line += code - _CODE_ONE_LINE
            yield n_bytes, line
        while at < len(table) and not table[at] & 0x80:  # only an entry's first byte has this bit
            at += 1


def _read_varint(table: bytes, at: int) -> int:
    value = shift = 0
    while at < len(table):
        byte = table[at]
        at += 1
        value |= (byte & 63) << shift
        shift += 6
        if not byte & 64:
            break
    return value


def _signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte
