"""Copied stacks into native frames, and into the rules by which the kernel then walks such a stack itself.

Where a file has no unwind table, as code from a just-in-time compiler, its frames are taken to have frame pointers, and kept only while
they lead to code. Everything is bounded: by the copy's size, by the number of frames, and by each frame lying further out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self

from ingero.agent.capture.kernel.abi import MAX_NATIVE, RETURN_BIT, UnwindKind
from ingero.agent.capture.stacks.cfi import UNKNOWN, UnwindRule

_WORD: Final = 8
_PAGE: Final = 4096
_BY_FRAME_POINTER: Final = UnwindRule(UnwindKind.BP, 16, -16)
_END: Final = UnwindRule(UnwindKind.END)
# From rsp, of struct rt_sigframe behind its return address (arch/x86/include/asm/sigframe.h).
_SIGNAL_BP, _SIGNAL_SP, _SIGNAL_IP = 120, 160, 168


class MappedCode(Protocol):
    """What is mapped in a process, as far as unwinding asks."""

    def is_code(self, address: int) -> bool:
        """Whether something executable is mapped there."""
        ...

    def find_rule(self, address: int) -> UnwindRule | None:
        """The rule at an address; None where no table says anything."""
        ...


@dataclass(frozen=True, slots=True)
class StackCopy:
    """A thread's stack as it was: ``struct ig_stack_copy``.

    Attributes:
        pc: The address to go on from, with `RETURN_BIT` where a call returns to it.
        sp: The stack pointer of that frame.
        bp: The value of rbp in that frame.
        data: Memory from the begin of the page of ``sp``.
        returns: Return addresses that probes had replaced, by where they lie.
    """

    pc: int
    sp: int
    bp: int
    data: bytes
    returns: dict[int, int]

    @classmethod
    def from_record(cls, record: Any) -> Self:  # noqa: ANN401 - one row of a structured array
        """From a ``struct ig_stack_copy``."""
        returns = record["returns"].tolist()
        return cls(
            int(record["pc"]),
            int(record["sp"]),
            int(record["bp"]),
            record["data"][: int(record["n_bytes"])].tobytes(),
            # Of several for one place the outermost counts, which comes last.
            {slot: address for slot, address in returns if slot},
        )

    def find_word(self, address: int) -> int | None:
        """The eight bytes at an address; None outside of the copy."""
        at = address - (self.sp & -_PAGE)
        if not 0 <= at <= len(self.data) - _WORD:
            return None
        return int.from_bytes(self.data[at : at + _WORD], "little")


@dataclass(slots=True)
class Unwound:
    """What a copied stack says.

    Attributes:
        addresses: Of the frames, innermost first; the first is the copy's own.
        rules: What was followed, by ``pc`` of ``struct ig_unwind_key``.
        is_cut: Whether the stack is deeper than was copied or than fits.
        is_unknown: Whether it ended at a frame that nothing is known of.
    """

    addresses: list[int] = field(default_factory=list)
    rules: dict[int, UnwindRule] = field(default_factory=dict)
    is_cut: bool = False
    is_unknown: bool = False


class _OutsideError(Exception):
    """A frame lies outside of the copy."""


def unwind(copy: StackCopy, code: MappedCode, n_before: int = 0) -> Unwound:
    """Follow a copied stack outwards.

    Args:
        copy: The stack.
        code: What the process has mapped.
        n_before: Native frames that are known already.
    """
    found = Unwound()
    key, sp, bp = copy.pc, copy.sp, copy.bp
    while True:
        pc = key & ~RETURN_BIT
        found.addresses.append(pc)
        # A call may be the last instruction of its function.
        rule = code.find_rule(pc - 1 if key & RETURN_BIT else pc)
        if rule is None:
            rule = _END if bp == 0 else _BY_FRAME_POINTER
        try:
            outer = _step_out(copy, rule, sp, bp) if _leads_on(rule) else None
        except _OutsideError:
            if rule is not _BY_FRAME_POINTER:
                found.rules[key] = rule
            elif (
                len(found.addresses) == 1
            ):  # it is further out than a copy that begins here reaches
                found.rules[key] = UNKNOWN
            found.is_cut = True
            return found
        if _leads_on(rule) and not _is_plausible(outer, code):
            outer, rule = None, UNKNOWN
        found.rules[key] = rule
        if outer is None or not outer[0]:
            found.is_unknown = rule.kind is UnwindKind.UNKNOWN
            return found
        key, sp, bp = outer
        if n_before + len(found.addresses) > MAX_NATIVE:
            found.is_cut = True
            return found


def _leads_on(rule: UnwindRule) -> bool:
    return rule.kind not in {UnwindKind.END, UnwindKind.UNKNOWN}


def _is_plausible(outer: tuple[int, int, int] | None, code: MappedCode) -> bool:
    """Whether a frame can be the caller: it is in code, or the end of the stack."""
    if outer is None:
        return False
    address = outer[0] & ~RETURN_BIT
    return not address or code.is_code(address - 1)


def _step_out(copy: StackCopy, rule: UnwindRule, sp: int, bp: int) -> tuple[int, int, int] | None:
    """Key, stack pointer and rbp of the caller; None when it would not lie further out.

    The kernel does the same (``bpf/include/ingero/unwind.h``).
    """
    if rule.kind is UnwindKind.SIGNAL:
        pc, outer_sp, outer_bp = (
            _read(copy, sp + offset) for offset in (_SIGNAL_IP, _SIGNAL_SP, _SIGNAL_BP)
        )
        return pc, outer_sp, outer_bp
    cfa = (bp if rule.kind is UnwindKind.BP else sp) + rule.cfa_offset
    if rule.kind is UnwindKind.REALIGNED:
        cfa = _read(copy, bp + rule.cfa_offset)
    if cfa <= sp:
        return None
    if rule.kind is UnwindKind.REALIGNED:
        bp = _read(copy, bp + rule.bp_offset)
    elif rule.bp_offset:
        bp = _read(copy, cfa + rule.bp_offset)
    place = cfa - _WORD
    address = copy.returns[place] if place in copy.returns else _read(copy, place)
    return (address | RETURN_BIT if address else 0), cfa, bp


def _read(copy: StackCopy, address: int) -> int:
    value = copy.find_word(address)
    if value is None:
        raise _OutsideError
    return value
