"""What the agent knows of its node and of its way to Fleet, as series of its own page.

Fleet exports what is pushed (`ingero.node.health_score` and others); this is for a scraper of the agent itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from ingero.agent.health.collective_counts import CollectiveCounts
from ingero.agent.health.loop import HealthSample
from ingero.agent.health.service import HealthAgent
from ingero.agent.metrics.collectives import iter_collective_series
from ingero.agent.metrics.series import Kind, Series
from ingero.wire.names import Attribute, DetectionMode


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
