"""The running collector: starts a graph, keeps it alive through reloads, and drains it.

One event loop on the main thread. The first SIGTERM or SIGINT drains, the second ends the process at once; SIGHUP reads
the configuration again and keeps the old one when the new one is bad.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from ingero.config import Endpoint
from ingero.errors import IngeroError
from ingero.fleet.component import (
    CapabilityT,
    ComponentId,
    ComponentKind,
    OfferedCapabilities,
    SharedT,
)
from ingero.fleet.config import FleetConfig, check_files
from ingero.fleet.factory import Factory
from ingero.fleet.graph import PIPELINE_SECONDS, Graph, GraphNode, build_graph
from ingero.fleet.jetstream.telemetry import STREAM_METRICS
from ingero.fleet.processors.memory_limiter import read_resident_bytes
from ingero.fleet.states import SharedStates
from ingero.fleet.views import (
    PipelineView,
    ServiceStatus,
    ServiceView,
)
from ingero.fleet.workers.pool import (
    POOL_METRICS,
    THRESHOLD_INTERVAL_NS,
    ReceiverPool,
    WorkerPool,
    WorkerUsage,
)
from ingero.heap import trim_heap
from ingero.serving.asgi import AsgiServer
from ingero.serving.ready import report_ready
from ingero.serving.scrape import scrape_app
from ingero.telemetry.clock import Clock, SystemClock
from ingero.telemetry.declare import counter, gauge
from ingero.telemetry.log import set_up_logging
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_S, format_duration

if TYPE_CHECKING:
    from ingero.fleet.jetstream.site import StreamSite

RELOADS: Final = counter(
    "ingero_fleet_config_reloads_total",
    "Reloads of the configuration: applied, refused (a file is bad) or reverted (the new one did not start).",
    "result",
)
UPTIME: Final = gauge("otelcol_process_uptime_seconds", "Seconds since the collector started.")
MEMORY: Final = gauge(
    "otelcol_process_memory_rss_bytes", "Resident memory of the process and its workers."
)
CPU: Final = gauge(
    "otelcol_process_cpu_seconds", "Processor time that the process and its workers have used."
)
SERVICE_METRICS: Final = (RELOADS, UPTIME, MEMORY, CPU, *POOL_METRICS, *STREAM_METRICS)

_RELOAD_NS: Final = 5 * NS_PER_S  # what the old generation gets before the new one may start
_RETRY_S: Final = 2.0  # between attempts to start the configuration that ran before
_GC_THRESHOLDS: Final = (20_000, 10, 100)
"""Pushes make no cycles; at Python's own thresholds a collection takes some milliseconds every tenth of a second."""
_log = logging.getLogger("ingero.fleet")


class _Event(Enum):
    STOP = "stop"
    RELOAD = "reload"
    RETRY = "retry"


