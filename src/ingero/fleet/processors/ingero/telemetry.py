"""Every instrument of the ``ingero`` processor, declared once."""

from __future__ import annotations

from typing import Final

from ingero.telemetry.declare import Metric, counter, gauge
from ingero.wire.names import FleetMetric

SCOPE_LABELS: Final = ("cluster_id", "cgroup_path_hash", "workload_type")
"""Labels of each series about a cluster (the last two empty) or a cohort that has a quorum of its own."""

THRESHOLD: Final = gauge(
    FleetMetric.THRESHOLD, "Score below which a node is a straggler.", *SCOPE_LABELS
)
ACTIVE_NODES: Final = gauge(FleetMetric.ACTIVE_NODES, "Nodes that vote.", *SCOPE_LABELS)
IDLE_NODES: Final = gauge(
    FleetMetric.IDLE_NODES, "Nodes that report no GPU work; known, not voting.", *SCOPE_LABELS
)
CALIBRATING_NODES: Final = gauge(
    "ingero_fleet_calibrating_nodes",
    "Nodes still learning their own baseline; known, not voting.",
    *SCOPE_LABELS,
)
MEDIAN: Final = gauge(FleetMetric.MEDIAN, "Median score of the active nodes.", *SCOPE_LABELS)
MAD: Final = gauge(
    FleetMetric.MAD, "Median absolute deviation of the active nodes' scores.", *SCOPE_LABELS
)
STRAGGLER_COUNT: Final = gauge(
    FleetMetric.STRAGGLER_COUNT, "Active nodes under the threshold.", *SCOPE_LABELS
)
COVERAGE_LOW: Final = gauge(
    FleetMetric.COVERAGE_LOW,
    "1 when fewer nodes report than quorum.coverage_fraction of max_expected_nodes.",
    *SCOPE_LABELS,
)
PANIC_MODE: Final = gauge(
    FleetMetric.PANIC_MODE,
    "1 while more than half of the active nodes fell at once and the settled threshold is held.",
    *SCOPE_LABELS,
)
QUORUM_MET: Final = gauge(
    "ingero_fleet_quorum_met", "1 when quorum.statistical_min nodes are active.", *SCOPE_LABELS
)
OPEN_EPISODES: Final = gauge(
    "ingero_fleet_straggler_episodes_open", "Straggler episodes not yet closed.", "cluster_id"
)
EPISODES: Final = counter(
    "ingero_fleet_straggler_episodes_total",
    "Straggler episodes by how they ended: resolved, state_change or lost.",
    "outcome",
)
SCORES: Final = counter("ingero_fleet_scores_total", "Health scores taken into the score map.")
SCORES_DROPPED: Final = counter(
    "ingero_fleet_scores_dropped_total",
    "Health scores not taken: not_finite, out_of_range, no_node_id, no_cluster_id, id_too_long, node_cap, cluster_cap.",
    "reason",
)
EVENTS_DROPPED: Final = counter(
    "ingero_fleet_straggler_events_dropped_total",
    "Straggler events of nodes that are not in the score map.",
)
MISMATCHES: Final = counter(
    "ingero_fleet_cluster_mismatch_total",
    "Pushes whose cluster hint in query or header differs from the body's; the body is believed.",
)
KNOWN_NODES: Final = gauge("ingero_fleet_known_nodes", "Rows of the score map, all clusters.")
KNOWN_CLUSTERS: Final = gauge("ingero_fleet_known_clusters", "Clusters in the score map.")

REPORTS_LOST: Final = counter(
    "ingero_fleet_reports_lost_total",
    "Reports of the ingero_fleet series that the rest of the pipeline did not take.",
)

SCOPE_METRICS: Final = (
    THRESHOLD,
    ACTIVE_NODES,
    IDLE_NODES,
    CALIBRATING_NODES,
    MEDIAN,
    MAD,
    STRAGGLER_COUNT,
    COVERAGE_LOW,
    PANIC_MODE,
    QUORUM_MET,
)
METRICS: Final[tuple[Metric, ...]] = (
    *SCOPE_METRICS,
    OPEN_EPISODES,
    EPISODES,
    SCORES,
    SCORES_DROPPED,
    EVENTS_DROPPED,
    MISMATCHES,
    KNOWN_NODES,
    KNOWN_CLUSTERS,
    REPORTS_LOST,
)
