"""Rows of unwind tables as rules that the kernel can follow.

Source of what is compared: System V x86-64 psABI 1.0; AAPCS64 2024Q3; of glibc 2.36 the frame of a signal handler
(sysdeps/unix/sysv/linux/x86_64/libc_sigaction.c).
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from ingero.agent.capture.kernel.abi import UnwindKind
from ingero.agent.capture.stacks.cfi import Common, Cursor, RegisterRow, run_program
from ingero.agent.capture.stacks.registers import AARCH64, X86_64

_OTHER: Final = b""
_BREG_RBP, _BREG_RSP, _DEREF = 0x76, 0x77, 0x06
# From rsp, of struct rt_sigframe behind its return address.
_SIGNAL_SP, _SIGNAL_IP, _SIGNAL_BP = 160, 168, 120
# An entry of a procedure linkage table: rsp + 8, and 8 more from one of its instructions on, which stands at [6].
_PLT: Final = bytes((0x77, 8, 0x80, 0, 0x3F, 0x1A, 0, 0x2A, 0x33, 0x24, 0x22))
_PLT_LITERAL: Final = 6
_LITERAL_0: Final = 0x30


class UnwindRule(NamedTuple):
    """How to get from one frame to its caller: ``struct ig_unwind_rule``.

    Attributes:
        kind: Where the CFA is counted from.
        cfa_offset: Bytes from there.
        bp_offset: Where the caller's frame pointer is saved, from the CFA; 0: it is still in its register.
        return_offset: The same of the return address, on arm64; on x86-64 it is always at CFA - 8.
    """

    kind: UnwindKind
    cfa_offset: int = 0
    bp_offset: int = 0
    return_offset: int = 0

    def to_bytes(self) -> bytes:
        """As the kernel's map holds it."""
        return struct.pack("<iiiI", self.cfa_offset, self.bp_offset, self.return_offset, self.kind)


UNKNOWN: Final = UnwindRule(UnwindKind.UNKNOWN)


def build_rule(common: Common, instructions: bytes, inside: int, address: int) -> UnwindRule:
    """The rule at an address of a function; of kind `UnwindKind.UNKNOWN` where none can express what the table says.

    Args:
        common: What the function's entry shares with others.
        instructions: Its own.
        inside: The address, from the function's begin.
        address: The same, as linked.

    Raises:
        BadDataError: The instructions are damaged.
    """
    row = run_program(common, instructions, inside)
    if common.registers is AARCH64:
        return UNKNOWN if common.is_signal else _build_arm_rule(row)
    if common.is_signal:
        return _build_signal_rule(row)
    if row.saved.get(X86_64.address, _OTHER) is None:
        return UnwindRule(UnwindKind.END)
    if row.saved.get(X86_64.address) != -8:
        return UNKNOWN
    saved = row.saved.get(X86_64.frame, 0)
    if isinstance(row.cfa, bytes):
        return _build_expression_rule(row.cfa, saved, address)
    return _build_plain_rule(*row.cfa, saved)


def _build_arm_rule(row: RegisterRow) -> UnwindRule:
    """The rule of a row.

    The return address is in the link register until the function saves it; the CFA is what the stack pointer was at the
    function's begin.
    """
    found = row.saved.get(AARCH64.address, 0), row.saved.get(AARCH64.frame, 0)
    if found[0] is None:
        return UnwindRule(UnwindKind.END)
    if isinstance(row.cfa, bytes) or isinstance(found[0], bytes) or isinstance(found[1], bytes):
        return UNKNOWN
    register, offset = row.cfa
    kind = {AARCH64.stack: UnwindKind.SP, AARCH64.frame: UnwindKind.BP}.get(register)
    return UNKNOWN if kind is None else _fit(UnwindRule(kind, offset, found[1] or 0, found[0]))


def _build_plain_rule(register: int, offset: int, saved: int | bytes | None) -> UnwindRule:
    kind = {X86_64.stack: UnwindKind.SP, X86_64.frame: UnwindKind.BP}.get(register)
    if kind is None or isinstance(saved, bytes):
        return UNKNOWN
    return _fit(UnwindRule(kind, offset, saved or 0))


def _build_expression_rule(cfa: bytes, saved: int | bytes | None, address: int) -> UnwindRule:
    if (
        len(cfa) == len(_PLT)
        and cfa.replace(cfa[_PLT_LITERAL : _PLT_LITERAL + 1], b"\0", 1) == _PLT
    ):
        is_pushed = address & 15 >= cfa[_PLT_LITERAL] - _LITERAL_0
        return UnwindRule(UnwindKind.SP, 16 if is_pushed else 8)
    place = _find_offset(cfa, _BREG_RBP, _DEREF)
    if place is None or not isinstance(saved, bytes):
        return UNKNOWN
    bp_place = _find_offset(saved, _BREG_RBP)
    return UNKNOWN if bp_place is None else _fit(UnwindRule(UnwindKind.REALIGNED, place, bp_place))


def _build_signal_rule(row: RegisterRow) -> UnwindRule:
    """The rules of a function that returns from a signal handler.

    The layout is the kernel's, checked against what the table says.
    """
    saved = row.saved
    is_known = (
        isinstance(row.cfa, bytes)
        and _find_offset(row.cfa, _BREG_RSP, _DEREF) == _SIGNAL_SP
        and _find_saved(saved.get(X86_64.address)) == _SIGNAL_IP
        and _find_saved(saved.get(X86_64.frame)) == _SIGNAL_BP
    )
    return UnwindRule(UnwindKind.SIGNAL) if is_known else UNKNOWN


def _find_saved(saved: int | bytes | None) -> int | None:
    return _find_offset(saved, _BREG_RSP) if isinstance(saved, bytes) else None


def _find_offset(expression: bytes, base: int, *rest: int) -> int | None:
    """The offset of an expression that is a register with an offset, and these operations; None when it is another."""
    if expression[:1] != bytes((base,)):
        return None
    at = Cursor(expression)
    at.byte()
    offset = at.signed()
    return offset if expression[at.at :] == bytes(rest) else None


def _fit(rule: UnwindRule) -> UnwindRule:
    fits = all(-(1 << 31) <= offset < 1 << 31 for offset in rule[1:])
    return rule if fits else UNKNOWN
