"""A sending queue with retries in front of anything that delivers batches.

Key names, defaults and meaning are those of the Collector's ``exporterhelper``; a queue on disk is missing. Batches
wait in memory and are sent by threads. When the queue is full the batch is refused as retryable. A destination that
is only slow makes its pushers wait: `Sender.find_refusal` says so before any other exporter takes the batch. One that
took nothing for `PATIENCE_NS` holds up nobody: what others take meanwhile is lost for it
(`ingero.fleet.graph.FanOut`).

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
from concurrent.futures import Future
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


class SendingReport:
    """What operators learn of one exporter: its counters, and lines when its destination goes away and comes back.

    Args:
        name: The exporter's id.
        host: The running service.
    """

    def __init__(self, name: str, host: Host) -> None:
        self._name = name
        self._clock: Clock = host.clock
        self._log = RateLimitedLog(_log, host.clock, burst=2)
        self._away_since_ns: int | None = None
        self._n_lost = 0
        host.every(_FLUSH_NS, self._log.flush)
        meter, labels = host.meter, {"exporter": name}
        self._sent = {of: meter.counter(one).bound(**labels) for of, one in SENT.items()}
        self._failed = {of: meter.counter(one).bound(**labels) for of, one in SEND_FAILED.items()}
        self._retried = meter.counter(RETRIES).bound(**labels)

    @property
    def is_given_up(self) -> bool:
        """Whether the destination took nothing for longer than its pushers are made to wait."""
        since_ns = self._away_since_ns
        return since_ns is not None and self._clock.mono_ns() - since_ns > PATIENCE_NS

    def count_sent(self, batch: Batch) -> None:
        """The destination took a batch; written if it had not before."""
        self._sent[batch.signal](batch.export.n_items)
        since_ns, self._away_since_ns = self._away_since_ns, None
        if since_ns is not None:
            self._log.write(
                "away",
                logging.INFO,
                "destination takes data again",
                exporter=self._name,
                after_s=round((self._clock.mono_ns() - since_ns) / NS_PER_S, 1),
            )

    def count_retry(self, refusal: RetryableError, n_waiting: int) -> None:
        """The destination did not take a batch for now, which will be tried again."""
        if self._away_since_ns is None:
            self._away_since_ns = self._clock.mono_ns()
        self._log.write(
            "away",
            logging.WARNING,
            "destination does not take data; trying again",
            exporter=self._name,
            error=refusal.message,
            waiting_batches=n_waiting,
        )
        self._retried(1)

    def count_lost(self, batch: Batch) -> None:
        """A batch is lost."""
        self._failed[batch.signal](batch.export.n_items)

    def give_up(self, batch: Batch, refusal: DeliveryError) -> None:
        """Count a batch that its destination refused, or did not take in time, and say so."""
        self.count_lost(batch)
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


class SendingThreads:
    """Takes waiting batches on threads, which are started as they are needed.

    Args:
        name: The exporter's id.
        n_threads: Most threads.
        send: Settles one batch; returns True when it is to wait again, for the exporter that takes over.
        report: Counts batches whose thread failed.
        host: The running service; batches outlive a reload in its shared state.

    Attributes:
        pending: What waits.
        is_stopping: No more batches come; those that wait are tried for the last time, or left to the next exporter.
        is_over: Nothing waits for a batch under way any more.
    """

    def __init__(
        self,
        name: str,
        n_threads: int,
        send: Callable[[Batch], bool],
        report: SendingReport,
        host: Host,
    ) -> None:
        self._name = name
        self._n_threads = n_threads
        self._send = send
        self._report = report
        self._host = host
        self._wake = threading.Condition()
        self._n_started = 0
        self._n_idle = 0
        self._settled: Future[None] | None = None
        self.is_stopping = False
        self.is_over = False
        self.pending = host.shared((name, "sending_queue"), Pending)
        self.pending.lose = report.count_lost

    def start(self) -> None:
        """Begin with what an earlier exporter left."""
        with self._wake:
            self._start_thread()

    def put(self, batch: Batch, max_batches: int) -> bool:
        """Queue a batch; False where as many as allowed wait."""
        with self._wake:
            if len(self.pending.batches) >= max_batches:
                return False
            self.pending.batches.append(batch)
            self._start_thread()
            self._wake.notify()
            return True

    def pause(self, wait_ns: float) -> None:
        """Wait before the next attempt: not while a reload takes over, and briefly while the service ends."""
        with self._wake:
            if self.is_stopping:
                wait_ns = min(wait_ns, _LAST_TRIES_NS)
                self._wake.wait_for(lambda: self.is_over, wait_ns / NS_PER_S)
            else:
                self._wake.wait_for(lambda: self.is_stopping, wait_ns / NS_PER_S)

    async def stop(self) -> None:
        """Wait until every batch is settled, or what waits is left to the next exporter."""
        settled: Future[None] = Future()
        settled.set_running_or_notify_cancel()  # a wait that is cancelled leaves it to the threads
        with self._wake:
            self.is_stopping, self._settled = True, settled
            self._check_settled()
            self._wake.notify_all()
        try:
            await asyncio.wrap_future(settled)
        finally:
            with self._wake:
                self._settled = None  # a thread that ends later finds nothing to tell
                self.is_over = True
                self._wake.notify_all()

    def discard(self) -> int:
        """Count what will not be sent any more; returns the items. Batches under way are settled by their threads."""
        with self._wake:
            n_items = sum(batch.export.n_items for batch in self.pending.batches)
            self.pending.discard()
        return n_items

    def _start_thread(self) -> None:
        """Start one more thread when batches wait and none is free; the lock is held."""
        if self.pending.batches and not self._n_idle and self._n_started < self._n_threads:
            self._n_started += 1
            name = f"send-{self._name}-{self._n_started}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        try:
            while (batch := self._take()) is not None:
                self._settle(batch)
        finally:
            with self._wake:
                self._n_started -= 1
                self._check_settled()

    def _settle(self, batch: Batch) -> None:
        is_settled = False
        try:
            is_left = self._send(batch)
            is_settled = True
        finally:
            if not is_settled:
                self._report.count_lost(batch)
        if is_left:
            with self._wake:
                self.pending.batches.appendleft(batch)

    def _take(self) -> Batch | None:
        with self._wake:
            self._n_idle += 1
            self._check_settled()
            while not self.pending.batches and not self.is_stopping:
                self._wake.wait()
            self._n_idle -= 1
            if not self.pending.batches or (self.is_stopping and not self._host.draining):
                return None
            return self.pending.batches.popleft()

    def _check_settled(self) -> None:
        """Wake `stop` when nothing is under way; the lock is held."""
        settled = self._settled
        if settled is None or settled.done() or self._n_started > self._n_idle:
            return
        if not self.pending.batches or not self._host.draining or not self._n_started:
            settled.set_result(None)


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
        self._threads: SendingThreads | None = None

    def start(self, host: Host) -> None:
        """Take counters and whatever an earlier exporter of this name left waiting."""
        self._host = host
        self._clock: Clock = host.clock
        self._report = SendingReport(self._name, host)
        self._threads = threads = SendingThreads(
            self._name, self._queue.num_consumers, self._send, self._report, host
        )
        labels = {"exporter": self._name}
        host.meter.gauge(QUEUE_CAPACITY).set(self._queue.queue_size, **labels)
        host.meter.gauge(QUEUE_SIZE).watch(lambda: len(threads.pending.batches), **labels)
        threads.start()

    def find_refusal(self) -> RetryableError | None:
        """Why a batch cannot be taken now although the destination works; None when it can, or when waiting has not helped."""
        assert self._threads is not None
        is_full = len(self._threads.pending.batches) >= self._queue.queue_size
        return self._full() if is_full and not self._report.is_given_up else None

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
        assert self._threads is not None
        if not self._queue.enabled:
            self._send_now(batch)
        elif not self._threads.put(batch, self._queue.queue_size):
            raise self._full()

    async def stop(self) -> None:
        """Wait until everything waiting is settled, or a reload will take it over.

        While the service ends, what the destination does not take for now is tried again until the service cancels
        this wait (its ``shutdown_timeout``); the rest is then counted as lost.
        """
        threads = self._threads
        if threads is None:
            return
        try:
            await threads.stop()
        finally:
            n_items = threads.discard() if self._host.draining else 0
            if n_items:
                message = "items lost: the destination did not take them before shutdown_timeout"
                _log.warning(message, extra={"fields": {"exporter": self._name, "items": n_items}})

    def _send(self, batch: Batch) -> bool:
        """Send until taken, refused for good or out of time; True when the next exporter is to send it."""
        threads = self._threads
        assert threads is not None
        began_ns = self._clock.mono_ns()
        interval_ns = float(self._retry.initial_interval)
        while True:
            try:
                self._deliver(batch)
            except RetryableError as refusal:
                wait_ns = self._next_wait(interval_ns, refusal)
                if threads.is_over or self._is_late(began_ns, wait_ns):
                    self._report.give_up(batch, refusal)
                    return False
                self._report.count_retry(refusal, len(threads.pending.batches))
                threads.pause(wait_ns)
                interval_ns = min(interval_ns * self._retry.multiplier, self._retry.max_interval)
                if threads.is_stopping and not self._host.draining:
                    return True
            except DeliveryError as refusal:
                self._report.give_up(batch, refusal)
                return False
            else:
                self._report.count_sent(batch)
                return False

    def _send_now(self, batch: Batch) -> None:
        try:
            self._deliver(batch)
        except DeliveryError:
            self._report.count_lost(batch)
            raise
        self._report.count_sent(batch)

    def _next_wait(self, interval_ns: float, refusal: RetryableError) -> float:
        spread = self._retry.randomization_factor
        wait_ns = interval_ns * random.uniform(1 - spread, 1 + spread)  # noqa: S311 -- spreads load, guards nothing
        return max(wait_ns, refusal.retry_after_ns or 0)

    def _is_late(self, began_ns: int, wait_ns: float) -> bool:
        limit_ns = self._retry.max_elapsed_time
        if not self._retry.enabled:
            return True
        return limit_ns > 0 and self._clock.mono_ns() - began_ns + wait_ns > limit_ns
