"""Where batches wait for their destination: in memory, or in a storage that outlives the process.

Every method is called with the queue's lock held, but for those that say that they take it.

A queue outlives a reload. The threads of an exporter that was stopped may still have batches under way; those are
settled here, or wait again for the exporter that took over.
"""

from __future__ import annotations

import struct
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from typing_extensions import override

from ingero.errors import BadDataError, ConfigError, RetryableError
from ingero.fleet.component import BatchStorage, BatchStore, Host, parse_id
from ingero.fleet.consumer import Batch
from ingero.otlp.codec import decode_protobuf, encode_protobuf
from ingero.otlp.names import Signal
from ingero.telemetry.clock import Clock

_HEAD: Final = struct.Struct("<BQ")
_SIGNALS: Final = (Signal.METRICS, Signal.LOGS, Signal.TRACES)
"""A stored batch names its signal by the place here; new ones go to the end."""


_GONE: Final = "the exporter was changed or removed before the destination took them"
_OVER: Final = "the destination did not take them before shutdown_timeout"


@dataclass(frozen=True, slots=True, eq=False)
class WaitingBatch:
    """One batch that was taken out, and where it is stored."""

    batch: Batch
    key: int | None = None


class WaitingBatches(ABC):
    """A queue whose batches stay until they are settled.

    Attributes:
        lock: Of the queue.
        on_change: Called with the lock held when a batch came or was settled: the running exporter's.
        read_patience_ns: How long the running exporter still waits for what those before it have under way; below 0
            when it does no longer.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.on_change: Callable[[], None] = lambda: None
        self.read_patience_ns: Callable[[], int] = lambda: 0
        self._taken: set[WaitingBatch] = set()

    def take_over(self, on_change: Callable[[], None], clock: Clock, patience_ns: int) -> None:
        """An exporter begins; it waits for what those before it have under way, but only for ``patience_ns``."""
        until_ns = clock.mono_ns() + patience_ns
        self.on_change = on_change
        self.read_patience_ns = lambda: until_ns - clock.mono_ns()

    @property
    def n_taken(self) -> int:
        """Batches under way."""
        return len(self._taken)

    @property
    @abstractmethod
    def is_durable(self) -> bool:
        """Whether what waits is there for the next process."""

    @abstractmethod
    def __len__(self) -> int:
        """Batches that wait, without those that were taken."""

    @abstractmethod
    def put(self, batch: Batch) -> None:
        """Add one at the end. Raises RetryableError when it cannot be stored, or nobody will send it any more."""

    @abstractmethod
    def take(self) -> WaitingBatch | None:
        """The oldest; None when nothing that waits can be read.

        Raises:
            RetryableError: The oldest cannot be read for now; it stays the oldest.
        """

    @abstractmethod
    def settle(self, waiting: WaitingBatch) -> bool:
        """Forget one that was delivered or given up; False when it was counted as lost before."""

    @abstractmethod
    def give_back(self, waiting: WaitingBatch) -> None:
        """Let one wait again, before all others."""

    @abstractmethod
    def end(self) -> None:
        """Count what waits and what is under way as lost; what is durable stays. Takes the lock."""


class MemoryBatches(WaitingBatches):
    """Batches in memory, shared with the exporter that takes over after a reload.

    Attributes:
        lose: Counts batches as lost, and says why.
    """

    def __init__(self) -> None:
        super().__init__()
        self._batches: deque[Batch] = deque()
        self._is_closed = False
        self.lose: Callable[[Sequence[Batch], str], None] = lambda _batches, _why: None

    @property
    @override
    def is_durable(self) -> bool:
        return False

    @override
    def __len__(self) -> int:
        return len(self._batches)

    @override
    def put(self, batch: Batch) -> None:
        if self._is_closed:
            raise RetryableError("the sending queue is closed")
        self._batches.append(batch)

    @override
    def take(self) -> WaitingBatch | None:
        if not self._batches:
            return None
        taken = WaitingBatch(self._batches.popleft())
        self._taken.add(taken)
        return taken

    @override
    def settle(self, waiting: WaitingBatch) -> bool:
        if waiting not in self._taken:
            return False
        self._taken.remove(waiting)
        return True

    @override
    def give_back(self, waiting: WaitingBatch) -> None:
        if not self.settle(waiting):
            return
        if self._is_closed:
            self.lose([waiting.batch], _GONE)
        else:
            self._batches.appendleft(waiting.batch)

    def discard(self) -> None:
        """Count what waits as lost: no exporter will take over. What is under way has its answer. Takes the lock."""
        with self.lock:
            self._lose_waiting([], _GONE)

    @override
    def end(self) -> None:
        with self.lock:
            under_way = [taken.batch for taken in self._taken]
            self._taken.clear()
            self._lose_waiting(under_way, _OVER)

    def _lose_waiting(self, under_way: Sequence[Batch], why: str) -> None:
        self._is_closed = True
        lost = [*under_way, *self._batches]
        self._batches.clear()
        if lost:
            self.lose(lost, why)


class StoredBatches(WaitingBatches):
    """Batches in a storage: a batch is there before `put` returns and until it is settled.

    One that was under way when the process was killed waits again, so that its destination may get it twice. One that
    is under way over a reload does not, until its request failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._keys: deque[int] = deque()

    def open(self, open_store: Callable[[], BatchStore]) -> None:
        """Begin with what is stored and not under way. Takes the lock. Raises what ``open_store`` raises."""
        with self.lock:
            self._store = open_store()
            under_way = {taken.key for taken in self._taken}
            self._keys = deque(key for key in self._store.list_keys() if key not in under_way)

    @property
    @override
    def is_durable(self) -> bool:
        return True

    @override
    def __len__(self) -> int:
        return len(self._keys)

    @override
    def put(self, batch: Batch) -> None:
        head = _HEAD.pack(_SIGNALS.index(batch.signal), batch.received_wall_ns)
        self._keys.append(self._store.write(head + encode_protobuf(batch.export)))

    @override
    def take(self) -> WaitingBatch | None:
        while self._keys:
            key = self._keys[0]
            try:
                batch = _decode(self._store.read(key))
            except BadDataError as error:
                self._keys.popleft()
                self._store.set_aside(key, error.message)
            else:
                self._keys.popleft()
                taken = WaitingBatch(batch, key)
                self._taken.add(taken)
                return taken
        return None

    @override
    def settle(self, waiting: WaitingBatch) -> bool:
        assert waiting.key is not None
        self._taken.remove(waiting)
        self._store.remove(waiting.key)
        return True

    @override
    def give_back(self, waiting: WaitingBatch) -> None:
        assert waiting.key is not None
        self._taken.remove(waiting)
        self._keys.appendleft(waiting.key)

    @override
    def end(self) -> None:
        """Nothing is lost: all of it is there for the next process."""


