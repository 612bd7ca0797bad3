"""What the agent knows of its node and of its way to Fleet, as series of its own page.

Fleet exports what is pushed (`ingero.node.health_score` and others); this is for a scraper of the agent itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ingero.agent.metrics.series import Kind, Series
from ingero.wire.names import Attribute, DetectionMode

if TYPE_CHECKING:
    from ingero.agent.health.collective_counts import CollectiveCounts
    from ingero.agent.health.loop import HealthSample
    from ingero.agent.health.service import HealthAgent


def iter_collective_series(collective_counts: CollectiveCounts) -> Iterator[Series]:
    """Sums since the start by outcome, and what waits for Fleet."""
    yield from _iter_outcomes(collective_counts)
    yield from _iter_spill_series(collective_counts)
    yield Series(
        "ingero.agent.collectives_without_end", Kind.SUM, "1",
        "Collectives whose end nobody waited for: Fleet compares no times of them.",
        (((), float(collective_counts.without_end)),), "ingero_agent_collectives_without_end_total",
    )  # fmt: skip
    yield Series(
        "ingero.agent.plugin_communicators_unplaced", Kind.SUM, "1",
        "Communicators that found the table of the plug-in for NCCL full: a hang on them is not seen.",
        (((), float(collective_counts.plugin_unplaced)),), "ingero_agent_plugin_communicators_unplaced_total",
    )  # fmt: skip
    yield Series(
        "ingero.agent.push_faults", Kind.SUM, "1",
        "Rounds of the pushing thread that a fault of the agent ended; the next one runs.",
        (((), float(collective_counts.push_faults)),), "ingero_agent_push_faults_total",
    )  # fmt: skip
    yield Series(
        "ingero.agent.collectives_waiting", Kind.GAUGE, "1",
        "Collectives that are kept in memory until Fleet takes them.", (((), float(collective_counts.waiting)),),
    )  # fmt: skip


def _iter_outcomes(collective_counts: CollectiveCounts) -> Iterator[Series]:
    """What became of collectives, of their pushes and of questions."""
    for name, description, points in (
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
            "Questions of Fleet why a rank is slow; sent answers include those that decline. Faulted: ended by a bug.",
            {
                "asked": collective_counts.diagnoses_asked,
                "sent": collective_counts.diagnoses_sent,
                "declined": collective_counts.diagnoses_declined,
                "failed": collective_counts.diagnoses_failed,
                "faulted": collective_counts.diagnoses_faulted,
            },
        ),
    ):
        yield _build_outcomes(name, description, points)


def _iter_spill_series(collective_counts: CollectiveCounts) -> Iterator[Series]:
    """What waits on disk while Fleet is away, and what became of it."""
    yield _build_outcomes(
        "ingero.agent.spill_faults",
        "Batches that waited on disk: damaged ones are not sent; failed ones the disk did not take, read or remove.",
        {"damaged": collective_counts.spill_damaged, "failed": collective_counts.spill_failed},
    )
    yield Series(
        "ingero.agent.collectives_late", Kind.SUM, "1",
        "Collectives that Fleet took from disk, after it had been away.",
        (((), float(collective_counts.taken_late)),), "ingero_agent_collectives_late_total",
    )  # fmt: skip
    yield Series(
        "ingero.agent.spill_size", Kind.GAUGE, "By",
        "What collectives that wait for Fleet take of the disk.",
        (((), float(collective_counts.spill_bytes)),),
    )  # fmt: skip


def _build_outcomes(name: str, description: str, points: Mapping[str, int]) -> Series:
    """Sums by outcome."""
    numbers = tuple(((("outcome", key),), float(value)) for key, value in points.items())
    return Series(name, Kind.SUM, "1", description, numbers, f"{name.replace('.', '_')}_total")


class HealthSeries:
    """The last sample of a health loop as series; nothing before the first."""

    def __init__(self) -> None:
        self._last: tuple[HealthSample, bool, CollectiveCounts | None] | None = None

    def note(
        self,
        agent: HealthAgent,
        sample: HealthSample,
        collective_counts: CollectiveCounts | None = None,
    ) -> None:
        """Keep a sample, and the counts of collectives where they are pushed; called in the health loop's thread."""
        self._last = sample, agent.cache.is_reachable, collective_counts

    def iter_series(self) -> Iterator[Series]:
        """Score, mode, path to Fleet and collectives; what is not known is absent."""
        if self._last is None:
            return
        sample, is_reachable, collective_counts = self._last
        if sample.score is not None:
            yield Series(
                "ingero.agent.health_score", Kind.GAUGE, "1", "This node's health score.",
                (((), sample.score),),
            )  # fmt: skip
        yield Series(
            "ingero.agent.detection_mode", Kind.GAUGE, "1", "What the node is judged by: 1 for one of them.",
            tuple(
                (((Attribute.DETECTION_MODE.value, mode.value),), float(mode is sample.applied.mode))
                for mode in DetectionMode
            ),
        )  # fmt: skip
        yield Series(
            "ingero.agent.fleet_reachable", Kind.GAUGE, "1",
            "1 unless the last three pushes failed.", (((), float(is_reachable)),),
        )  # fmt: skip
        if collective_counts is not None:
            yield from iter_collective_series(collective_counts)
