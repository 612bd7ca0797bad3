"""When the thresholds of a cluster are computed again, and what turned with them.

In the push itself while a cluster is small, so that the answer knows the push; above `SMALL_CLUSTER` nodes, or when
that would take more than a tenth of the time, on the timer, which runs every ``recompute_min_interval``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from typing import Final

from ingero.fleet.processors.peer_threshold.cluster import ClusterState
from ingero.fleet.processors.peer_threshold.config import IngeroConfig
from ingero.fleet.processors.peer_threshold.notifications import (
    Arrival,
    ClusterEvent,
    EventKind,
    NotificationQueue,
)
from ingero.telemetry.clock import Clock
from ingero.telemetry.limited import FieldValue
from ingero.units import NS_PER_MS

SMALL_CLUSTER: Final = 256
"""Nodes up to which a push computes the thresholds itself: about 60 µs."""
_TIMER_BUDGET_NS: Final = 5 * NS_PER_MS
_PUSH_SHARE: Final = 0.1
"""Share of the time that computing inside pushes may take in the long run."""
_PUSH_BURST_NS: Final = 200 * NS_PER_MS
_MAX_CHARGED_NS: Final = 2 * NS_PER_MS
"""A computation that took longer was interrupted; it counts as no more than this."""


class ThresholdUpdates:
    """Computes thresholds. The registry's lock is held during each computation."""

    def __init__(
        self, config: IngeroConfig, clock: Clock, notifications: NotificationQueue
    ) -> None:
        self.config = config
        self._clock = clock
        self._notifications = notifications
        self._spent_at_ns = clock.mono_ns()
        self._spent_ns = 0

    def update_in_push(self, cluster: ClusterState, arrival: Arrival) -> None:
        """Compute at once if it is cheap enough: a leaky bucket of time spent. The caller holds the lock."""
        now_ns = arrival.mono_ns
        if cluster.scores.n_nodes > SMALL_CLUSTER:
            if now_ns - cluster.computed_ns >= self.config.recompute_min_interval:
                self.update(cluster, arrival)
            return
        drained = int((now_ns - self._spent_at_ns) * _PUSH_SHARE)
        self._spent_ns, self._spent_at_ns = max(0, self._spent_ns - drained), now_ns
        if self._spent_ns < _PUSH_BURST_NS:
            self.update(cluster, arrival)
            took_ns = self._clock.mono_ns() - now_ns
            self._spent_ns += min(max(0, took_ns), _MAX_CHARGED_NS)

    def update_due(
        self, clusters: Iterable[ClusterState], arrival: Arrival, lock: threading.RLock
    ) -> None:
        """Compute what is due, the oldest first, taking the lock for each cluster.

        Stops after `_TIMER_BUDGET_NS`, so that pushes wait no longer than that; the rest is first in the next call.
        """
        oldest_ns = arrival.mono_ns - self.config.push_interval
        due = [
            one
            for one in clusters
            if one.is_dirty or one.is_waiting or one.computed_ns <= oldest_ns
        ]
        for cluster in sorted(due, key=lambda one: one.computed_ns):
            with lock:
                self.update(cluster, arrival)
            if self._clock.mono_ns() - arrival.mono_ns > _TIMER_BUDGET_NS:
                break

    def update(self, cluster: ClusterState, arrival: Arrival) -> None:
        """Compute a cluster's thresholds, and note what turned. The caller holds the lock."""
        had_quorum, was_panic = cluster.has_quorum, cluster.state.in_panic
        cluster.recompute(arrival.mono_ns)
        levels, in_panic = cluster.state.levels, cluster.state.in_panic
        cluster_id, wall_ns = cluster.cluster_id, arrival.wall_ns
        values: dict[str, FieldValue] = {
            "active_nodes": int(levels.n_active[0]),
            "known_nodes": cluster.scores.n_nodes,
        }
        if cluster.has_quorum != had_quorum:
            event = ClusterEvent(
                EventKind.QUORUM, cluster_id, wall_ns, is_on=cluster.has_quorum, values=values
            )
            self._notifications.note_event(event)
        if in_panic != was_panic:
            began_ns = cluster.panic_wall_ns
            cluster.panic_wall_ns = wall_ns if in_panic else None
            values = values | {
                "under_threshold": int(levels.n_under[0]),
                "threshold": _finite(levels.thresholds[0]),
                "median": _finite(levels.median[0]),
            }
            event = ClusterEvent(
                EventKind.PANIC, cluster_id, wall_ns, began_ns, is_on=in_panic, values=values
            )
            self._notifications.note_event(event)


def _finite(value: float) -> float | None:
    return round(float(value), 6) if math.isfinite(value) else None
