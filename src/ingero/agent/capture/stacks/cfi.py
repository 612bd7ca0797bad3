"""Call frame instructions: where a caller's registers are, as a program that is run up to one address.

Source: DWARF 5 sections 6.4.2 and 7.24; Linux Standard Base Core 5.0, chapter 10.6; DWARF for the Arm 64-bit
Architecture 2024Q3, section 4.4 (what it adds to the instructions).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ingero.agent.capture.stacks.registers import X86_64, Registers
from ingero.errors import BadDataError

_MAX_REMEMBERED: Final = 64
_PC_RELATIVE: Final = 0x10
_FORMATS: Final = {
    0x00: "<Q",
    0x02: "<H",
    0x03: "<I",
    0x04: "<Q",
    0x0A: "<h",
    0x0B: "<i",
    0x0C: "<q",
}
_OTHER: Final = b""  # in place of an expression: saved in a way that a rule cannot say


class Cursor:
    """Reads numbers one after the other; `BadDataError` behind the end."""

    def __init__(self, data: bytes, address: int = 0) -> None:
        self.data = data
        self.address = address  # of the first byte
        self.at = 0

    def fixed(self, form: str) -> int:
        """A number of a `struct` format."""
        try:
            (value,) = struct.unpack_from(form, self.data, self.at)
        except struct.error as error:
            raise BadDataError("an unwind table ends inside an entry") from error
        self.at += struct.calcsize(form)
        return int(value)

    def byte(self) -> int:
        """One byte."""
        return self.fixed("<B")

    def unsigned(self) -> int:
        """An unsigned LEB128 number."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 70:
                raise BadDataError("a number in an unwind table does not end")

    def signed(self) -> int:
        """A signed LEB128 number."""
        begin = self.at
        value = self.unsigned()
        bits = 7 * (self.at - begin)
        return value - (1 << bits) if value >> (bits - 1) else value

    def block(self) -> bytes:
        """Bytes behind their number."""
        length = self.unsigned()
        self.at += length
        if self.at > len(self.data):
            raise BadDataError("an unwind table ends inside an entry")
        return self.data[self.at - length : self.at]

    def text(self) -> bytes:
        """Bytes up to a NUL, which is skipped."""
        end = self.data.find(b"\0", self.at)
        if end < 0:
            raise BadDataError("an unwind table ends inside an entry")
        found = self.data[self.at : end]
        self.at = end + 1
        return found

    def pointer(self, encoding: int) -> int:
        """An address in one of the encodings of `.eh_frame`."""
        place = self.address + self.at
        if encoding & 0x0F not in _FORMATS or encoding & 0x70 not in {0, _PC_RELATIVE}:
            raise BadDataError(f"an unwind table has addresses of the form {encoding:#x}")
        value = self.fixed(_FORMATS[encoding & 0x0F])
        return (value + place if encoding & _PC_RELATIVE else value) & ((1 << 64) - 1)


@dataclass(frozen=True, slots=True)
class Common:
    """What the entries of many functions share (CIE)."""

    code_align: int
    data_align: int
    encoding: int
    is_signal: bool
    has_size: bool
    instructions: bytes
    registers: Registers = X86_64


@dataclass(slots=True)
class RegisterRow:
    """Where a frame's registers are at one address.

    ``cfa`` is (register, offset) or an expression; ``saved`` holds, by register, the offset from the CFA, an expression
    for the place, or None where there is no value.
    """

    cfa: tuple[int, int] | bytes
    saved: dict[int, int | bytes | None] = field(default_factory=dict)

    def copy(self) -> RegisterRow:
        """One that changes by itself."""
        return RegisterRow(self.cfa, dict(self.saved))

    def get_cfa(self) -> tuple[int, int]:
        """The register and the offset; fails on an expression."""
        if isinstance(self.cfa, bytes):
            raise BadDataError("an unwind table changes a part of an expression")
        return self.cfa


