"""Processes and the executable files they have mapped.

A file is known by device and inode, so one library reached by two paths is one, and two copies of it are two.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingero.agent.kernel.perf import Mapping

_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class FileId:
    """A file, whatever it is called."""

    device: tuple[int, int]
    inode: int


def file_of(mapping: Mapping) -> FileId:
    """The identity of a mapped file."""
    return FileId(mapping.device, mapping.inode)


def iter_mappings(pid: int) -> Iterator[Mapping]:
    """Executable file mappings of a process; nothing when it is gone or may not be read."""
    try:
        lines = (_PROC / str(pid) / "maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or "x" not in fields[1] or not fields[5].startswith("/"):
            continue
        start, _, end = fields[0].partition("-")
        major, _, minor = fields[3].partition(":")
        yield Mapping(
            pid,
            int(start, 16),
            int(end, 16),
            (int(major, 16), int(minor, 16)),
            int(fields[4]),
            fields[5].removesuffix(" (deleted)"),
        )


def iter_pids() -> Iterator[int]:
    """Every process there is now."""
    for entry in os.scandir(_PROC):
        if entry.name.isdigit():
            yield int(entry.name)


def is_program(mapping: Mapping) -> bool:
    """Whether a mapping is the process's own executable, where a static runtime would be."""
    try:
        status = (_PROC / str(mapping.pid) / "exe").stat()
    except OSError:
        return False
    return status.st_ino == mapping.inode and mapping.inode != 0
