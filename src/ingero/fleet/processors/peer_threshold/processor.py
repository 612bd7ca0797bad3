"""The ``ingero`` processor in a pipeline: reads pushes into the registry, passes them on, reports on a timer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Final

from ingero.fleet.component import (
    AdminRoutes,
    ComponentId,
    HardwareSource,
    Host,
    Learner,
    RankLevels,
    Stability,
    ThresholdSource,
)
from ingero.fleet.consumer import Batch, Consumer
from ingero.fleet.factory import ProcessorFactory
from ingero.fleet.helpers.downstream import Downstream
from ingero.fleet.processors.peer_threshold import telemetry
from ingero.fleet.processors.peer_threshold.admin import AdminPages
from ingero.fleet.processors.peer_threshold.config import IngeroConfig
from ingero.fleet.processors.peer_threshold.episode_events import (
    build_episodes,
    describe_notification,
    write_lines,
)
from ingero.fleet.processors.peer_threshold.levels import ScoreLevels
from ingero.fleet.processors.peer_threshold.notifications import Arrival
from ingero.fleet.processors.peer_threshold.registry import ClusterRegistry
from ingero.fleet.processors.peer_threshold.report import ClusterGauges, PipelineReport
from ingero.otlp.codec import Export, structs
from ingero.otlp.names import Signal
from ingero.telemetry.clock import Clock
from ingero.telemetry.limited import RateLimitedLog
from ingero.units import NS_PER_S
from ingero.wire.push import ResourceCache, read_push

_log = logging.getLogger("ingero.fleet.processors.ingero")
_EMIT_GAP_NS: Final = NS_PER_S
"""Least time between two reports of series; one after a notification otherwise comes at once."""


class PeerThresholdState:
    """What the processor's instances in several pipelines share; kept over a reload.

    Attributes:
        registry: Scores and thresholds of all clusters.
        downstream: Where series and episodes go.
        host: Under which service the timers run; a reload brings another.
    """

    def __init__(self, config: IngeroConfig, host: Host) -> None:
        self.registry = ClusterRegistry(config, host.clock, host.meter)
        lost = host.meter.counter(telemetry.REPORTS_LOST).bound()
        self.downstream = Downstream(host.clock, lost)
        self.host: object = None

    def accepts(self, settings: object) -> bool:
        """Whether it can go on with other settings: always, they say how scores are read, not what they are."""
        return isinstance(settings, IngeroConfig)


class PeerThresholdProcessor:
    """The processor in one pipeline.

    Every pipeline that names the processor shares its state; the first of them to start runs its timers. Series go
    down the first metrics pipeline, episodes as records down the first logs pipeline.
    """

    def __init__(
        self, component: ComponentId, config: IngeroConfig, signal: Signal, following: Consumer
    ) -> None:
        self._id = component
        self._config = config
        self._signal = signal
        self._following = following
        self._cache = ResourceCache(2 * config.max_expected_nodes)
        self._registry: ClusterRegistry | None = None
        self._clock: Clock | None = None
        self._reporter: _Reporter | None = None
        self._count_refused: Callable[[float], None] | None = None

    async def start(self, host: Host) -> None:
        """Join or make the shared state; the first instance under this host also runs its timers."""
        state = host.shared(
            (str(self._id), "state"), lambda: PeerThresholdState(self._config, host)
        )
        registry = state.registry
        self._registry, self._clock = registry, host.clock
        self._count_refused = host.meter.counter(telemetry.POINTS_REFUSED).bound()
        if state.host is not host:
            state.host = host
            state.downstream.begin(host, str(self._id))
            registry.configure(self._config)
            host.offer(ThresholdSource, registry)
            host.offer(HardwareSource, registry)
            host.offer(Learner, registry)
            host.offer(AdminRoutes, AdminPages(registry))
            host.offer(RankLevels, ScoreLevels(registry))
            self._reporter = _Reporter(state, host)
            host.every(self._config.recompute_min_interval, self._reporter.tick)
            host.every(self._config.push_interval, self._reporter.emit)
            host.meter.refresh_with(f"processors.{self._id}", self._reporter.show)
        state.downstream.join(self._signal, self._following)

    async def stop(self) -> None:
        """Send what is not sent yet; the state stays for the next configuration."""
        if self._reporter is not None:
            self._reporter.announce()
            self._reporter.end(f"processors.{self._id}")

    def consume(self, batch: Batch) -> None:
        """Read a metrics export into the registry, then pass it on, without senders that a cap refused; logs pass."""
        if batch.signal is not Signal.METRICS:
            self._following.consume(batch)
            return
        registry, clock = self._registry, self._clock
        assert registry is not None
        assert clock is not None
        pushes = read_push(batch.export, self._cache)
        arrival = Arrival(clock.mono_ns(), batch.received_wall_ns)
        refused = registry.take(pushes, batch.push, arrival)
        if refused:
            kept = self._drop(batch, frozenset(refused))
            if kept is None:
                return
            batch = kept
        self._following.consume(batch)

    def _drop(self, batch: Batch, refused: Collection[int]) -> Batch | None:
        """The batch without some of its resources, counted and named in the answer; None when nothing is left."""
        export, push = batch.export, batch.push
        rest = None
        if len(refused) < len(export.root.resource_metrics):
            entries = export.tree.resource_metrics
            kept = [entry for index, entry in enumerate(entries) if index not in refused]
            rest = Export.from_tree(Signal.METRICS, structs.MetricsRequest(kept))
        n_dropped = export.n_items - (rest.n_items if rest else 0)
        push.n_rejected += max(0, n_dropped - len(refused))  # the registry counted one for each
        assert self._count_refused is not None
        self._count_refused(n_dropped)
        return Batch(batch.signal, rest, batch.received_wall_ns, push) if rest else None


class _Reporter:
    """The registry's timers."""

    def __init__(self, state: PeerThresholdState, host: Host) -> None:
        self._registry = state.registry
        self._downstream = state.downstream
        self._clock = host.clock
        self._meter = host.meter
        self._gauges = ClusterGauges(host.meter)
        self._report = PipelineReport()
        self._log = RateLimitedLog(_log, host.clock, burst=2)
        self._emitted_ns = 0
        self._is_emit_due = False

    def tick(self) -> None:
        """Compute what is due, announce what turned, and report the series that changed with it."""
        self._registry.tick()
        self.announce()
        self._log.flush()
        if self._is_emit_due and self._clock.mono_ns() - self._emitted_ns >= _EMIT_GAP_NS:
            self.emit()

    def show(self) -> None:
        """Bring the service's own gauges up to date: before each scrape."""
        registry = self._registry
        registry.tick()
        with registry.lock:
            clusters = list(registry.clusters.values())
            self._gauges.show_totals(registry.n_nodes, len(clusters))
            self._gauges.forget_all_but([cluster.cluster_id for cluster in clusters])
        for cluster in clusters:
            with registry.lock:
                self._gauges.show(cluster)

    def end(self, owner: str) -> None:
        """Show what there is for the last time."""
        self.show()
        self._meter.refresh_with(owner, lambda: None)

    def emit(self) -> None:
        """Send the series of every cluster down the pipeline."""
        registry = self._registry
        self._emitted_ns, self._is_emit_due = self._clock.mono_ns(), False
        with registry.lock:
            export = self._report.build(list(registry.clusters.values()), self._clock.wall_ns())
        self._downstream.send(Signal.METRICS, export)

    def announce(self) -> None:
        """Log what turned, and send its records down the logs pipeline."""
        registry = self._registry
        if not registry.notifications:
            return
        with registry.lock:
            notifications = registry.notifications.take()
        self._is_emit_due = True
        write_lines(self._log, notifications)
        if not self._downstream.has_ledger:
            self._downstream.send(Signal.LOGS, build_episodes(notifications))
            return
        for one in notifications:
            states = describe_notification(one)
            self._downstream.report(one.cluster_id, states, build_episodes([one]))


FACTORY = ProcessorFactory(
    type="ingero",
    config=IngeroConfig,
    description="Compares the health scores of nodes and draws the threshold that each push is answered with.",
    signals=frozenset({Signal.METRICS, Signal.LOGS}),
    stability=Stability.BETA,
    metrics=telemetry.METRICS,
    create=PeerThresholdProcessor,
)
