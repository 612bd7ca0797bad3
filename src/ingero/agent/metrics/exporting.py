"""A trace's series for other programs: a page that Prometheus scrapes, and OTLP pushed to a collector."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Final, Protocol, TypeAlias

from msgspec.structs import replace

from ingero.agent.capture.discover.identity import ProcessIdentity
from ingero.agent.capture.totals import Totals
from ingero.agent.health.transport import PushTransport
from ingero.agent.metrics.recent import RecentDurations
from ingero.agent.metrics.series import Distribution, Kind, Labels, Series, iter_call_series
from ingero.errors import UnsupportedError
from ingero.model.arrays import Records
from ingero.model.events import Events
from ingero.otlp.codec import (
    build_attributes,
    build_gauge,
    build_metrics,
    build_number,
    build_sum,
    merge_exports,
)
from ingero.otlp.codec.build import CUMULATIVE
from ingero.otlp.codec.export import Export
from ingero.otlp.codec.structs import Histogram, HistogramDataPoint, Metric
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S
from ingero.wire.process_resource import ProcessResource

PUSH_NS: Final = 10 * NS_PER_S
SCOPE: Final = "ingero"
_LABELS: Final = {"gpu.uuid": "gpu_uuid", "ingero.infer.outlier_bucket": "bucket"}
_MAX_RESOURCES: Final = 4096
"""Beyond it, those of processes without a count of their own are forgotten."""
Resources: TypeAlias = Mapping[int, ProcessResource]
"""Where processes run, by pid; those of which nothing is known are left out."""


class Outlet(Protocol):
    """Where series go."""

    def take(self, series: tuple[Series, ...], wall_ns: int, resources: Resources, /) -> None:
        """The series as they are now; called once a second and once at the end, in the tracing thread."""
        ...


class MetricObserver:
    """Turns a trace's totals into series for its outlets.

    Args:
        outlets: Who gets them.
        more: Series of other parts, asked for each time.
    """

    def __init__(
        self, outlets: Iterable[Outlet], more: Callable[[], Iterable[Series]] = lambda: ()
    ) -> None:
        self._outlets = tuple(outlets)
        self._more = more
        self._recent = RecentDurations()
        self._ranks: dict[int, int] = {}
        self._resources: Resources = {}

    def on_process(self, identity: ProcessIdentity) -> None:
        """Remember its rank and where it runs."""
        if identity.place.rank >= 0:
            self._ranks[identity.pid] = identity.place.rank
        else:  # of another process, which had this pid before
            self._ranks.pop(identity.pid, None)
        known = {pid: one for pid, one in self._resources.items() if pid != identity.pid}
        # A new mapping each time: outlets keep the one that they were given, for another thread.
        self._resources = known | ({identity.pid: identity.resource} if identity.resource else {})

    def on_events(self, ring: str, records: Records, events: Events) -> None:
        """Nothing: counts are exact without the events."""

    def on_totals(self, totals: Totals) -> None:
        """Hand the series to the outlets."""
        if max(len(self._resources), len(self._ranks)) > _MAX_RESOURCES:
            counted = set(totals.all_keys["pid"].tolist())
            self._ranks = {pid: rank for pid, rank in self._ranks.items() if pid in counted}
            self._resources = {pid: one for pid, one in self._resources.items() if pid in counted}
        recent = self._recent.take(totals)
        series = (*iter_call_series(totals, self._ranks), recent, *self._more())
        for outlet in self._outlets:
            outlet.take(series, totals.wall_ns, self._resources)


class PrometheusPage:
    """The last series as the text that Prometheus scrapes.

    Raises:
        UnsupportedError: ``prometheus_client`` is not installed.
    """

    def __init__(self) -> None:
        try:
            import prometheus_client  # noqa: F401, PLC0415 - an extra that only this needs
        except ImportError as error:
            raise UnsupportedError(
                "--prometheus needs the package prometheus-client",
                hint="pip install 'ingero[agent]'",
            ) from error
        self._series: tuple[Series, ...] = ()

    def take(
        self, series: tuple[Series, ...], _wall_ns: int, _resources: Resources | None = None
    ) -> None:
        """Keep them for the next scrape."""
        self._series = series

    def render(self) -> str:
        """The page, text format 0.0.4."""
        from ingero.telemetry.exposition import encode_text  # noqa: PLC0415

        return encode_text(self.collect()).decode()

    def readiness(self, _window_ns: int) -> tuple[bool, str]:
        """Ready once something was counted."""
        return bool(self._series), "ready" if self._series else "not ready: no counts yet"

    def collect(self) -> Iterator[Any]:
        """What ``prometheus_client`` asks for."""
        for series in self._series:
            if series.points:
                yield _build_family(series)


def _build_family(series: Series) -> Any:  # noqa: ANN401 - a type of an optional package
    from prometheus_client.metrics_core import (  # noqa: PLC0415
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        UnknownMetricFamily,
    )

    name = series.prometheus_name
    # One point may know more than another; an empty label is an absent one.
    names = list(dict.fromkeys(_label(key) for labels, _ in series.points for key, _ in labels))
    kinds = {
        Kind.GAUGE: GaugeMetricFamily,
        Kind.UP_DOWN: GaugeMetricFamily,
        Kind.HISTOGRAM: HistogramMetricFamily,
    }
    kind = kinds.get(series.kind, CounterMetricFamily)
    if series.kind is Kind.SUM and not name.endswith("_total"):
        kind = (
            UnknownMetricFamily  # a counter of that name would get a suffix that is not documented
        )
    family: Any = kind(name, series.description, labels=names)
    for labels, value in series.points:
        given: Mapping[str, str] = {_label(key): str(text) for key, text in labels}
        texts = [given.get(key, "") for key in names]
        if isinstance(value, Distribution):
            bounds = [*(repr(bound) for bound in value.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(value.counts), strict=True))
            family.add_metric(texts, buckets, sum_value=value.total)
        else:
            family.add_metric(texts, value)
    return family


def _label(name: str) -> str:
    """A label for Prometheus: without the dots, and without a prefix but where the existing agent has one."""
    if name.startswith(
        "hw."
    ):  # OpenTelemetry's own: its mapping to Prometheus keeps the whole name
        return name.replace(".", "_")
    return _LABELS.get(name) or name.rpartition(".")[2]


class OtlpPusher:
    """Pushes the latest series every ten seconds and once at the end.

    Sums are cumulative, so the next push repeats what a lost one held.

    Args:
        transport: How to send.
        resource: Attributes of this agent.
        clock: For ``Retry-After``.
        on_failure: Called for each failed push that follows a successful one, and of the first.
    """

    def __init__(
        self,
        transport: PushTransport,
        resource: Mapping[str, str],
        clock: Clock,
        on_failure: Callable[[str], None],
    ) -> None:
        self.n_pushed = self.n_failed = 0
        self._transport = transport
        self._resource = resource
        self._clock = clock
        self._on_failure = on_failure
        self._started_ns = clock.wall_ns()
        self._latest: tuple[tuple[Series, ...], int, Resources] | None = None
        self._is_failing = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ingero-otlp", daemon=True)
        self._thread.start()

    def take(self, series: tuple[Series, ...], wall_ns: int, resources: Resources) -> None:
        """Keep them for the next push."""
        self._latest = (series, wall_ns, resources)

    def iter_series(self) -> Iterator[Series]:
        """What became of the pushes so far."""
        counts = (("taken", self.n_pushed), ("failed", self.n_failed))
        points = tuple(((("outcome", outcome),), float(n)) for outcome, n in counts)
        description = "Pushes of these metrics to the collector of --otlp."
        name = "ingero_trace_otlp_pushes_total"
        yield Series("ingero.trace.otlp.pushes", Kind.SUM, "1", description, points, name)

    def _run(self) -> None:
        while not self._stop.wait(PUSH_NS / NS_PER_S):
            self._push()

    def _push(self) -> None:
        latest, self._latest = self._latest, None
        if latest is None:
            return
        series, wall_ns, resources = latest
        export = build_export(series, self._resource, self._started_ns, wall_ns, resources)
        answer = self._transport.send(export, self._clock.wall_ns())
        if answer.is_taken:
            self.n_pushed += 1
        else:
            self.n_failed += 1
            if not self._is_failing:
                self._on_failure(answer.detail)
        self._is_failing = not answer.is_taken

    def close(self) -> None:
        """Push what came last and stop; waits for one answer at most twice."""
        self._stop.set()
        self._thread.join()
        self._push()
        self._transport.close()


def build_export(
    series: Iterable[Series],
    resource: Mapping[str, str],
    started_ns: int,
    wall_ns: int,
    resources: Resources | None = None,
) -> Export:
    """One metrics request; sums and histograms are cumulative since ``started_ns``, or since a start of their own.

    Points of a process of which it is known where it runs have a resource of their own, that says so.
    """
    version = resource.get("service.version", "")
    exports = []
    for process, some in _split_by_process(series, resources or {}):
        metrics = [_build_metric(one, started_ns, wall_ns) for one in some]
        exports.append(build_metrics({**resource, **dict(process)}, metrics, SCOPE, version))
    return merge_exports(exports)


def _split_by_process(
    series: Iterable[Series], resources: Resources
) -> Iterator[tuple[ProcessResource, list[Series]]]:
    """Series by where their processes run: first, and always, those of the node."""
    split: dict[ProcessResource, list[Series]] = {(): []}
    for one in series:
        points: dict[ProcessResource, list[tuple[Labels, Any]]] = {}
        for labels, value in one.points:
            pid = dict(labels).get("pid")
            place = resources.get(pid, ()) if isinstance(pid, int) else ()
            points.setdefault(place, []).append((labels, value))
        for place, some in points.items():
            split.setdefault(place, []).append(dataclasses.replace(one, points=tuple(some)))
    yield from split.items()


def _build_metric(series: Series, started_ns: int, wall_ns: int) -> Metric:
    if series.kind is Kind.HISTOGRAM:
        points = [
            _build_histogram_point(
                labels, value, _find_start_ns(series, labels, started_ns, wall_ns), wall_ns
            )
            for labels, value in series.points
            if isinstance(value, Distribution)
        ]
        return Metric(
            name=series.name,
            unit=series.unit,
            description=series.description,
            histogram=Histogram(points, aggregation_temporality=CUMULATIVE),
        )
    numbers = [
        build_number(int(value) if float(value).is_integer() else value, wall_ns, dict(labels))
        for labels, value in series.points
        if not isinstance(value, Distribution)
    ]
    if series.kind is Kind.GAUGE:
        return build_gauge(series.name, numbers, series.unit, series.description)
    starts = [
        _find_start_ns(series, labels, started_ns, wall_ns)
        for labels, value in series.points
        if not isinstance(value, Distribution)
    ]
    numbers = [
        replace(point, start_time_unix_nano=start_ns)
        for point, start_ns in zip(numbers, starts, strict=True)
    ]
    metric = build_sum(series.name, numbers, series.unit, series.description)
    if series.kind is Kind.UP_DOWN and metric.sum is not None:
        metric.sum.is_monotonic = False
    return metric


def _find_start_ns(series: Series, labels: Labels, started_ns: int, wall_ns: int) -> int:
    """Since when a point counts; a thread that reads an engine meanwhile may know of a start after ``wall_ns``."""
    return min(series.starts.get(labels, started_ns), wall_ns)


def _build_histogram_point(
    labels: Labels, value: Distribution, started_ns: int, wall_ns: int
) -> HistogramDataPoint:
    return HistogramDataPoint(
        attributes=build_attributes(dict(labels)),
        start_time_unix_nano=started_ns,
        time_unix_nano=wall_ns,
        count=sum(value.counts),
        sum=value.total,
        bucket_counts=list(value.counts),
        explicit_bounds=list(value.bounds),
    )
