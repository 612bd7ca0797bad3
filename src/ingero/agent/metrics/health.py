"""What the agent knows of its node and of its way to Fleet, as series of its own page.

Fleet exports what is pushed (`ingero.node.health_score` and others); this is for a scraper that asks the agent itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from ingero.agent.health.loop import Look
from ingero.agent.health.service import HealthAgent
from ingero.agent.metrics.series import Kind, Series
from ingero.wire.names import Attribute, DetectionMode


class HealthSeries:
    """The last look of a health loop as series; nothing before the first."""

    def __init__(self) -> None:
        self._last: tuple[Look, bool] | None = None

    def note(self, agent: HealthAgent, look: Look) -> None:
        """Keep a look; called in the health loop's thread."""
        self._last = look, agent.cache.is_reachable

    def iter_series(self) -> Iterator[Series]:
        """Score, mode and path to Fleet; a score that is not known is absent."""
        if self._last is None:
            return
        look, is_reachable = self._last
        if look.score is not None:
            yield Series(
                "ingero.agent.health_score", Kind.GAUGE, "1", "This node's health score.",
                (((), look.score),),
            )  # fmt: skip
        yield Series(
            "ingero.agent.detection_mode", Kind.GAUGE, "1", "What the node is judged by: 1 for one of them.",
            tuple(
                (((Attribute.DETECTION_MODE.value, mode.value),), float(mode is look.bar.mode))
                for mode in DetectionMode
            ),
        )  # fmt: skip
        yield Series(
            "ingero.agent.fleet_reachable", Kind.GAUGE, "1",
            "1 unless the last three pushes failed.", (((), float(is_reachable)),),
        )  # fmt: skip
