"""CUDA runtimes that are linked into files of other names than a runtime's.

Where their functions are named they can be probed; where the names were stripped only the driver's calls are seen.
"""

from __future__ import annotations

import threading
from typing import Final

from ingero.agent.capture.discover.processes import (
    FileState,
    OpenFile,
    has_ended,
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
_MAX_SEARCHED: Final = 4096


class HiddenRuntimes:
    """Finds such files of processes, each looked into once. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._searched = set[int]()
        self._known: dict[FileState, OwnRuntime] = {}
        self._found: dict[tuple[int, str], Unprobed] = {}

    @property
    def found(self) -> tuple[Unprobed, ...]:
        """Those of every process that was searched."""
        with self._lock:
            return tuple(self._found.values())

    def search(self, pid: int) -> list[Mapping]:
        """Search what a process has mapped; returns the files whose runtime is named, so that it can be probed.

        A runtime that is linked in asks for the driver's library only when it starts: search when that is mapped. Files
        that are mapped later are for `is_named`.
        """
        # Before its files are read: those that it maps from now on may be missing among them.
        self._note_searched(pid)
        others = {one.path: one for one in iter_mappings(pid) if not is_library(one)}
        return [mapping for mapping in others.values() if self._look_into(mapping)]

    def is_named(self, mapping: Mapping) -> bool:
        """Whether a process that was searched has mapped a file since whose runtime is named."""
        with self._lock:
            is_searched = mapping.pid in self._searched
        return is_searched and not is_library(mapping) and self._look_into(mapping)

    def _note_searched(self, pid: int) -> None:
        with self._lock:
            if len(self._searched) >= _MAX_SEARCHED:
                self._searched = {one for one in self._searched if not has_ended(one)}
            self._searched.add(pid)

    def _look_into(self, mapping: Mapping) -> bool:
        """Whether there is a runtime whose functions are named; one that is hidden is among those found from now on."""
        try:
            with open_mapped(mapping) as opened:
                runtime = self._ask(opened)
        except (
            OSError,
            BadDataError,
        ):  # what it is cannot be said, and nothing of it was probed before
            return False
        if runtime is OwnRuntime.HIDDEN:
            with self._lock:
                shown = mapping.pid if len(self._found) < MAX_UNPROBED else MANY
                self._found.setdefault(
                    (shown, mapping.path), Unprobed(shown, mapping.path, HIDDEN_RUNTIME)
                )
        return runtime is OwnRuntime.NAMED

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
