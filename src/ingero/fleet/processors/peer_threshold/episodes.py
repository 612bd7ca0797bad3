"""Straggler episodes: many events of one node, with a new id each, are one episode.

Agents send ``ingero.node.straggler_event`` = 1 on every tick while they are stragglers, each with a fresh
``ingero.event.id``, and a single 0 when they recover (wire facts: an event that is lost is not repeated, and an agent
that turns idle, dies or starts again sends no 0 at all). So an episode opens on the first 1 and closes for one of three
reasons; a node whose scores are good and whose agent says no 1 for a while has recovered too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple

MAX_CLOSED: Final = 256
"""Episodes of a cluster that are remembered after their end."""


class Outcome(StrEnum):
    """Why an episode is no longer open."""

    RESOLVED = "resolved"  # the agent said 0, or says 1 no more while its scores are good
    STATE_CHANGE = "state_change"  # the node turned idle or calibrating: it is no longer judged
    LOST = "lost"  # the node stopped pushing; nothing says that it recovered


@dataclass(frozen=True, slots=True)
class StragglerEvent:
    """One push of ``ingero.node.straggler_event`` = 1.

    Attributes:
        event_id: The agent's id of this event, not of the episode.
        score: The node's score when it classified itself; None when it did not say.
        threshold: The threshold it compared with; None when it did not say.
        mode: Where the agent had the threshold from.
        dominant_signal: The signal that fell most, as the agent believes.
    """

    event_id: str = ""
    score: float | None = None
    threshold: float | None = None
    mode: str = ""
    dominant_signal: str = ""


@dataclass(slots=True)
class Episode:
    """One node's time as a straggler.

    Attributes:
        first: The event that opened it; its id names the episode.
        last: The newest event.
        n_events: Events so far, repeats of one id included.
        opened_wall_ns: Wall time of the first event's arrival.
        last_wall_ns: Wall time of the newest event's arrival.
        in_panic: The whole cluster fell when it opened, or before it was announced.
        closed_wall_ns: Wall time of the end; None while open.
        outcome: Why it ended; None while open.
        is_announced: Its beginning was announced: not so in panic, and not before its peers reported.
        held_since_ns: Monotonic time since which it waits to be announced.
    """

    cluster_id: str
    node_id: str
    first: StragglerEvent
    last: StragglerEvent
    opened_wall_ns: int
    last_wall_ns: int
    n_events: int = 1
    in_panic: bool = False
    closed_wall_ns: int | None = None
    outcome: Outcome | None = None
    is_announced: bool = False
    held_since_ns: int = 0


def find_incident_id(episode: Episode) -> str:
    """The same at an episode's beginning and end."""
    return episode.first.event_id or f"{episode.node_id}@{episode.opened_wall_ns}"


class ReportedEpisode(NamedTuple):
    """An episode whose beginning was reported, and no end.

    Attributes:
        node_id: The node.
        incident_id: As `find_incident_id` was.
        opened_wall_ns: As `Episode.opened_wall_ns` was.
    """

    node_id: str
    incident_id: str
    opened_wall_ns: int

    def take_for(self, episode: Episode) -> None:
        """Let an episode, of which this process may know the end only, be the one that was reported."""
        episode.first = replace(episode.first, event_id=self.incident_id)
        episode.opened_wall_ns, episode.is_announced = self.opened_wall_ns, True

    def build(self, cluster_id: str) -> Episode:
        """It as far as it is known."""
        event, opened_ns = StragglerEvent(self.incident_id), self.opened_wall_ns
        return Episode(
            cluster_id, self.node_id, event, event, opened_ns, opened_ns, 0, is_announced=True
        )


class EpisodeTracker:
    """Open episodes of one cluster by node, and the most recent closed ones.

    Bounded: at most one open episode per known node (the caller refuses events of unknown nodes), and `MAX_CLOSED`
    closed ones. Not thread-safe; the owner locks.
    """

    __slots__ = ("_closed", "_cluster_id", "_good_since_ns", "_open")

    def __init__(self, cluster_id: str) -> None:
        self._cluster_id: Final = cluster_id
        self._open: dict[str, Episode] = {}
        self._closed: deque[Episode] = deque(maxlen=MAX_CLOSED)
        self._good_since_ns: dict[str, int] = {}

    @property
    def n_open(self) -> int:
        """Episodes that have not ended."""
        return len(self._open)

    def is_open(self, node_id: str) -> bool:
        """Whether the node is in an episode."""
        return node_id in self._open

    def list_announced(self) -> list[str]:
        """Nodes in an episode that was announced."""
        return [node_id for node_id, episode in self._open.items() if episode.is_announced]

    def list_episodes(self) -> list[Episode]:
        """Open episodes, then closed ones, newest first in each."""
        return [*reversed(self._open.values()), *reversed(self._closed)]

    def list_of(self, node_id: str) -> list[Episode]:
        """A node's episodes that are remembered, oldest first."""
        return [one for one in reversed(self.list_episodes()) if one.node_id == node_id]

    def note(
        self, node_id: str, event: StragglerEvent, wall_ns: int, *, in_panic: bool
    ) -> Episode | None:
        """Apply one event; returns the episode it opened, None when it opened none.

        An episode that began in panic opens once more with the first event after it: the node is a straggler on its
        own. The same event twice changes nothing but ``n_events``.
        """
        self._good_since_ns.pop(node_id, None)
        episode = self._open.get(node_id)
        if episode is None:
            episode = Episode(
                self._cluster_id, node_id, event, event, wall_ns, wall_ns, in_panic=in_panic
            )
            self._open[node_id] = episode
            return episode
        episode.last, episode.last_wall_ns = event, wall_ns
        episode.n_events += 1
        if episode.in_panic and not in_panic and not episode.is_announced:
            episode.in_panic = False
            return episode
        return None

    def note_score(self, node_id: str, now_ns: int, *, is_good: bool) -> int:
        """Note a score of a node in an episode; for how long its scores have been good since its last event, in ns.

        Args:
            node_id: The node.
            now_ns: Monotonic time.
            is_good: Whether the score is one of a node that has recovered; False too where nothing says so.
        """
        if not is_good:
            self._good_since_ns.pop(node_id, None)
            return 0
        return now_ns - self._good_since_ns.setdefault(node_id, now_ns)

    def close(self, node_id: str, outcome: Outcome, wall_ns: int) -> Episode | None:
        """End the node's episode, if it has one."""
        self._good_since_ns.pop(node_id, None)
        episode = self._open.pop(node_id, None)
        if episode is None:
            return None
        episode.closed_wall_ns, episode.outcome = wall_ns, outcome
        self._closed.append(episode)
        return episode
