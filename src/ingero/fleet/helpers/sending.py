"""A sending queue with retries in front of anything that delivers batches.

Key names, defaults and meaning are those of the Collector's ``exporterhelper``. Batches wait in memory, or in the
storage that ``storage`` names, and are sent by threads. When the queue is full the batch is refused as retryable. A
destination that is only slow makes its pushers wait: `Sender.find_refusal` says so before any other exporter takes the
batch. One that took nothing for ten seconds holds up nobody: what others take meanwhile is lost for it
(`ingero.fleet.graph.FanOut`).

A request that is under way when a stop times out is not cut. Its thread goes on, and settles the batch in the queue
that the exporter shares with the one that takes over after a reload (`ingero.fleet.helpers.waiting_batches`). That one
counts it among its own requests for ten seconds, and no longer: it may hang for ever.

Lossy: every item that is not delivered is in ``otelcol_exporter_send_failed_*`` (refused permanently, retries ran out,
or left over at the end or under changed settings) or ``otelcol_exporter_enqueue_failed_*`` (the queue was full while
others took the batch).
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final

from ingero.errors import DeliveryError, PermanentError, RetryableError
from ingero.faults import find_place
from ingero.fleet.component import (
    ComponentId,
    Host,
)
from ingero.fleet.consumer import Batch
from ingero.fleet.helpers.queue_config import QueueConfig, RetryConfig
from ingero.fleet.helpers.sending_report import (
    PATIENCE_NS,
    QUEUE_CAPACITY,
    QUEUE_SIZE,
    SendingReport,
)
from ingero.fleet.helpers.waiting_batches import WaitingBatch, WaitingBatches, open_waiting
from ingero.fleet.views import DeliveryState, DeliveryView, RefusalView
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

_LAST_TRIES_NS: Final = NS_PER_S // 2
"""Longest pause between attempts while the service ends."""
_UNREADABLE_PAUSE_S: Final = 1.0
"""Between two attempts to read what is stored."""


class SendingThreads:
    """Takes waiting batches on threads, which are started as they are needed.

    Args:
        waiting: Where batches wait.
        n_threads: Most threads.
        send: Sends one batch; returns what counts its end, or None when it is to wait again.
        report: Counts batches whose sending met a defect, and what cannot be read.

    Attributes:
        waiting: What waits.
        is_stopping: No more batches come; those that wait are tried for the last time, or left to the next exporter.
        is_over: Nothing waits for a batch under way any more.
    """

    def __init__(
        self,
        waiting: WaitingBatches,
        n_threads: int,
        send: Callable[[Batch], Callable[[], None] | None],
        report: SendingReport,
    ) -> None:
        self._n_threads = n_threads
        self._send = send
        self._report = report
        self._wake = threading.Condition(waiting.lock)
        self._pausing = threading.Condition(waiting.lock)
        self._n_started = 0
        self._n_idle = 0
        self._settled: Future[None] | None = None
        self._is_last = False
        self.is_stopping = False
        self.is_over = False
        self.waiting = waiting

    def start(self, clock: Clock) -> None:
        """Begin with what an earlier exporter left."""
        with self.waiting.lock:
            self.waiting.take_over(self._go_on, clock, PATIENCE_NS)
            self._go_on()

    def put(self, batch: Batch, max_batches: int) -> bool:
        """Queue a batch; False where as many as allowed wait. Raises RetryableError when it cannot be stored."""
        with self.waiting.lock:
            if len(self.waiting) >= max_batches:
                return False
            self.waiting.put(batch)
            self.waiting.on_change()
            return True

    def pause(self, wait_ns: float) -> None:
        """Wait before the next attempt: not while a reload takes over, and briefly while the service ends."""
        with self._pausing:
            if self.is_stopping:
                wait_ns = min(wait_ns, _LAST_TRIES_NS)
                self._pausing.wait_for(lambda: self.is_over, wait_ns / NS_PER_S)
            else:
                self._pausing.wait_for(lambda: self.is_stopping, wait_ns / NS_PER_S)

    async def stop(self, *, is_last: bool) -> None:
        """Wait until every batch is settled, or what waits is left to the next exporter.

        A batch that is still under way when this wait is cancelled is left to its thread.

        Args:
            is_last: There is no next exporter: what waits is tried for the last time, and what is left then is lost.
        """
        settled: Future[None] = Future()
        settled.set_running_or_notify_cancel()  # a wait that is cancelled leaves it to the threads
        with self.waiting.lock:
            self.is_stopping, self._is_last, self._settled = True, is_last, settled
            self._check_settled()
            self._wake.notify_all()
            self._pausing.notify_all()
        try:
            await asyncio.wrap_future(settled)
        finally:
            if is_last:
                self.waiting.end()
            with self.waiting.lock:
                self._settled = None  # a thread that ends later finds nothing to tell
                self.is_over = True
                self._wake.notify_all()
                self._pausing.notify_all()

    def _go_on(self) -> None:
        """A batch came, or one was settled, maybe by a thread of the exporter before; the lock is held."""
        if len(self.waiting) > self._n_idle and self._n_started < self._n_threads:
            self._start_thread()
        if self.is_stopping:
            self._wake.notify_all()
        elif len(self.waiting):
            self._wake.notify()
        self._check_settled()

    def _start_thread(self) -> None:
        if not self.leaves_rest():
            self._n_started += 1
            name = f"send-{self._report.name}-{self._n_started}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    @property
    def _is_emptying(self) -> bool:
        """Whether what waits is to be sent although the service ends: it would be lost, or its destination works."""
        is_kept = self.waiting.is_durable and self._report.away_ns is not None
        return self._is_last and not is_kept

    def leaves_rest(self) -> bool:
        """Whether a batch that was not taken is left to the next exporter, or to the next process."""
        return self.is_over or (self.is_stopping and not self._is_emptying)

    def _work(self) -> None:
        try:
            while (waiting := self._take()) is not None:
                self._settle(waiting)
        finally:
            with self.waiting.lock:
                self._n_started -= 1
                self._check_settled()

    def _settle(self, waiting: WaitingBatch) -> None:
        try:
            count = self._send(waiting.batch)
        except Exception as error:  # noqa: BLE001 - one batch's defect must not end the thread of all others
            count = partial(self._report.give_up, waiting.batch, _describe_defect(error))
        with self.waiting.lock:
            if count is None:
                self.waiting.give_back(waiting)
            elif self.waiting.settle(waiting):
                count()
            self.waiting.on_change()

    def _take(self) -> WaitingBatch | None:
        with self.waiting.lock:
            self._n_idle += 1
            try:
                return self._find_next()
            finally:
                self._n_idle -= 1

    def _find_next(self) -> WaitingBatch | None:
        """Wait for a batch; None when this thread is to end. The lock is held.

        What threads of the exporter before have under way counts as well, for some seconds: no more are sent at once
        over a reload, and one thread keeps the order, unless the requests before it hang.
        """
        while True:
            if self.is_stopping and (not len(self.waiting) or self.leaves_rest()):
                return None
            if not len(self.waiting):
                self._wake.wait()
                continue
            patience_ns = self.waiting.read_patience_ns()
            if patience_ns > 0 and self.waiting.n_taken >= self._n_threads:
                self._wake.wait(patience_ns / NS_PER_S)
                continue
            try:
                found = self.waiting.take()
            except RetryableError as trouble:
                self._report.note_refusal(trouble)
                if self.is_stopping:
                    return None  # what is stored stays for the next process
                self._pausing.wait_for(lambda: self.is_stopping, _UNREADABLE_PAUSE_S)
            else:
                if found is not None:
                    return found

    def _check_settled(self) -> None:
        """Wake `stop` when nothing is under way; the lock is held."""
        settled = self._settled
        if settled is None or settled.done() or self.waiting.n_taken:
            return
        if not len(self.waiting) or not self._is_emptying or not self._n_started:
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
        """Take counters and whatever an earlier exporter of this name left waiting.

        Raises:
            IngeroError: The storage that the queue names cannot be used.
        """
        self._host = host
        self._clock: Clock = host.clock
        self._report = SendingReport(self._name, host)
        waiting = open_waiting(self._name, self._queue.storage, host, self._report.lose)
        self._threads = threads = SendingThreads(
            waiting, self._queue.num_consumers, self._send, self._report
        )
        labels = {"exporter": self._name}
        host.meter.gauge(QUEUE_CAPACITY).set(self._queue.queue_size, **labels)
        host.meter.gauge(QUEUE_SIZE).watch(lambda: len(threads.waiting), **labels)
        threads.start(host.clock)
        host.offer(DeliveryView, self)
        host.offer(RefusalView, self)

    def read_state(self) -> DeliveryState:
        """Queue and destination, for pages about the service."""
        assert self._threads is not None
        capacity = self._queue.queue_size if self._queue.enabled else 0
        return self._report.read_state(len(self._threads.waiting), capacity)

    def find_refusal(self) -> RetryableError | None:
        """Why a batch cannot be taken now although the destination works.

        It is None when it can, or when waiting has not helped.
        """
        assert self._threads is not None
        is_full = len(self._threads.waiting) >= self._queue.queue_size
        return self._full() if is_full and not self._report.is_given_up else None

    def _full(self) -> RetryableError:
        return RetryableError(
            f"exporters.{self._name}: the sending queue is full ({self._queue.queue_size} batches)"
        )

    def consume(self, batch: Batch) -> None:
        """Queue a batch, or send it now when there is no queue.

        Raises:
            RetryableError: The queue or its disk is full, or there is none and the destination did not take the batch.
            PermanentError: There is no queue and the destination refused the batch permanently.
        """
        assert self._threads is not None
        if not self._queue.enabled:
            self._send_now(batch)
        elif not self._threads.put(batch, self._queue.queue_size):
            raise self._full()

    async def stop(self) -> None:
        """Wait until everything waiting is settled, or a reload will take it over.

        While the service ends, what the destination does not take for now is tried again until the service cancels
        this wait (its ``shutdown_timeout``); the rest is then counted as lost, also what is under way.
        """
        if self._threads is not None:
            await self._threads.stop(is_last=self._host.draining)

    def _send(self, batch: Batch) -> Callable[[], None] | None:
        """Send until taken, refused permanently or out of time; returns what counts that.

        None when the next exporter is to send it.
        """
        threads = self._threads
        assert threads is not None
        began_ns = self._clock.mono_ns()
        interval_ns = float(self._retry.initial_interval)
        while True:
            try:
                self._deliver(batch)
            except RetryableError as refusal:
                if threads.is_over:
                    return None
                wait_ns = self._next_wait(interval_ns, refusal)
                if self._is_late(began_ns, wait_ns):
                    return partial(self._report.give_up, batch, refusal)
                self._report.count_retry(refusal, len(threads.waiting))
                threads.pause(wait_ns)
                interval_ns = min(interval_ns * self._retry.multiplier, self._retry.max_interval)
                if threads.leaves_rest():
                    return None
            except DeliveryError as refusal:
                return partial(self._report.give_up, batch, refusal)
            else:
                return partial(self._report.count_sent, batch)

    def _send_now(self, batch: Batch) -> None:
        try:
            self._deliver(batch)
        except DeliveryError as refusal:
            self._report.count_lost(batch)
            self._report.note_refusal(refusal)
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


def _describe_defect(error: Exception) -> PermanentError:
    """An error that nothing expects, by its type and place: what it says may quote a header."""
    place = find_place(error)
    where = f"{Path(place.file).name}:{place.line}"
    return PermanentError(f"the batch could not be sent: unexpected {place.type} at {where}")
