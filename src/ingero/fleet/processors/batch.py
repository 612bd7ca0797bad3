"""``batch``: joins small exports into larger ones.

Takes a batch at once and answers for it: what waits here was acknowledged. When the next component refuses for now, the
items stay and new ones are refused once twice the batch size waits, so memory stays bounded and nothing is lost.

Source: opentelemetry-collector ``processor/batchprocessor`` (key names, defaults).
Lossy: ``ingero_fleet_batch_dropped_items_total`` counts what was refused permanently, or was left at the end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Final, Self

from pydantic import Field, model_validator

from ingero.config import Duration, StrictModel
from ingero.errors import DeliveryError, PermanentError, RetryableError
from ingero.fleet.component import ComponentId, Host, Stability
from ingero.fleet.consumer import Batch, Consumer
from ingero.fleet.factory import ProcessorFactory
from ingero.otlp.codec import merge_exports, split_export
from ingero.otlp.names import Signal
from ingero.telemetry.declare import counter
from ingero.units import NS_PER_MS, NS_PER_S, parse_duration

SENDS: Final = counter(
    "otelcol_processor_batch_sends_total",
    "Batches sent on, by what made them go: size, timeout or stop.",
    "processor",
    "trigger",
)
DROPPED: Final = counter(
    "ingero_fleet_batch_dropped_items_total",
    "Items that were acknowledged and then refused permanently by what follows, or left at the end.",
    "processor",
)

_MIN_WAIT_NS: Final = 10 * NS_PER_MS  # between two tries at a consumer that refuses
_log = logging.getLogger("ingero.fleet.processors.batch")


class BatchConfig(StrictModel):
    """When waiting items go out."""

    absent_keys = {  # noqa: RUF012 -- declared as ClassVar by StrictModel
        "metadata_keys": "batches of all senders are joined; leave it out",
        "metadata_cardinality_limit": "batches of all senders are joined; leave it out",
    }

    send_batch_size: int = Field(
        8192, ge=1, description="Points, records or spans that make a batch go out."
    )
    send_batch_max_size: int = Field(
        0, ge=0, description="Most items in one batch; larger ones are cut; 0 never cuts."
    )
    timeout: Duration = Field(
        parse_duration("200ms"), description="Longest wait of an item; 0s sends each batch at once."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if 0 < self.send_batch_max_size < self.send_batch_size:
            raise ValueError("send_batch_max_size is below send_batch_size")
        return self


class BatchProcessor:
    """Collects exports of one pipeline."""

    def __init__(
        self, component: ComponentId, config: BatchConfig, signal: Signal, following: Consumer
    ) -> None:
        del signal
        self._name = str(component)
        self._config = config
        self._following = following
        self._lock = threading.Lock()
        self._waiting: list[Batch] = []
        self._n_waiting = 0
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self, host: Host) -> None:
        """Take counters and the loop that the timeout runs on."""
        self._loop = asyncio.get_running_loop()
        self._sends = host.meter.counter(SENDS)
        self._dropped = host.meter.counter(DROPPED).bound(processor=self._name)

    async def stop(self) -> None:
        """Send what waits; count what cannot be sent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            self._flush("stop")
        except RetryableError as refusal:
            with self._lock:
                lost, self._n_waiting = self._n_waiting, 0
                self._waiting.clear()
            self._dropped(lost)
            _log.warning(
                "processors.%s lost %d items at stop: %s", self._name, lost, refusal.message
            )

    def consume(self, batch: Batch) -> None:
        """Take a batch; send all that waits when there is enough.

        Raises:
            RetryableError: What follows takes nothing and twice the batch size waits already.
        """
        if batch.push.is_replay:  # it leaves with nothing: joined to others it would
            self._following.consume(batch)
            return
        with self._lock:
            if self._n_waiting >= 2 * self._config.send_batch_size:
                raise RetryableError(f"processors.{self._name}: waiting for what follows")
            is_first = not self._waiting
            self._waiting.append(batch)
            self._n_waiting += batch.export.n_items
            is_full = self._n_waiting >= self._config.send_batch_size
        if is_full or not self._config.timeout:
            self._try_flush("size")
        elif is_first and self._loop is not None:
            self._loop.call_soon_threadsafe(self._arm)

    def _arm(self) -> None:
        """Set the timeout; on the loop."""
        if self._timer is None and self._loop is not None:
            wait_ns = max(self._config.timeout, _MIN_WAIT_NS)
            self._timer = self._loop.call_later(wait_ns / NS_PER_S, self._on_timeout)

    def _on_timeout(self) -> None:
        self._timer = None
        self._try_flush("timeout")

    def _try_flush(self, trigger: str) -> None:
        """Send what waits, or leave it for the next timeout."""
        try:
            self._flush(trigger)
        except RetryableError:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._arm)

    def _flush(self, trigger: str) -> None:
        with self._lock:
            taken, self._waiting, self._n_waiting = self._waiting, [], 0
        if not taken:
            return
        parts = self._join(taken)
        while parts:
            try:
                self._following.consume(parts[0])
            except PermanentError as refusal:
                self._drop(parts[0], refusal)
            except RetryableError:
                self._put_back(parts)
                raise
            else:
                self._sends.add(1, processor=self._name, trigger=trigger)
            del parts[0]

    def _join(self, taken: list[Batch]) -> list[Batch]:
        merged = merge_exports([batch.export for batch in taken])
        limit = self._config.send_batch_max_size or merged.n_items or 1
        first = taken[0]
        return [
            Batch(first.signal, part, first.received_wall_ns)
            for part in split_export(merged, limit)
        ]

    def _drop(self, batch: Batch, refusal: DeliveryError) -> None:
        n_items = batch.export.n_items
        self._dropped(n_items)
        _log.warning("processors.%s lost %d items: %s", self._name, n_items, refusal.message)

    def _put_back(self, parts: list[Batch]) -> None:
        with self._lock:
            self._waiting = parts + self._waiting
            self._n_waiting += sum(part.export.n_items for part in parts)


FACTORY: Final = ProcessorFactory(
    type="batch",
    config=BatchConfig,
    description="Joins small exports into larger ones.",
    stability=Stability.BETA,
    metrics=(SENDS, DROPPED),
    create=BatchProcessor,
)
