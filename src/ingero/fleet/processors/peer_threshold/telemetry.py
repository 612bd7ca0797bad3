"""Every instrument of the ``ingero`` processor, declared once, and the counters of its registry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ingero.fleet.processors.peer_threshold.episodes import Outcome
from ingero.telemetry.declare import MetricDeclaration, counter, gauge
from ingero.telemetry.metrics import MeterRegistry
from ingero.wire.names import FleetMetric

COHORT_LABELS: Final = ("cluster_id", "cgroup_path_hash", "workload_type")
"""Labels of each series about a cohort that has a quorum of its own."""

CLUSTER_METRICS: Final = (
    gauge(
        FleetMetric.THRESHOLD,
        "Score below which a node of the cluster is a straggler.",
        "cluster_id",
    ),
    gauge(FleetMetric.ACTIVE_NODES, "Nodes that vote.", "cluster_id"),
    gauge(
        FleetMetric.IDLE_NODES, "Nodes that report no GPU work; known, not voting.", "cluster_id"
    ),
    gauge(
        "ingero_fleet_calibrating_nodes",
        "Nodes still learning their own baseline; known, not voting.",
        "cluster_id",
    ),
    gauge(
        "ingero_fleet_other_nodes",
        "Nodes in a state that is none of active, calibrating and idle; known, not voting.",
        "cluster_id",
    ),
    gauge(FleetMetric.MEDIAN, "Median score of the active nodes.", "cluster_id"),
    gauge(FleetMetric.MAD, "Median absolute deviation of the active nodes' scores.", "cluster_id"),
    gauge(
        FleetMetric.STRAGGLER_COUNT, "Active nodes under their threshold; 0 in panic.", "cluster_id"
    ),
    gauge(
        FleetMetric.COVERAGE_LOW,
        "1 when fewer nodes report than quorum.coverage_fraction of the expected ones.",
        "cluster_id",
    ),
    gauge(
        FleetMetric.PANIC_MODE,
        "1 while more than half of the active nodes are under the settled threshold: it is held, and no node"
        " is answered with it.",
        "cluster_id",
    ),
    gauge(
        "ingero_fleet_quorum_met", "1 when quorum.statistical_min nodes are active.", "cluster_id"
    ),
)
"""One series per cluster each, so that they can be summed."""
COHORT_METRICS: Final = (
    gauge(
        "ingero_fleet_cohort_threshold",
        "Score below which a node of the cohort is a straggler.",
        *COHORT_LABELS,
    ),
    gauge("ingero_fleet_cohort_active_nodes", "Nodes of the cohort that vote.", *COHORT_LABELS),
    gauge(
        "ingero_fleet_cohort_median", "Median score of the cohort's active nodes.", *COHORT_LABELS
    ),
    gauge(
        "ingero_fleet_cohort_mad",
        "Median absolute deviation of the scores of the cohort's active nodes.",
        *COHORT_LABELS,
    ),
    gauge(
        "ingero_fleet_cohort_straggler_count",
        "Active nodes of the cohort under its threshold; 0 in panic.",
        *COHORT_LABELS,
    ),
)
STRAGGLER: Final = gauge(
    "ingero_fleet_straggler",
    "1 while a node is in a straggler episode; gone at its end.",
    "cluster_id",
    "node_id",
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
    "Health scores not taken: not_finite, out_of_range, no_node_id, no_cluster_id, id_too_long, node_cap, total_cap,"
    " cluster_cap.",
    "reason",
)
POINTS_REFUSED: Final = counter(
    "ingero_fleet_refused_points_total",
    "Points not passed on because a cap refused their sender; the answer says so.",
)
STRAGGLERS_UNSHOWN: Final = gauge(
    "ingero_fleet_stragglers_unshown",
    "Nodes in an episode that have no series of ingero_fleet_straggler because there are too many.",
    "cluster_id",
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

METRICS: Final[tuple[MetricDeclaration, ...]] = (
    *CLUSTER_METRICS,
    *COHORT_METRICS,
    STRAGGLER,
    STRAGGLERS_UNSHOWN,
    OPEN_EPISODES,
    EPISODES,
    SCORES,
    SCORES_DROPPED,
    POINTS_REFUSED,
    EVENTS_DROPPED,
    MISMATCHES,
    KNOWN_NODES,
    KNOWN_CLUSTERS,
    REPORTS_LOST,
)


class RegistryCounters:
    """Counts what the registry takes and refuses.

    Args:
        meter: Makes the instruments.
        reasons: Why scores are refused.

    Attributes:
        refused: By reason, adds to refused scores.
        episodes: By outcome, adds to episodes that ended.
        scores: Adds to scores taken.
        lost_events: Adds to straggler events that were dropped.
        lost_notifications: Adds to reports that were lost.
        mismatches: Adds to pushes whose hint differs from the body.
    """

    def __init__(self, meter: MeterRegistry, reasons: Iterable[str]) -> None:
        dropped, episodes = meter.counter(SCORES_DROPPED), meter.counter(EPISODES)
        self.refused = {reason: dropped.bound(reason=reason) for reason in reasons}
        self.episodes = {outcome: episodes.bound(outcome=outcome.value) for outcome in Outcome}
        self.scores = meter.counter(SCORES).bound()
        self.lost_events = meter.counter(EVENTS_DROPPED).bound()
        self.lost_notifications = meter.counter(REPORTS_LOST).bound()
        self.mismatches = meter.counter(MISMATCHES).bound()