def _settle() -> None:
    """After start-up: give back what only it needed, and let collections no longer walk what it made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    trim_heap()


class Generation:
    """One configuration running; the `Host` that its components see.

    Attributes:
        draining: It is the last one and is to end. One that a reload stops is not, also where the service ends then.
    """

    def __init__(self, service: FleetService, config: FleetConfig) -> None:
        self.config = config
        self.draining = False
        self._service = service
        self.graph: Graph = build_graph(
            config, service.factories, service.telemetry.registry, service.clock
        )
        self._offered = OfferedCapabilities()
        self._offered.add(ServiceView, None, service)
        self._timers: dict[int | None, list[asyncio.TimerHandle]] = {}
        self._started: list[GraphNode] = []
        self._starting: GraphNode | None = None
        self.addresses: dict[str, Endpoint] = {}
        self._site = self._build_site()
        self._pool = self._build_pool()

    @property
    def worker_usage(self) -> WorkerUsage:
        """What the service's workers use."""
        return self._service.telemetry.workers

    @property
    def clock(self) -> Clock:
        """The service's clock; where pushes come from a stream, one that tells when they were received."""
        return self._service.clock if self._site is None else self._site.clock

    @property
    def meter(self) -> MeterRegistry:
        """The service's own telemetry."""
        return self._service.telemetry.registry

    def offer(self, capability: type[CapabilityT], provider: CapabilityT) -> None:
        """Note a capability under the component that is starting."""
        by = None if self._starting is None else self._starting.id
        self._offered.add(capability, by, provider)

    def find(
        self, capability: type[CapabilityT], component: ComponentId | None = None
    ) -> Sequence[CapabilityT]:
        """Providers in the order in which they offered."""
        return self._offered.find(capability, component)

    def shared(self, key: tuple[str, str], build: Callable[[], SharedT]) -> SharedT:
        """State by key; see `SharedStates`."""
        return self._service.states.get(key, build)

    def announce(self, bound: Endpoint, what: str = "") -> None:
        """Note and log the endpoint under the name of the component that is starting."""
        assert self._starting is not None
        self.note_address(f"{self._starting.label} {what}".strip(), bound)

    def note_address(self, name: str, bound: Endpoint) -> None:
        """Note and log what listens where."""
        self.addresses[name] = bound
        _log.info("%s listens on %s", name, bound)

    def every(self, interval_ns: int, action: Callable[[], None]) -> None:
        """Repeat ``action``; what it raises goes to the loop's exception handler, which logs it."""
        loop = asyncio.get_running_loop()
        owner = None if self._starting is None else id(self._starting.component)
        timers = self._timers.setdefault(owner, [])
        slot = len(timers)

        def fire() -> None:
            timers[slot] = loop.call_later(interval_ns / NS_PER_S, fire)
            action()

        timers.append(loop.call_later(interval_ns / NS_PER_S, fire))

    async def start(self) -> None:
        """Start every component in order; when one fails, stop those that run.

        Raises:
            IngeroError: What the component said, with its name in front.
        """
        if self._site is not None:
            self._site.offer(self)
        for node in self.graph.nodes:
            self._starting = node
            try:
                await node.component.start(self)
            except IngeroError as error:
                await self._stop_one(node, 1.0)
                await self.stop(NS_PER_S)
                _name_component(node, error)
                raise
            self._started.append(node)
        self._starting = None
        if self._pool is not None:
            try:
                await self._pool.start()
            except IngeroError:
                await self.stop(NS_PER_S)
                raise
            self.every(THRESHOLD_INTERVAL_NS, self._pool.send_thresholds)
        if self._site is not None:
            self._site.start(self)

    def _build_site(self) -> StreamSite | None:
        nats = self.config.service.storage.nats
        if nats is None:
            return None
        from ingero.fleet.jetstream.site import StreamSite  # noqa: PLC0415 -- its client takes 4 MiB

        return StreamSite(nats, self._service.clock, self.meter)

    def _build_pool(self) -> WorkerPool | None:
        service = self.config.service
        if service.workers == 1:
            return None
        makers = {(one.kind, one.type): one.create for one in self._service.factories}
        extensions = {
            one: (makers[kind, one.type], model)
            for (kind, one), model in self.config.settings.items()
            if kind is ComponentKind.EXTENSION
        }
        declared = [metric for one in self._service.factories for metric in one.metrics]
        logs = (service.telemetry.logs.level, service.telemetry.logs.encoding)
        counters = {metric.name: metric for metric in declared}
        pool = WorkerPool(service.workers, extensions, logs, self, counters)
        self.offer(ReceiverPool, pool)
        return pool

    async def stop(self, timeout_ns: int) -> None:
        """Stop what runs, in reverse order, within the time given; each component gets what is left of it."""
        deadline_ns = self.clock.mono_ns() + timeout_ns
        if self._pool is not None:
            await self._pool.stop(timeout_ns / NS_PER_S / 2)
        if self._site is not None:
            await self._site.stop()
        while self._started:
            left_s = max((deadline_ns - self.clock.mono_ns()) / NS_PER_S, 0.05)
            await self._stop_one(self._started.pop(), left_s)
        self._end_timers(None)

    def _end_timers(self, owner: int | None) -> None:
        """Cancel what a component asked to be repeated; ``None`` stands for timers set outside of a start."""
        for timer in self._timers.pop(owner, ()):
            timer.cancel()

    async def _stop_one(self, node: GraphNode, timeout_s: float) -> None:
        self._end_timers(id(node.component))
        try:
            async with asyncio.timeout(timeout_s):
                await node.component.stop()
        except TimeoutError:
            _log.warning("%s did not stop in time", node.label)
        except IngeroError as error:
            _log.warning("%s did not stop cleanly: %s", node.label, error.message)


