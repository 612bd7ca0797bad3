"""What became of a node's collectives, as series of the agent's own page."""

from __future__ import annotations

from collections.abc import Iterator

from ingero.agent.health.account import CollectiveAccount
from ingero.agent.metrics.series import Kind, Series


def iter_collective_series(account: CollectiveAccount) -> Iterator[Series]:
    """Sums since the start by outcome, and what waits for Fleet."""
    for name, says, points in (
        (
            "ingero.agent.collectives",
            "Collectives by what became of them; unknown_communicator and dropped are not told to Fleet.",
            {
                "taken": account.taken,
                "dropped": account.dropped,
                "unknown_communicator": account.unknown_communicator,
            },
        ),
        (
            "ingero.agent.plugin_collectives",
            "Collectives of the plug-in for NCCL; what is lost or refused keeps the probes' clock.",
            {
                "told": account.plugin_told,
                "lost": account.plugin_lost,
                "refused": account.plugin_refused,
            },
        ),
        (
            "ingero.agent.collective_pushes",
            "Requests with collectives that Fleet took or did not take.",
            {"taken": account.requests_taken, "failed": account.requests_failed},
        ),
    ):
        numbers = tuple(((("outcome", key),), float(value)) for key, value in points.items())
        yield Series(name, Kind.SUM, "1", says, numbers, f"{name.replace('.', '_')}_total")
    yield Series(
        "ingero.agent.collectives_without_end", Kind.SUM, "1",
        "Collectives whose end nobody waited for: Fleet compares no times of them.",
        (((), float(account.without_end)),), "ingero_agent_collectives_without_end_total",
    )  # fmt: skip
    yield Series(
        "ingero.agent.collectives_waiting", Kind.GAUGE, "1",
        "Collectives that are kept until Fleet takes them.", (((), float(account.waiting)),),
    )  # fmt: skip
