"""Another process's memory and what is mapped in it."""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingero.agent.capture.discover.processes import (
    OpenFile,
    iter_maps,
    open_file,
    open_same,
)
from ingero.agent.capture.kernel.regular_files import open_inside
from ingero.closing import Closing

_PROC: Final = Path("/proc")
_WORD: Final = struct.Struct("<Q")


class RemoteMemory(Closing):
    """Reads one process's memory.

    Held by descriptor: when the process ends or replaces its image, reads fail; they never reach another process that
    has got the same pid.

    Args:
        pid: The process.

    Raises:
        OSError: It is gone, or we may not read it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.open(_PROC / str(pid) / "mem", os.O_RDONLY | os.O_CLOEXEC)

    def read(self, address: int, n_bytes: int) -> bytes:
        """Bytes at an address; fewer at the end of a mapping, none where nothing is mapped."""
        try:
            return os.pread(self._fd, n_bytes, address)
        except (OSError, OverflowError, ValueError):
            return b""

    def word(self, address: int) -> int:
        """The eight bytes at an address as a number; 0 when they cannot be read."""
        data = self.read(address, _WORD.size)
        return int(_WORD.unpack(data)[0]) if len(data) == _WORD.size else 0

    def close(self) -> None:
        """Let go of the process."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True, slots=True)
class Region:
    """One mapping of a file.

    Attributes:
        start: First address.
        end: First address after it.
        offset: Where in the file it begins.
        is_code: Whether it may be executed.
        file: Device and inode, as ``/proc`` writes them.
        path: The file's name inside the process; empty for memory without one.
    """

    start: int
    end: int
    offset: int
    is_code: bool
    file: tuple[str, int]
    path: str


def iter_regions(pid: int) -> Iterator[Region]:
    """Every mapping of a process in order of address; nothing when it is gone or may not be read."""
    for addresses, access, offset, device, inode, path in iter_maps(pid):
        start, _, end = addresses.partition("-")
        yield Region(
            int(start, 16),
            int(end, 16),
            int(offset, 16),
            "x" in access,
            (device, int(inode)),
            path,
        )


def open_region(pid: int, region: Region) -> OpenFile:
    """Open a mapped file.

    Through ``/proc/PID/map_files``, which works across mount namespaces and for deleted files, else by its name inside
    the process's root.

    Raises:
        OSError: Neither works, or another file has the name.
    """
    folder = _PROC / str(pid)
    try:
        return open_file(folder / "map_files" / f"{region.start:x}-{region.end:x}")
    except OSError:
        by_name = functools.partial(open_inside, folder / "root", region.path)
        return OpenFile(open_same(by_name, region.file[1]))
