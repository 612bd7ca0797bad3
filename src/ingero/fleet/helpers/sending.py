"""A sending queue with retries in front of anything that delivers batches.

Key names, defaults and meaning are those of the Collector's ``exporterhelper``; a queue on disk is missing. Batches wait
in memory and are sent by threads. When the queue is full the batch is refused as retryable. A destination that is only slow makes its pushers
wait: `Sender.find_refusal` says so before any other exporter takes the batch. One that took nothing for `PATIENCE_NS` holds up nobody: what
others take meanwhile is lost for it (`ingero.fleet.graph.FanOut`).

Lossy: every item that is not delivered is in ``otelcol_exporter_send_failed_*`` (refused for good, retries ran out, or
left over at the end) or ``otelcol_exporter_enqueue_failed_*`` (the queue was full while others took the batch).
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from pydantic import Field

from ingero.config import Duration, StrictModel
from ingero.errors import DeliveryError, RetryableError
from ingero.fleet.component import ComponentId, Host
from ingero.fleet.consumer import Batch
from ingero.otlp.names import Signal
from ingero.telemetry.clock import Clock
from ingero.telemetry.declare import MetricDeclaration, counter, gauge
from ingero.telemetry.limited import RateLimitedLog
from ingero.units import NS_PER_S, parse_duration

_ITEMS: Final = {
    Signal.METRICS: "metric_points",
    Signal.LOGS: "log_records",
    Signal.TRACES: "spans",
}


def _by_signal(name: str, says: str) -> dict[Signal, MetricDeclaration]:
    return {
        signal: counter(
            f"otelcol_exporter_{name}_{items}_total",
            says.format(items.replace("_", " ")),
            "exporter",
        )
        for signal, items in _ITEMS.items()
    }


SENT: Final = _by_signal("sent", "The {} that the destination took.")
SEND_FAILED: Final = _by_signal(
    "send_failed", "The {} that were lost: refused for good, retries ran out, or left at the end."
)
ENQUEUE_FAILED: Final = _by_signal(
    "enqueue_failed",
    "The {} that were lost to this exporter: it did not take them, and other exporters did.",
)
QUEUE_SIZE: Final = gauge(
    "otelcol_exporter_queue_size", "Batches that wait in the sending queue.", "exporter"
)
QUEUE_CAPACITY: Final = gauge(
    "otelcol_exporter_queue_capacity", "Batches that the sending queue can hold.", "exporter"
)
RETRIES: Final = counter(
    "ingero_fleet_exporter_retries_total", "Attempts after the first to send a batch.", "exporter"
)
SENDING_METRICS: Final = (
    *SENT.values(),
    *SEND_FAILED.values(),
    QUEUE_SIZE,
    QUEUE_CAPACITY,
    RETRIES,
)

PATIENCE_NS: Final = 10 * NS_PER_S
"""A destination that took nothing for so long is away, not slow."""
_FLUSH_NS: Final = 10 * NS_PER_S
_LAST_TRIES_NS: Final = NS_PER_S // 2
"""Longest pause between attempts while the service ends."""

_log = logging.getLogger("ingero.fleet.exporter")


class QueueConfig(StrictModel):
    """Where batches wait for their destination."""

    enabled: bool = Field(
        default=True,
        description="Without a queue a batch is sent while its pusher waits, and nothing else moves meanwhile.",
    )
    num_consumers: int = Field(10, ge=1, le=256, description="Batches under way at once.")
    queue_size: int = Field(
        1000,
        ge=1,
        description="Batches that may wait. One more is refused, and its pusher keeps it; where other exporters took it, it is lost to "
        "this one, counted and logged.",
    )


class RetryConfig(StrictModel):
    """What happens to a batch that its destination did not take for now."""

    enabled: bool = Field(
        default=True, description="Without retries such a batch is lost and counted."
    )
    initial_interval: Duration = Field(
        parse_duration("5s"), description="Wait before the first retry."
    )
    randomization_factor: float = Field(
        0.5, ge=0, le=1, description="Share by which each wait varies either way."
    )
    multiplier: float = Field(
        1.5, ge=1, description="Growth of the wait from one retry to the next."
    )
    max_interval: Duration = Field(parse_duration("30s"), description="Longest wait.")
    max_elapsed_time: Duration = Field(
        parse_duration("5m"),
        description="Time after which a batch is given up and counted; 0s never gives up.",
    )


@dataclass(slots=True)
class Pending:
    """Batches that wait, shared with the exporter that takes over after a reload.

    Attributes:
        batches: Oldest first.
        lose: Counts a batch as lost.
    """

    batches: deque[Batch] = field(default_factory=deque)
    lose: Callable[[Batch], None] | None = None

    def discard(self) -> None:
        """Count what nobody will send any more."""
        while self.batches:
            batch = self.batches.popleft()
            if self.lose is not None:
                self.lose(batch)


class Sender:
    """Queue, threads and retries around one ``deliver`` function.

    Args:
        component: Whose counters these are.
        deliver: Sends one batch; raises `RetryableError` or `PermanentError`. Runs on several threads.
        queue: The queue's settings.
        retry: The retries' settings.
    """

    def __init__(
        self,
        component: ComponentId,
        deliver: Callable[[Batch], None],
        queue: QueueConfig,
        retry: RetryConfig,
    ) -> None:
        self._name = str(component)
        self._deliver = deliver
        self._queue = queue
        self._retry = retry
        self._wake = threading.Condition()
        self._pending = Pending()
        self._n_workers = 0
        self._n_idle = 0
        self._n_flying = 0
        self._stopping = False
        self._given_up = False
        self._idle: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, host: Host) -> None:
        """Take counters and whatever an earlier exporter of this name left waiting."""
        self._host = host
        self._clock: Clock = host.clock
        self._log = RateLimitedLog(_log, host.clock, burst=2)
        self._away_since_ns: int | None = None
        self._n_lost = 0
        host.every(_FLUSH_NS, self._log.flush)
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._stopping = self._given_up = False
        meter = host.meter
        labels = {"exporter": self._name}
        self._sent = {of: meter.counter(one).bound(**labels) for of, one in SENT.items()}
        self._failed = {of: meter.counter(one).bound(**labels) for of, one in SEND_FAILED.items()}
        self._retried = meter.counter(RETRIES).bound(**labels)
        self._pending = host.shared((self._name, "sending_queue"), Pending)
        self._pending.lose = self._lose
        meter.gauge(QUEUE_CAPACITY).set(self._queue.queue_size, **labels)
        meter.gauge(QUEUE_SIZE).watch(lambda: len(self._pending.batches), **labels)
        with self._wake:
            self._hire()

    def find_refusal(self) -> RetryableError | None:
        """Why a batch cannot be taken now although the destination works; None when it can, or when waiting has not helped."""
        with self._wake:
            if len(self._pending.batches) < self._queue.queue_size:
                return None
            since_ns = self._away_since_ns
        if since_ns is not None and self._clock.mono_ns() - since_ns > PATIENCE_NS:
            return None
        return self._full()

    def _full(self) -> RetryableError:
        return RetryableError(
            f"exporters.{self._name}: the sending queue is full ({self._queue.queue_size} batches)"
        )

    def consume(self, batch: Batch) -> None:
        """Queue a batch, or send it now when there is no queue.

        Raises:
            RetryableError: The queue is full, or there is none and the destination did not take the batch.
            PermanentError: There is no queue and the destination refused the batch for good.
        """
        if not self._queue.enabled:
            self._send_now(batch)
            return
        with self._wake:
            if len(self._pending.batches) >= self._queue.queue_size:
                raise self._full()
            self._pending.batches.append(batch)
            self._hire()
            self._wake.notify()

    async def stop(self) -> None:
        """Wait until everything waiting is settled, or a reload will take it over.

        While the service ends, what the destination does not take for now is tried again until the service cancels this wait (its
        ``shutdown_timeout``); the rest is then counted as lost.
        """
        if self._idle is None:
            return
        with self._wake:
            self._stopping = True
            self._idle.clear()
            self._tell_if_idle()
            self._wake.notify_all()
        try:
            await self._idle.wait()
        finally:
            with self._wake:
                self._idle = None  # a thread that ends later finds nobody to tell
                self._given_up = True
                self._wake.notify_all()
            if self._host.draining:
                self._discard()

    def _discard(self) -> None:
        """Count and tell what nobody will send any more. Batches under way are settled by their threads."""
        with self._wake:
            n_items = sum(batch.export.n_items for batch in self._pending.batches)
            self._pending.discard()
        if n_items:
            message = "items lost: the destination did not take them before shutdown_timeout"
            _log.warning(message, extra={"fields": {"exporter": self._name, "items": n_items}})

    def _hire(self) -> None:
        """Start one more thread when batches wait and nobody is free; the lock is held."""
        if (
            self._pending.batches
            and not self._n_idle
            and self._n_workers < self._queue.num_consumers
        ):
            self._n_workers += 1
            name = f"send-{self._name}-{self._n_workers}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        try:
            while (batch := self._take()) is not None:
                is_settled = False
                try:
                    self._send(batch)
                    is_settled = True
                finally:
                    if not is_settled:
                        self._lose(batch)
                    with self._wake:
                        self._n_flying -= 1
                        self._tell_if_idle()
        finally:
            with self._wake:
                self._n_workers -= 1
                self._tell_if_idle()

    def _take(self) -> Batch | None:
        with self._wake:
            self._n_idle += 1
            while not self._pending.batches and not self._stopping:
                self._wake.wait()
            self._n_idle -= 1
            if not self._pending.batches or (self._stopping and not self._host.draining):
                return None
            self._n_flying += 1
            return self._pending.batches.popleft()

    def _send(self, batch: Batch) -> None:
        """Send until taken, refused for good, out of time, or told to stop."""
        began_ns = self._clock.mono_ns()
        interval_ns = float(self._retry.initial_interval)
        while True:
            try:
                self._deliver(batch)
            except RetryableError as refusal:
                wait_ns = self._next_wait(interval_ns, refusal)
                if self._given_up or self._is_late(began_ns, wait_ns):
                    self._give_up(batch, refusal)
                    return
                self._tell_away(refusal)
                self._retried(1)
                self._pause(wait_ns)
                interval_ns = min(interval_ns * self._retry.multiplier, self._retry.max_interval)
                if self._stopping and not self._host.draining:
                    self._put_back(batch)
                    return
            except DeliveryError as refusal:
                self._give_up(batch, refusal)
                return
            else:
                self._sent[batch.signal](batch.export.n_items)
                self._tell_back()
                return

    def _tell_away(self, refusal: RetryableError) -> None:
        if self._away_since_ns is None:
            self._away_since_ns = self._clock.mono_ns()
        self._log.write(
            "away",
            logging.WARNING,
            "destination does not take data; trying again",
            exporter=self._name,
            error=refusal.message,
            waiting_batches=len(self._pending.batches),
        )

    def _tell_back(self) -> None:
        since_ns, self._away_since_ns = self._away_since_ns, None
        if since_ns is not None:
            self._log.write(
                "away",
                logging.INFO,
                "destination takes data again",
                exporter=self._name,
                after_s=round((self._clock.mono_ns() - since_ns) / NS_PER_S, 1),
            )

    def _send_now(self, batch: Batch) -> None:
        try:
            self._deliver(batch)
        except DeliveryError:
            self._failed[batch.signal](batch.export.n_items)
            raise
        self._sent[batch.signal](batch.export.n_items)

    def _next_wait(self, interval_ns: float, refusal: RetryableError) -> float:
        spread = self._retry.randomization_factor
        wait_ns = interval_ns * random.uniform(1 - spread, 1 + spread)  # noqa: S311 -- spreads load, guards nothing
        return max(wait_ns, refusal.retry_after_ns or 0)

    def _is_late(self, began_ns: int, wait_ns: float) -> bool:
        limit_ns = self._retry.max_elapsed_time
        if not self._retry.enabled:
            return True
        return limit_ns > 0 and self._clock.mono_ns() - began_ns + wait_ns > limit_ns

    def _pause(self, wait_ns: float) -> None:
        """Wait before the next attempt: not while a reload takes over, and briefly while the service ends."""
        with self._wake:
            if self._stopping:
                wait_ns = min(wait_ns, _LAST_TRIES_NS)
                self._wake.wait_for(lambda: self._given_up, wait_ns / NS_PER_S)
            else:
                self._wake.wait_for(lambda: self._stopping, wait_ns / NS_PER_S)

    def _put_back(self, batch: Batch) -> None:
        with self._wake:
            self._pending.batches.appendleft(batch)

    def _give_up(self, batch: Batch, refusal: DeliveryError) -> None:
        self._lose(batch)
        self._n_lost += batch.export.n_items
        self._log.write(
            "lost",
            logging.WARNING,
            "items lost: the destination did not take them",
            exporter=self._name,
            items=batch.export.n_items,
            items_total=self._n_lost,
            error=refusal.message,
        )

    def _lose(self, batch: Batch) -> None:
        self._failed[batch.signal](batch.export.n_items)

    def _tell_if_idle(self) -> None:
        """Wake `stop` when nothing is under way; the lock is held."""
        if not self._stopping or self._n_flying or self._loop is None or self._idle is None:
            return
        if not self._pending.batches or not self._host.draining or not self._n_workers:
            self._loop.call_soon_threadsafe(self._idle.set)
