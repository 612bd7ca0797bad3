"""The context of every question: one recording, loaded once while it does not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ingero.errors import StoreError
from ingero.model.incidents import Explanation
from ingero.model.recording import Recording
from ingero.recording.causal.engine import explain
from ingero.recording.causal.evidence import Evidence
from ingero.recording.queries.window import Wanted, load_part
from ingero.recording.store.reader import ForkMemory
from ingero.recording.store.sql import SqlStop

FoundT = TypeVar("FoundT")
Stamp = tuple[int, ...]


class Pager(Protocol):
    """Sends one alert to people; only a program that was asked to has one."""

    def __call__(self, alert: dict[str, Any], dedup_key: str) -> str:
        """Send it; returns the key that repeats are joined by."""
        ...


@dataclass(frozen=True, slots=True)
class ExternalAccess:
    """What a question may reach beyond the recording; nothing unless the user said so.

    Attributes:
        ask_nodes: Asks the nodes that were named: path below ``/api/v1/`` and body in, an answer of each out.
        page: Pages people.
    """

    ask_nodes: Callable[[str, object | None], Any] | None = None
    page: Pager | None = None


@dataclass(slots=True)
class _Kept:
    """A part of the recording and what was found in it."""

    key: tuple[object, ...]
    recording: Recording
    found: dict[str, Any] = field(default_factory=dict)


class RecordingFile:
    """A recording that questions are asked of.

    Keeps the last part that was loaded while the file stays as it was, with what was found in it, so that a
    conversation pays for loading and explaining once. Not for several threads at a time.

    Args:
        path: The file. Need not exist yet; each question says so while it does not.
        outside: What may be reached beyond it.

    Attributes:
        stop: What ends the SQL of the question that is being answered; None for nothing.
    """

    def __init__(self, path: Path, outside: ExternalAccess | None = None) -> None:
        self.path = path
        self.outside = outside or ExternalAccess()
        self.stop: SqlStop | None = None
        self._kept: _Kept | None = None
        self._forks: tuple[Stamp, ForkMemory] = ((), ForkMemory())

    def load(self, wanted: Wanted) -> Recording:
        """Load a part of the recording.

        Raises:
            StoreError: The file cannot be read as a recording.
            BadDataError: The part is not one.
        """
        return self._keep(wanted).recording

    def explain(self, wanted: Wanted) -> Explanation:
        """What went wrong in a part."""
        return self.remember(wanted, "explanation", explain)

    def evidence(self, wanted: Wanted) -> Evidence:
        """A part arranged for questions."""
        return self.remember(wanted, "evidence", Evidence)

    def remember(self, wanted: Wanted, name: str, find: Callable[[Recording], FoundT]) -> FoundT:
        """What `find` says of a part, found once while the file stays as it was."""
        kept = self._keep(wanted)
        if name not in kept.found:
            kept.found[name] = find(kept.recording)
        found: FoundT = kept.found[name]
        return found

    def stamp(self) -> Stamp:
        """What changes when the file or its log does; empty when there is no file.

        Raises:
            StoreError: The file cannot be looked at.
        """
        stamps: list[int] = []
        for path in (self.path, self.path.with_name(self.path.name + "-wal")):
            try:
                facts = path.stat()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StoreError(f"{path}: {error.strerror}") from error
            stamps += [facts.st_mtime_ns, facts.st_size, facts.st_ino]
        return tuple(stamps)

    def _keep(self, wanted: Wanted) -> _Kept:
        stamp = self.stamp()
        key = (stamp, wanted)
        if self._kept is None or self._kept.key != key:
            self._kept = None  # two parts at once would take twice the memory
            if self._forks[0] != stamp:
                self._forks = (stamp, ForkMemory())
            self._kept = _Kept(key, load_part(self.path, wanted, self._forks[1]))
        return self._kept
