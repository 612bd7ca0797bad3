"""The exporter: stores a push that repeats, keeps others and walks them on a timer or at the scrape, writes in slices.

On one core a scrape of 10 000 nodes takes several hundred milliseconds, so nothing here runs longer than a
slice at a time: between slices the event loop takes pushes.

Lossy: `REFUSED`, `CONFLICTS`, `UNSUPPORTED` and `OVERSIZED` count what is not shown.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, TypeVar

from ingero.fleet.component import ComponentId, Host, Stability
from ingero.fleet.consumer import Batch
from ingero.fleet.exporters.prometheus.config import PrometheusConfig
from ingero.fleet.exporters.prometheus.formats import ExpositionFormat, choose_format
from ingero.fleet.exporters.prometheus.intake import SeriesIntake
from ingero.fleet.exporters.prometheus.protobuf import iter_protobuf
from ingero.fleet.exporters.prometheus.reading import DELTA
from ingero.fleet.exporters.prometheus.series import SeriesStore
from ingero.fleet.exporters.prometheus.text import ExpositionSettings, iter_exposition
from ingero.fleet.factory import METRICS_ONLY, ExporterFactory
from ingero.fleet.helpers.certificates import HANDSHAKES_REFUSED, open_renewing_context
from ingero.fleet.helpers.prometheus_labels import SENDER_LABELS
from ingero.fleet.views import ScrapeState, ScrapeView
from ingero.otlp.codec import Export
from ingero.serving.asgi import AsgiServer
from ingero.serving.scrape import send_text
from ingero.telemetry.clock import Clock
from ingero.telemetry.declare import counter, gauge
from ingero.units import NS_PER_MS, NS_PER_S
from ingero.wire.names import MetricName

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, HTTPScope, Scope

SERIES: Final = gauge("ingero_fleet_prometheus_series", "Series shown to scrapers.", "exporter")
SCRAPES: Final = counter("ingero_fleet_prometheus_scrapes_total", "Scrapes answered.", "exporter")
REFUSED: Final = counter(
    "ingero_fleet_prometheus_refused_points_total",
    "Points of new series that were not stored because of max_series.",
    "exporter",
)
CONFLICTS: Final = counter(
    "ingero_fleet_prometheus_conflicting_points_total",
    "Points whose name is already shown as another type.",
    "exporter",
)
UNSUPPORTED: Final = counter(
    "ingero_fleet_prometheus_unsupported_points_total",
    "Points that cannot be shown: histograms whose buckets do not fit their bounds or their count or that have more"
    " than 4096, exponential ones of a scale below -4, deltas of a sum without a finite number, names without a letter"
    " or too long.",
    "exporter",
)
OVERSIZED: Final = counter(
    "ingero_fleet_prometheus_oversized_points_total",
    "Points with more or longer labels than label_limit, label_name_length_limit and label_value_length_limit allow.",
    "exporter",
)

_MAX_PENDING: Final = 256
"""Exports that wait to be walked; at about 10 KiB each. Above it a push walks two, until none waits."""
_MAX_SENDERS_AT_ONCE: Final = 16
"""Of one export, at 10 to 15 µs each; one of more senders waits for slices of time."""
_DRAIN_INTERVAL_NS: Final = 25 * NS_PER_MS
_DRAIN_SLICE_NS: Final = 2 * NS_PER_MS
_SCRAPE_SLICE_NS: Final = 1 * NS_PER_MS
_PARTS_PER_CHECK: Final = 64
_N_REMEMBERED: Final = 5
_REPLACEABLE: Final = frozenset({MetricName.HEALTH_SCORE.value, MetricName.STRAGGLER_EVENT.value})
"""First metric of the pushes that an agent repeats with the same gauges and cumulative sums: the last one says all."""

_ADDING: Final = frozenset({"sum", "histogram", "exponential_histogram"})
"""Kinds of metrics whose points may be differences."""

PartT = TypeVar("PartT", str, bytes)


class _Scrapes:
    """One scrape at a time, and when the last few were."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self._n = 0
        self._times_ns: deque[int] = deque(maxlen=_N_REMEMBERED)

    def note(self, mono_ns: int) -> None:
        self._n += 1
        self._times_ns.append(mono_ns)

    def read_state(self, exporter: str, n_series: int, mono_ns: int) -> ScrapeState:
        times = self._times_ns
        pauses_ns = [later - earlier for earlier, later in itertools.pairwise(times)]
        since_s = round((mono_ns - times[-1]) / NS_PER_S, 1) if times else None
        interval_s = round(max(pauses_ns) / NS_PER_S, 1) if len(pauses_ns) > 1 else None
        return ScrapeState(exporter, n_series, self._n, since_s, interval_s)