def _decode(stored: bytes) -> Batch:
    if len(stored) < _HEAD.size or stored[0] >= len(_SIGNALS):
        raise BadDataError("not a stored batch of this version")
    number, received_wall_ns = _HEAD.unpack_from(stored)
    signal = _SIGNALS[number]
    return Batch(signal, decode_protobuf(stored[_HEAD.size :], signal), received_wall_ns)


def open_waiting(
    name: str, storage: str | None, host: Host, lose: Callable[[Sequence[Batch], str], None]
) -> WaitingBatches:
    """The queue of an exporter.

    Args:
        name: The exporter's id.
        storage: Id of the extension that stores it; None for memory.
        host: The running service.
        lose: Counts batches as lost, and says why.

    Raises:
        ConfigError: No running extension of that name stores batches.
        IngeroError: It cannot store those of this exporter.
    """
    if storage is None:
        memory = host.shared((name, "sending_queue"), MemoryBatches)
        memory.lose = lose
        return memory
    found = host.find(BatchStorage, parse_id(storage))
    if not found:
        raise ConfigError(
            f"exporters.{name}.sending_queue.storage: no running extension {storage!r} stores batches",
            hint="add a file_storage to extensions and to service.extensions",
        )
    owner = f"exporters.{name}"
    stored = host.shared((found[0].find_place(owner), "sending_queue"), StoredBatches)
    stored.open(lambda: found[0].open_store(owner))
    return stored
