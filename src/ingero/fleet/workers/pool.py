"""The judge's end: starts workers, applies what they relay, and starts those again that die."""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol, cast

from typing_extensions import override

from ingero.config import StrictModel
from ingero.errors import IngeroError
from ingero.fleet.component import Component, ComponentId, PushAnswer
from ingero.fleet.workers.messages import (
    READ_WORKER,
    FrameBuffer,
    FromJudge,
    FromWorker,
    RelayedAnswer,
    RelayedPush,
    StopOrder,
    Threshold,
    ThresholdUpdate,
    WorkerCounts,
    WorkerFailed,
    WorkerReady,
    encode_frame,
    pack_threshold,
)
from ingero.otlp.names import Signal
from ingero.telemetry.clock import Clock
from ingero.telemetry.declare import MetricDeclaration, counter, gauge
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_S

RESTARTS: Final = counter(
    "ingero_fleet_worker_restarts_total",
    "Workers that ended by themselves and were started again; what they had not answered came again.",
)
WORKERS: Final = gauge("ingero_fleet_workers", "Workers that listen now.")
POOL_METRICS: Final = (RESTARTS, WORKERS)

THRESHOLD_INTERVAL_NS: Final = NS_PER_S // 5
_START_TIMEOUT_S: Final = 120.0
_CALM_NS: Final = 10 * NS_PER_S
"""A worker that lived for this long is started again at once."""
_MAX_PAUSE_S: Final = 10.0
_PROGRAM: Final = "from ingero.fleet.worker import main; main()"
_log = logging.getLogger("ingero.fleet.workers")


Creator = Callable[..., Component]
"""A component's class, or another function of a module: it is pickled by its name."""


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """What a worker is to run; pickled.

    Attributes:
        extensions: In start order: name, what makes it, settings.
        receivers: Likewise, with the signals that pipelines want; their endpoints have the ports that the judge holds.
        log_level: As in ``service.telemetry.logs``, as is the next.
        log_encoding: One line of text or of JSON.
    """

    extensions: tuple[tuple[ComponentId, Creator, StrictModel], ...]
    receivers: tuple[tuple[ComponentId, Creator, StrictModel, tuple[Signal, ...]], ...]
    log_level: str
    log_encoding: str


class JudgedEndpoint(Protocol):
    """One protocol of a receiver, in the judge."""

    def apply(self, push: RelayedPush) -> tuple[RelayedAnswer, str]:
        """Take a push as if it had come here; also the cluster that it was of, empty where it is not known."""
        ...

    def find_threshold(self, cluster_id: str) -> PushAnswer | None:
        """The threshold for a sender of this cluster that says no more of itself."""
        ...


class WorkerUsage:
    """What all workers of the service use, also those that have ended."""

    def __init__(self) -> None:
        self._ended_cpu_s = 0.0
        self._running: dict[int, WorkerCounts] = {}

    def note(self, pid: int, counts: WorkerCounts) -> None:
        """Keep what a worker said of itself."""
        self._running[pid] = counts

    def end(self, pid: int) -> None:
        """A worker has ended."""
        counts = self._running.pop(pid, None)
        self._ended_cpu_s += 0.0 if counts is None else counts.cpu_s

    def sum_cpu_s(self) -> float:
        """Processor time of all workers there were, as they last said."""
        return self._ended_cpu_s + sum(one.cpu_s for one in self._running.values())

    def sum_resident_bytes(self) -> int:
        """Memory of the workers there are."""
        return sum(one.resident_bytes for one in self._running.values())


class PoolHost(Protocol):
    """What a pool needs of the service."""

    @property
    def clock(self) -> Clock:
        """The clock of the service."""
        ...

    @property
    def meter(self) -> MeterRegistry:
        """The service's own telemetry."""
        ...

    @property
    def worker_usage(self) -> WorkerUsage:
        """What the workers use."""
        ...


@dataclass(frozen=True, slots=True)
class PooledReceiver:
    """A receiver that workers run.

    Attributes:
        id: Its name.
        create: What makes it, from name, settings and outputs.
        settings: With the ports that the judge holds.
        signals: What pipelines want from it.
        extensions: What it needs.
        endpoints: Its protocols, in the order in which it starts them.
    """

    id: ComponentId
    create: Creator
    settings: StrictModel
    signals: tuple[Signal, ...]
    extensions: tuple[ComponentId, ...]
    endpoints: tuple[JudgedEndpoint, ...]