class _WaitingExports:
    """Exports to be walked, the oldest first; a later push of an agent takes the place of one that shows no more."""

    def __init__(self, intake: SeriesIntake) -> None:
        self._intake = intake
        self._exports: dict[object, tuple[Export, int, int]] = {}
        self._sequence = 0
        self._is_behind = False

    def __len__(self) -> int:
        return len(self._exports)

    def add(self, batch: Batch, now_ns: int, wall_ns: int) -> None:
        """Keep an export; where too many wait, walk two for each that comes, until none does.

        One for one would leave as many, and none would be stored at once again.
        """
        key = find_replaceable(batch)
        if key is None:
            self._sequence += 1
            key = self._sequence
        elif key in self._exports and not says_all(batch.export, self._exports[key][0]):
            self._apply(key)
        self._exports[key] = (batch.export, now_ns, wall_ns)
        self._is_behind |= len(self._exports) > _MAX_PENDING
        if self._is_behind:
            for _ in range(min(2, len(self._exports))):
                self.apply_oldest()
            self._is_behind = bool(self._exports)

    def apply_oldest(self) -> None:
        """Walk the one that waits longest."""
        self._apply(next(iter(self._exports)))

    def _apply(self, key: object) -> None:
        self._intake.apply(*self._exports.pop(key))