def _name_component(node: GraphNode, error: IngeroError) -> None:
    """Put the component's name in front of each line of an error."""
    error.message = "\n".join(f"{node.label}: {line}" for line in error.message.splitlines())
    error.args = (error.message,)


class OwnTelemetry:
    """The service's own instruments, those of its process, and the endpoints at which they are scraped.

    Attributes:
        registry: Every instrument.
        workers: What workers use.
        started_mono_ns: When the service began to run; 0 before that.
    """

    def __init__(self, clock: Clock) -> None:
        self.registry = MeterRegistry()
        self.workers = WorkerUsage()
        self.started_mono_ns = 0
        self._clock = clock
        self._servers: list[AsgiServer] = []
        for result in ("applied", "refused", "reverted"):  # there from the start, for alerts
            self.registry.counter(RELOADS).bound(result=result)
        self.registry.gauge(UPTIME).watch(self._read_uptime_s)
        self.registry.gauge(MEMORY).watch(
            lambda: read_resident_bytes() + self.workers.sum_resident_bytes()
        )
        self.registry.gauge(CPU).watch(lambda: sum(os.times()[:2]) + self.workers.sum_cpu_s())

    async def open(
        self, endpoints: Sequence[Endpoint], note_address: Callable[[str, Endpoint], None]
    ) -> None:
        """Listen, and note each address that was bound. Raises IngeroError where that fails."""
        for endpoint in endpoints:
            server = AsgiServer(scrape_app(self.registry), endpoint)
            try:
                await server.start()
            except IngeroError as error:
                error.message = f"service.telemetry.metrics: {error.message}"
                error.args = (error.message,)
                raise
            self._servers.append(server)
            note_address("service.telemetry.metrics", server.bound)

    async def close(self) -> None:
        """Close every endpoint."""
        while self._servers:
            await self._servers.pop().stop()

    def _read_uptime_s(self) -> float:
        if not self.started_mono_ns:
            return 0.0
        return (self._clock.mono_ns() - self.started_mono_ns) / NS_PER_S


@dataclass(slots=True)
class _Life:
    status: ServiceStatus = ServiceStatus.STARTING
    started_wall_ns: int = 0


