"""Programs with a CUDA runtime linked in and its names stripped: of these only the driver's calls are seen."""

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
from ingero.agent.capture.probes.targets import has_hidden_runtime, is_library
from ingero.errors import BadDataError
from ingero.model.recording import Unprobed

MAX_UNPROBED: Final = 1024
_HIDDEN: Final = "it has a CUDA runtime linked in, names stripped: only the driver's calls are seen"
_MAX_EXAMINED: Final = 65_536


class HiddenRuntimes:
    """Finds such files of processes, each looked into once. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[FileState, bool] = {}
        self._found: dict[tuple[int, str], Unprobed] = {}

    @property
    def found(self) -> tuple[Unprobed, ...]:
        """Those of every process that was searched."""
        with self._lock:
            return tuple(self._found.values())

    def search(self, pid: int) -> None:
        """Search what a process has mapped.

        A hidden runtime asks for the driver's library only when it starts: search when that is mapped.
        """
        for mapping in self._iter_hiding(pid):
            with self._lock:
                shown = pid if len(self._found) < MAX_UNPROBED else MANY
                self._found.setdefault(
                    (shown, mapping.path), Unprobed(shown, mapping.path, _HIDDEN)
                )

    def _iter_hiding(self, pid: int) -> Iterator[Mapping]:
        others = {one.path: one for one in iter_mappings(pid) if not is_library(one)}
        for mapping in others.values():
            try:
                with open_mapped(mapping) as opened:
                    is_hidden = self._ask(opened)
            except (
                OSError,
                BadDataError,
            ):  # what it is cannot be said, and nothing of it was probed before
                continue
            if is_hidden:
                yield mapping

    def _ask(self, opened: OpenFile) -> bool:
        with self._lock:
            known = self._known.get(opened.state)
        if known is None:
            known = has_hidden_runtime(opened)
            with self._lock:
                if len(self._known) >= _MAX_EXAMINED:
                    self._known.clear()
                self._known[opened.state] = known
        return known
