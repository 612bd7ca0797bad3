"""A worker process: receivers of one configuration, whose pushes the judge applies.

Started by `ingero.fleet.workers.pool`. It ends when the judge says so or is gone, and by no signal that a supervisor
sends to a whole service: the judge drains it.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from ingero.config import Endpoint
from ingero.config.environment import quiet_grpc
from ingero.errors import IngeroError, PermanentError
from ingero.fleet.component import (
    CapabilityT,
    Component,
    ComponentId,
    OfferedCapabilities,
    SharedT,
)
from ingero.fleet.consumer import Batch
from ingero.fleet.processors.memory_limiter import read_resident_bytes
from ingero.fleet.workers.link import JudgeLink, PushRelay
from ingero.fleet.workers.messages import StopOrder, WorkerCounts, WorkerFailed, WorkerReady
from ingero.fleet.workers.pool import WorkerOrder
from ingero.telemetry.clock import Clock, SystemClock
from ingero.telemetry.log import set_up_logging
from ingero.telemetry.metrics import CounterInstrument, MeterRegistry
from ingero.units import NS_PER_S

_REPORT_NS: Final = NS_PER_S
_IGNORED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _AtTheJudge:
    """Stands where a pipeline would: pushes never come here."""

    def consume(self, batch: Batch) -> None:
        """Refuse, for a worker has no pipelines."""
        raise PermanentError(f"a worker has no pipeline for {batch.signal}")


class WorkerHost:
    """The `Host` of a worker's components.

    Attributes:
        clock: Time.
        meter: What is counted here; the judge adds it to its own.
        draining: Set when the worker is to end.
    """

    def __init__(self, link: JudgeLink) -> None:
        self.clock: Clock = SystemClock()
        self.meter = MeterRegistry()
        self.draining = False
        self._offered = OfferedCapabilities()
        self._offered.add(PushRelay, None, link)
        self._starting: ComponentId | None = None
        self._states: dict[tuple[str, str], Any] = {}

    def offer(self, capability: type[CapabilityT], provider: CapabilityT) -> None:
        """Note a capability under the component that is starting."""
        self._offered.add(capability, self._starting, provider)

    def find(
        self, capability: type[CapabilityT], component: ComponentId | None = None
    ) -> Sequence[CapabilityT]:
        """Providers in the order in which they offered."""
        return self._offered.find(capability, component)

    def shared(self, key: tuple[str, str], build: Callable[[], SharedT]) -> SharedT:
        """State by key."""
        if key not in self._states:
            self._states[key] = build()
        found: SharedT = self._states[key]
        return found

    def announce(self, bound: Endpoint, what: str = "") -> None:
        """Nothing: the judge announced it."""

    def every(self, interval_ns: int, action: Callable[[], None]) -> None:
        """Repeat ``action`` until the process ends; what it raises, the loop logs."""
        loop = asyncio.get_running_loop()

        def fire() -> None:
            loop.call_later(interval_ns / NS_PER_S, fire)
            action()

        loop.call_later(interval_ns / NS_PER_S, fire)

    async def start(self, name: ComponentId, label: str, component: Component) -> None:
        """Start one component. Raises IngeroError with its name in front."""
        self._starting = name
        try:
            await component.start(self)
        except IngeroError as error:
            raise IngeroError(f"{label}.{name}: {error.message}", hint=error.hint) from error
        self._starting = None


class WorkerRun:
    """One run of a worker.

    Args:
        order: What to run.
        link: The connection to the judge.
    """

    def __init__(self, order: WorkerOrder, link: JudgeLink) -> None:
        self._order = order
        self._link = link
        self._host = WorkerHost(link)
        self._running: list[Component] = []
        self._sent: dict[tuple[str, tuple[str, ...]], float] = {}

    async def run(self) -> None:
        """Receive until the judge ends it or is gone."""
        link, host = self._link, self._host
        try:
            await self._start()
        except IngeroError as error:
            link.send(WorkerFailed(error.message, error.hint))
            link.close()
            await link.order
            return
        self._report()
        link.send(WorkerReady())
        host.every(_REPORT_NS, self._report)
        order = await link.order
        host.draining = True
        await self._stop(order)
        self._report()
        link.close()

    async def _start(self) -> None:
        for name, create, settings in self._order.extensions:
            await self._host.start(name, "extensions", create(name, settings))
        for name, create, settings, signals in self._order.receivers:
            receiver = create(name, settings, dict.fromkeys(signals, _AtTheJudge()))
            self._running.append(receiver)
            await self._host.start(name, "receivers", receiver)

    async def _stop(self, order: StopOrder | None) -> None:
        """Answer what is in flight; without a judge nothing can be."""
        within_s = 1.0 if order is None else order.within_s
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._running:
                    await self._running.pop().stop()

    def _report(self) -> None:
        """Tell the judge what was counted here since the last time."""
        added = []
        for instrument in self._host.meter:
            if not isinstance(instrument, CounterInstrument):
                continue
            for values, series in list(instrument.series.items()):
                key, now = (instrument.metric.name, values), series.read()
                if now != self._sent.get(key, 0.0):
                    added.append((*key, now - self._sent.get(key, 0.0)))
                    self._sent[key] = now
        self._link.send(WorkerCounts(added, sum(os.times()[:2]), read_resident_bytes()))


def main() -> None:
    """Entry point: the argument is the descriptor of the connection to the judge."""
    for one in _IGNORED:
        signal.signal(one, signal.SIG_IGN)
    quiet_grpc()
    import uvloop  # noqa: PLC0415 -- a part of the extra fleet

    connection = socket.socket(fileno=int(sys.argv[1]))
    with connection.makefile("rb", buffering=0) as stream:
        order: WorkerOrder = _read_order(stream.read)
    set_up_logging(order.log_level, order.log_encoding)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        connection.setblocking(False)  # noqa: FBT003 -- the socket API takes it by position
        _, link = await loop.create_connection(lambda: JudgeLink(loop), sock=connection)
        await WorkerRun(order, link).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def _read_order(read: Callable[[int], bytes]) -> WorkerOrder:
    def read_all(n_bytes: int) -> bytes:
        parts = b""
        while len(parts) < n_bytes:
            part = read(n_bytes - len(parts))
            if not part:
                sys.exit(0)  # the judge is gone already
            parts += part
        return parts

    content = read_all(int.from_bytes(read_all(4), "big"))
    order: WorkerOrder = pickle.loads(content)  # noqa: S301 -- from our parent, on a socket nobody else has
    return order
