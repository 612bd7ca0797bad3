"""What the registry knows, as numbers: on our own telemetry, and as an export for the pipeline.

A cluster has one series of each of `telemetry.CLUSTER_METRICS`, so that sums count no node twice; a cohort has series
under names of its own (`telemetry.COHORT_METRICS`) while it has a quorum of its own, so that hashes that are unique per
pod make none. Both ways carry the same series: who scrapes both ports sums by ``job``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np

from ingero.fleet.processors.peer_threshold import telemetry
from ingero.fleet.processors.peer_threshold.cluster import ClusterState
from ingero.fleet.processors.peer_threshold.scores import Cohort, ReportedState
from ingero.otlp.codec import structs
from ingero.otlp.codec.build import build_gauge, build_metrics, build_number, merge_exports
from ingero.otlp.codec.export import Export
from ingero.otlp.codec.points import NO_RECORDED_VALUE
from ingero.telemetry.declare import MetricDeclaration
from ingero.telemetry.metrics import GaugeInstrument, MeterRegistry
from ingero.wire.log_records import FLEET_SCOPE, build_fleet_resource

SeriesKey: TypeAlias = tuple[MetricDeclaration, tuple[str, ...]]
"""Instrument and label values."""
Series: TypeAlias = dict[SeriesKey, float]
"""Value of each series; what is unknown is absent."""

MAX_STRAGGLERS: Final = 1000
"""Nodes of one cluster that `telemetry.STRAGGLER` names."""


def cluster_values(cluster: ClusterState) -> dict[str, float]:
    """What `telemetry.CLUSTER_METRICS` show of one cluster, by name; NaN where unknown. The caller holds the lock."""
    levels, state, states = cluster.state.levels, cluster.state, cluster.scores.states
    counts = np.bincount(states, minlength=len(ReportedState))
    values = (
        levels.thresholds[0],
        levels.n_active[0],
        counts[ReportedState.IDLE],
        counts[ReportedState.CALIBRATING],
        counts[ReportedState.OTHER],
        levels.median[0],
        levels.mad[0],
        np.count_nonzero(state.is_straggler),
        state.coverage_low,
        state.in_panic,
        levels.quorum_met[0],
    )
    names = (metric.name for metric in telemetry.CLUSTER_METRICS)
    return {name: float(value) for name, value in zip(names, values, strict=True)}


def iter_cohorts(cluster: ClusterState) -> Iterator[tuple[Cohort, dict[str, float]]]:
    """Each cohort with a quorum, and what `telemetry.COHORT_METRICS` show of it. The caller holds the lock."""
    scores, state = cluster.scores, cluster.state
    levels = state.levels
    n_cohorts = len(state.cohorts)
    n_straggling = np.zeros(n_cohorts, np.int64)
    if state.is_straggler.any():
        rows = cluster.active_rows[state.is_straggler]
        rows = rows[rows < scores.n_nodes]
        n_straggling = np.bincount(scores.cohort_idx[rows], minlength=n_cohorts)[:n_cohorts]
    names = [metric.name for metric in telemetry.COHORT_METRICS]
    for index in np.flatnonzero(levels.quorum_met[1:]):
        if index >= len(scores.cohorts):
            return  # cohorts came and went since the thresholds were computed
        columns = (levels.thresholds, levels.n_active, levels.median, levels.mad)
        values = [float(column[1 + index]) for column in columns]
        values.append(float(n_straggling[index]))
        yield scores.cohorts[index], dict(zip(names, values, strict=True))


def build_series(cluster: ClusterState) -> Series:
    """Every series of one cluster. The caller holds the lock."""
    cluster_id = cluster.cluster_id
    found: Series = {}

    def put(
        metrics: Sequence[MetricDeclaration], values: Mapping[str, float], labels: tuple[str, ...]
    ) -> None:
        for metric in metrics:
            value = values[metric.name]
            if value == value:  # noqa: PLR0124 - only NaN differs from itself; absent is not zero
                found[metric, labels] = value

    put(telemetry.CLUSTER_METRICS, cluster_values(cluster), (cluster_id,))
    for cohort, values in iter_cohorts(cluster):
        put(telemetry.COHORT_METRICS, values, (cluster_id, *cohort))
    stragglers = cluster.episodes.list_announced()
    for node_id in stragglers[:MAX_STRAGGLERS]:
        found[telemetry.STRAGGLER, (cluster_id, node_id)] = 1.0
    if len(stragglers) > MAX_STRAGGLERS:
        found[telemetry.STRAGGLERS_UNSHOWN, (cluster_id,)] = len(stragglers) - MAX_STRAGGLERS
    return found


_SHOWN: Final = (
    *telemetry.CLUSTER_METRICS,
    *telemetry.COHORT_METRICS,
    telemetry.STRAGGLER,
    telemetry.STRAGGLERS_UNSHOWN,
)


class ClusterGauges:
    """Keeps the service's own gauges equal to the registry, and forgets series whose subject is gone."""

    def __init__(self, meter: MeterRegistry) -> None:
        self._gauges: dict[MetricDeclaration, GaugeInstrument] = {
            metric: meter.gauge(metric) for metric in _SHOWN
        }
        self._open_episodes = meter.gauge(telemetry.OPEN_EPISODES)
        self._known_nodes = meter.gauge(telemetry.KNOWN_NODES)
        self._known_clusters = meter.gauge(telemetry.KNOWN_CLUSTERS)
        self._shown: dict[str, Series] = {}

    def show_totals(self, n_nodes: int, n_clusters: int) -> None:
        """The size of the score map."""
        self._known_nodes.set(n_nodes)
        self._known_clusters.set(n_clusters)

    def show(self, cluster: ClusterState) -> None:
        """Set the series of one cluster."""
        cluster_id = cluster.cluster_id
        before, now = self._shown.get(cluster_id, {}), build_series(cluster)
        for key, value in now.items():
            if before.get(key) != value:
                metric, values = key
                self._gauges[metric].set(value, **dict(zip(metric.labels, values, strict=True)))
        self._remove(before.keys() - now.keys())
        self._shown[cluster_id] = now
        self._open_episodes.set(cluster.episodes.n_open, cluster_id=cluster_id)

    def forget_all_but(self, cluster_ids: Sequence[str]) -> None:
        """Remove the series of clusters that are no longer known."""
        for cluster_id in self._shown.keys() - set(cluster_ids):
            self._remove(self._shown.pop(cluster_id).keys())
            self._open_episodes.remove(cluster_id=cluster_id)

    def _remove(self, keys: Iterable[SeriesKey]) -> None:
        for metric, values in keys:
            self._gauges[metric].remove(**dict(zip(metric.labels, values, strict=True)))