class ReceiverPool(Protocol):
    """Capability in the judge: receivers that find it do not listen, but join it when they start."""

    def join(self, receiver: PooledReceiver) -> None:
        """Have workers run this receiver; its endpoints follow those of earlier ones."""
        ...


class _Link(asyncio.Protocol):
    """The connection to one worker."""

    def __init__(self, pool: WorkerPool, worker: _Worker) -> None:
        self._pool = pool
        self._worker = worker
        self._frames = FrameBuffer()
        self._transport: asyncio.Transport | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    @override
    def data_received(self, data: bytes) -> None:
        answers: list[FromJudge] = []
        for frame in self._frames.add(data):
            for message in READ_WORKER.decode(frame):
                if isinstance(message, RelayedPush):
                    answers.append(self._pool.apply(message))
                else:
                    self._pool.note(self._worker, message)
        self.send(answers)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._worker.gone.set()

    def send(self, messages: Sequence[FromJudge]) -> None:
        """Send them in one frame."""
        if messages and self._transport is not None:
            self._transport.write(encode_frame(messages))

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()


@dataclass(slots=True, eq=False)
class _Worker:
    """One child.

    Attributes:
        process: The process.
        started_ns: Monotonic time.
        link: The connection; None before there is one.
        ready: Done when it listens; its exception says why it does not.
        gone: Set when its connection is closed.
    """

    process: subprocess.Popen[bytes]
    started_ns: int
    ready: asyncio.Future[None]
    link: _Link | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class WorkerPool:
    """The workers of one configuration; a `ReceiverPool`. Everything runs on the event loop.

    Args:
        n_workers: Processes that receive.
        extensions: What makes every extension, and its settings.
        logs: Level and encoding of log lines.
        host: Time, and where what workers counted is added.
        counters: What they may count, by name.
    """

    def __init__(
        self,
        n_workers: int,
        extensions: Mapping[ComponentId, tuple[Creator, StrictModel]],
        logs: tuple[str, str],
        host: PoolHost,
        counters: Mapping[str, MetricDeclaration],
    ) -> None:
        self._n_workers = n_workers
        self._settings = (extensions, logs)
        self._counters = counters
        self._meter, self._clock = host.meter, host.clock
        self._receivers: list[PooledReceiver] = []
        self._endpoints: list[JudgedEndpoint] = []
        self._is_up = False
        self._sent: dict[tuple[int, str], PushAnswer | None] = {}
        self._workers: dict[int, _Worker] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._usage = host.worker_usage

    def join(self, receiver: PooledReceiver) -> None:
        """See `ReceiverPool`."""
        self._receivers.append(receiver)
        self._endpoints += receiver.endpoints

    async def start(self) -> None:
        """Start every worker, and wait until all of them listen. Raises IngeroError when one does not."""
        self._meter.counter(RESTARTS).bound()
        loop = asyncio.get_running_loop()
        for at in range(self._n_workers):
            self._workers[at] = worker = await self._spawn()
            self._tasks.append(loop.create_task(self._keep(at, worker)))
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                for worker in list(self._workers.values()):
                    await worker.ready
        except TimeoutError as error:
            raise IngeroError(f"workers did not start within {_START_TIMEOUT_S:.0f} s") from error
        self._is_up = True

    async def stop(self, timeout_s: float) -> None:
        """Have the workers answer what is in flight and end; kill those that take longer."""
        for task in self._tasks:
            task.cancel()
        workers = list(self._workers.values())
        for worker in workers:
            if worker.link is not None:
                worker.link.send([StopOrder(max(timeout_s - 1.0, 0.1))])
        for worker in workers:
            try:
                async with asyncio.timeout(timeout_s):
                    await worker.gone.wait()
            except TimeoutError:
                _log.warning("worker %d did not end in time", worker.process.pid)
                worker.process.kill()
            await asyncio.to_thread(worker.process.wait)
            self._usage.end(worker.process.pid)
        self._workers.clear()
        self._show()

    def apply(self, push: RelayedPush) -> RelayedAnswer:
        """Apply one push; a defect that it meets is answered as one process answers it, and harms no other."""
        try:
            answer, cluster_id = self._endpoints[push.endpoint_idx].apply(push)
        except Exception:  # noqa: BLE001 - one request's defect must not end a worker with all others'
            _log.exception("a request could not be handled")
            return RelayedAnswer(push.number, "PERMANENT", "internal error")
        if cluster_id and answer.threshold is not None:
            self._sent.setdefault((push.endpoint_idx, cluster_id), None)
        return answer

    def note(self, worker: _Worker, message: FromWorker) -> None:
        """Take what a worker says of itself."""
        if isinstance(message, WorkerReady):
            worker.ready.set_result(None)
            self._show()
            if worker.link is not None:
                worker.link.send([
                    ThresholdUpdate(endpoint_idx, cluster_id, pack_threshold(answer))
                    for (endpoint_idx, cluster_id), answer in self._sent.items()
                ])
        elif isinstance(message, WorkerFailed):
            worker.ready.set_exception(IngeroError(message.message, hint=message.hint))
        elif isinstance(message, WorkerCounts):
            self._usage.note(worker.process.pid, message)
            for name, values, amount in message.added:
                metric = self._counters[name]
                self._meter.counter(metric).add(
                    amount, **dict(zip(metric.labels, values, strict=True))
                )

    def send_thresholds(self) -> None:
        """Tell every worker the thresholds that changed; called at `THRESHOLD_INTERVAL_NS`."""
        updates: list[FromJudge] = []
        for (endpoint_idx, cluster_id), sent in list(self._sent.items()):
            answer = self._endpoints[endpoint_idx].find_threshold(cluster_id)
            if answer is sent:
                continue
            threshold: Threshold | None = pack_threshold(answer)
            updates.append(ThresholdUpdate(endpoint_idx, cluster_id, threshold))
            if answer is None:
                del self._sent[endpoint_idx, cluster_id]
            else:
                self._sent[endpoint_idx, cluster_id] = answer
        for worker in self._workers.values():
            if worker.link is not None:
                worker.link.send(updates)

    async def _keep(self, at: int, worker: _Worker) -> None:
        """Start a worker again whenever it ends; one that fails at the first start is left to `start`."""
        pause_s = 0.0
        while True:
            await worker.gone.wait()
            status = await asyncio.to_thread(worker.process.wait)
            del self._workers[at]
            self._usage.end(worker.process.pid)
            self._show()
            if not worker.ready.done():
                worker.ready.set_exception(IngeroError(f"a worker ended at its start ({status})"))
            fault = worker.ready.exception()
            if not self._is_up:
                return
            self._meter.counter(RESTARTS).add(1)
            is_calm = self._clock.mono_ns() - worker.started_ns >= _CALM_NS
            pause_s = 0.0 if is_calm else min(2 * pause_s or 0.1, _MAX_PAUSE_S)
            why = f"status {status}" if fault is None else f"status {status}: {fault}"
            _log.error("worker %d ended (%s); another is started", worker.process.pid, why)
            await asyncio.sleep(pause_s)
            self._workers[at] = worker = await self._spawn()

    async def _spawn(self) -> _Worker:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        order = self._build_order()
        process = _start_process(theirs)
        worker = _Worker(process, self._clock.mono_ns(), loop.create_future())
        content = pickle.dumps(order)
        with suppress(OSError):  # it has ended already, which its connection tells
            ours.sendall(len(content).to_bytes(4, "big") + content)
        ours.setblocking(False)  # noqa: FBT003 -- the socket API takes it by position
        _, link = await loop.create_connection(lambda: _Link(self, worker), sock=ours)
        worker.link = link
        return worker

    def _build_order(self) -> WorkerOrder:
        extensions, (level, encoding) = self._settings
        needed = dict.fromkeys(name for one in self._receivers for name in one.extensions)
        receivers = ((one.id, one.create, one.settings, one.signals) for one in self._receivers)
        return WorkerOrder(
            tuple((name, *extensions[name]) for name in needed),
            tuple(receivers),
            level,
            encoding,
        )

    def _show(self) -> None:
        is_ready = [one.ready.done() for one in self._workers.values()]
        self._meter.gauge(WORKERS).set(sum(is_ready))


def _start_process(theirs: socket.socket) -> subprocess.Popen[bytes]:
    with theirs:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