class _Program:
    """Runs instructions; ``row`` is what they say so far."""

    def __init__(self, common: Common) -> None:
        self.row = RegisterRow((common.registers.stack, 0))
        self._common = common
        self._initial: dict[int, int | bytes | None] = {}
        self._remembered: list[RegisterRow] = []
        self._location = 0

    def run(self, instructions: bytes, target: int) -> None:
        """Run them, up to those for what lies behind ``target``, in bytes from the function's begin."""
        at = Cursor(instructions)
        while at.at < len(instructions) and self._location <= target:
            code = at.byte()
            if code < 0x40:
                self._run_other(code, at)
            elif code < 0x80:
                self.advance(code & 0x3F)
            elif code < 0xC0:
                self.save(code & 0x3F, at.unsigned())
            else:
                self.restore(code & 0x3F)

    def keep_initial(self) -> None:
        """From here on registers are restored to what they are now."""
        self._initial = dict(self.row.saved)

    def _run_other(self, code: int, at: Cursor) -> None:
        if code not in _OTHERS:
            raise BadDataError(f"an unwind table has an instruction {code:#x}")
        run, operands = _OTHERS[code]
        run(self, *[_READ[operand](at) for operand in operands])

    def advance(self, n_units: int) -> None:
        self._location += n_units * self._common.code_align

    def save(self, register: int, n_units: int) -> None:
        self.row.saved[register] = n_units * self._common.data_align

    def save_by_expression(self, register: int, expression: bytes) -> None:
        self.row.saved[register] = expression

    def save_elsewhere(self, register: int, _: int | bytes) -> None:
        self.row.saved[register] = _OTHER

    def lose(self, register: int) -> None:
        self.row.saved[register] = None

    def restore(self, register: int) -> None:
        self.keep(register)
        if register in self._initial:
            self.row.saved[register] = self._initial[register]

    def keep(self, register: int) -> None:
        self.row.saved.pop(register, None)

    def remember(self) -> None:
        if len(self._remembered) >= _MAX_REMEMBERED:
            raise BadDataError("an unwind table remembers too many rows")
        self._remembered.append(self.row.copy())

    def recall(self) -> None:
        if not self._remembered:
            raise BadDataError("an unwind table recalls a row that it did not remember")
        self.row = self._remembered.pop()

    def define(self, register: int, offset: int) -> None:
        self.row.cfa = (register, offset)

    def define_scaled(self, register: int, n_units: int) -> None:
        self.row.cfa = (register, n_units * self._common.data_align)

    def define_register(self, register: int) -> None:
        self.row.cfa = (register, self.row.get_cfa()[1])

    def define_offset(self, offset: int) -> None:
        self.row.cfa = (self.row.get_cfa()[0], offset)

    def define_offset_scaled(self, n_units: int) -> None:
        self.define_offset(n_units * self._common.data_align)

    def define_by_expression(self, expression: bytes) -> None:
        self.row.cfa = expression

    def do_nothing(self, *_: int) -> None:
        pass


_READ: Final[dict[str, Callable[[Cursor], int | bytes]]] = {
    "1": Cursor.byte,
    "2": lambda at: at.fixed("<H"),
    "4": lambda at: at.fixed("<I"),
    "u": Cursor.unsigned,
    "s": Cursor.signed,
    "n": lambda at: -at.unsigned(),
    "b": Cursor.block,
}
# By code: what it does, and its operands. DW_CFA_set_loc is not there: no compiler writes it.
_OTHERS: Final[dict[int, tuple[Callable[..., None], str]]] = {
    0x00: (_Program.do_nothing, ""),
    0x02: (_Program.advance, "1"),
    0x03: (_Program.advance, "2"),
    0x04: (_Program.advance, "4"),
    0x05: (_Program.save, "uu"),
    0x06: (_Program.restore, "u"),
    0x07: (_Program.lose, "u"),
    0x08: (_Program.keep, "u"),
    0x09: (_Program.save_elsewhere, "uu"),
    0x0A: (_Program.remember, ""),
    0x0B: (_Program.recall, ""),
    0x0C: (_Program.define, "uu"),
    0x0D: (_Program.define_register, "u"),
    0x0E: (_Program.define_offset, "u"),
    0x0F: (_Program.define_by_expression, "b"),
    0x10: (_Program.save_by_expression, "ub"),
    0x11: (_Program.save, "us"),
    0x12: (_Program.define_scaled, "us"),
    0x13: (_Program.define_offset_scaled, "s"),
    0x14: (_Program.save_elsewhere, "uu"),
    0x15: (_Program.save_elsewhere, "us"),
    0x16: (_Program.save_elsewhere, "ub"),
    # Whether the return address is signed: DW_CFA_AARCH64_negate_ra_state_with_pc, DW_CFA_AARCH64_negate_ra_state. A
    # signature is taken off every address, so this need not be known; on x86-64 no compiler writes them.
    0x2C: (_Program.do_nothing, ""),
    0x2D: (_Program.do_nothing, ""),
    0x2E: (_Program.do_nothing, "u"),  # DW_CFA_GNU_args_size
    0x2F: (_Program.save, "un"),  # DW_CFA_GNU_negative_offset_extended
}


def run_program(common: Common, instructions: bytes, inside: int) -> RegisterRow:
    """Where the registers are at an address of a function.

    Args:
        common: What the function's entry shares with others.
        instructions: Its own.
        inside: The address, from the function's begin.

    Raises:
        BadDataError: The instructions are damaged.
    """
    program = _Program(common)
    program.run(common.instructions, inside)
    program.keep_initial()
    program.run(instructions, inside)
    return program.row
