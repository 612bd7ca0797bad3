"""What the alerter did, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ingero.agent.events.alert.delivery import DeliveryCounts
from ingero.agent.events.alert.episodes import Episodes
from ingero.agent.events.sink import render_family

_OUTCOMES: Final = (
    ("sent_total", "n_sent", "Alerts that the receiver took."),
    ("failed_tries_total", "n_failed", "Tries that failed and were or will be made again."),
    ("refused_total", "n_refused", "Alerts that the receiver refused permanently."),
    ("dropped_total", "n_dropped", "Alerts dropped because too many waited or the alerter ended."),
)


class AlerterPage:
    """The pages of an alerter: a `Scraped`.

    Args:
        episodes: What it reads.
        counts: What became of its alerts, by the receiver's name.
    """

    def __init__(self, episodes: Episodes, counts: Mapping[str, DeliveryCounts]) -> None:
        self._episodes = episodes
        self._counts = counts

    def render(self) -> str:
        """The metrics, text format 0.0.4."""
        episodes = self._episodes
        families: list[tuple[str, str, str, list[tuple[str, int]]]] = [
            ("connected", "gauge", "Whether an agent is connected.",
             [("", int(episodes.is_connected))]),
            ("open_episodes", "gauge", "Episodes that are not over.", [("", episodes.n_open)]),
            ("bad_lines_total", "counter", "Lines that could not be read.", [("", episodes.n_bad)]),
            ("evicted_total", "counter", "Episodes forgotten because there were too many.",
             [("", episodes.n_evicted)]),
        ]  # fmt: skip
        for name, field, description in _OUTCOMES:
            points = [
                (f'{{receiver="{receiver}"}}', int(getattr(counts, field)))
                for receiver, counts in sorted(self._counts.items())
            ]
            families.append((name, "counter", description, points))
        return "".join(
            render_family(
                f"ingero_alerter_{name}",
                kind,
                description,
                [(labels, str(n)) for labels, n in points],
            )
            for name, kind, description, points in families
        )

    def readiness(self, _window_ns: int) -> tuple[bool, str]:
        """Ready while an agent is connected."""
        is_ready = self._episodes.is_connected
        return is_ready, "ready" if is_ready else "not ready: uds_disconnected"
