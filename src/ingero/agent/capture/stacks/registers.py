"""Registers that unwinding asks for, by the numbers that unwind tables give them.

Source: System V x86-64 psABI 1.0, figure 3.36; DWARF for the Arm 64-bit Architecture 2024Q3, section 4.1; elf.h
(``e_machine``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Registers:
    """Of one kind of processor.

    Attributes:
        machine: ``e_machine`` of its ELF files.
        stack: Number of the stack pointer.
        frame: Of the frame pointer.
        address: Of the return address: a column of its own on x86-64, the link register on arm64.
    """

    machine: int
    stack: int
    frame: int
    address: int


X86_64: Final = Registers(62, 7, 6, 16)
AARCH64: Final = Registers(183, 31, 29, 30)
_KNOWN: Final = {one.machine: one for one in (X86_64, AARCH64)}


def find_registers(machine: int) -> Registers | None:
    """Those of a kind of processor; None of one that is not unwound."""
    return _KNOWN.get(machine)
