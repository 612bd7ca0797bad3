"""Native frames: what is mapped at an address, and what the file there calls it."""

from __future__ import annotations

import bisect
import contextlib
import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingero.agent.capture.discover.processes import OpenFile, read_status
from ingero.agent.capture.kernel.abi import UnwindKind
from ingero.agent.capture.kernel.regular_files import open_inside, read_whole
from ingero.agent.capture.stacks.control_block import IS_ARM
from ingero.agent.capture.stacks.memory import Region, RemoteMemory, iter_regions, open_region
from ingero.agent.capture.stacks.rules import UnwindRule
from ingero.agent.capture.stacks.symbols import Symbols
from ingero.closing import Closing
from ingero.errors import BadDataError

_MAX_FILES: Final = 128
_NO_FILES: Final = ("/memfd:", "/dev/zero", "/SYSV")  # memory that only looks like a file
_PERF_LINE: Final = re.compile(rb"^([0-9a-f]+) ([0-9a-f]+) (.+)$", re.MULTILINE)
_MAX_PERF_BYTES: Final = 64 << 20
# What a signal handler returns to on arm64: mov x8, #__NR_rt_sigreturn; svc #0. No table tells of it
# (arch/arm64/kernel/vdso/sigreturn.S).
_RETURN_FROM_SIGNAL: Final = bytes.fromhex("681180d2 010000d4")
_INSTRUCTION_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class NativeFrame:
    """One native frame.

    Attributes:
        address: In memory.
        file: Device and inode of what is mapped there, as `Region.file`; of inode 0 for memory without a file.
        path: Its path inside the process.
        symbol: The function, demangled; empty when not known.
        distance: Bytes from its begin.
    """

    address: int
    file: tuple[str, int]
    path: str
    symbol: str = ""
    distance: int = 0


@dataclass(frozen=True, slots=True)
class _SymbolFile:
    """A file that is kept open, and what was found in it as it was when it was opened."""

    opened: OpenFile
    symbols: Symbols | None

    def is_current(self) -> bool:
        return self.opened.is_unchanged()

    def close(self) -> None:
        if self.symbols is not None:
            self.symbols.close()
        self.opened.close()


class SymbolFiles(Closing):
    """Symbol tables by file, shared by all processes; the least recently used are let go."""

    def __init__(self) -> None:
        self._by_file: OrderedDict[tuple[str, int], _SymbolFile] = OrderedDict()

    def find(self, pid: int, region: Region) -> Symbols | None:
        """The symbols of a mapped file; None when it is no sound ELF file, or cannot be opened through this process."""
        known = self._by_file.get(region.file)
        if known is not None and known.is_current():
            self._by_file.move_to_end(region.file)
            return known.symbols
        if known is not None:
            self._by_file.pop(region.file).close()
        try:
            found = _open_symbols(pid, region)
        except (
            OSError
        ):  # as when this process has just ended: the file has its symbols all the same
            return None
        self._by_file[region.file] = found
        if len(self._by_file) > _MAX_FILES:
            _, oldest = self._by_file.popitem(last=False)
            oldest.close()
        return found.symbols

    def close(self) -> None:
        """Close every file."""
        for known in self._by_file.values():
            known.close()
        self._by_file.clear()


def _open_symbols(pid: int, region: Region) -> _SymbolFile:
    """A mapped file with its symbols; without any where it is no sound ELF file.

    Raises:
        OSError: It cannot be opened or read.
    """
    opened = open_region(pid, region)
    try:
        return _SymbolFile(opened, Symbols(opened.fd))
    except BadDataError:
        return _SymbolFile(opened, None)
    except BaseException:
        opened.close()
        raise


