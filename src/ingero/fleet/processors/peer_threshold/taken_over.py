"""What another Fleet reported as open of a cluster goes on, or ends, under the id that it was reported with.

A process that reads pushes from the middle of an episode would name it by the first event that it reads, and date a
panic by its own timer: what was open would never end, and begin once more.
"""

from __future__ import annotations

from ingero.fleet.processors.peer_threshold.cluster import ClusterState
from ingero.fleet.processors.peer_threshold.episodes import (
    Episode,
    Outcome,
    ReportedEpisode,
    find_incident_id,
)
from ingero.fleet.processors.peer_threshold.notifications import (
    Arrival,
    ClusterEvent,
    EventKind,
    NotificationQueue,
)


class TakenOver:
    """A cluster whose pushes were replayed, before its notifications go on. The registry's lock is held.

    Args:
        cluster_id: Its name.
        cluster: What the pushes say; None where they say nothing of it.
        notifications: Which hold those of the cluster back.
        now: The moment of the take-over.
    """

    def __init__(
        self,
        cluster_id: str,
        cluster: ClusterState | None,
        notifications: NotificationQueue,
        now: Arrival,
    ) -> None:
        self._cluster_id = cluster_id
        self._cluster = cluster
        self._notifications = notifications
        self._now = now

    def take_panic(self, began_wall_ns: int) -> None:
        """Let the panic be the one that was reported; without one, that has ended meanwhile."""
        if self._cluster is not None and self._cluster.state.in_panic:
            self._cluster.panic_wall_ns = began_wall_ns
            return
        end = ClusterEvent(
            EventKind.PANIC, self._cluster_id, self._now.wall_ns, began_wall_ns, is_on=False, values={}
        )  # fmt: skip
        self._notifications.note_event(end)

    def take_episode(self, reported: ReportedEpisode) -> None:
        """Let the node's first episode be the one that was reported; without one, that has ended meanwhile."""
        known = [] if self._cluster is None else self._cluster.episodes.list_of(reported.node_id)
        if any(find_incident_id(one) == reported.incident_id for one in known):
            return
        if not known:
            self._end(reported)
            return
        first_id, is_held = find_incident_id(known[0]), False
        for held in self._notifications.list_held(self._cluster_id):
            if isinstance(held, Episode) and find_incident_id(held) == first_id:
                reported.take_for(held)
                is_held = True
        reported.take_for(known[0])
        if known[0].outcome is not None and not is_held:
            self._notifications.note_close(known[0])

    def _end(self, reported: ReportedEpisode) -> None:
        cluster = self._cluster
        is_here = cluster is not None and cluster.scores.find_row(reported.node_id) is not None
        episode = reported.build(self._cluster_id)
        episode.closed_wall_ns = self._now.wall_ns
        episode.outcome = Outcome.RESOLVED if is_here else Outcome.LOST
        self._notifications.note_close(episode)
