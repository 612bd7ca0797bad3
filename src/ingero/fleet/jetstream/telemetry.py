"""What Fleet counts of the stream."""

from __future__ import annotations

from typing import Final

from ingero.telemetry.declare import counter, gauge

STORED: Final = counter(
    "ingero_fleet_stream_pushes_total",
    "Pushes for the stream: stored, or refused, in which case their sender sends them again.",
    "outcome",
)
JUDGED: Final = counter(
    "ingero_fleet_stream_judged_total",
    "Pushes that this Fleet took from the stream: replayed at a take-over or by a standby, live, or refused.",
    "outcome",
)
TAKEOVERS: Final = counter(
    "ingero_fleet_stream_takeovers_total", "Clusters of which this Fleet became the judge."
)
LEASES_LOST: Final = counter(
    "ingero_fleet_stream_leases_lost_total",
    "Clusters that this Fleet ceased to judge because it could not renew its lease.",
)
CLUSTERS: Final = gauge("ingero_fleet_stream_clusters", "Clusters that this Fleet judges.")
FOLLOWED: Final = gauge(
    "ingero_fleet_stream_followed_clusters",
    "Clusters that another Fleet judges and that this one follows, to take over within seconds.",
)
TAKEOVER_SECONDS: Final = gauge(
    "ingero_fleet_stream_takeover_seconds",
    "How long the latest take-over read the stream until it knew what its predecessor knew.",
)
STREAM_METRICS: Final = (
    STORED,
    JUDGED,
    TAKEOVERS,
    LEASES_LOST,
    CLUSTERS,
    FOLLOWED,
    TAKEOVER_SECONDS,
)
