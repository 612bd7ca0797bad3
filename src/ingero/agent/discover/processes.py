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


@dataclass(frozen=True, slots=True)
class Reach:
    """A file and a path by which we can open it, which need not be its name."""

    path: str
    file: FileId


def find_reach(path: str) -> Reach | None:
    """The file that a path leads to; None when there is none or it may not be seen.

    The identity is that of stat(): on overlayfs perf and ``/proc`` name different inodes for one file.
    """
    try:
        status = os.stat(path)  # noqa: PTH116 - a link in /proc, which Path would not make clearer
    except OSError:
        return None
    return Reach(path, FileId((os.major(status.st_dev), os.minor(status.st_dev)), status.st_ino))


def find_mapped(mapping: Mapping) -> Reach | None:
    """How to open a mapped file.

    Through ``/proc/PID/map_files``, which works across mount namespaces and for deleted files; where the kernel refuses that,
    through the process's root.
    """
    folder = _PROC / str(mapping.pid)
    return find_reach(f"{folder}/map_files/{mapping.start:x}-{mapping.end:x}") or find_reach(
        f"{folder}/root{mapping.path}"
    )


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
        program = str((_PROC / str(mapping.pid) / "exe").readlink())
    except OSError:
        return False
    # The mapping's path begins at the process's root, the link's at ours.
    return program.removesuffix(" (deleted)").endswith(mapping.path)
