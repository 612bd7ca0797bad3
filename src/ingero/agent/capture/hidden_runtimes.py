"""CUDA runtimes that are linked into files of other names than a runtime's.

Where their functions are named they can be probed; where the names were stripped only the driver's calls are seen.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final

from ingero.agent.capture.discover.processes import (
    FileState,
    OpenFile,
    iter_mappings,
    open_mapped,
)
from ingero.agent.capture.kernel.perf import Mapping
from ingero.agent.capture.probed_files import MANY
from ingero.agent.capture.probes.targets import OwnRuntime, find_own_runtime, is_library
from ingero.errors import BadDataError
from ingero.model.recording import HIDDEN_RUNTIME, Unprobed

MAX_UNPROBED: Final = 1024
_MAX_EXAMINED: Final = 65_536


class HiddenRuntimes:
    """Finds such files of processes, each looked into once. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[FileState, OwnRuntime] = {}
        self._found: dict[tuple[int, str], Unprobed] = {}

    @property
    def found(self) -> tuple[Unprobed, ...]:
        """Those of every process that was searched."""
        with self._lock:
            return tuple(self._found.values())

    def search(self, pid: int) -> list[Mapping]:
        """Search what a process has mapped; returns the files whose runtime is named, so that it can be probed.

        A runtime that is linked in asks for the driver's library only when it starts: search when that is mapped.
        """
        named = []
        for mapping, runtime in self._iter_found(pid):
            if runtime is OwnRuntime.NAMED:
                named.append(mapping)
                continue
            with self._lock:
                shown = pid if len(self._found) < MAX_UNPROBED else MANY
                self._found.setdefault(
                    (shown, mapping.path), Unprobed(shown, mapping.path, HIDDEN_RUNTIME)
                )
        return named

    def _iter_found(self, pid: int) -> Iterator[tuple[Mapping, OwnRuntime]]:
        others = {one.path: one for one in iter_mappings(pid) if not is_library(one)}
        for mapping in others.values():
            try:
                with open_mapped(mapping) as opened:
                    runtime = self._ask(opened)
            except (
                OSError,
                BadDataError,
            ):  # what it is cannot be said, and nothing of it was probed before
                continue
            if runtime is not OwnRuntime.NONE:
                yield mapping, runtime

    def _ask(self, opened: OpenFile) -> OwnRuntime:
        with self._lock:
            known = self._known.get(opened.state)
        if known is None:
            known = find_own_runtime(opened)
            with self._lock:
                if len(self._known) >= _MAX_EXAMINED:
                    self._known.clear()
                self._known[opened.state] = known
        return known
