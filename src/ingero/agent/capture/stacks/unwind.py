"""Copied stacks into native frames, and into the rules by which the kernel then walks such a stack itself.

Where a file has no unwind table, as code from a just-in-time compiler, its frames are taken to have frame pointers, and
kept only while they lead to code. Everything is bounded: by the copy's size, by the number of frames, and by each frame
lying further out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, Self

from ingero.agent.capture.kernel.abi import MAX_NATIVE, RETURN_BIT, UnwindKind
from ingero.agent.capture.stacks.control_block import IS_ARM
from ingero.agent.capture.stacks.rules import UNKNOWN, UnwindRule

_WORD: Final = 8
_PIECE: Final = 4096  # a copy begins at a multiple of it, whatever the size of the kernel's pages
_END: Final = UnwindRule(UnwindKind.END)
# Of code without a table. On arm64 the caller's stack pointer does not follow from the frame record (AAPCS64, "the
# frame pointer").
_BY_FRAME_POINTER: Final = {
    False: UnwindRule(UnwindKind.BP, 16, -16),
    True: UnwindRule(UnwindKind.RECORD),
}
# From rsp, of struct rt_sigframe behind its return address (arch/x86/include/asm/sigframe.h).
_SIGNAL_BP, _SIGNAL_SP, _SIGNAL_IP = 120, 160, 168
# From sp, of struct rt_sigframe (arch/arm64/kernel/signal.c): behind siginfo, struct ucontext up to its struct
# sigcontext, and the first word of that, lie x0 to x30, sp and pc.
_ARM_REGISTERS: Final = 128 + 176 + 8
_ARM_SIGNAL: Final = (
    _ARM_REGISTERS + 8 * 32,
    _ARM_REGISTERS + 8 * 31,
    _ARM_REGISTERS + 8 * 29,
)  # pc, sp, x29
_ARM_SIGNAL_LINK: Final = _ARM_REGISTERS + 8 * 30


class MappedCode(Protocol):
    """What is mapped in a process, as far as unwinding asks."""

    def is_code(self, address: int) -> bool:
        """Whether something executable is mapped there."""
        ...

    def find_rule(self, address: int) -> UnwindRule | None:
        """The rule at an address; None where no table says anything."""
        ...

    def strip(self, address: int) -> int:
        """A return address without the signature that arm64 may have put above it (pointer authentication)."""
        ...


@dataclass(frozen=True, slots=True)
class StackCopy:
    """A thread's stack as it was: ``struct ig_stack_copy``.

    Attributes:
        pc: The address to go on from, with `RETURN_BIT` where a call returns to it.
        sp: The stack pointer of that frame.
        bp: The value of the frame pointer in that frame.
        data: Memory from the begin of the 4 KiB of ``sp``.
        returns: Return addresses that probes had replaced, by ``slot`` of ``struct ig_return``.
        link: On arm64 the value of x30 in that frame; 0 when it does not say where the frame returns to.
        is_sp_least: On arm64: the stack pointer is ``sp`` or more.
    """

    pc: int
    sp: int
    bp: int
    data: bytes
    returns: dict[int, int]
    link: int = 0
    is_sp_least: bool = False

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
            int(record["link"]),
            bool(record["is_sp_least"]),
        )

    def find_word(self, address: int) -> int | None:
        """The eight bytes at an address; None outside of the copy."""
        at = address - (self.sp & -_PIECE)
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


class _Frame(NamedTuple):
    """A frame: `key` is its address with `RETURN_BIT`, as in ``struct ig_unwind_key``; the rest as of `StackCopy`."""

    key: int
    sp: int
    bp: int
    link: int = 0
    is_sp_least: bool = False


class _OutsideError(Exception):
    """A frame lies outside of the copy."""


def unwind(
    copy: StackCopy, code: MappedCode, n_before: int = 0, *, is_arm: bool = IS_ARM
) -> Unwound:
    """Follow a copied stack outwards.

    Args:
        copy: The stack.
        code: What the process has mapped.
        n_before: Native frames that are known already.
        is_arm: It is of an arm64 processor.
    """
    found = Unwound()
    by_pointer = _BY_FRAME_POINTER[is_arm]
    frame = _Frame(copy.pc, copy.sp, copy.bp, copy.link, copy.is_sp_least)
    while True:
        key = frame.key
        pc = key & ~RETURN_BIT
        found.addresses.append(pc)
        # A call may be the last instruction of its function.
        rule = code.find_rule(pc - 1 if key & RETURN_BIT else pc)
        if rule is None:
            rule = _END if frame.bp == 0 else by_pointer
        outer = None
        try:
            if _leads_on(rule):
                step_out = _step_out_arm if is_arm else _step_out
                outer = step_out(copy, rule, frame, code)
        except _OutsideError:
            if rule is not by_pointer:
                found.rules[key] = rule
            elif len(found.addresses) == 1:  # further out than a copy that begins here reaches
                found.rules[key] = UNKNOWN
            found.is_cut = True
            return found
        if _leads_on(rule) and not _is_plausible(outer, code):
            outer, rule = None, UNKNOWN
        found.rules[key] = rule
        if outer is None or not outer.key:
            found.is_unknown = rule.kind is UnwindKind.UNKNOWN
            return found
        frame = outer
        if n_before + len(found.addresses) > MAX_NATIVE:
            found.is_cut = True
            return found


def _leads_on(rule: UnwindRule) -> bool:
    return rule.kind not in {UnwindKind.END, UnwindKind.UNKNOWN}


def _is_plausible(outer: _Frame | None, code: MappedCode) -> bool:
    """Whether a frame can be the caller: it is in code, or the end of the stack."""
    if outer is None:
        return False
    address = outer.key & ~RETURN_BIT
    return not address or code.is_code(address - 1)


def _step_out(copy: StackCopy, rule: UnwindRule, frame: _Frame, _code: MappedCode) -> _Frame | None:
    """The caller on x86-64; None when it would not lie further out.

    The kernel does the same (``bpf/include/ingero/unwind.h``).
    """
    sp, bp = frame.sp, frame.bp
    if rule.kind is UnwindKind.SIGNAL:
        return _Frame(*_read_all(copy, sp, (_SIGNAL_IP, _SIGNAL_SP, _SIGNAL_BP)))
    cfa = (bp if rule.kind is UnwindKind.BP else sp) + rule.cfa_offset
    if rule.kind is UnwindKind.REALIGNED:
        cfa = _read(copy, bp + rule.cfa_offset)
    if cfa <= sp or rule.kind is UnwindKind.RECORD:
        return None
    if rule.kind is UnwindKind.REALIGNED:
        bp = _read(copy, bp + rule.bp_offset)
    elif rule.bp_offset:
        bp = _read(copy, cfa + rule.bp_offset)
    place = cfa - _WORD
    address = copy.returns[place] if place in copy.returns else _read(copy, place)
    return _Frame(address | RETURN_BIT if address else 0, cfa, bp)


def _step_out_arm(
    copy: StackCopy, rule: UnwindRule, frame: _Frame, code: MappedCode
) -> _Frame | None:
    """The caller on arm64; None when it would not lie further out, or when x30 is asked for and does not lead to it.

    The kernel does the same (``bpf/include/ingero/unwind.h``).
    """
    if rule.kind is UnwindKind.SIGNAL:
        if frame.is_sp_least:
            return None
        return _Frame(
            *_read_all(copy, frame.sp, _ARM_SIGNAL), _read(copy, frame.sp + _ARM_SIGNAL_LINK)
        )
    if rule.kind is UnwindKind.RECORD:
        return _follow_record(copy, frame, code)
    cfa = _find_arm_cfa(rule, frame)
    # A function that has not saved its return address may not have moved the stack pointer either.
    if cfa is None or cfa < frame.sp or (cfa == frame.sp and rule.return_offset):
        return None
    address = _read(copy, cfa + rule.return_offset) if rule.return_offset else frame.link
    bp = _read(copy, cfa + rule.bp_offset) if rule.bp_offset else frame.bp
    address = code.strip(copy.returns.get(cfa, address))
    if not address and not rule.return_offset:
        return None
    return _Frame(address | RETURN_BIT if address else 0, cfa, bp)


def _find_arm_cfa(rule: UnwindRule, frame: _Frame) -> int | None:
    if rule.kind is UnwindKind.BP:
        return frame.bp + rule.cfa_offset
    if rule.kind is not UnwindKind.SP:
        return None
    if not frame.is_sp_least:
        return frame.sp + rule.cfa_offset
    # x29 leads to where it and the return address are saved, if side by side.
    is_record = rule.bp_offset and rule.return_offset == rule.bp_offset + _WORD
    return frame.bp - rule.bp_offset if is_record else None


def _follow_record(copy: StackCopy, frame: _Frame, code: MappedCode) -> _Frame | None:
    """By what a function with a frame pointer leaves on the stack: the caller's x29, and the return address."""
    record = frame.bp
    if record < frame.sp:
        return None
    address = code.strip(_read(copy, record + _WORD))
    key = address | RETURN_BIT if address else 0
    return _Frame(key, record + 2 * _WORD, _read(copy, record), is_sp_least=True)


def _read(copy: StackCopy, address: int) -> int:
    value = copy.find_word(address)
    if value is None:
        raise _OutsideError
    return value


def _read_all(copy: StackCopy, base: int, offsets: tuple[int, int, int]) -> tuple[int, int, int]:
    first, second, third = (_read(copy, base + at) for at in offsets)
    return first, second, third
