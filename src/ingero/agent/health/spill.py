"""What Fleet did not take, on disk until it does: bounded in size and age, oldest first, kept over an agent's end.

Nothing is written while Fleet answers. A batch is a file (`ingero.otlp.client.batch_folder`): one that was being
written when the agent was killed was never stored, one that was taken and not removed is sent again, and Fleet drops
repeats.

Lossy, all in `SpillCounts`: what is too old, what is the oldest when the room is used up, what is found damaged. What
the disk does not take stays with the caller.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from ingero.errors import BadDataError, IngeroError, RetryableError
from ingero.otlp.client.batch_folder import BatchFolder, BatchFolderSettings
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

DEFAULT_FOLDER: Final = "/var/lib/ingero/spill"
DEFAULT_MAX_BYTES: Final = 256 << 20
DEFAULT_MAX_AGE_NS: Final = 6 * 3600 * NS_PER_S
_BLOCK_BYTES: Final = 4096
"""A file takes whole blocks of the disk."""
_HEAD: Final = struct.Struct("<BQI")  # version, time of writing, items
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class SpillSettings:
    """Where, and how much.

    Attributes:
        folder: Made when something is written; one agent at a time.
        max_bytes: On disk; beyond it the oldest go.
        max_age_ns: What waited longer is not sent any more.
    """

    folder: Path = Path(DEFAULT_FOLDER)
    max_bytes: int = DEFAULT_MAX_BYTES
    max_age_ns: int = DEFAULT_MAX_AGE_NS


@dataclass(slots=True)
class SpillCounts:
    """What became of batches and their items since the start.

    Attributes:
        n_stored: Batches written.
        n_expired_items: Items of batches that grew too old, or were the oldest when the room was used up.
        n_damaged: Batches whose file is damaged or gone; what they held is not known. They lie beside as ``*.damaged``.
        n_write_failures: Batches that the disk did not take; they stay in memory.
        n_read_failures: Times a batch could not be read for now, as with too many open files; it waits on.
        n_remove_failures: Delivered batches that the disk did not remove: the next agent sends them again.
        problem: The newest of these, for people; empty while there was none.
    """

    n_stored: int = 0
    n_expired_items: int = 0
    n_damaged: int = 0
    n_write_failures: int = 0
    n_read_failures: int = 0
    n_remove_failures: int = 0
    problem: str = ""

    def note_write_failure(self, reason: str) -> None:
        """See `FolderLosses`."""
        self.n_write_failures += 1
        self.problem = reason

    def note_read_failure(self, reason: str) -> None:
        """See `FolderLosses`."""
        self.n_read_failures += 1
        self.problem = reason

    def note_remove_failure(self, reason: str) -> None:
        """See `FolderLosses`."""
        self.n_remove_failures += 1
        self.problem = reason

    def note_damaged(self, place: Path, reason: str) -> None:
        """See `FolderLosses`."""
        self.n_damaged += 1
        self.problem = f"{place} is damaged and set aside: {reason}"


class SpilledBatch(NamedTuple):
    """A batch read back from disk.

    Attributes:
        body: What was stored.
        n_items: How many items its writer said it has.
        wall_ns: When it was stored.
    """

    body: bytes
    n_items: int
    wall_ns: int


class Spill:
    """Batches that wait. One thread writes and reads; its numbers may be read on any.

    A folder that cannot be used is tried again with the next batch: the agent goes on without it.

    Args:
        settings: Where, and how much.
        clock: Both clocks.

    Attributes:
        counts: What became of batches.
        n_bytes: On disk.
    """

    def __init__(self, settings: SpillSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._folder: BatchFolder | None = None
        self._waiting: deque[tuple[int, int]] = deque()
        self._first: SpilledBatch | None = None
        self._lock = threading.Lock()
        self.counts = SpillCounts()
        self.n_bytes = 0
        if settings.folder.is_dir():
            self._open()

    @property
    def n_batches(self) -> int:
        """Batches that wait."""
        return len(self._waiting)

    def put(self, body: bytes, n_items: int) -> bool:
        """Store a batch behind the others; False when the disk does not take it."""
        if self._folder is None and not self._open():
            self.counts.n_write_failures += 1
            return False
        assert self._folder is not None
        head = _HEAD.pack(_VERSION, max(self._clock.wall_ns(), 0), n_items)
        n_bytes = _round(len(head) + len(body))
        with self._lock:
            try:
                while self._waiting and self.n_bytes + n_bytes > self._settings.max_bytes:
                    self._expire_first()
            except RetryableError:  # how much the oldest holds must be known, to be counted as lost
                self.counts.n_write_failures += 1
                return False
            if n_bytes > self._settings.max_bytes:
                self.counts.note_write_failure(f"a batch of {n_bytes} bytes is larger than allowed")
                return False
            try:
                key = self._folder.write(head + body)
            except RetryableError:
                return False
            self._waiting.append((key, n_bytes))
            self.n_bytes += n_bytes
            self.counts.n_stored += 1
        return True

    def peek(self) -> SpilledBatch | None:
        """The oldest batch that can be read and is not too old; None when there is none.

        Raises:
            RetryableError: It cannot be read for now; it stays the oldest.
        """
        with self._lock:
            while self._waiting:
                first = self._read_first()
                if first is None:
                    continue
                if self._clock.wall_ns() - first.wall_ns <= self._settings.max_age_ns:
                    return first
                self._expire_first()
        return None

    def pop(self) -> None:
        """Forget the oldest batch: it was delivered, or never will be."""
        with self._lock:
            self._remove_first()

    def refuse_first(self, reason: str) -> None:
        """The oldest batch holds nothing that can be sent: set it aside."""
        with self._lock:
            self._set_first_aside(reason)

    def close(self) -> None:
        """Let another agent have the folder."""
        with self._lock:
            if self._folder is not None:
                self._folder.close()
            self._folder = None

    def _open(self) -> bool:
        settings = self._settings
        try:
            settings.folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            folder = BatchFolder(BatchFolderSettings(settings.folder), self.counts, self._clock)
        except (OSError, IngeroError) as error:
            description = error.message if isinstance(error, IngeroError) else str(error)
            self.counts.problem = description
            return False
        self._folder = folder
        self._waiting = deque((key, _round(folder.measure(key))) for key in folder.list_keys())
        self.n_bytes = sum(n_bytes for _, n_bytes in self._waiting)
        return True

    def _read_first(self) -> SpilledBatch | None:
        """The oldest; None when it was set aside instead. Raises RetryableError when it cannot be read for now."""
        if self._first is None:
            assert self._folder is not None
            try:
                self._first = _decode(self._folder.read(self._waiting[0][0]))
            except BadDataError as error:
                self._set_first_aside(error.message)
        return self._first

    def _expire_first(self) -> None:
        first = self._read_first()
        if first is not None:
            self.counts.n_expired_items += first.n_items
            self._remove_first()

    def _remove_first(self) -> None:
        assert self._folder is not None
        key, n_bytes = self._waiting.popleft()
        self._folder.remove(key)
        self.n_bytes -= n_bytes
        self._first = None

    def _set_first_aside(self, reason: str) -> None:
        assert self._folder is not None
        key, n_bytes = self._waiting.popleft()
        self._folder.set_aside(key, reason)
        self.n_bytes -= n_bytes
        self._first = None


@contextmanager
def open_spill(settings: SpillSettings | None, clock: Clock) -> Iterator[Spill | None]:
    """What waits from before, and what will; None without settings."""
    if settings is None:
        yield None
        return
    spill = Spill(settings, clock)
    try:
        yield spill
    finally:
        spill.close()


def _decode(stored: bytes) -> SpilledBatch:
    if len(stored) < _HEAD.size:
        raise BadDataError(f"{len(stored)} bytes without a head")
    version, wall_ns, n_items = _HEAD.unpack_from(stored)
    if version != _VERSION:
        raise BadDataError(f"written by another release: version {version}")
    return SpilledBatch(stored[_HEAD.size :], n_items, wall_ns)


def _round(n_bytes: int) -> int:
    return -(-n_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
