"""Where batches wait for their destination: in memory, or in a storage that outlives the process.

Every method is called with the lock of `ingero.fleet.helpers.sending.SendingThreads` held.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from typing_extensions import override

from ingero.errors import BadDataError, ConfigError
from ingero.fleet.component import BatchStorage, BatchStore, Host, parse_id
from ingero.fleet.consumer import Batch
from ingero.otlp.codec import decode_protobuf, encode_protobuf
from ingero.otlp.names import Signal

_HEAD: Final = struct.Struct("<BQ")
_SIGNALS: Final = (Signal.METRICS, Signal.LOGS, Signal.TRACES)
"""A stored batch names its signal by the place here; new ones go to the end."""


@dataclass(frozen=True, slots=True)
class WaitingBatch:
    """One batch that was taken out, and where it is stored."""

    batch: Batch
    key: int | None = None


class WaitingBatches(Protocol):
    """A queue whose batches stay until they are settled."""

    @property
    def is_durable(self) -> bool:
        """Whether what waits is there for the next process."""
        ...

    def __len__(self) -> int:
        """Batches that wait, without those that were taken."""
        ...

    def put(self, batch: Batch) -> None:
        """Add one at the end. Raises RetryableError when it cannot be stored."""
        ...

    def take(self) -> WaitingBatch | None:
        """The oldest; None when nothing that waits can be read.

        Raises:
            RetryableError: The oldest cannot be read for now; it stays the oldest.
        """
        ...

    def settle(self, waiting: WaitingBatch) -> None:
        """Forget one that was delivered or given up."""
        ...

    def give_back(self, waiting: WaitingBatch) -> None:
        """Let one wait again, before all others."""
        ...

    def discard(self) -> int:
        """Count what waits as lost; returns its items. What is durable stays."""
        ...


class MemoryBatches(WaitingBatches):
    """Batches in memory, shared with the exporter that takes over after a reload.

    Attributes:
        lose: Counts a batch as lost.
    """

    def __init__(self) -> None:
        self._batches: deque[Batch] = deque()
        self.lose: Callable[[Batch], None] | None = None

    @property
    @override
    def is_durable(self) -> bool:
        return False

    @override
    def __len__(self) -> int:
        return len(self._batches)

    @override
    def put(self, batch: Batch) -> None:
        self._batches.append(batch)

    @override
    def take(self) -> WaitingBatch | None:
        return WaitingBatch(self._batches.popleft()) if self._batches else None

    @override
    def settle(self, waiting: WaitingBatch) -> None:
        del waiting

    @override
    def give_back(self, waiting: WaitingBatch) -> None:
        self._batches.appendleft(waiting.batch)

    @override
    def discard(self) -> int:
        n_items = sum(batch.export.n_items for batch in self._batches)
        while self._batches:
            batch = self._batches.popleft()
            if self.lose is not None:
                self.lose(batch)
        return n_items


class StoredBatches(WaitingBatches):
    """Batches in a storage: a batch is there before `put` returns and until it is settled.

    One that was under way when the process was killed waits again, so that its destination may get it twice.
    """

    def __init__(self, store: BatchStore) -> None:
        self._store = store
        self._keys = deque(store.list_keys())

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
                return WaitingBatch(batch, key)
        return None

    @override
    def settle(self, waiting: WaitingBatch) -> None:
        assert waiting.key is not None
        self._store.remove(waiting.key)

    @override
    def give_back(self, waiting: WaitingBatch) -> None:
        assert waiting.key is not None
        self._keys.appendleft(waiting.key)

    @override
    def discard(self) -> int:
        return 0


def _decode(stored: bytes) -> Batch:
    if len(stored) < _HEAD.size or stored[0] >= len(_SIGNALS):
        raise BadDataError("not a stored batch of this version")
    number, received_wall_ns = _HEAD.unpack_from(stored)
    signal = _SIGNALS[number]
    return Batch(signal, decode_protobuf(stored[_HEAD.size :], signal), received_wall_ns)


def open_waiting(
    name: str, storage: str | None, host: Host, lose: Callable[[Batch], None]
) -> WaitingBatches:
    """The queue of an exporter.

    Args:
        name: The exporter's id.
        storage: Id of the extension that stores it; None for memory.
        host: The running service.
        lose: Counts a batch as lost.

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
    return StoredBatches(found[0].open_store(f"exporters.{name}"))
