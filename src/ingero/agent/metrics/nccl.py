"""Which of the traced processes have NCCL loaded, from which file and in which version.

The scan has a thread of its own: the maps of a training process are thousands of lines, and a library is hundreds of
megabytes.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingero.agent.capture.discover.identity import ProcessIdentity
from ingero.agent.capture.discover.processes import FileState, iter_mappings, open_mapped
from ingero.agent.capture.kernel.perf import Mapping
from ingero.agent.capture.totals import Totals
from ingero.agent.metrics.series import Kind, Series
from ingero.model.arrays import Records
from ingero.model.events import Events

SCAN_S: Final = 5.0
_VERSION: Final = re.compile(rb"NCCL version (\d+\.\d+\.\d+)")
"""Text that NCCL prints when it starts; in the library of every release since 2.0."""
_SEARCHED_BYTES: Final = 64 << 20
"""In NVIDIA's 2.28.9 the text is 2 MB from the beginning of 400 MB."""
_PIECE_BYTES: Final = 1 << 20
_OVERLAP_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class LoadedNccl:
    """A process with the library.

    Attributes:
        pid: Its id.
        name: Its command name.
        path: The file, as the process calls it.
        version: Such as 2.28.9; empty where the file does not hold it.
    """

    pid: int
    name: str
    path: str
    version: str


class NcclProcesses:
    """Scans processes as they are met and every `SCAN_S` seconds: an observer with series."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._versions: dict[FileState, str] = {}
        self._loaded: tuple[LoadedNccl, ...] = ()
        self._is_closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ingero-nccl-loaded", daemon=True)

    def start(self) -> None:
        """Begin to scan."""
        self._thread.start()

    def close(self) -> None:
        """Stop scanning."""
        self._is_closed = True
        self._wake.set()
        self._thread.join()

    def on_process(self, identity: ProcessIdentity) -> None:
        """Scan it soon."""
        self._names[identity.pid] = identity.name
        self._wake.set()

    def on_events(self, ring: str, records: Records, events: Events) -> None:
        """Not used: a scan reads the maps of processes."""

    def on_totals(self, totals: Totals) -> None:
        """Not used: a scan reads the maps of processes."""

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait(SCAN_S)
            self._wake.clear()
            self.scan()

    def scan(self) -> None:
        """Scan every process that was met; one that is gone is forgotten."""
        loaded = []
        for pid, name in list(self._names.items()):
            if not Path(f"/proc/{pid}").exists():
                self._names.pop(pid, None)
                continue
            for mapping in iter_mappings(pid):
                if not mapping.path.rpartition("/")[2].startswith("libnccl.so"):
                    continue
                try:
                    version = self._find_version(mapping)
                except OSError:  # gone meanwhile, or not ours to read
                    continue
                loaded.append(LoadedNccl(pid, name, mapping.path, version))
                break
        self._loaded = tuple(loaded)

    def _find_version(self, mapping: Mapping) -> str:
        with open_mapped(mapping) as opened:
            if opened.state not in self._versions:
                self._versions[opened.state] = find_version(Path(opened.reach))
            return self._versions[opened.state]

    def iter_series(self) -> Iterator[Series]:
        """The last scan."""
        points = tuple(
            (
                (
                    ("pid", one.pid),
                    ("comm", one.name),
                    ("libnccl_path", one.path),
                    ("libnccl_version", one.version),
                ),
                1.0,
            )
            for one in sorted(self._loaded, key=lambda one: one.pid)
        )
        description = "Processes that have the NCCL library loaded."
        yield Series("gpu.nccl.process_loaded", Kind.GAUGE, "1", description, points)
        count = (((), float(len(points))),)
        yield Series("gpu.nccl.processes_total", Kind.GAUGE, "1", "How many.", count)


def find_version(path: Path) -> str:
    """The version that an NCCL library says it is; empty when it cannot be read or does not say.

    The file is read and not mapped: its owner may cut it off meanwhile, which would end this process by SIGBUS.
    """
    window = b""
    try:
        with path.open("rb") as file:
            for _ in range(_SEARCHED_BYTES // _PIECE_BYTES):
                piece = file.read(_PIECE_BYTES)
                if not piece:
                    break
                window += piece
                found = _VERSION.search(window)
                if found is not None and found.end() < len(window):
                    return found[1].decode()
                window = window[-_OVERLAP_BYTES:]  # where a version may have begun
    except OSError:  # gone, or forbidden
        return ""
    found = _VERSION.search(window)
    return "" if found is None else found[1].decode()
