"""Which functions of a file are probed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ingero.agent.discover.elf import find_functions
from ingero.agent.discover.processes import FileId, Reach, is_program
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


def is_library(mapping: Mapping) -> bool:
    """Whether a mapped file has the name of a library that we probe."""
    return mapping.path.rpartition("/")[2].startswith(_NAMES)


def is_candidate(mapping: Mapping) -> bool:
    """Whether a mapped file may hold what we probe: by name, or because it is the program itself."""
    return is_library(mapping) or is_program(mapping)


def find_target(reach: Reach, path: str) -> ProbeTarget | None:
    """Look into a file; None when nothing of ours is in it or it cannot be read.

    Args:
        reach: The file and how to open it.
        path: What its process calls it.
    """
    cookies = get_cookies()
    try:
        found = find_functions(reach.path, cookies, [library.marker for library in LIBRARIES])
    except (OSError, BadDataError, ValueError):  # gone, forbidden, not ELF, empty
        return None
    probes: dict[int, int] = {}
    for name, offset in found.items():
        probes.setdefault(offset, cookies[name])
    if not probes:
        return None
    libraries = tuple(
        library.name
        for library in LIBRARIES
        if any(name in found for function in library.functions for name in function.names())
    )
    return ProbeTarget(reach.file, path, reach.path, libraries, tuple(sorted(probes.items())))
