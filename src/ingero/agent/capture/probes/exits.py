"""Where a function is left: its last instructions, for probes that need no return address replaced.

A function is decoded once. Whatever may be its end is given: the kernel's side tells a real one by the stack pointer,
which is as it was at the entry (``on_leave`` of bpf/include/ingero/calls.h), so that one too many costs a trap and no
more.

- a return instruction;
- a jump to another library's function (a tail call such as ``operator delete``);
- a jump whose target stands in a register, which is a switch of its own or a tail call.

A jump to a function of the same file is followed: the work, and the return, are there. Parts that the compiler put
elsewhere (``.cold``) are parts of the function. Extents are those of the unwind table, which a stripped file has too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from ingero.agent.capture.discover.elf import ElfFile, FileBytes
from ingero.agent.capture.kernel.elf import read_headers, read_machine
from ingero.agent.capture.stacks.unwind_table import UnwindTable
from ingero.errors import BadDataError, UnsupportedError

if TYPE_CHECKING:
    from capstone import Cs

_MAX_PARTS: Final = 32
_MAX_BYTES: Final = 1 << 18
_X86_64, _AARCH64 = 62, 183  # e_machine: System V gABI
_RETURNS: Final = frozenset({"ret", "retf", "retaa", "retab"})
_JUMPS: Final = frozenset({"b", "br", "braa", "brab", "cbz", "cbnz", "tbz", "tbnz"})
_LINKAGE: Final = (".plt", ".plt.sec", ".plt.got")


class Instruction(NamedTuple):
    """What matters of one.

    Attributes:
        address: As linked.
        is_return: Whether it returns.
        is_jump: Whether it jumps, always or on a condition; a call is none.
        target: Where to, as linked; None of a jump by a register, and of what does not jump.
    """

    address: int
    is_return: bool
    is_jump: bool
    target: int | None


Decode = Callable[[bytes, int], Iterator[tuple[int, int, str, str]]]


@dataclass(slots=True)
class ExitFinder:
    """Finds the exits of functions of one file.

    Args:
        file: The file.

    Raises:
        BadDataError: It is no ELF file, or has no unwind table; also of `find`.
        UnsupportedError: It is not for a processor that is known here, or the disassembler is not installed.
        OSError: It cannot be read; also of `find`.
    """

    file: FileBytes
    elf: ElfFile
    table: UnwindTable
    linkage: tuple[tuple[int, int], ...]
    decode: Decode

    def find(self, offset: int) -> frozenset[int]:
        """File offsets of the last instructions of the function that begins at a file offset.

        Raises:
            BadDataError: What lies there is no code, or the function has more parts than can be meant.
        """
        exits: set[int] = set()
        seen: set[int] = set()
        waiting = [self.elf.find_address(offset)]
        while waiting:
            begin, end = self.table.find_function(waiting.pop())
            if begin in seen:
                continue
            seen.add(begin)
            if len(seen) > _MAX_PARTS or end - begin > _MAX_BYTES:
                raise BadDataError(f"the function at {offset:#x} has no end that can be found")
            for one in self._decode(begin, end):
                if one.is_return or (one.is_jump and self._leaves_file(one.target)):
                    exits.add(self.elf.get_offset(one.address))
                elif one.is_jump and one.target is not None and not begin <= one.target < end:
                    waiting.append(one.target)
        return frozenset(exits)

    def _leaves_file(self, target: int | None) -> bool:
        return target is None or any(begin <= target < end for begin, end in self.linkage)

    def _decode(self, begin: int, end: int) -> Iterator[Instruction]:
        at = begin
        code = self.file.read(self.elf.get_offset(begin), end - begin)
        for address, size, mnemonic, operands in self.decode(code, begin):
            at = address + size
            yield _read_instruction(address, mnemonic, operands)
        if at != end:
            raise BadDataError(f"there is something else than code at {at:#x}")


def open_exit_finder(file: FileBytes) -> ExitFinder:
    """What finds the exits of a file's functions; raises as `ExitFinder` says."""
    elf = ElfFile(file)
    sections = elf.find_sections(_LINKAGE)
    return ExitFinder(
        file,
        elf,
        UnwindTable(file, read_headers(file)[1]),
        sections,
        _open_decoder(read_machine(file)),
    )


@functools.cache
def _open_decoder(machine: int) -> Decode:
    try:
        import capstone  # noqa: PLC0415 - only where PyTorch is met
    except ImportError as error:
        raise UnsupportedError(
            "the end of a C++ function cannot be found without a disassembler",
            hint="pip install 'ingero[agent]' has it (capstone)",
        ) from error
    if machine == _X86_64:
        cs: Cs = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    elif machine == _AARCH64:
        cs = capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM)
    else:
        raise UnsupportedError(f"functions of processor {machine} cannot be decoded here")
    decode: Decode = cs.disasm_lite
    return decode


def _read_instruction(address: int, mnemonic: str, operands: str) -> Instruction:
    """As capstone spells it: ``notrack jmp``, ``repz ret``, ``b.eq``, ``tbz w0, #3, #0x40``."""
    name = mnemonic.rpartition(" ")[2]
    is_return = name in _RETURNS
    is_jump = name in _JUMPS or name.startswith(("j", "b.", "loop"))
    target = operands.rpartition(" ")[2].lstrip("#")
    is_known = is_jump and target.startswith("0x")
    return Instruction(address, is_return, is_jump, int(target, 16) if is_known else None)
