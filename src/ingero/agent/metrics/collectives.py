"""What became of a node's collectives, as series of the agent's own page."""

from __future__ import annotations

from collections.abc import Iterator

from ingero.agent.health.collective_counts import CollectiveCounts
from ingero.agent.metrics.series import Kind, Series


def iter_collective_series(collective_counts: CollectiveCounts) -> Iterator[Series]:
    """Sums since the start by outcome, and what waits for Fleet."""
    for name, says, points in (
        (
            "ingero.agent.collectives",
            "Collectives by what became of them; unknown_communicator and dropped are not sent to Fleet.",
            {
                "taken": collective_counts.taken,
                "dropped": collective_counts.dropped,
                "unknown_communicator": collective_counts.unknown_communicator,
            },
        ),
        (
            "ingero.agent.plugin_collectives",
            "Collectives of the plug-in for NCCL; what is lost or refused keeps the probes' clock.",
            {
                "told": collective_counts.plugin_told,
                "lost": collective_counts.plugin_lost,
                "refused": collective_counts.plugin_refused,
            },
        ),
        (
            "ingero.agent.collective_pushes",
            "Requests with collectives that Fleet took or did not take.",
            {
                "taken": collective_counts.requests_taken,
                "failed": collective_counts.requests_failed,
            },
        ),
        (
            "ingero.agent.diagnoses",
            "Questions of Fleet why a rank is slow; sent answers include those that decline.",
            {
                "asked": collective_counts.diagnoses_asked,
                "sent": collective_counts.diagnoses_sent,
                "declined": collective_counts.diagnoses_declined,
                "failed": collective_counts.diagnoses_failed,
            },
        ),
    ):
        numbers = tuple(((("outcome", key),), float(value)) for key, value in points.items())
        yield Series(name, Kind.SUM, "1", says, numbers, f"{name.replace('.', '_')}_total")
    yield Series(
        "ingero.agent.collectives_without_end", Kind.SUM, "1",
        "Collectives whose end nobody waited for: Fleet compares no times of them.",
        (((), float(collective_counts.without_end)),), "ingero_agent_collectives_without_end_total",
    )  # fmt: skip
    yield Series(
        "ingero.agent.collectives_waiting", Kind.GAUGE, "1",
        "Collectives that are kept until Fleet takes them.", (((), float(collective_counts.waiting)),),
    )  # fmt: skip
