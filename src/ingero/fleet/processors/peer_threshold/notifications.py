"""What is told of clusters and episodes, and when: never N stragglers where one cluster moved.

Above episodes, below the board, which locks. An episode is told once every other active node of its cluster was heard
since it began (at the latest after one push interval): only then is it known that the node fell alone. One that begins
in panic is kept and not told while the panic lasts; if the node says afterwards that it still is a straggler, it is told
then.

Lossy: beyond `MAX_NOTIFICATIONS` the oldest news are dropped and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, TypeAlias

from ingero.fleet.processors.peer_threshold.episodes import Episode
from ingero.telemetry.limited import FieldValue

MAX_NOTIFICATIONS: Final = 4096
MAX_EVENTS: Final = 256
"""Events of clusters that are shown."""


class EventKind(StrEnum):
    """What turns for a whole cluster."""

    QUORUM = "quorum"
    PANIC = "panic"
    NODE_CAP = "node_cap"
    TOTAL_CAP = "total_cap"
    CLUSTER_CAP = "cluster_cap"


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """A beginning or an end.

    Attributes:
        kind: Of what.
        cluster_id: Where; empty for all clusters.
        is_on: It began.
        wall_ns: When.
        began_wall_ns: When what ends had begun; None at a beginning, and where it is not known.
        values: Numbers for people.
    """

    kind: EventKind
    cluster_id: str
    is_on: bool
    wall_ns: int
    began_wall_ns: int | None = None
    values: Mapping[str, FieldValue] = field(default_factory=dict)


Notification: TypeAlias = Episode | ClusterEvent
SettledSince: TypeAlias = "Callable[[Episode], bool]"
"""Whether every other active node of an episode's cluster was heard since it began."""


class NotificationQueue:
    """Collects news until they are told.

    Args:
        hold_ns: Longest time an episode waits for its peers to be heard.
        count_lost: Told how many news were dropped.

    Attributes:
        events: The newest events of clusters, oldest first.
    """

    def __init__(self, hold_ns: int, count_lost: Callable[[float], None]) -> None:
        self.hold_ns = hold_ns
        self.events: deque[ClusterEvent] = deque(maxlen=MAX_EVENTS)
        self._count_lost = count_lost
        self._news: deque[Notification] = deque()
        self._waiting: dict[tuple[str, str], Episode] = {}

    def note_event(self, event: ClusterEvent) -> None:
        """A cluster turned."""
        self.events.append(event)
        self._append(event)
        if event.kind is EventKind.PANIC and event.is_on:
            for key, episode in list(self._waiting.items()):
                if key[0] == event.cluster_id:
                    episode.in_panic = True
                    del self._waiting[key]

    def note_open(self, episode: Episode, mono_ns: int) -> None:
        """An episode began, or goes on after a panic in which it was not told."""
        if episode.in_panic:
            return
        episode.held_since_ns = mono_ns
        self._waiting[episode.cluster_id, episode.node_id] = episode

    def note_close(self, episode: Episode) -> None:
        """An episode ended."""
        waiting = self._waiting.pop((episode.cluster_id, episode.node_id), None)
        if waiting is not None:
            self._append(replace(episode, closed_wall_ns=None, outcome=None, is_told=True))
            episode.is_told = True
        if episode.is_told:
            self._append(replace(episode))

    def release(self, now_ns: int, is_settled: SettledSince) -> None:
        """Let the episodes be told that waited long enough, or need not wait."""
        for key, episode in list(self._waiting.items()):
            if now_ns - episode.held_since_ns >= self.hold_ns or is_settled(episode):
                del self._waiting[key]
                episode.is_told = True
                self._append(replace(episode))

    def take(self) -> list[Notification]:
        """Everything to tell now, oldest first."""
        news = list(self._news)
        self._news.clear()
        return news

    def __bool__(self) -> bool:
        return bool(self._news)

    def _append(self, news: Notification) -> None:
        if len(self._news) >= MAX_NOTIFICATIONS:
            self._news.popleft()
            self._count_lost(1)
        self._news.append(news)
