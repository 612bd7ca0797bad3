"""Which functions of a mapped file are probed.

The file is opened through ``/proc/PID/map_files``, which works across mount namespaces and for deleted files; where the kernel
refuses that, through the process's root.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ingero.agent.discover.elf import find_functions
from ingero.agent.discover.processes import FileId, file_of, is_program
from ingero.agent.kernel.perf import Mapping
from ingero.agent.symbols.libraries import LIBRARIES, get_cookies
from ingero.errors import BadDataError

_NAMES: Final = ("libcudart", "libcuda.so", "libnccl", "libtorch_cuda", "libtorch_global_deps")


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


def is_candidate(mapping: Mapping) -> bool:
    """Whether a mapped file may hold what we probe: by name, or because it is the program itself."""
    name = mapping.path.rpartition("/")[2]
    return name.startswith(_NAMES) or is_program(mapping)


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
