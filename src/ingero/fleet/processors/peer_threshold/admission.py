"""Which scores are taken: names that can be kept, numbers that are scores, and room under the caps."""

from __future__ import annotations

import math
from typing import Final

from ingero.fleet.helpers.caps import CapWatch
from ingero.fleet.processors.peer_threshold.cluster import ClusterState
from ingero.fleet.processors.peer_threshold.config import IngeroConfig
from ingero.fleet.processors.peer_threshold.notifications import (
    Arrival,
    ClusterEvent,
    EventKind,
    NotificationQueue,
)
from ingero.wire.names import MAX_ID_LENGTH
from ingero.wire.push import PushFacts

REFUSALS: Final = {
    "not_finite": "the health score is not a finite number",
    "out_of_range": "the health score is not within 0 and 1",
    "no_node_id": "the resource has no ingero.node.id",
    "no_cluster_id": "neither the resource nor the request names a cluster",
    "id_too_long": f"a name is longer than {MAX_ID_LENGTH} characters",
    "node_cap": "no more nodes of this cluster are taken (max_expected_nodes)",
    "total_cap": "no more nodes are taken (max_total_nodes)",
    "cluster_cap": "no more clusters are taken (max_clusters)",
}
"""Why a score is not taken: the counter's label, and the reason in the answer to its sender."""
CAPS: Final = frozenset({"node_cap", "total_cap", "cluster_cap"})
"""Reasons for which nothing else of the sender is taken either."""


def check_report(facts: PushFacts, cluster_id: str, score: float) -> str:
    """Why a score cannot be taken, whatever room there is; empty when it can."""
    node_id = facts.resource.node_id
    if not node_id:
        return "no_node_id"
    if not cluster_id:
        return "no_cluster_id"
    longest = max(len(node_id), len(cluster_id), len(facts.cohort), len(facts.workload_type))
    if longest > MAX_ID_LENGTH:
        return "id_too_long"
    if 0.0 <= score <= 1.0:
        return ""
    return "out_of_range" if math.isfinite(score) else "not_finite"


class CapCheck:
    """The caps on nodes and clusters; a cap that begins or ceases to refuse is an event. The owner locks."""

    def __init__(self, config: IngeroConfig, notifications: NotificationQueue) -> None:
        self._notifications = notifications
        self._watch: CapWatch[tuple[EventKind, str]] = CapWatch(2 * config.push_interval)
        self.config = config

    def check(
        self, cluster: ClusterState | None, n_clusters: int, n_nodes: int, arrival: Arrival
    ) -> str:
        """Which cap a new node would exceed; empty when there is room.

        Args:
            cluster: The node's; None for a new one.
            n_clusters: Clusters that are known.
            n_nodes: Nodes that are known, of all clusters.
            arrival: When the node pushed.
        """
        config, where = self.config, ""
        if cluster is None and n_clusters >= config.max_clusters:
            kind, cap = EventKind.CLUSTER_CAP, config.max_clusters
        elif cluster is not None and cluster.scores.n_nodes >= config.max_expected_nodes:
            kind, cap, where = EventKind.NODE_CAP, config.max_expected_nodes, cluster.cluster_id
        elif n_nodes >= config.total_cap:
            kind, cap = EventKind.TOTAL_CAP, config.total_cap
        else:
            return ""
        if self._watch.refuse((kind, where), arrival.mono_ns):
            event = ClusterEvent(kind, where, arrival.wall_ns, is_on=True, values={"cap": cap})
            self._notifications.note_event(event)
        return kind.value

    def note_ended(self, arrival: Arrival) -> None:
        """Note the caps that refuse no longer."""
        for (kind, where), n_refused in self._watch.take_ended(arrival.mono_ns):
            event = ClusterEvent(
                kind, where, arrival.wall_ns, is_on=False, values={"refused": n_refused}
            )
            self._notifications.note_event(event)
