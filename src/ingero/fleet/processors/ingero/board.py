"""Every cluster's book behind one lock: what is taken, what is refused, and when bars are computed again.

Above the books, below the processor; knows pushes (`ingero.wire.otlp.push`) but no pipeline. Shared by all pipelines
that name the processor, and kept over a reload that leaves its settings as they were.

A bar is computed in the push itself while a cluster is small, so that the answer knows the push; above
`SMALL_CLUSTER` nodes, or when that would take more than a tenth of the time, it waits for the tick, which comes every
``recompute_min_interval``.

Lossy: scores that are not numbers in [0, 1], nodes and clusters over their caps, senders without a name and names
longer than `MAX_ID_LENGTH` are refused and counted; see `ingero.fleet.processors.ingero.telemetry`.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from sys import intern
from typing import Final

from ingero.detect.threshold import ThresholdSettings
from ingero.fleet.component import Hardware, Meter, PushAnswer, PushContext
from ingero.fleet.consumer import Consumer
from ingero.fleet.processors.ingero import telemetry
from ingero.fleet.processors.ingero.book import ClusterBook
from ingero.fleet.processors.ingero.config import IngeroConfig
from ingero.fleet.processors.ingero.episodes import Episode, Outcome, StragglerEvent
from ingero.fleet.processors.ingero.scores import STATE_OF_NAME, Cohort, NodeState, Report
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_MS, NS_PER_S
from ingero.wire.names import Signal
from ingero.wire.otlp.push import PushFacts

SMALL_CLUSTER: Final = 256
"""Nodes up to which a push computes the bars itself: about 60 µs."""
MAX_ID_LENGTH: Final = 256
"""Longest cluster id, node id, cgroup hash or workload type, in characters."""
MAX_NEWS: Final = 4096
"""Episodes' beginnings and ends that wait to be told."""
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
    "node_cap": "no more nodes are taken (max_expected_nodes)",
    "cluster_cap": "no more clusters are taken (max_clusters)",
}
"""Why a score is not taken: the counter's label, and what its sender is told."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a push came.

    Attributes:
        mono_ns: Orders and expires.
        wall_ns: For display.
    """

    mono_ns: int
    wall_ns: int