class FleetService:
    """The process's one collector.

    Args:
        load: Reads and checks the configuration; called again for each reload.
        factories: The components there are.
        clock: Time.
    """

    def __init__(
        self,
        load: Callable[[], FleetConfig],
        factories: Sequence[Factory],
        *,
        clock: Clock | None = None,
    ) -> None:
        self.factories = tuple(factories)
        self.clock: Clock = clock or SystemClock()
        self.telemetry = OwnTelemetry(self.clock)
        self.states = SharedStates()
        self._load = load
        self._life = _Life()
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._generation: Generation | None = None
        self._is_running = False
        self._exit_code = 0

    @property
    def status(self) -> ServiceStatus:
        """Where it is in its life."""
        return self._life.status

    @property
    def started_wall_ns(self) -> int:
        """When it began to run; 0 before that."""
        return self._life.started_wall_ns

    @property
    def config_source(self) -> str:
        """Name of the configuration file."""
        return self._generation.config.source if self._generation else ""

    def components(self) -> Sequence[tuple[ComponentKind, ComponentId]]:
        """Every component that runs, in start order."""
        if self._generation is None:
            return ()
        return [(node.kind, node.id) for node in self._generation.graph.nodes]

    def settings(self) -> dict[str, Any]:
        """Every component's settings and ``service``, as JSON-able values; secrets are stars."""
        if self._generation is None:
            return {}
        config = self._generation.config
        found: dict[str, Any] = {kind.value: {} for kind in ComponentKind}
        for (kind, one), model in config.settings.items():
            found[kind.value][str(one)] = model.model_dump(mode="json")
        return found | {"service": config.service.model_dump(mode="json")}

    def pipelines(self) -> Sequence[PipelineView]:
        """Every pipeline that runs."""
        if self._generation is None:
            return ()
        series = self.telemetry.registry.histogram(PIPELINE_SECONDS).series
        return [head.view(series[head.name,].read()[0]) for head in self._generation.graph.heads]

    async def run(self) -> int:
        """Run until asked to stop.

        Returns:
            0 after SIGTERM or `stop`, 130 after SIGINT.

        Raises:
            IngeroError: It could not start; everything that had started was stopped.
        """
        config = self._load()
        self._set_up(config)
        self._catch_signals()
        await self._start(config)
        _settle()
        while (event := await self._next_event()) is not _Event.STOP:
            if event is _Event.RELOAD:
                await self._reload()
            else:
                assert self._generation is not None
                await self._go_back(self._generation.config)
        await self._drain()
        return self._exit_code

    def stop(self) -> None:
        """Ask it to drain and return from `run`."""
        self._life.status = ServiceStatus.DRAINING
        self._events.put_nowait(_Event.STOP)

    def reload(self) -> None:
        """Ask it to read its configuration again."""
        self._events.put_nowait(_Event.RELOAD)

    async def _start(self, config: FleetConfig) -> None:
        self._is_running = False
        self._generation = generation = Generation(self, config)
        try:
            endpoints = config.service.telemetry.metrics.endpoints
            await self.telemetry.open(endpoints, generation.note_address)
            await generation.start()
        except IngeroError:
            await self.telemetry.close()
            raise
        self._is_running = True
        if self._life.status is ServiceStatus.STARTING:
            self._life = _Life(ServiceStatus.RUNNING, self.clock.wall_ns())
            self.telemetry.started_mono_ns = self.clock.mono_ns()
        _log.info("running %d pipelines from %s", len(generation.graph.heads), config.source)
        report_ready("ingero-fleet", generation.addresses)

    async def _reload(self) -> None:
        old = self._generation
        assert old is not None
        reloads = self.telemetry.registry.counter(RELOADS)
        try:
            config = self._load()
            check_files(config, self.factories)
        except IngeroError as error:
            reloads.add(1, result="refused")
            _log.error("configuration not reloaded, the old one stays: %s", error.message)
            return
        await self._stop_generation(old, min(_RELOAD_NS, old.config.service.shutdown_timeout))
        states = self.states.set_aside_changed(old.config, config)
        self._set_up(config)
        try:
            await self._start(config)
        except IngeroError as error:
            reloads.add(1, result="reverted")
            _log.error("the new configuration did not start, going back: %s", error.message)
            self.states.restore(states)
            self._set_up(old.config)
            await self._go_back(old.config)
            return
        self.states.discard_unused(states)
        reloads.add(1, result="applied")

    async def _go_back(self, config: FleetConfig) -> None:
        """Start what ran before; where even that fails, a file may be bad only for now."""
        try:
            await self._start(config)
        except IngeroError as error:
            _log.error("the old one does not start, trying again: %s", error.message)

    async def _next_event(self) -> _Event:
        """What is asked for next; another attempt to start where nothing runs and nothing is asked for."""
        try:
            async with asyncio.timeout(None if self._is_running else _RETRY_S):
                return await self._events.get()
        except TimeoutError:
            return _Event.RETRY

    async def _stop_generation(self, generation: Generation, timeout_ns: int) -> None:
        await generation.stop(timeout_ns)
        await self.telemetry.close()

    async def _drain(self) -> None:
        assert self._generation is not None
        began_ns = self.clock.mono_ns()
        timeout_ns = self._generation.config.service.shutdown_timeout
        self._generation.draining = True
        await self._stop_generation(self._generation, timeout_ns)
        self.states.end()
        _log.info("stopped in %s", format_duration(self.clock.mono_ns() - began_ns))

    def _set_up(self, config: FleetConfig) -> None:
        logs = config.service.telemetry.logs
        set_up_logging(logs.level, logs.encoding)
        for warning in config.warnings:
            _log.warning("%s", warning)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for caught in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(caught, self._on_stop_signal, caught)
        loop.add_signal_handler(signal.SIGHUP, self.reload)

    def _on_stop_signal(self, caught: signal.Signals) -> None:
        if self._life.status is ServiceStatus.DRAINING:
            _log.warning("second %s: ending now, data in flight is lost", caught.name)
            os._exit(128 + caught)
        _log.info("%s: draining; send it again to end at once", caught.name)
        self._exit_code = 130 if caught is signal.SIGINT else 0
        self.stop()
