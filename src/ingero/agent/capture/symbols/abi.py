"""Where a C function's arguments are when it is entered, by the calling convention.

Only what the probed prototypes use: integers, pointers, and structures passed by value. Sources: System V x86-64 psABI
section 3.2.3 (integer registers rdi rsi rdx rcx r8 r9; a structure over 16 bytes in memory; one up to 16 bytes in
registers only if all of it fits); Arm AAPCS64 section 6.8.2 (x0..x7; a structure over 16 bytes replaced by a pointer).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ingero.agent.capture.kernel.abi import N_REGISTERS, Selector
from ingero.errors import BadDataError

_REGISTERS: Final = {"x86_64": 6, "aarch64": 8}
_WORD: Final = 8

TYPE_BYTES: Final = {
    "ptr": 8,  # pointers and handles
    "u64": 8,  # size_t, unsigned long long
    "i32": 4,  # int, unsigned int, enumerations
    "dim3": 12,  # three unsigned int
    "extent": 24,  # cudaExtent: three size_t
    "loc": 8,  # cudaMemLocation: two int
    "id128": 128,  # ncclUniqueId
}


@dataclass(frozen=True, slots=True)
class Argument:
    """One parameter and where it is.

    Attributes:
        name: As in the prototype.
        kind: A key of TYPE_BYTES.
        place: 1..8 an integer register, 9.. a stack word (`Selector.PLACE`).
        by_reference: The place holds a pointer to the value (AAPCS64, large structures).
    """

    name: str
    kind: str
    place: int
    by_reference: bool = False

    @property
    def in_memory(self) -> bool:
        """Whether the value itself lies on the stack."""
        return self.place > N_REGISTERS


def build_arguments(prototype: str, machine: str) -> dict[str, Argument]:
    """Place the parameters of a prototype such as ``"dst:ptr src:ptr count:u64 kind:i32"``.

    Raises:
        BadDataError: An unknown type or machine, or an argument too far up the stack to be described.
    """
    n_registers = _REGISTERS.get(machine)
    if n_registers is None:
        raise BadDataError(f"the calling convention of {machine} is not known")
    arguments: dict[str, Argument] = {}
    next_register, next_word = 1, N_REGISTERS + 1
    for text in prototype.split():
        name, _, kind = text.partition(":")
        n_bytes = TYPE_BYTES.get(kind)
        if n_bytes is None:
            raise BadDataError(f"{text!r} in a prototype has no known type")
        by_reference = n_bytes > 2 * _WORD and machine == "aarch64"
        in_memory = n_bytes > 2 * _WORD and not by_reference
        n_words = 1 if by_reference else -(-n_bytes // _WORD)
        if not in_memory and next_register + n_words - 1 <= n_registers:
            place, next_register = next_register, next_register + n_words
        else:
            place, next_word = next_word, next_word + n_words
            if machine == "aarch64" and not in_memory:
                next_register = n_registers + 1
        if place > Selector.PLACE:
            raise BadDataError(f"argument {name!r} lies too far up the stack")
        arguments[name] = Argument(name, kind, place, by_reference)
    return arguments


def build_selector(expression: str, arguments: dict[str, Argument]) -> int:
    """How to fetch what a role's expression names.

    ``name`` is the argument; ``name.y`` the second and ``name.z`` the third word of a dim3; ``name@16`` the 64-bit and
    ``name@16:i32`` the 32-bit field at that offset of what the pointer ``name`` points to; ``&name`` the address of a
    structure passed by value.
    """
    takes_address = expression.startswith("&")
    base, _, width = expression.removeprefix("&").partition(":")
    base, _, offset = base.partition("@")
    name, _, component = base.partition(".")
    argument = arguments[name]
    selector = argument.place
    if takes_address:
        return selector | (Selector.ADDRESS if argument.in_memory else 0)
    if offset:
        selector |= Selector.DEREF | int(offset) // 4 << Selector.OFFSET_SHIFT
        return selector | (Selector.W32 if width == "i32" else 0)
    if component == "z":
        return (selector + 1) | Selector.W32
    if component == "y":
        return selector | Selector.HIGH
    return selector | (Selector.W32 if argument.kind in {"i32", "dim3"} else 0)