class PipelineReport:
    """The same series for whatever comes after the processor; a series that ended is marked so once."""

    def __init__(self) -> None:
        self._sent: dict[str, Series] = {}

    def build(self, clusters: Sequence[ClusterState], wall_ns: int) -> Export | None:
        """An export with one resource per cluster; None when there is nothing to send. The caller holds the lock."""
        now = {cluster.cluster_id: build_series(cluster) for cluster in clusters}
        exports = []
        for cluster_id in {**self._sent, **now}:
            series, before = now.get(cluster_id, {}), self._sent.get(cluster_id, {})
            ended = [key for key in before if key not in series]
            if series or ended:
                exports.append(_build_export(cluster_id, series, ended, wall_ns))
        self._sent = now
        return merge_exports(exports) if exports else None


def _build_export(
    cluster_id: str, series: Series, ended: Sequence[SeriesKey], wall_ns: int
) -> Export:
    points: dict[MetricDeclaration, list[structs.NumberDataPoint]] = {}

    def put(key: SeriesKey, value: float) -> structs.NumberDataPoint:
        metric, values = key
        labels = dict(zip(metric.labels, values, strict=True))
        point = build_number(value, wall_ns, labels)
        points.setdefault(metric, []).append(point)
        return point

    for key, value in series.items():
        put(key, value)
    for key in ended:
        point = put(key, 0.0)
        point.flags, point.as_double = NO_RECORDED_VALUE, None
    metrics = [
        build_gauge(metric.name, found, unit="", description=metric.description)
        for metric, found in points.items()
    ]
    return build_metrics(build_fleet_resource(cluster_id), metrics, FLEET_SCOPE)
