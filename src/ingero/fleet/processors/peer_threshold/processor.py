"""The ``ingero`` processor in a pipeline: reads pushes into the board, passes them on, reports on a timer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Final

from ingero.errors import DeliveryError
from ingero.fleet.component import (
    AdminRoutes,
    ComponentId,
    HardwareSource,
    Host,
    PushContext,
    Stability,
    ThresholdSource,
)
from ingero.fleet.consumer import Batch, Consumer
from ingero.fleet.factory import ProcessorFactory
from ingero.fleet.processors.peer_threshold import telemetry
from ingero.fleet.processors.peer_threshold.admin import AdminPages
from ingero.fleet.processors.peer_threshold.config import IngeroConfig
from ingero.fleet.processors.peer_threshold.episode_events import build_episodes, write_lines
from ingero.fleet.processors.peer_threshold.registry import Arrival, ClusterRegistry
from ingero.fleet.processors.peer_threshold.report import OwnTelemetry, PipelineReport
from ingero.otlp.codec import Export, structs
from ingero.otlp.names import Signal
from ingero.telemetry.clock import Clock
from ingero.telemetry.limited import RateLimitedLog
from ingero.units import NS_PER_S
from ingero.wire.push import ResourceCache, read_push

_log = logging.getLogger("ingero.fleet.processors.ingero")
_EMIT_GAP_NS: Final = NS_PER_S
"""Least time between two reports; one that tells news comes at once otherwise."""


class PeerThresholdProcessor:
    """One pipeline's door to the board.

    Every pipeline that names the processor shares one board; the first of them to start runs its timers. Series go
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
        self._board: ClusterRegistry | None = None
        self._clock: Clock | None = None
        self._reporter: _Reporter | None = None
        self._count_refused: Callable[[float], None] | None = None

    async def start(self, host: Host) -> None:
        """Join or make the board; the first instance under this host also runs its timers."""
        board = host.shared(
            (str(self._id), "board"), lambda: ClusterRegistry(self._config, host.clock, host.meter)
        )
        self._board, self._clock = board, host.clock
        self._count_refused = host.meter.counter(telemetry.POINTS_REFUSED).bound()
        if board.host is not host:
            board.host = host
            board.following.clear()
            board.configure(self._config)
            host.offer(ThresholdSource, board)
            host.offer(HardwareSource, board)
            host.offer(AdminRoutes, AdminPages(board))
            self._reporter = _Reporter(board, host)
            host.every(self._config.recompute_min_interval, self._reporter.tick)
            host.every(self._config.push_interval, self._reporter.emit)
            host.meter.refresh_with(f"processors.{self._id}", self._reporter.show)
        board.following.setdefault(self._signal, self._following)

    async def stop(self) -> None:
        """Tell what is not told yet; the board stays for the next configuration."""
        if self._reporter is not None:
            self._reporter.tell()
            self._reporter.end(f"processors.{self._id}")

    def consume(self, batch: Batch) -> None:
        """Read a metrics export into the board, then pass it on, without senders that a cap refused; logs pass."""
        if batch.signal is not Signal.METRICS:
            self._following.consume(batch)
            return
        board, clock = self._board, self._clock
        assert board is not None
        assert clock is not None
        pushes = read_push(batch.export, self._cache)
        arrival = Arrival(clock.mono_ns(), batch.received_wall_ns)
        refused = board.take(pushes, batch.push, arrival)
        if refused:
            kept = self._drop(batch, frozenset(refused))
            if kept is None:
                return
            batch = kept
        self._following.consume(batch)

    def _drop(self, batch: Batch, refused: Collection[int]) -> Batch | None:
        """The batch without some of its resources, counted and told to the sender; None when nothing is left."""
        export, push = batch.export, batch.push
        rest = None
        if len(refused) < len(export.root.resource_metrics):
            entries = export.tree.resource_metrics
            kept = [entry for index, entry in enumerate(entries) if index not in refused]
            rest = Export.from_tree(Signal.METRICS, structs.MetricsRequest(kept))
        n_dropped = export.n_items - (rest.n_items if rest else 0)
        push.n_rejected += max(0, n_dropped - len(refused))  # the board counted one for each
        assert self._count_refused is not None
        self._count_refused(n_dropped)
        return Batch(batch.signal, rest, batch.received_wall_ns, push) if rest else None


class _Reporter:
    """The board's timers."""

    def __init__(self, board: ClusterRegistry, host: Host) -> None:
        self._board = board
        self._clock = host.clock
        self._meter = host.meter
        self._telemetry = OwnTelemetry(host.meter)
        self._report = PipelineReport()
        self._log = RateLimitedLog(_log, host.clock, burst=2)
        self._lost = host.meter.counter(telemetry.REPORTS_LOST).bound()
        self._emitted_ns = 0
        self._is_emit_due = False

    def tick(self) -> None:
        """Compute what is due, tell the news, and what changed with them."""
        self._board.tick()
        self.tell()
        self._log.flush()
        if self._is_emit_due and self._clock.mono_ns() - self._emitted_ns >= _EMIT_GAP_NS:
            self.emit()

    def show(self) -> None:
        """Bring the service's own gauges up to date: before each scrape."""
        board = self._board
        board.tick()
        with board.lock:
            books = list(board.books.values())
            self._telemetry.show_totals(board.n_nodes, len(books))
            self._telemetry.forget_all_but([book.cluster_id for book in books])
        for book in books:
            with board.lock:
                self._telemetry.show(book)

    def end(self, owner: str) -> None:
        """Show what there is for the last time."""
        self.show()
        self._meter.refresh_with(owner, lambda: None)

    def emit(self) -> None:
        """Pass the series of every cluster down the pipeline."""
        board = self._board
        self._emitted_ns, self._is_emit_due = self._clock.mono_ns(), False
        with board.lock:
            export = self._report.build(list(board.books.values()), self._clock.wall_ns())
        if export is not None:
            self._send(Signal.METRICS, export)

    def tell(self) -> None:
        """Log what turned, and pass its records down the logs pipeline."""
        board = self._board
        if not board.desk:
            return
        with board.lock:
            news = board.desk.take()
        self._is_emit_due = True
        write_lines(self._log, news)
        export = build_episodes(news)
        if export.n_items:
            self._send(Signal.LOGS, export)

    def _send(self, signal: Signal, export: Export) -> None:
        following = self._board.following.get(signal)
        if following is None:
            return
        try:
            following.consume(Batch(signal, export, self._clock.wall_ns(), PushContext()))
        except DeliveryError:
            self._lost(1)


FACTORY = ProcessorFactory(
    type="ingero",
    config=IngeroConfig,
    says="Compares the health scores of nodes and draws the threshold that each push is answered with.",
    signals=frozenset({Signal.METRICS, Signal.LOGS}),
    stability=Stability.BETA,
    metrics=telemetry.METRICS,
    create=PeerThresholdProcessor,
)
