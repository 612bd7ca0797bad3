"""Which files of a process hold functions that we probe.

A file is known by device and inode, so one library reached by two paths is one, and two copies of it are two. It is opened
through ``/proc/PID/map_files``, which works across mount namespaces and for deleted files; where the kernel refuses that,
through the process's root.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingero.agent.discover.elf import find_functions
from ingero.agent.kernel.perf import Mapping
from ingero.agent.symbols.libraries import LIBRARIES, get_cookies
from ingero.errors import BadDataError

_NAMES: Final = ("libcudart", "libcuda.so", "libnccl", "libtorch_cuda", "libtorch_global_deps")
_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class FileId:
    """A file, whatever it is called."""

    device: tuple[int, int]
    inode: int


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """A file to probe.

    Attributes:
        file: What it is.
        path: Its name inside the process that showed it.
        reach: The path by which we open it.
        libraries: Which of our libraries are in it.
        probes: File offset and descriptor index of every function, each offset once.
    """

    file: FileId
    path: str
    reach: str
    libraries: tuple[str, ...]
    probes: tuple[tuple[int, int], ...]


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


def is_candidate(mapping: Mapping) -> bool:
    """Whether a mapped file may hold what we probe: by name, or because it is the program itself."""
    name = mapping.path.rpartition("/")[2]
    return name.startswith(_NAMES) or is_program(mapping)


def is_program(mapping: Mapping) -> bool:
    """Whether a mapping is the process's own executable, where a static runtime would be."""
    try:
        status = (_PROC / str(mapping.pid) / "exe").stat()
    except OSError:
        return False
    return status.st_ino == mapping.inode and mapping.inode != 0


def find_target(mapping: Mapping) -> ProbeTarget | None:
    """Look into a mapped file; None when nothing of ours is in it or it cannot be opened."""
    for reach in (
        f"/proc/{mapping.pid}/map_files/{mapping.start:x}-{mapping.end:x}",
        f"/proc/{mapping.pid}/root{mapping.path}",
    ):
        try:
            return _inspect(mapping, reach)
        except (OSError, BadDataError, ValueError):  # gone, forbidden, empty or not an ELF file
            continue
    return None


def _inspect(mapping: Mapping, reach: str) -> ProbeTarget | None:
    cookies = get_cookies()
    libraries: list[str] = []
    probes: dict[int, int] = {}
    for library in LIBRARIES:
        names = [name for function in library.functions for name in function.names()]
        offsets = find_functions(reach, names, library.marker)
        # A program that merely imports the library defines none of them.
        if offsets:
            libraries.append(library.name)
        for name, offset in offsets.items():
            probes.setdefault(offset, cookies[name])
    if not probes:
        return None
    return ProbeTarget(
        file_of(mapping), mapping.path, reach, tuple(libraries), tuple(sorted(probes.items()))
    )