class Board:
    """The score map of the whole service.

    ``take`` and ``tick`` lock; `find_answer` does not.

    Attributes:
        lock: Held by whoever reads more than one thing of ``books``.
        books: Book by cluster id.
        n_nodes: Rows over all books.
        host: Under which service the timers run; a reload brings another.
        config: The settings it was made with.
        following: What comes after the processor, by signal; the first pipeline of each.
        news: Episodes as they began or ended, oldest first, for whoever tells them; kept only while there is a logs
            pipeline. Locked.
    """

    def __init__(self, config: IngeroConfig, clock: Clock, meter: Meter) -> None:
        self.lock = threading.RLock()
        self.books: dict[str, ClusterBook] = {}
        self.n_nodes = 0
        self.host: object = None
        self.config: Final = config
        self.following: dict[Signal, Consumer] = {}
        self.news: deque[Episode] = deque()
        self._clock = clock
        self._settings = ThresholdSettings(
            k=config.threshold.k,
            ema_alpha=config.threshold.ema_alpha,
            min_margin=config.threshold.min_margin,
            statistical_min=config.quorum.statistical_min,
            coverage_fraction=config.quorum.coverage_fraction,
            max_expected_nodes=config.max_expected_nodes,
            push_interval_ns=config.push_interval,
            ttl_multiplier=config.ttl_multiplier,
        )
        self._expired_ns = self._spent_at_ns = clock.mono_ns()
        self._spent_ns = 0
        dropped = meter.counter(telemetry.SCORES_DROPPED)
        self._refuse = {reason: dropped.bound(reason=reason) for reason in _REFUSALS}
        episodes = meter.counter(telemetry.EPISODES)
        self._count_episode = {o: episodes.bound(outcome=o.value) for o in Outcome}
        self._count_score = meter.counter(telemetry.SCORES).bound()
        self._count_lost_event = meter.counter(telemetry.EVENTS_DROPPED).bound()
        self._count_lost_news = meter.counter(telemetry.REPORTS_LOST).bound()
        self._count_mismatch = meter.counter(telemetry.MISMATCHES).bound()

    def now_ns(self) -> int:
        """Monotonic time."""
        return self._clock.mono_ns()

    def take(self, pushes: Sequence[PushFacts], context: PushContext, arrival: Arrival) -> None:
        """Apply what a push says, and write into its context who pushed.

        A push of several nodes, as a collector sends, is answered for its cluster when they share one.
        """
        with self.lock:
            for facts in pushes:
                self._take_one(facts, context, arrival)
        if len(pushes) == 1:
            facts = pushes[0]
            context.cluster_id = facts.resource.cluster_id or context.cluster_hint or None
            context.node_id = facts.resource.node_id or None
            context.cohort = facts.cohort
        elif pushes:
            clusters = {facts.resource.cluster_id or context.cluster_hint for facts in pushes}
            context.cluster_id = clusters.pop() if len(clusters) == 1 else ""

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

    def tick(self) -> list[ClusterBook]:
        """Expire, and compute the bars that are due; returns the books that were computed.

        Stops after `_TICK_BUDGET_NS`, so that pushes wait no longer than that; what is left is first in the next tick.
        """
        now_ns = self._clock.mono_ns()
        wall_ns = self._clock.wall_ns()
        done: list[ClusterBook] = []
        if now_ns - self._expired_ns >= _EXPIRY_INTERVAL_NS:
            self._expired_ns = now_ns
            with self.lock:
                for book in list(self.books.values()):
                    self._expire(book, Arrival(now_ns, wall_ns))
        due = sorted(
            (
                book
                for book in list(self.books.values())
                if book.is_dirty or now_ns - book.computed_ns >= self.config.push_interval
            ),
            key=lambda book: book.computed_ns,
        )
        for book in due:
            with self.lock:
                book.recompute(now_ns)
            done.append(book)
            if self._clock.mono_ns() - now_ns > _TICK_BUDGET_NS:
                break
        return done

    def _take_one(self, facts: PushFacts, context: PushContext, arrival: Arrival) -> None:
        resource, hint = facts.resource, context.cluster_hint
        cluster_id = resource.cluster_id or hint
        if hint and cluster_id != hint:
            self._count_mismatch(1)
        if facts.health_score is not None:
            reason = self._take_score(facts, cluster_id, arrival)
            if reason:
                self._refuse[reason](1)
                context.n_rejected += 1
                context.rejected_why = _REFUSALS[reason]
        if facts.straggler_event is not None:
            self._take_event(facts, cluster_id, arrival.wall_ns)

    def _take_score(self, facts: PushFacts, cluster_id: str, arrival: Arrival) -> str:
        """Store a score; the reason when it is refused, else empty."""
        score = facts.health_score
        assert score is not None
        node_id = facts.resource.node_id
        reason = _check_names(facts, cluster_id) or _check_score(score)
        book = self.books.get(cluster_id)
        is_known = book is not None and book.scores.find_row(node_id) is not None
        if not reason and not is_known:
            reason = self._check_caps(cluster_id)
        if reason:
            return reason
        if book is None:
            book = self.books[cluster_id] = ClusterBook(cluster_id, self._settings)
        self.n_nodes += not is_known
        self._count_score(1)
        state = STATE_OF_NAME.get(facts.state, NodeState.OTHER)
        cohort = Cohort(facts.cohort, facts.workload_type if facts.cohort else "")
        now_ns = arrival.mono_ns
        is_changed = book.scores.put(Report(node_id, score, state, cohort), now_ns)
        if facts.info_point is not None and (
            book.resources.get(node_id) is not facts.resource or node_id not in book.gpu_models
        ):
            book.gpu_models[node_id] = intern(facts.gpu_model[:MAX_ID_LENGTH])
        book.resources[node_id] = facts.resource
        if is_changed:
            book.is_dirty = True
            if state is not NodeState.ACTIVE:
                self._note_change(
                    book.episodes.close(node_id, Outcome.STATE_CHANGE, arrival.wall_ns)
                )
        if book.is_dirty:
            self._compute_in_push(book, now_ns)
        return ""

    def _compute_in_push(self, book: ClusterBook, now_ns: int) -> None:
        """Compute at once if it is cheap enough: a leaky bucket of time spent."""
        if book.scores.n_nodes > SMALL_CLUSTER:
            if now_ns - book.computed_ns >= self.config.recompute_min_interval:
                book.recompute(now_ns)
            return
        drained = int((now_ns - self._spent_at_ns) * _PUSH_SHARE)
        self._spent_ns, self._spent_at_ns = max(0, self._spent_ns - drained), now_ns
        if self._spent_ns < _PUSH_BURST_NS:
            book.recompute(now_ns)
            took_ns = self._clock.mono_ns() - now_ns
            self._spent_ns += min(max(0, took_ns), _MOST_CHARGED_NS)

    def _take_event(self, facts: PushFacts, cluster_id: str, wall_ns: int) -> None:
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
        self._note_change(
            book.episodes.note(facts.resource.node_id, event, wall_ns, in_panic=in_panic)
        )

    def _note_change(self, episode: Episode | None) -> None:
        """Count an episode that ended, and keep the news of one that began or ended."""
        if episode is None:
            return
        if episode.outcome is not None:
            self._count_episode[episode.outcome](1)
        if Signal.LOGS in self.following:
            if len(self.news) >= MAX_NEWS:
                self.news.popleft()
                self._count_lost_news(1)
            self.news.append(replace(episode))

    def _check_caps(self, cluster_id: str) -> str:
        if self.n_nodes >= self.config.max_expected_nodes:
            return "node_cap"
        is_new = cluster_id not in self.books
        return "cluster_cap" if is_new and len(self.books) >= self.config.max_clusters else ""

    def _expire(self, book: ClusterBook, arrival: Arrival) -> None:
        gone = book.scores.expire(arrival.mono_ns - self.config.ttl_ns)
        for node_id in gone:
            book.resources.pop(node_id, None)
            book.gpu_models.pop(node_id, None)
            self._note_change(book.episodes.close(node_id, Outcome.LOST, arrival.wall_ns))
        self.n_nodes -= len(gone)
        book.is_dirty = book.is_dirty or bool(gone)
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


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def _text(value: object) -> str:
    return value[:MAX_ID_LENGTH] if isinstance(value, str) else ""
