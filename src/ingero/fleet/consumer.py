"""How data moves: `Batch` in, an exception out when it was not taken.

The contract is about the data, as in the Collector's ``consumererror``: returning means taken (or deliberately
dropped and counted), `RetryableError` means send it again, `PermanentError` means never again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from ingero.errors import RetryableError
from ingero.fleet.component import PushContext
from ingero.otlp.codec import Export
from ingero.otlp.names import Signal


@dataclass(slots=True)
class Batch:
    """One OTLP export request on its way through a pipeline.

    Attributes:
        signal: Which pipeline type it belongs to.
        export: The decoded request; see `ingero.otlp.codec.Export`. Treated as read-only: a processor that changes
            data passes a new one on, because a receiver may feed several pipelines with the same batch.
        received_wall_ns: When the receiver had the whole body.
        push: What is known about who sent it.
    """

    signal: Signal
    export: Export
    received_wall_ns: int
    push: PushContext = field(default_factory=PushContext)


@runtime_checkable
class Bounded(Protocol):
    """A consumer that knows beforehand that it would refuse a batch."""

    def find_refusal(self, batch: Batch) -> RetryableError | None:
        """What `Consumer.consume` would raise now, where its pusher should wait; None when it may be called."""
        ...


class Consumer(Protocol):
    """Anything a batch can be handed to."""

    def consume(self, batch: Batch) -> None:
        """Take the batch or raise.

        Raises:
            RetryableError: Not taken; the caller may send the same batch again.
            PermanentError: Not taken and never will be.
        """
        ...