class PrometheusExporter:
    """One scrape endpoint. ``consume`` may run on any thread, the rest on the event loop."""

    def __init__(self, component: ComponentId, config: PrometheusConfig) -> None:
        self._id = component
        self._config = config
        fixed = SENDER_LABELS | config.const_labels.keys()
        self._store = SeriesStore(config.max_series, fixed)
        self._intake = SeriesIntake(self._store, config)
        self._pending = _WaitingExports(self._intake)
        self._lock = threading.Lock()
        self._scrapes = _Scrapes()
        self._server: AsgiServer | None = None
        self._clock: Clock | None = None
        self._counted: dict[str, int] = {}
        self._counters: dict[str, Callable[[float], None]] = {}

    async def start(self, host: Host) -> None:
        """Listen and start the drain timer."""
        self._clock = host.clock
        label = str(self._id)
        for name, metric in _COUNTED.items():
            self._counters[name] = host.meter.counter(metric).bound(exporter=label)
        self._counters["scrapes"] = host.meter.counter(SCRAPES).bound(exporter=label)
        host.meter.gauge(SERIES).watch(lambda: self._store.n_series, exporter=label)
        host.every(_DRAIN_INTERVAL_NS, self._drain_slice)
        endpoint = self._config.endpoint
        context = open_renewing_context(self._config.tls, host, f"exporters.{label}", endpoint)
        self._server = AsgiServer(self._app, endpoint, tls=context)
        await self._server.start()
        host.announce(self._server.bound)
        host.offer(ScrapeView, self)

    async def stop(self) -> None:
        """Close the endpoint."""
        if self._server is not None:
            await self._server.stop()

    def read_state(self) -> ScrapeState:
        """Who came when, for pages about the service."""
        assert self._clock is not None
        return self._scrapes.read_state(str(self._id), self._store.n_series, self._clock.mono_ns())

    def consume(self, batch: Batch) -> None:
        """Store an export that repeats, while nothing waits; keep others, and walk the oldest when too many wait."""
        clock = self._clock
        assert clock is not None
        export = batch.export
        with self._lock:
            arrival = (clock.mono_ns(), batch.received_wall_ns)
            is_small = len(export.metrics) <= _MAX_SENDERS_AT_ONCE
            if self._pending or not is_small or not self._intake.repeat(export, *arrival):
                self._pending.add(batch, *arrival)

    def _drain_slice(self, slice_ns: int = _DRAIN_SLICE_NS) -> None:
        """Walk what waits, for one slice of time."""
        assert self._clock is not None
        end_ns = self._clock.mono_ns() + slice_ns
        while self._pending:
            with self._lock:
                if self._pending:
                    self._pending.apply_oldest()
            if self._clock.mono_ns() >= end_ns:
                break
        self._count()

    def _count(self) -> None:
        store, intake = self._store, self._intake
        for name, total in (
            ("refused", store.n_refused),
            ("conflicts", store.n_conflicts),
            ("unsupported", intake.n_unsupported),
            ("oversized", intake.n_oversized),
        ):
            fresh = total - self._counted.get(name, 0)
            if fresh:
                self._counted[name] = total
                self._counters[name](fresh)

    async def _app(
        self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        del receive
        assert scope["type"] == "http"
        if scope["path"] != "/metrics":
            await send_text(send, 404, "the metrics are at /metrics\n")
            return
        if scope["method"] not in {"GET", "HEAD"}:
            await send_text(send, 405, "GET only\n")
            return
        assert self._clock is not None
        accept = _header(scope, b"accept")
        shown = choose_format(accept, has_open_metrics=self._config.enable_open_metrics)
        is_gzip = "gzip" in _header(scope, b"accept-encoding")
        chunks = await self._render(shown, is_gzip=is_gzip)
        self._counters["scrapes"](1)
        self._scrapes.note(self._clock.mono_ns())
        headers = [
            (b"content-type", shown.encode()),
            (b"content-length", str(sum(map(len, chunks))).encode()),
            (b"x-content-type-options", b"nosniff"),
        ]
        if is_gzip:
            headers.append((b"content-encoding", b"gzip"))
        await send({
            "type": "http.response.start",
            "status": 200,
            "headers": headers,
            "trailers": False,
        })
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _render(self, shown: ExpositionFormat, *, is_gzip: bool) -> list[bytes]:
        """All of it, compressed or not, made in slices; one scrape at a time."""
        assert self._clock is not None
        async with self._scrapes.lock:
            while self._pending:
                self._drain_slice(_SCRAPE_SLICE_NS)
                await asyncio.sleep(0)
            with self._lock:
                self._store.expire(self._clock.mono_ns() - self._config.metric_expiration)
            packer = zlib.compressobj(1, zlib.DEFLATED, 31) if is_gzip else None
            chunks: list[bytes] = []
            slices = self._iter_slices(shown)
            for chunk in slices:
                chunks.append(packer.compress(chunk) if packer else chunk)
                await asyncio.sleep(0)
            if packer:
                chunks.append(packer.flush())
        return [chunk for chunk in chunks if chunk]

    def _iter_slices(self, shown: ExpositionFormat) -> Iterator[bytes]:
        """The body, a slice of time at a time."""
        with_timestamps = self._config.send_timestamps
        if shown is ExpositionFormat.PROTOBUF:
            parts = iter_protobuf(self._store, with_timestamps=with_timestamps)
            while taken := self._take_slice(parts):
                yield b"".join(taken)
        else:
            is_open = shown is ExpositionFormat.OPEN_METRICS
            lines = iter_exposition(self._store, ExpositionSettings(is_open, with_timestamps))
            while written := self._take_slice(lines):
                yield "".join(written).encode("utf-8", "replace")

    def _take_slice(self, parts: Iterator[PartT]) -> list[PartT]:
        """Parts for one slice of time; empty at the end."""
        assert self._clock is not None
        end_ns = self._clock.mono_ns() + _SCRAPE_SLICE_NS
        taken: list[PartT] = []
        with self._lock:
            for part in parts:
                taken.append(part)
                if len(taken) % _PARTS_PER_CHECK == 0 and self._clock.mono_ns() >= end_ns:
                    break
        return taken


def find_replaceable(batch: Batch) -> object:
    """What a later push of the same agent replaces without loss; None when every point must be seen."""
    push = batch.push
    if not push.node_id:
        return None
    entries = batch.export.metrics
    if len(entries) != 1:
        return None
    metrics = entries[0][1]
    if not metrics or metrics[0][0] is not metrics[-1][0]:  # none, or of several scopes
        return None
    first = metrics[0][2]
    return (push.cluster_id, push.node_id, first, len(metrics)) if first in _REPLACEABLE else None


def says_all(newer: Export, older: Export) -> bool:
    """Whether every series of an older push is in a newer one of the same key, and none of them adds up over pushes.

    A series is its resource, metric and attributes: two cohorts, or two agents, of one node push the same names.
    """
    (sender, known), (other, waiting) = newer.metrics[0], older.metrics[0]
    one, two = sender.resource, other.resource
    if (one is None) != (two is None) or (one is not None and one.attributes != two.attributes):
        return False
    # Lists are compared as a whole: a call for each of them would take a tenth of the time of a push.
    for (_, _, again, same, now), (_, metric, name, kind, then) in zip(known, waiting, strict=True):
        if name != again or kind != same or len(now) != len(then):
            return False
        if kind in _ADDING and getattr(metric, kind).aggregation_temporality == DELTA:
            return False
        if len(then) == 1:
            if now[0].attributes != then[0].attributes:
                return False
        elif [point.attributes for point in now] != [point.attributes for point in then]:
            return False
    return True


def _header(scope: HTTPScope, name: bytes) -> str:
    return b",".join(value for key, value in scope["headers"] if key == name).decode("latin-1")


_COUNTED: Final = {
    "refused": REFUSED,
    "conflicts": CONFLICTS,
    "unsupported": UNSUPPORTED,
    "oversized": OVERSIZED,
}

FACTORY = ExporterFactory(
    type="prometheus",
    config=PrometheusConfig,
    description="Shows the latest point of every series to a Prometheus scraper.",
    signals=METRICS_ONLY,
    stability=Stability.BETA,
    metrics=(SERIES, SCRAPES, REFUSED, CONFLICTS, UNSUPPORTED, OVERSIZED, HANDSHAKES_REFUSED),
    create=PrometheusExporter,
    example={"endpoint": "127.0.0.1:9090"},
)
