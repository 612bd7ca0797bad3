"""The context of every question: one recording, loaded once while it does not change."""

from __future__ import annotations

from pathlib import Path

from ingero.agent.queries.window import Wanted, load_part
from ingero.errors import StoreError
from ingero.model.recording import Recording


class RecordingFile:
    """A recording that questions are asked of.

    Keeps the last part that was loaded while the file stays as it was, so that a conversation pays for loading once.

    Args:
        path: The file. Need not exist yet; each question says so while it does not.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: tuple[tuple[object, ...], Recording] | None = None

    def load(self, wanted: Wanted) -> Recording:
        """Load a part of the recording.

        Raises:
            StoreError: The file cannot be read as a recording.
            BadDataError: The part is not one.
        """
        key = (*self._stamp(), wanted)
        if self._kept is None or self._kept[0] != key:
            self._kept = (key, load_part(self.path, wanted))
        return self._kept[1]

    def _stamp(self) -> tuple[object, ...]:
        """What changes when the file or its log does."""
        stamps: list[object] = []
        for path in (self.path, self.path.with_name(self.path.name + "-wal")):
            try:
                facts = path.stat()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StoreError(f"{path}: {error.strerror}") from error
            stamps += [facts.st_mtime_ns, facts.st_size, facts.st_ino]
        return tuple(stamps)
