"""What the board knows, as numbers: on our own telemetry, and as an export for the pipeline.

Series of one cluster or cohort are ten gauges (`telemetry.SCOPE_METRICS`). The cluster's own carry empty cohort
labels; a cohort has series while it has a quorum of its own, so that hashes that are unique per pod make none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np

from ingero.fleet.component import Gauge, Meter
from ingero.fleet.processors.ingero import telemetry
from ingero.fleet.processors.ingero.book import ClusterBook
from ingero.fleet.processors.ingero.scores import Cohort, NodeState
from ingero.wire.names import Attribute, Signal
from ingero.wire.otlp import structs
from ingero.wire.otlp.build import build_attributes, build_gauge, build_number
from ingero.wire.otlp.export import Export

ScopeKey: TypeAlias = tuple[str, str, str]
"""Values of `telemetry.SCOPE_LABELS`."""

_SCOPE: Final = "ingero.fleet"
_CLUSTER: Final = Cohort("", "")


def iter_scopes(book: ClusterBook) -> Iterator[tuple[Cohort, list[float]]]:
    """The cluster, then each cohort with a quorum: values in the order of `telemetry.SCOPE_METRICS`, NaN where unknown.

    The caller holds the board's lock.
    """
    scores, state = book.scores, book.state
    levels = state.levels
    n_cohorts = len(state.cohorts)
    n_straggling = np.zeros(1 + n_cohorts, np.int64)
    if state.is_straggler.size and state.is_straggler.any():
        rows = book.active_rows[state.is_straggler]
        rows = rows[rows < scores.n_nodes]
        n_straggling[0] = rows.size
        n_straggling[1:] = np.bincount(scores.cohort_idx[rows], minlength=n_cohorts)[:n_cohorts]
    idle = scores.cohort_idx[scores.states == NodeState.IDLE]
    calibrating = scores.cohort_idx[scores.states == NodeState.CALIBRATING]
    for row in (0, *(1 + np.flatnonzero(levels.quorum_met[1:]))):
        cohort = scores.cohorts[row - 1] if row else _CLUSTER
        yield (
            cohort,
            [
                float(levels.thresholds[row]),
                float(levels.n_active[row]),
                float(idle.size if row == 0 else np.count_nonzero(idle == row - 1)),
                float(calibrating.size if row == 0 else np.count_nonzero(calibrating == row - 1)),
                float(levels.median[row]),
                float(levels.mad[row]),
                float(n_straggling[row]),
                float(state.coverage_low),
                float(state.in_panic),
                float(levels.quorum_met[row]),
            ],
        )


class OwnTelemetry:
    """Keeps the service's own gauges equal to the books, and forgets series whose scope is gone."""

    def __init__(self, meter: Meter) -> None:
        self._gauges: list[Gauge] = [meter.gauge(metric) for metric in telemetry.SCOPE_METRICS]
        self._open_episodes = meter.gauge(telemetry.OPEN_EPISODES)
        self._known_nodes = meter.gauge(telemetry.KNOWN_NODES)
        self._known_clusters = meter.gauge(telemetry.KNOWN_CLUSTERS)
        self._shown: dict[str, dict[ScopeKey, list[float]]] = {}

    def show_totals(self, n_nodes: int, n_clusters: int) -> None:
        """The size of the score map."""
        self._known_nodes.set(n_nodes)
        self._known_clusters.set(n_clusters)

    def show(self, book: ClusterBook) -> None:
        """Set the series of one cluster."""
        cluster_id = book.cluster_id
        before = self._shown.get(cluster_id, {})
        now = {
            (cluster_id, cohort.cgroup_path_hash, cohort.workload_type): values
            for cohort, values in iter_scopes(book)
        }
        for key, values in now.items():
            self._set(key, values, before.get(key))
        for key in before.keys() - now.keys():
            self._remove(key)
        self._shown[cluster_id] = now
        self._open_episodes.set(book.episodes.n_open, cluster_id=cluster_id)

    def forget_all_but(self, cluster_ids: Sequence[str]) -> None:
        """Remove the series of clusters that are no longer known."""
        for cluster_id in self._shown.keys() - set(cluster_ids):
            for key in self._shown.pop(cluster_id):
                self._remove(key)
            self._open_episodes.remove(cluster_id=cluster_id)

    def _set(self, key: ScopeKey, values: list[float], before: list[float] | None) -> None:
        labels = dict(zip(telemetry.SCOPE_LABELS, key, strict=True))
        for index, gauge in enumerate(self._gauges):
            value = values[index]
            if value != value:  # noqa: PLR0124 - only NaN differs from itself; absent is not zero
                gauge.remove(**labels)
            elif before is None or before[index] != value:
                gauge.set(value, **labels)

    def _remove(self, key: ScopeKey) -> None:
        labels = dict(zip(telemetry.SCOPE_LABELS, key, strict=True))
        for gauge in self._gauges:
            gauge.remove(**labels)


def build_export(books: Sequence[ClusterBook], wall_ns: int) -> Export:
    """The same series as a metrics export, one resource per cluster, for whatever comes after the processor."""
    entries = []
    for book in books:
        points: list[list[structs.NumberDataPoint]] = [[] for _ in telemetry.SCOPE_METRICS]
        for cohort, values in iter_scopes(book):
            labels = build_attributes(
                dict(zip(telemetry.SCOPE_LABELS, (book.cluster_id, *cohort), strict=True))
            )
            for index, value in enumerate(values):
                if value == value:  # noqa: PLR0124 - only NaN differs from itself
                    point = build_number(value, wall_ns)
                    point.attributes = labels
                    points[index].append(point)
        metrics = [
            build_gauge(metric.name, found, unit="", description=metric.description)
            for metric, found in zip(telemetry.SCOPE_METRICS, points, strict=True)
            if found
        ]
        resource: dict[str, str] = {
            Attribute.SERVICE_NAME: "ingero-fleet",
            Attribute.CLUSTER_ID: book.cluster_id,
        }
        entries.append(
            structs.ResourceMetrics(
                resource=structs.Resource(build_attributes(resource)),
                scope_metrics=[
                    structs.ScopeMetrics(
                        scope=structs.InstrumentationScope(_SCOPE, ""), metrics=metrics
                    )
                ],
            )
        )
    return Export.from_tree(Signal.METRICS, structs.MetricsRequest(entries))
