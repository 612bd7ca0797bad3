"""The processes that use CUDA or NCCL now, and how much of what they call can be seen."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingero.agent.capture.discover.processes import (
    FileState,
    OpenFile,
    iter_mappings,
    iter_pids,
    open_mapped,
)
from ingero.agent.capture.discovery import find_targets
from ingero.agent.capture.kernel.perf import Mapping
from ingero.agent.capture.probes.targets import (
    OwnRuntime,
    find_own_runtime,
    is_candidate,
    is_driver,
    is_library,
)
from ingero.errors import BadDataError, UnsupportedError

_VERSION: Final = re.compile(r"\.so\.(\d[\d.]*)$")


@dataclass(frozen=True, slots=True)
class ActiveLibrary:
    """A file of CUDA or NCCL that a process has mapped.

    Attributes:
        path: Its name inside the process; the program's own where they are linked into it.
        version: As the file's name has it; empty where it has none.
        problem: Why it cannot be probed; empty where it can.
    """

    path: str
    version: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ActiveProcess:
    """A process that has a library of CUDA or NCCL.

    Attributes:
        pid: Its pid.
        name: Its command name.
        libraries: What it has.
        hidden_runtimes: Files with a CUDA runtime linked in and its names stripped: of these only the driver's calls
            are seen.
    """

    pid: int
    name: str
    libraries: tuple[ActiveLibrary, ...]
    hidden_runtimes: tuple[str, ...] = ()


def find_active() -> list[ActiveProcess]:
    """Every process with a library that can be probed and may be read; a file is read once."""
    known: dict[tuple[str, FileState], bool] = {}
    return [found for pid in iter_pids() if (found := _inspect(pid, known)) is not None]


def _inspect(pid: int, known: dict[tuple[str, FileState], bool]) -> ActiveProcess | None:
    mappings = list({mapping.path: mapping for mapping in iter_mappings(pid)}.values())
    libraries = tuple(_iter_libraries(mappings, known))
    if not libraries:
        return None
    hidden: list[str] = []
    if any(is_driver(mapping) for mapping in mappings):
        others = [one for one in mappings if not is_library(one)]
        hidden = [one.path for one in others if _ask("hidden", one, known, _hides_runtime)]
        seen = {library.path for library in libraries}
        libraries += tuple(
            ActiveLibrary(one.path)
            for one in others
            if one.path not in seen and _ask("named", one, known, _names_runtime)
        )
    try:
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        name = ""
    return ActiveProcess(pid, name, libraries, tuple(hidden))


def _iter_libraries(
    mappings: list[Mapping], known: dict[tuple[str, FileState], bool]
) -> Iterator[ActiveLibrary]:
    for mapping in filter(is_candidate, mappings):
        found = _VERSION.search(mapping.path)
        version = found[1] if found else ""
        try:
            is_probed = functools.partial(_is_probed, mapping=mapping)
            if _ask("probed", mapping, known, is_probed, is_strict=True):
                yield ActiveLibrary(mapping.path, version)
        except (OSError, BadDataError, UnsupportedError) as error:
            if is_library(mapping):
                problem = (
                    getattr(error, "message", "") or getattr(error, "strerror", "") or str(error)
                )
                yield ActiveLibrary(mapping.path, version, problem)


def _ask(
    question: str,
    mapping: Mapping,
    known: dict[tuple[str, FileState], bool],
    find: Callable[[OpenFile], bool],
    *,
    is_strict: bool = False,
) -> bool:
    """Ask a mapped file something, each once; without ``is_strict`` False where it cannot be asked."""
    try:
        with open_mapped(mapping) as opened:
            key = question, opened.state
            if key not in known:
                known[key] = find(opened)
            return known[key]
    except (OSError, BadDataError):
        if is_strict:
            raise
        return False


def _hides_runtime(opened: OpenFile) -> bool:
    return find_own_runtime(opened) is OwnRuntime.HIDDEN


def _names_runtime(opened: OpenFile) -> bool:
    return find_own_runtime(opened) is OwnRuntime.NAMED


def _is_probed(opened: OpenFile, mapping: Mapping) -> bool:
    return any(True for _ in find_targets(opened, mapping))
