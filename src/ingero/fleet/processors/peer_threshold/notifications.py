"""What is announced of clusters and episodes, and when: never N stragglers where one cluster moved.

Above episodes, below the registry, which locks. An episode is announced once every other active node of its cluster
reported since it began (at the latest after one push interval): only then is it known that the node fell alone. One
that begins in panic is kept and not announced while the panic lasts; if the node says afterwards that it still is a
straggler, it is announced then.

Lossy: beyond `MAX_NOTIFICATIONS` the oldest are dropped and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

from ingero.fleet.processors.peer_threshold.episodes import Episode
from ingero.telemetry.limited import FieldValue

MAX_NOTIFICATIONS: Final = 4096
MAX_EVENTS: Final = 256
"""Events of clusters that are shown."""


class Arrival(NamedTuple):
    """When a push came, or the timer ran.

    Attributes:
        mono_ns: Orders and expires.
        wall_ns: For display.
    """

    mono_ns: int
    wall_ns: int


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
        kind: Which state of the cluster changed.
        cluster_id: Where; empty for all clusters.
        wall_ns: When.
        began_wall_ns: When what ends had begun; None at a beginning, and where it is not known.
        is_on: Whether it began; False when it ended.
        values: Numbers for people.
    """

    kind: EventKind
    cluster_id: str
    wall_ns: int
    began_wall_ns: int | None = None
    is_on: bool = field(kw_only=True)
    values: Mapping[str, FieldValue] = field(kw_only=True)


Notification: TypeAlias = Episode | ClusterEvent


class NotificationQueue:
    """Collects notifications until they are taken.

    Args:
        hold_ns: Longest time an episode waits for reports of its peers.
        count_lost: Called with 1 for each notification that is dropped.

    Attributes:
        events: The newest events of clusters, oldest first.
    """

    def __init__(self, hold_ns: int, count_lost: Callable[[float], None]) -> None:
        self.hold_ns = hold_ns
        self.events: deque[ClusterEvent] = deque(maxlen=MAX_EVENTS)
        self._count_lost = count_lost
        self._ready: deque[Notification] = deque()
        self._waiting: dict[tuple[str, str], Episode] = {}
        self._held: dict[str, list[Notification]] = {}

    def hold(self, cluster_id: str) -> None:
        """Forget what waits of a cluster, and keep back what comes until `go_on`."""
        self._held[cluster_id] = []
        self._ready = deque(one for one in self._ready if one.cluster_id != cluster_id)
        for key in [key for key in self._waiting if key[0] == cluster_id]:
            del self._waiting[key]

    def is_held(self, cluster_id: str) -> bool:
        """Whether a cluster's notifications are kept back."""
        return cluster_id in self._held

    def go_on(self, cluster_id: str, is_reported: Callable[[Notification], bool]) -> None:
        """Announce what was kept back, without what another Fleet has announced."""
        for notification in self._held.pop(cluster_id, ()):
            if not is_reported(notification):
                self._append(notification)
        for key, episode in list(self._waiting.items()):
            if key[0] == cluster_id and is_reported(episode):
                del self._waiting[key]
                episode.is_announced = True

    def list_held(self, cluster_id: str) -> list[Notification]:
        """What is kept back of a cluster, oldest first."""
        return list(self._held.get(cluster_id, ()))

    def note_event(self, event: ClusterEvent) -> None:
        """Note that a state of a cluster began or ended."""
        self.events.append(event)
        self._append(event)
        if event.kind is EventKind.PANIC and event.is_on:
            for key, episode in list(self._waiting.items()):
                if key[0] == event.cluster_id:
                    episode.in_panic = True
                    del self._waiting[key]

    def note_open(self, episode: Episode, mono_ns: int) -> None:
        """An episode began, or goes on after a panic in which it was not announced."""
        if episode.in_panic:
            return
        episode.held_since_ns = mono_ns
        self._waiting[episode.cluster_id, episode.node_id] = episode

    def note_close(self, episode: Episode) -> None:
        """An episode ended."""
        waiting = self._waiting.pop((episode.cluster_id, episode.node_id), None)
        if waiting is not None:
            episode.is_announced = True
            self._append(replace(episode, closed_wall_ns=None, outcome=None))
        if episode.is_announced:
            self._append(replace(episode))

    def release(self, now_ns: int, is_settled: Callable[[Episode], bool]) -> None:
        """Announce the episodes that waited long enough, or need not wait.

        Args:
            now_ns: Monotonic time.
            is_settled: Whether every other active node of an episode's cluster reported since it began.
        """
        for key, episode in list(self._waiting.items()):
            if key[0] in self._held:
                continue
            if now_ns - episode.held_since_ns >= self.hold_ns or is_settled(episode):
                del self._waiting[key]
                episode.is_announced = True
                self._append(replace(episode))

    def take(self) -> list[Notification]:
        """Everything that is ready, oldest first."""
        ready = list(self._ready)
        self._ready.clear()
        return ready

    def __bool__(self) -> bool:
        return bool(self._ready)

    def _append(self, notification: Notification) -> None:
        held = self._held.get(notification.cluster_id)
        if held is not None:
            if isinstance(notification, ClusterEvent):  # only how a cluster stands now is of use
                held[:] = [one for one in held if not _is_of(one, notification.kind)]
            held.append(notification)
            del held[:-MAX_NOTIFICATIONS]  # older ones were announced long ago
            return
        if len(self._ready) >= MAX_NOTIFICATIONS:
            self._ready.popleft()
            self._count_lost(1)
        self._ready.append(notification)


def _is_of(notification: Notification, kind: EventKind) -> bool:
    return isinstance(notification, ClusterEvent) and notification.kind is kind
