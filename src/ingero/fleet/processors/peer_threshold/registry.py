"""Every cluster's book behind one lock: what is taken, what is refused, and when bars are computed again.

Above the books, below the processor; knows pushes (`ingero.wire.push`) but no pipeline. Shared by all pipelines
that name the processor, and kept over a reload that leaves its settings as they were.

A bar is computed in the push itself while a cluster is small, so that the answer knows the push; above
`SMALL_CLUSTER` nodes, or when that would take more than a tenth of the time, it waits for the tick, which comes every
``recompute_min_interval``.

Lossy: scores that are not numbers in [0, 1], nodes and clusters over their caps, senders without a name and names
longer than `MAX_ID_LENGTH` are refused and counted; see `ingero.fleet.processors.peer_threshold.telemetry`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ingero.detect.threshold import THRESHOLD_FLOOR, ThresholdSettings
from ingero.fleet.component import WITHHELD, Hardware, PushAnswer, PushContext
from ingero.fleet.consumer import Consumer
from ingero.fleet.helpers.caps import CapWatch
from ingero.fleet.processors.peer_threshold import telemetry
from ingero.fleet.processors.peer_threshold.cluster import ClusterState
from ingero.fleet.processors.peer_threshold.config import IngeroConfig
from ingero.fleet.processors.peer_threshold.episodes import Episode, Outcome, StragglerEvent
from ingero.fleet.processors.peer_threshold.notifications import (
    ClusterEvent,
    EventKind,
    NotificationQueue,
)
from ingero.fleet.processors.peer_threshold.scores import (
    STATE_OF_NAME,
    Cohort,
    Report,
    ReportedState,
)
from ingero.otlp.names import Signal
from ingero.telemetry.clock import Clock
from ingero.telemetry.limited import FieldValue
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_MS, NS_PER_S
from ingero.wire.push import PushFacts

SMALL_CLUSTER: Final = 256
"""Nodes up to which a push computes the bars itself: about 60 µs."""
MAX_ID_LENGTH: Final = 256
"""Longest cluster id, node id, cgroup hash or workload type, in characters."""
_EXPIRY_INTERVAL_NS: Final = NS_PER_S
_TICK_BUDGET_NS: Final = 5 * NS_PER_MS
_PUSH_SHARE: Final = 0.1
"""Share of the time that computing inside pushes may take in the long run."""
_PUSH_BURST_NS: Final = 200 * NS_PER_MS
_MOST_CHARGED_NS: Final = 2 * NS_PER_MS
"""A computation that took longer was interrupted; it is charged no more than this."""
_REFUSALS: Final = {
    "not_finite": "the health score is not a finite number",
    "out_of_range": "the health score is not within 0 and 1",
    "no_node_id": "the resource has no ingero.node.id",
    "no_cluster_id": "neither the resource nor the request names a cluster",
    "id_too_long": f"a name is longer than {MAX_ID_LENGTH} characters",
    "node_cap": "no more nodes of this cluster are taken (max_expected_nodes)",
    "total_cap": "no more nodes are taken (max_total_nodes)",
    "cluster_cap": "no more clusters are taken (max_clusters)",
}
"""Why a score is not taken: the counter's label, and what its sender is told."""
CAPS: Final = frozenset({"node_cap", "total_cap", "cluster_cap"})
"""Reasons for which nothing else of the sender is taken either."""
_LOWEST: Final = PushAnswer(THRESHOLD_FLOOR, quorum_met=False)


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a push came.

    Attributes:
        mono_ns: Orders and expires.
        wall_ns: For display.
    """

    mono_ns: int
    wall_ns: int


class ClusterRegistry:
    """The score map of the whole service.

    ``take`` and ``tick`` lock; `find_answer` does not.

    Attributes:
        lock: Held by whoever reads more than one thing of ``books``.
        books: Book by cluster id.
        n_nodes: Rows over all books.
        host: Under which service the timers run; a reload brings another.
        config: The settings it was made with.
        following: What comes after the processor, by signal; the first pipeline of each.
        desk: What is to be told of episodes and clusters. Locked.
    """

    def __init__(self, config: IngeroConfig, clock: Clock, meter: MeterRegistry) -> None:
        self.lock = threading.RLock()
        self.books: dict[str, ClusterState] = {}
        self.n_nodes = 0
        self.host: object = None
        self.following: dict[Signal, Consumer] = {}
        self._clock = clock
        self._count_lost_news = meter.counter(telemetry.REPORTS_LOST).bound()
        self.desk = NotificationQueue(config.push_interval, self._count_lost_news)
        self._caps: CapWatch[tuple[EventKind, str]] = CapWatch(2 * config.push_interval)
        self.configure(config)
        self._expired_ns = self._spent_at_ns = clock.mono_ns()
        self._spent_ns = 0
        dropped = meter.counter(telemetry.SCORES_DROPPED)
        self._refuse = {reason: dropped.bound(reason=reason) for reason in _REFUSALS}
        episodes = meter.counter(telemetry.EPISODES)
        self._count_episode = {o: episodes.bound(outcome=o.value) for o in Outcome}
        self._count_score = meter.counter(telemetry.SCORES).bound()
        self._count_lost_event = meter.counter(telemetry.EVENTS_DROPPED).bound()
        self._count_mismatch = meter.counter(telemetry.MISMATCHES).bound()

    def accepts(self, settings: object) -> bool:
        """Whether it can go on with other settings: always, they say how scores are read, not what they are."""
        return isinstance(settings, IngeroConfig)

    def configure(self, config: IngeroConfig) -> None:
        """Go on with these settings."""
        self.config = config
        self._settings = ThresholdSettings(
            k=config.threshold.k,
            ema_alpha=config.threshold.ema_alpha,
            min_margin=config.threshold.min_margin,
            statistical_min=config.quorum.statistical_min,
            coverage_fraction=config.quorum.coverage_fraction,
            max_expected_nodes=config.max_expected_nodes,
            push_interval_ns=config.push_interval,
            ttl_multiplier=config.ttl_multiplier,
            settle_ns=config.settle_ns,
        )
        self._told_in_panic = _LOWEST if config.panic_answer == "floor" else WITHHELD
        self.desk.hold_ns = config.push_interval
        with self.lock:
            for book in self.books.values():
                book.configure(self._find_settings(book.cluster_id), self._told_in_panic)
                book.is_dirty = True

    def _find_settings(self, cluster_id: str) -> ThresholdSettings:
        expected = self.config.expected_nodes.get(cluster_id)
        if expected is None:
            return self._settings
        return replace(self._settings, max_expected_nodes=expected)

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
        """The bar for whoever this is, or None when there is none to tell. Any thread."""
        book = self.books.get(cluster_id)
        if book is None:
            return None
        return book.find_answer(node_id, cohort_hash, self._clock.mono_ns())

    def find_hardware(self, cluster_id: str, node_id: str) -> Hardware | None:
        """What a node says it is. Any thread."""
        book = self.books.get(cluster_id)
        resource = None if book is None else book.resources.get(node_id)
        if book is None or resource is None:
            return None
        return Hardware(resource.provider, book.gpu_models.get(node_id, ""))

    def tick(self) -> list[ClusterState]:
        """Expire, and compute the bars that are due; returns the books that were computed.

        Stops after `_TICK_BUDGET_NS`, so that pushes wait no longer than that; what is left is first in the next tick.
        """
        now_ns = self._clock.mono_ns()
        wall_ns = self._clock.wall_ns()
        done: list[ClusterState] = []
        arrival = Arrival(now_ns, wall_ns)
        if now_ns - self._expired_ns >= _EXPIRY_INTERVAL_NS:
            self._expired_ns = now_ns
            with self.lock:
                self._expire_all(arrival)
        due = sorted(
            (book for book in list(self.books.values()) if self._is_due(book, now_ns)),
            key=lambda book: book.computed_ns,
        )
        for book in due:
            with self.lock:
                self._recompute(book, arrival)
            done.append(book)
            if self._clock.mono_ns() - now_ns > _TICK_BUDGET_NS:
                break
        with self.lock:
            self.desk.release(now_ns, self._is_settled)
        return done

    def _is_due(self, book: ClusterState, now_ns: int) -> bool:
        is_old = now_ns - book.computed_ns >= self.config.push_interval
        return book.is_dirty or is_old or book.is_waiting

    def _is_settled(self, episode: Episode) -> bool:
        """Whether every other active node of the cluster was heard since this episode began to wait."""
        book = self.books.get(episode.cluster_id)
        return book is None or book.is_heard_since(episode.held_since_ns, but=episode.node_id)

    def _recompute(self, book: ClusterState, arrival: Arrival) -> None:
        """Compute a cluster's bars, and note what turned."""
        had_quorum, was_panic = book.has_quorum, book.state.in_panic
        book.recompute(arrival.mono_ns)
        levels = book.state.levels
        values: dict[str, FieldValue] = {
            "active_nodes": int(levels.n_active[0]),
            "known_nodes": book.scores.n_nodes,
        }
        cluster_id, wall_ns = book.cluster_id, arrival.wall_ns
        if book.has_quorum != had_quorum:
            event = ClusterEvent(
                EventKind.QUORUM, cluster_id, book.has_quorum, wall_ns, values=values
            )
            self.desk.note_event(event)
        if book.state.in_panic != was_panic:
            began_ns = book.panic_wall_ns
            book.panic_wall_ns = wall_ns if book.state.in_panic else None
            values |= {
                "under_threshold": int(levels.n_under[0]),
                "threshold": _finite(levels.thresholds[0]),
                "median": _finite(levels.median[0]),
            }
            event = ClusterEvent(
                EventKind.PANIC, cluster_id, book.state.in_panic, wall_ns, began_ns, values
            )
            self.desk.note_event(event)

    def _take_one(self, facts: PushFacts, context: PushContext, arrival: Arrival) -> str:
        """Apply one node's push; the reason when its score is refused, else empty."""
        resource, hint = facts.resource, context.cluster_hint
        cluster_id = resource.cluster_id or hint
        if hint and cluster_id != hint:
            self._count_mismatch(1)
        if facts.health_score is not None:
            reason = self._take_score(facts, cluster_id, arrival)
        elif facts.straggler_event is not None:
            reason = self._check_unscored(facts, cluster_id, arrival)
        else:
            return ""
        if reason:
            self._refuse[reason](1)
            context.n_rejected += 1
            context.rejected_why = _REFUSALS[reason]
        if facts.straggler_event is not None:
            self._take_event(facts, cluster_id, arrival)
        return reason

    def _check_unscored(self, facts: PushFacts, cluster_id: str, arrival: Arrival) -> str:
        """The cap that keeps an event's sender out, if one does."""
        book = self.books.get(cluster_id)
        if book is not None and book.scores.find_row(facts.resource.node_id) is not None:
            return ""
        return self._check_caps(cluster_id, arrival)

    def _take_score(self, facts: PushFacts, cluster_id: str, arrival: Arrival) -> str:
        """Store a score; the reason when it is refused, else empty."""
        score = facts.health_score
        assert score is not None
        node_id = facts.resource.node_id
        reason = _check_names(facts, cluster_id) or _check_score(score)
        book = self.books.get(cluster_id)
        is_known = book is not None and book.scores.find_row(node_id) is not None
        if not reason and not is_known:
            reason = self._check_caps(cluster_id, arrival)
        if reason:
            return reason
        if book is None:
            settings = self._find_settings(cluster_id)
            book = ClusterState(cluster_id, settings, self._told_in_panic)
            self.books[cluster_id] = book
        self.n_nodes += not is_known
        self._count_score(1)
        state = STATE_OF_NAME.get(facts.state, ReportedState.OTHER)
        cohort = Cohort(facts.cohort, facts.workload_type if facts.cohort else "")
        now_ns = arrival.mono_ns
        is_changed = book.scores.put(Report(node_id, score, state, cohort), now_ns)
        book.note_facts(facts, is_known_state=state is not ReportedState.OTHER)
        if book.roll is not None:
            book.roll.hear(node_id)
        if is_changed:
            book.is_dirty = True
            if state is not ReportedState.ACTIVE:
                self._note_close(
                    book.episodes.close(node_id, Outcome.STATE_CHANGE, arrival.wall_ns)
                )
        if book.is_dirty or book.roll is not None:
            self._compute_in_push(book, arrival)
        return ""

    def _compute_in_push(self, book: ClusterState, arrival: Arrival) -> None:
        """Compute at once if it is cheap enough: a leaky bucket of time spent."""
        now_ns = arrival.mono_ns
        if book.scores.n_nodes > SMALL_CLUSTER:
            if now_ns - book.computed_ns >= self.config.recompute_min_interval:
                self._recompute(book, arrival)
            return
        drained = int((now_ns - self._spent_at_ns) * _PUSH_SHARE)
        self._spent_ns, self._spent_at_ns = max(0, self._spent_ns - drained), now_ns
        if self._spent_ns < _PUSH_BURST_NS:
            self._recompute(book, arrival)
            took_ns = self._clock.mono_ns() - now_ns
            self._spent_ns += min(max(0, took_ns), _MOST_CHARGED_NS)

    def _take_event(self, facts: PushFacts, cluster_id: str, arrival: Arrival) -> None:
        book = self.books.get(cluster_id)
        if book is None or book.scores.find_row(facts.resource.node_id) is None:
            self._count_lost_event(1)
            return
        attributes = facts.event_attributes or {}
        event = StragglerEvent(
            is_straggler=bool(facts.straggler_event),
            event_id=facts.event_id[:MAX_ID_LENGTH],
            score=_number(attributes.get("score")),
            threshold=_number(attributes.get("threshold")),
            mode=_text(attributes.get("ingero.detection_mode", attributes.get("mode"))),
            dominant_signal=_text(attributes.get("dominant_signal")),
        )
        in_panic = book.state.in_panic
        node_id = facts.resource.node_id
        episode = book.episodes.note(node_id, event, arrival.wall_ns, in_panic=in_panic)
        if episode is not None and episode.outcome is None:
            self.desk.note_open(episode, arrival.mono_ns)
        else:
            self._note_close(episode)

    def _note_close(self, episode: Episode | None) -> None:
        """Count an episode that ended."""
        if episode is not None and episode.outcome is not None:
            self._count_episode[episode.outcome](1)
            self.desk.note_close(episode)

    def _check_caps(self, cluster_id: str, arrival: Arrival) -> str:
        """Which cap a new node of this cluster would exceed; empty when there is room."""
        config, book = self.config, self.books.get(cluster_id)
        if book is None and len(self.books) >= config.max_clusters:
            kind, cap, where = EventKind.CLUSTER_CAP, config.max_clusters, ""
        elif book is not None and book.scores.n_nodes >= config.max_expected_nodes:
            kind, cap, where = EventKind.NODE_CAP, config.max_expected_nodes, cluster_id
        elif self.n_nodes >= config.total_cap:
            kind, cap, where = EventKind.TOTAL_CAP, config.total_cap, ""
        else:
            return ""
        if self._caps.refuse((kind, where), arrival.mono_ns):
            event = ClusterEvent(kind, where, True, arrival.wall_ns, values={"cap": cap})  # noqa: FBT003
            self.desk.note_event(event)
        return kind.value

    def _expire_all(self, arrival: Arrival) -> None:
        for book in list(self.books.values()):
            self._expire(book, arrival)
        for (kind, cluster_id), n_refused in self._caps.take_ended(arrival.mono_ns):
            values: dict[str, FieldValue] = {"refused": n_refused}
            event = ClusterEvent(kind, cluster_id, False, arrival.wall_ns, values=values)  # noqa: FBT003
            self.desk.note_event(event)

    def _expire(self, book: ClusterState, arrival: Arrival) -> None:
        gone = book.scores.expire(arrival.mono_ns - self.config.ttl_ns)
        for node_id in gone:
            book.forget(node_id)
            self._note_close(book.episodes.close(node_id, Outcome.LOST, arrival.wall_ns))
        self.n_nodes -= len(gone)
        book.is_dirty = book.is_dirty or bool(gone)
        if not book.scores.n_nodes and book.is_dirty:
            self._recompute(book, arrival)
        if not book.scores.n_nodes and not book.is_remembered(arrival.mono_ns):
            del self.books[book.cluster_id]


def _check_names(facts: PushFacts, cluster_id: str) -> str:
    """Why this sender cannot be known by name; empty when it can."""
    node_id = facts.resource.node_id
    if not node_id:
        return "no_node_id"
    if not cluster_id:
        return "no_cluster_id"
    longest = max(len(node_id), len(cluster_id), len(facts.cohort), len(facts.workload_type))
    return "id_too_long" if longest > MAX_ID_LENGTH else ""


def _check_score(score: float) -> str:
    if 0.0 <= score <= 1.0:
        return ""
    return "out_of_range" if math.isfinite(score) else "not_finite"


def _finite(value: float) -> float | None:
    return round(float(value), 6) if math.isfinite(value) else None


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def _text(value: object) -> str:
    return value[:MAX_ID_LENGTH] if isinstance(value, str) else ""
