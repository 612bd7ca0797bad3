"""Which functions of a file are probed."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

from ingero.agent.capture.discover.elf import ElfFile, FileBytes
from ingero.agent.capture.discover.processes import FileId, OpenFile, is_program
from ingero.agent.capture.kernel.perf import Mapping
from ingero.agent.capture.symbols.libraries import LIBRARIES, get_cookies

_NAMES: Final = (
    "libcudart",
    "libcuda.so",
    "libnccl",
    "libtorch_cuda",
    "libtorch_global_deps",
    "libtorch_cpu",
)
_DRIVER: Final = "libcuda.so"
_RUNTIME: Final = "libcudart"
_TORCH: Final = "libtorch_cpu."
_DEVICE_CODE: Final = frozenset((".nv_fatbin", ".nvFatBinSegment", "__nv_relfatbin"))
"""Sections of what nvcc compiled, which hands its device code to a CUDA runtime; they stay when names are stripped."""
_PLUGIN: Final = re.compile(r"libnccl-(?![0-9a-f]{8}\.)")
"""Plug-ins, ours among them: NCCL calls them, nobody else does. auditwheel puts eight digits of a hash behind the name
of a library that it copies into a wheel (``copylib()`` of auditwheel/repair.py)."""


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """A file to probe.

    Attributes:
        file: What it is.
        path: Its name inside the process that showed it.
        libraries: Which of our libraries are in it.
        probes: File offset and descriptor index of every function, each offset once. The kernel takes about 0.1 ms for
            each, so those that a program calls first come first.
        leaves: File offsets of instructions by which functions of C++ are left, see
            `ingero.agent.capture.probes.exits`.
    """

    file: FileId
    path: str
    libraries: tuple[str, ...]
    probes: tuple[tuple[int, int], ...]
    leaves: tuple[int, ...] = ()

    def join(self, other: ProbeTarget) -> ProbeTarget:
        """Both parts of one file."""
        libraries = tuple(dict.fromkeys((*self.libraries, *other.libraries)))
        return ProbeTarget(
            self.file, self.path, libraries, self.probes + other.probes, self.leaves + other.leaves
        )


def is_library(mapping: Mapping) -> bool:
    """Whether a mapped file has the name of a library that we probe."""
    name = mapping.path.rpartition("/")[2]
    return name.startswith(_NAMES) and not _PLUGIN.match(name)


def is_torch(mapping: Mapping) -> bool:
    """Whether a mapped file has the name of the library in which PyTorch keeps Gloo."""
    return mapping.path.rpartition("/")[2].startswith(_TORCH)


def is_driver(mapping: Mapping) -> bool:
    """Whether a mapped file has the name of CUDA's driver library."""
    return mapping.path.rpartition("/")[2].startswith(_DRIVER)


class OwnRuntime(enum.Enum):
    """Whether a CUDA runtime is linked into a file, and what can be seen of it."""

    NONE = enum.auto()
    NAMED = enum.auto()
    """Its functions can be found by their names."""
    HIDDEN = enum.auto()
    """Its names were stripped: of its user only the driver's calls can be seen."""


def find_own_runtime(opened: OpenFile) -> OwnRuntime:
    """Whether a file has device code and a runtime of its own to hand it to: it asks for no runtime library.

    Raises:
        BadDataError: It is no ELF file of 64 bits.
        OSError: It cannot be read.
    """
    elf = ElfFile(FileBytes(opened.fd))
    if not _DEVICE_CODE & elf.find_section_names() or elf.needs_library(_RUNTIME):
        return OwnRuntime.NONE
    target = find_target(opened, "")
    is_named = target is not None and "cudart" in target.libraries
    return OwnRuntime.NAMED if is_named else OwnRuntime.HIDDEN


def is_candidate(mapping: Mapping) -> bool:
    """Whether a mapped file may hold what we probe: by name, or because it is the program itself."""
    return is_library(mapping) or is_program(mapping)


def iter_targets(opened: OpenFile, path: str) -> Iterator[ProbeTarget]:
    """Look into a file: first what it exports, then what was linked into it.

    Nothing is an answer too: that nothing of ours is defined in the file, which stays true until it is changed.

    Args:
        opened: The file.
        path: What its process calls it.

    Raises:
        BadDataError: It is no ELF file of 64 bits.
        OSError: It cannot be read.
    """
    cookies = get_cookies()
    elf = ElfFile(FileBytes(opened.fd))
    known = set[int]()
    for find in (elf.find_exported, elf.find_local):
        found = find(cookies)
        probes: dict[int, int] = {}
        for name, offset in found.items():
            if offset not in known:
                probes.setdefault(offset, cookies[name])
        known |= probes.keys()
        if probes:
            libraries = _name_libraries(found)
            yield ProbeTarget(opened.file, path, libraries, tuple(probes.items()))


def find_target(opened: OpenFile, path: str) -> ProbeTarget | None:
    """The same at once; None when nothing of ours is defined in the file."""
    parts = list(iter_targets(opened, path))
    return functools.reduce(ProbeTarget.join, parts) if parts else None


def _name_libraries(found: Collection[str]) -> tuple[str, ...]:
    return tuple(
        library.name
        for library in LIBRARIES
        if any(name in found for function in library.functions for name in function.names())
    )