class ProcessCode:
    """The code that one process has mapped.

    Args:
        pid: The process.
        files: Symbol tables.
        memory: Its memory, which is asked for instructions on arm64.
    """

    def __init__(self, pid: int, files: SymbolFiles, memory: RemoteMemory | None = None) -> None:
        self._pid = pid
        self._files = files
        self._memory = memory if IS_ARM else None
        self._mask = -1
        self._regions: list[Region] = []
        self._starts: list[int] = []
        self._compiled = _PerfMap(pid)

    def describe(self, addresses: Iterable[int]) -> list[NativeFrame]:
        """Frames for addresses, innermost first, up to the first that is not code: there the chain was broken."""
        frames: list[NativeFrame] = []
        for address in addresses:
            # A return address may lie behind the last instruction of its function.
            inside = address - 1 if frames else address
            region = self._find_region(inside)
            if region is None:
                break
            frames.append(self._describe(address, inside, region))
        return frames

    def is_code(self, address: int) -> bool:
        """Whether something executable is mapped there."""
        return self._find_region(address) is not None

    def find_rule(self, address: int) -> UnwindRule | None:
        """How to get from a frame at an address to its caller; None where no file tells."""
        region = self._find_region(address)
        if region is None:
            return None
        rule = None
        if region.path.startswith("/") and not region.path.startswith(_NO_FILES):
            symbols = self._files.find(self._pid, region)
            bias = symbols.find_bias(region.start, region.offset) if symbols else None
            rule = symbols.find_rule(address - bias) if symbols and bias is not None else None
        if rule is None and self._memory is not None and is_signal_return(self._memory, address):
            return UnwindRule(UnwindKind.SIGNAL)
        return rule

    def strip(self, address: int) -> int:
        """A return address without the signature that arm64 may have put above it (pointer authentication)."""
        if not self._regions:
            self._read_regions()
        return address & self._mask

    def forget(self) -> None:
        """Something was mapped: look again at the next question."""
        self._regions.clear()
        self._starts.clear()

    def _find_region(self, address: int) -> Region | None:
        """The code around an address; what is mapped is read again when nothing is known there, as after dlopen()."""
        for is_fresh in (False, True):
            if is_fresh:
                self._read_regions()
            i = bisect.bisect_right(self._starts, address) - 1
            if i >= 0 and address < self._regions[i].end:
                return self._regions[i]
        return None

    def _read_regions(self) -> None:
        every = list(iter_regions(self._pid))
        self._regions = [region for region in every if region.is_code]
        self._starts = [region.start for region in self._regions]
        if IS_ARM:
            self._mask = find_address_mask(every)

    def _describe(self, address: int, inside: int, region: Region) -> NativeFrame:
        if not region.path.startswith("/") or region.path.startswith(_NO_FILES):
            symbol, distance = self._compiled.find(inside)
            return NativeFrame(
                address, region.file, region.path, symbol, distance + address - inside
            )
        symbols = self._files.find(self._pid, region)
        bias = symbols.find_bias(region.start, region.offset) if symbols else None
        found = symbols.find_function(inside - bias) if symbols and bias is not None else None
        if found is None:
            return NativeFrame(address, region.file, region.path)
        return NativeFrame(address, region.file, region.path, found[0], found[1] + address - inside)


def find_address_mask(regions: Sequence[Region]) -> int:
    """The bits of an address in a process; arm64 keeps signatures above them.

    The stack lies at the top of what a process may address: 39, 42, 47, 48 or 52 bits, as the kernel was built, and
    with 52 below 48 unless the process asks for more (Documentation/arch/arm64/memory.rst of Linux 6.12).
    """
    top = max((region.end for region in regions), default=0)
    return (1 << (top - 1).bit_length()) - 1 if top else -1


def is_signal_return(memory: RemoteMemory, address: int) -> bool:
    """Whether an address, or the one behind it, is where a signal handler returns to on arm64."""
    begin = -(-address // _INSTRUCTION_BYTES) * _INSTRUCTION_BYTES
    return memory.read(begin, len(_RETURN_FROM_SIGNAL)) == _RETURN_FROM_SIGNAL


class _PerfMap:
    """Functions that a just-in-time compiler wrote to ``/tmp/perf-PID.map``, by the pid that it sees itself under.

    Source: tools/perf/Documentation/jit-interface.txt.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stamp: tuple[int, int] = (0, 0)
        self._functions: list[tuple[int, int, str]] = []

    def find(self, address: int) -> tuple[str, int]:
        """Name and distance from its begin; an empty name when the file does not tell."""
        self._refresh()
        i = bisect.bisect_right(self._functions, (address, 1 << 64, "")) - 1
        if i >= 0:
            start, size, name = self._functions[i]
            if address < start + size:
                return name, address - start
        return "", 0

    def _refresh(self) -> None:
        try:
            fd = open_inside(f"/proc/{self._pid}/root", _find_perf_map(self._pid))
        except OSError:
            return
        try:
            status = os.fstat(fd)
            stamp = (status.st_mtime_ns, status.st_size)
            if stamp == self._stamp:
                return
            data = read_whole(fd, _MAX_PERF_BYTES)
        except OSError:
            return
        finally:
            os.close(fd)
        self._stamp = stamp
        self._functions = sorted(
            (int(start, 16), int(size, 16), name.decode("utf-8", "replace"))
            for start, size, name in _PERF_LINE.findall(data)
        )


def _find_perf_map(pid: int) -> str:
    """Its name inside the process's root."""
    own = str(pid)
    with contextlib.suppress(OSError):
        own = read_status(Path("/proc") / own).get("NSpid", own).split()[-1]
    return f"/tmp/perf-{own}.map"  # noqa: S108 - where the compilers write it
