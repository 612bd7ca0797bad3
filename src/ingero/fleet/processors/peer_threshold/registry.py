"""Every cluster behind one lock: which pushes are taken, and what their senders are answered.

Above the clusters, below the processor; knows pushes (`ingero.wire.push`) but no pipeline. Shared by all pipelines
that name the processor, and kept over a reload.

Lossy: scores that are not numbers in [0, 1], nodes and clusters over their caps, senders without a name and names
longer than `MAX_ID_LENGTH` are refused and counted; see `ingero.fleet.processors.peer_threshold.telemetry`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Final

from ingero.detect.threshold import THRESHOLD_FLOOR, ThresholdSettings
from ingero.fleet.component import WITHHELD, Hardware, PushAnswer, PushContext
from ingero.fleet.processors.peer_threshold.admission import CAPS, REFUSALS, CapCheck, check_report
from ingero.fleet.processors.peer_threshold.cluster import ClusterSettings, ClusterState
from ingero.fleet.processors.peer_threshold.config import IngeroConfig
from ingero.fleet.processors.peer_threshold.episode_events import (
    is_reported,
    read_open_episodes,
    read_panic_start,
)
from ingero.fleet.processors.peer_threshold.episodes import Episode, Outcome, StragglerEvent
from ingero.fleet.processors.peer_threshold.notifications import Arrival, NotificationQueue
from ingero.fleet.processors.peer_threshold.scores import (
    STATE_OF_NAME,
    Cohort,
    Report,
    ReportedState,
)
from ingero.fleet.processors.peer_threshold.taken_over import TakenOver
from ingero.fleet.processors.peer_threshold.telemetry import RegistryCounters
from ingero.fleet.processors.peer_threshold.updates import ThresholdUpdates
from ingero.telemetry.clock import Clock
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_S
from ingero.wire.names import MAX_ID_LENGTH, Attribute
from ingero.wire.push import PushFacts
from ingero.wire.typed import read_number

_EXPIRY_INTERVAL_NS: Final = NS_PER_S
_LOWEST: Final = PushAnswer(THRESHOLD_FLOOR, quorum_met=False)


class ClusterRegistry:
    """The score map of the whole service.

    ``take`` and ``tick`` lock; `find_answer` does not.

    Attributes:
        lock: Held by whatever reads more than one thing of ``clusters``.
        clusters: By cluster id; without those that another Fleet judges, whose pushes are replayed here.
        n_nodes: Nodes of all these clusters.
        notifications: What is to be announced of episodes and clusters. Locked.
    """

    def __init__(self, config: IngeroConfig, clock: Clock, meter: MeterRegistry) -> None:
        self.lock = threading.RLock()
        self.clusters: dict[str, ClusterState] = {}
        self._replayed: dict[str, ClusterState] = {}
        self._replayed_expiry_ns: dict[str, int] = {}
        self.n_nodes = 0
        self._clock = clock
        self._expired_ns = clock.mono_ns()
        self._counters = RegistryCounters(meter, REFUSALS)
        self.notifications = NotificationQueue(
            config.push_interval, self._counters.lost_notifications
        )
        self._caps = CapCheck(config, self.notifications)
        self._updates = ThresholdUpdates(config, clock, self.notifications)
        self.configure(config)

    def configure(self, config: IngeroConfig) -> None:
        """Go on with these settings: they say how scores are read, not what they are."""
        self._config = self._caps.config = self._updates.config = config
        self.notifications.hold_ns = config.push_interval
        with self.lock:
            for cluster in (*self.clusters.values(), *self._replayed.values()):
                cluster.settings = self._build_settings(cluster.cluster_id)
                cluster.is_dirty = True

    def _build_settings(self, cluster_id: str) -> ClusterSettings:
        config = self._config
        return ClusterSettings(
            ThresholdSettings(
                k=config.threshold.k,
                ema_alpha=config.threshold.ema_alpha,
                min_margin=config.threshold.min_margin,
                statistical_min=config.quorum.statistical_min,
                coverage_fraction=config.quorum.coverage_fraction,
                max_expected_nodes=config.expected_nodes.get(cluster_id, config.max_expected_nodes),
                push_interval_ns=config.push_interval,
                ttl_multiplier=config.ttl_multiplier,
                settle_ns=config.settle_ns,
            ),
            _LOWEST if config.panic_answer == "floor" else WITHHELD,
        )

    def now_ns(self) -> int:
        """Monotonic time."""
        return self._clock.mono_ns()

    def take(
        self, pushes: Sequence[PushFacts], context: PushContext, arrival: Arrival
    ) -> list[int]:
        """Apply what a push says, and write into its context who pushed.

        A push of several nodes, as a collector sends, is answered for its cluster when they share one.

        Returns:
            Indices of the pushes of which nothing is to be passed on, because a cap refused their sender.
        """
        refused = []
        with self.lock:
            for index, facts in enumerate(pushes):
                if self._take_one(facts, context, arrival) in CAPS:
                    refused.append(index)
        if len(pushes) == 1:
            facts = pushes[0]
            context.cluster_id = facts.resource.cluster_id or context.cluster_hint or None
            context.node_id = facts.resource.node_id or None
            context.cohort = facts.cohort
        elif pushes:
            clusters = {facts.resource.cluster_id or context.cluster_hint for facts in pushes}
            context.cluster_id = clusters.pop() if len(clusters) == 1 else ""
        return refused

    def find_answer(
        self, cluster_id: str, cohort_hash: str = "", node_id: str | None = None
    ) -> PushAnswer | None:
        """What this node, cohort or cluster is answered; None when there is no threshold. Any thread."""
        cluster = self.clusters.get(cluster_id)
        if cluster is None:
            return None
        return cluster.find_answer(node_id, cohort_hash, self._clock.mono_ns())

    def find_hardware(self, cluster_id: str, node_id: str) -> Hardware | None:
        """What a node computes with; None for an unknown node. Any thread."""
        cluster = self.clusters.get(cluster_id)
        return None if cluster is None else cluster.nodes.find_hardware(node_id)

    def begin_replay(self, cluster_id: str, reported: Mapping[str, str]) -> None:
        """See `Learner`."""
        del reported
        with self.lock:
            cluster = self.clusters.pop(cluster_id, None)
            self.n_nodes -= 0 if cluster is None else cluster.scores.n_nodes
            self._replayed.pop(cluster_id, None)
            self._replayed_expiry_ns.pop(cluster_id, None)
            self.notifications.hold(cluster_id)

    def note_stored(self, cluster_id: str, stored_wall_ns: int, now_ns: int) -> None:
        """See `Learner`: nothing here depends on it."""

    def is_behind(self, cluster_id: str) -> bool:
        """See `Learner`: never, a push is applied at once."""
        del cluster_id
        return False

    def end_replay(self, cluster_id: str, reported: Mapping[str, str]) -> None:
        """See `Learner`."""
        with self.lock:
            self._replayed_expiry_ns.pop(cluster_id, None)
            cluster = self._replayed.pop(cluster_id, None)
            if cluster is not None:
                self.clusters[cluster_id] = cluster
                self.n_nodes += cluster.scores.n_nodes
            arrival = Arrival(self._clock.mono_ns(), self._clock.wall_ns())
            taken_over = TakenOver(cluster_id, cluster, self.notifications, arrival)
            began_ns = read_panic_start(reported)
            if began_ns is not None:
                if cluster is not None:
                    self._updates.update(cluster, arrival)
                taken_over.take_panic(began_ns)
            for one in read_open_episodes(reported):
                taken_over.take_episode(one)
            self.notifications.go_on(cluster_id, lambda one: is_reported(one, reported))

    def tick(self) -> None:
        """Expire, compute the thresholds that are due, and announce the episodes that need not wait any longer."""
        arrival = Arrival(self._clock.mono_ns(), self._clock.wall_ns())
        if arrival.mono_ns - self._expired_ns >= _EXPIRY_INTERVAL_NS:
            self._expired_ns = arrival.mono_ns
            with self.lock:
                for cluster in list(self.clusters.values()):
                    self._expire(cluster, arrival)
                self._caps.note_ended(arrival)
        self._updates.update_due(list(self.clusters.values()), arrival, self.lock)
        with self.lock:
            self.notifications.release(arrival.mono_ns, self._is_settled)

    def _is_settled(self, episode: Episode) -> bool:
        """Whether every other active node of the cluster reported since this episode began to wait."""
        cluster = self.clusters.get(episode.cluster_id)
        return cluster is None or cluster.is_reported_since(
            episode.held_since_ns, but=episode.node_id
        )

    def _take_one(self, facts: PushFacts, context: PushContext, arrival: Arrival) -> str:
        """Apply one node's push; the reason when its score is refused, else empty."""
        resource, hint = facts.resource, context.cluster_hint
        cluster_id = resource.cluster_id or hint
        if hint and cluster_id != hint:
            self._counters.mismatches(1)
        score = facts.health_score
        if score is None and facts.straggler_event is None:
            return ""
        is_judged = not self.notifications.is_held(cluster_id)
        clusters = self.clusters if is_judged else self._replayed
        cluster = clusters.get(cluster_id)
        if cluster is not None and not is_judged:
            self._expire_replayed(cluster, arrival)
        is_known = cluster is not None and cluster.scores.find_row(resource.node_id) is not None
        reason = "" if score is None else check_report(facts, cluster_id, score)
        if not reason and not is_known:
            n_clusters, n_nodes = (len(clusters), self.n_nodes) if is_judged else (0, 0)
            reason = self._caps.check(cluster, n_clusters, n_nodes, arrival)
        if reason:
            self._counters.refused[reason](not context.is_replay)
            context.n_rejected += 1
            context.rejected_why = REFUSALS[reason]
        elif score is not None:
            if cluster is None:
                cluster = ClusterState(cluster_id, self._build_settings(cluster_id))
                clusters[cluster_id] = cluster
            self.n_nodes += is_judged and not is_known
            is_known = True
            self._counters.scores(not context.is_replay)
            self._put_score(cluster, facts, score, arrival)
        if facts.straggler_event is not None:
            if cluster is not None and is_known:
                self._put_event(cluster, facts, arrival)
            else:
                self._counters.lost_events(not context.is_replay)
        return reason

    def _put_score(
        self, cluster: ClusterState, facts: PushFacts, score: float, arrival: Arrival
    ) -> None:
        node_id = facts.resource.node_id
        state = STATE_OF_NAME.get(facts.state, ReportedState.OTHER)
        cohort = Cohort(facts.cohort, facts.workload_type if facts.cohort else "")
        is_changed = cluster.scores.put(Report(node_id, score, state, cohort), arrival.mono_ns)
        cluster.nodes.note(facts, is_known_state=state is not ReportedState.OTHER)
        if cluster.first_reports is not None:
            cluster.first_reports.note(node_id)
        if is_changed:
            cluster.is_dirty = True
            if state is not ReportedState.ACTIVE:
                self._close_episode(cluster, node_id, Outcome.STATE_CHANGE, arrival)
        if cluster.is_dirty or cluster.first_reports is not None:
            self._updates.update_in_push(cluster, arrival)
        if state is ReportedState.ACTIVE and cluster.is_recovered(node_id, score, arrival.mono_ns):
            self._close_episode(cluster, node_id, Outcome.RESOLVED, arrival)

    def _put_event(self, cluster: ClusterState, facts: PushFacts, arrival: Arrival) -> None:
        node_id, attributes = facts.resource.node_id, facts.event_attributes or {}
        if not facts.straggler_event:
            self._close_episode(cluster, node_id, Outcome.RESOLVED, arrival)
            return
        event = StragglerEvent(
            event_id=facts.event_id[:MAX_ID_LENGTH],
            score=read_number(attributes.get(Attribute.SCORE)),
            threshold=read_number(attributes.get(Attribute.THRESHOLD)),
            mode=_text(
                attributes.get(
                    Attribute.DETECTION_MODE, attributes.get(Attribute.DETECTION_MODE_V010)
                )
            ),
            dominant_signal=_text(attributes.get(Attribute.DOMINANT_SIGNAL)),
        )
        in_panic = cluster.state.in_panic
        episode = cluster.episodes.note(node_id, event, arrival.wall_ns, in_panic=in_panic)
        if episode is not None:
            self.notifications.note_open(episode, arrival.mono_ns)

    def _close_episode(
        self, cluster: ClusterState, node_id: str, outcome: Outcome, arrival: Arrival
    ) -> None:
        episode = cluster.episodes.close(node_id, outcome, arrival.wall_ns)
        if episode is not None:
            self._counters.episodes[outcome](cluster.cluster_id in self.clusters)
            self.notifications.note_close(episode)

    def _expire_replayed(self, cluster: ClusterState, arrival: Arrival) -> None:
        """Forget silent nodes of a replayed cluster by the time of its pushes, as its judge did."""
        last_ns = self._replayed_expiry_ns.get(cluster.cluster_id, 0)
        if arrival.mono_ns - last_ns >= _EXPIRY_INTERVAL_NS:
            self._replayed_expiry_ns[cluster.cluster_id] = arrival.mono_ns
            self._forget_silent(cluster, arrival)

    def _forget_silent(self, cluster: ClusterState, arrival: Arrival) -> int:
        """Close episodes of nodes that are silent for too long; how many nodes were forgotten."""
        gone = cluster.expire(arrival.mono_ns - self._config.ttl_ns)
        for node_id in gone:
            self._close_episode(cluster, node_id, Outcome.LOST, arrival)
        return len(gone)

    def _expire(self, cluster: ClusterState, arrival: Arrival) -> None:
        self.n_nodes -= self._forget_silent(cluster, arrival)
        if not cluster.scores.n_nodes and cluster.is_dirty:
            self._updates.update(cluster, arrival)
        if not cluster.scores.n_nodes and not cluster.is_remembered(arrival.mono_ns):
            del self.clusters[cluster.cluster_id]


def _text(value: object) -> str:
    return value[:MAX_ID_LENGTH] if isinstance(value, str) else ""
