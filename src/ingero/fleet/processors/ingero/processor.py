"""The ``ingero`` processor in a pipeline: reads pushes into the board, passes them on, reports on a timer."""

from __future__ import annotations

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
from ingero.fleet.processors.ingero import telemetry
from ingero.fleet.processors.ingero.admin import AdminPages
from ingero.fleet.processors.ingero.board import Arrival, Board
from ingero.fleet.processors.ingero.book import ClusterBook
from ingero.fleet.processors.ingero.config import IngeroConfig
from ingero.fleet.processors.ingero.news import build_episodes
from ingero.fleet.processors.ingero.report import OwnTelemetry, build_export
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S
from ingero.wire.names import Signal
from ingero.wire.otlp import Export, ResourceCache, read_push

_SHOW_INTERVAL_NS = NS_PER_S


class IngeroProcessor:
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
        self._board: Board | None = None
        self._clock: Clock | None = None
        self._reporter: _Reporter | None = None

    async def start(self, host: Host) -> None:
        """Join or make the board; the first instance under this host also runs its timers."""
        board = host.shared(
            (str(self._id), "board"), lambda: Board(self._config, host.clock, host.meter)
        )
        self._board, self._clock = board, host.clock
        if board.host is not host:
            board.host = host
            board.following.clear()
            host.offer(ThresholdSource, board)
            host.offer(HardwareSource, board)
            host.offer(AdminRoutes, AdminPages(board))
            self._reporter = _Reporter(board, host)
            host.every(self._config.recompute_min_interval, self._reporter.tick)
            host.every(self._config.push_interval, self._reporter.emit)
        board.following.setdefault(self._signal, self._following)

    async def stop(self) -> None:
        """Tell what is not told yet; the board stays for the next configuration."""
        if self._reporter is not None:
            self._reporter.tell()

    def consume(self, batch: Batch) -> None:
        """Read a metrics export into the board, then pass it on unchanged; logs pass."""
        if batch.signal is not Signal.METRICS:
            self._following.consume(batch)
            return
        board, clock = self._board, self._clock
        assert board is not None
        assert clock is not None
        pushes = read_push(batch.export, self._cache)
        board.take(pushes, batch.push, Arrival(clock.mono_ns(), batch.received_wall_ns))
        self._following.consume(batch)


class _Reporter:
    """The board's timers."""

    def __init__(self, board: Board, host: Host) -> None:
        self._board = board
        self._clock = host.clock
        self._telemetry = OwnTelemetry(host.meter)
        self._lost = host.meter.counter(telemetry.REPORTS_LOST).bound()
        self._shown_ns = 0
        self._shown: dict[str, int] = {}

    def tick(self) -> None:
        """Compute what is due, tell the news; once a second bring the service's own gauges up to date."""
        board = self._board
        board.tick()
        self.tell()
        now_ns = self._clock.mono_ns()
        if now_ns - self._shown_ns < _SHOW_INTERVAL_NS:
            return
        self._shown_ns = now_ns
        books = list(board.books.values())
        self._telemetry.show_totals(board.n_nodes, len(books))
        self._telemetry.forget_all_but([book.cluster_id for book in books])
        self._shown = {book.cluster_id: self._show(book) for book in books}

    def emit(self) -> None:
        """Pass the series of every cluster down the pipeline."""
        board = self._board
        with board.lock:
            books = list(board.books.values())
            if not books:
                return
            wall_ns = self._clock.wall_ns()
            export = build_export(books, wall_ns)
        self._send(Signal.METRICS, export)

    def tell(self) -> None:
        """Pass episodes that began or ended down the logs pipeline."""
        board = self._board
        if not board.news:
            return
        with board.lock:
            news = list(board.news)
            board.news.clear()
        self._send(Signal.LOGS, build_episodes(news))

    def _send(self, signal: Signal, export: Export) -> None:
        following = self._board.following.get(signal)
        if following is None:
            return
        try:
            following.consume(Batch(signal, export, self._clock.wall_ns(), PushContext()))
        except DeliveryError:
            self._lost(1)

    def _show(self, book: ClusterBook) -> int:
        n_before = self._shown.get(book.cluster_id)
        if book.n_recomputes != n_before:
            with self._board.lock:
                self._telemetry.show(book)
        return book.n_recomputes


FACTORY = ProcessorFactory(
    type="ingero",
    config=IngeroConfig,
    says="Compares the health scores of nodes and draws the threshold that each push is answered with.",
    signals=frozenset({Signal.METRICS, Signal.LOGS}),
    stability=Stability.BETA,
    metrics=telemetry.METRICS,
    create=IngeroProcessor,
)
