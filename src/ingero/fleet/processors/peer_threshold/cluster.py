"""One cluster: its scores, its bars, its episodes, and the answer that each of its nodes is given.

Above scores and episodes, below the board that holds every cluster. The statistics themselves are
`ingero.detect.threshold`; this keeps their state between pushes and decides what is told when quorum is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from sys import intern
from typing import Final

import numpy as np

from ingero.detect.threshold import Scores, ThresholdSettings, ThresholdState, step_threshold
from ingero.fleet.component import WITHHELD, PushAnswer
from ingero.fleet.processors.peer_threshold.episodes import EpisodeTracker
from ingero.fleet.processors.peer_threshold.scores import ClusterScores, Cohort, ReportedState
from ingero.model.arrays import IntArray
from ingero.wire.push import PushFacts, ResourceFacts

MAX_NAME_LENGTH: Final = 256
"""Longest name that is kept of what a node says of itself, in characters."""


@dataclass(frozen=True, slots=True)
class ThresholdAnswers:
    """The bars as nodes are told them, replaced as a whole, so that an answer needs no lock.

    Attributes:
        quorum_met: Of the cluster, when these were computed.
        cluster: What the cluster's nodes are told.
        by_cohort: What a cohort is told by its name, where it has a bar of its own.
        by_hash: The same by cgroup hash, where one workload type has it.
        last_good_ns: Monotonic time at which there last was a quorum.
        instead: What everybody is told instead, during panic.
    """

    quorum_met: bool = False
    cluster: PushAnswer | None = None
    by_cohort: Mapping[str, PushAnswer | None] = field(default_factory=dict)
    by_hash: Mapping[str, PushAnswer | None] = field(default_factory=dict)
    last_good_ns: int = 0
    instead: PushAnswer | None = None


class Roll:
    """Who was heard again since the last newcomer: once everybody was, nobody is still to come.

    Not thread-safe; of use while a cluster is first heard.
    """

    __slots__ = ("_n_again", "_newcomer", "_seen_at")

    def __init__(self) -> None:
        self._newcomer = 0
        self._n_again = 0
        self._seen_at: dict[str, int] = {}

    def hear(self, node_id: str) -> None:
        """A node pushed."""
        seen_at = self._seen_at.get(node_id)
        if seen_at is None:
            self._newcomer += 1  # from now on everybody is to be heard again
            self._n_again = 0
            self._seen_at[node_id] = 0
        elif seen_at != self._newcomer:
            self._seen_at[node_id] = self._newcomer
            self._n_again += 1

    def forget(self, node_id: str) -> None:
        """A node is gone."""
        seen_at = self._seen_at.pop(node_id, None)
        self._n_again -= seen_at == self._newcomer

    @property
    def is_complete(self) -> bool:
        """Every node that was heard was heard again."""
        return 0 < len(self._seen_at) == self._n_again


class ClusterState:
    """State of one cluster. Not thread-safe except `find_answer`; the board locks.

    Attributes:
        cluster_id: Its name.
        scores: The latest report of each node.
        resources: Who each node says it is, from its latest push.
        gpu_models: What its GPUs are, where it said so.
        workloads: What it says it works on, where it said so.
        other_states: The state that a node gave, where that is none of `ReportedState`.
        episodes: Stragglers' stories.
        state: What `step_threshold` returned last.
        active_rows: Rows of ``scores`` that ``state`` is about, in its order.
        computed_ns: When that was; 0 before the first time.
        is_dirty: A push or an expiry since then changes the result.
        n_recomputes: How often it was computed.
        panic_wall_ns: When the panic that holds began; None without one.
        roll: Who was heard while the first bar is waited for; None since.
    """

    __slots__ = (
        "_settings",
        "_told",
        "_told_in_panic",
        "active_rows",
        "cluster_id",
        "computed_ns",
        "episodes",
        "gpu_models",
        "is_dirty",
        "n_recomputes",
        "other_states",
        "panic_wall_ns",
        "resources",
        "roll",
        "scores",
        "state",
        "workloads",
    )

    def __init__(
        self, cluster_id: str, settings: ThresholdSettings, told_in_panic: PushAnswer = WITHHELD
    ) -> None:
        self.cluster_id: Final = cluster_id
        self.scores = ClusterScores()
        self.resources: dict[str, ResourceFacts] = {}
        self.gpu_models: dict[str, str] = {}
        self.episodes = EpisodeTracker(cluster_id)
        self.state = ThresholdState()
        self.active_rows: IntArray = np.zeros(0, np.int64)
        self.computed_ns = 0
        self.is_dirty = False
        self.n_recomputes = 0
        self.workloads: dict[str, str] = {}
        self.other_states: dict[str, str] = {}
        self.panic_wall_ns: int | None = None
        self.roll: Roll | None = Roll()
        self._told = ThresholdAnswers()
        self.configure(settings, told_in_panic)

    def configure(self, settings: ThresholdSettings, told_in_panic: PushAnswer) -> None:
        """Go on with other settings."""
        self._settings = settings
        self._told_in_panic = told_in_panic

    @property
    def has_quorum(self) -> bool:
        """Whether enough nodes voted when the bars were computed last."""
        return bool(self.state.levels.quorum_met[0])

    @property
    def is_waiting(self) -> bool:
        """Whether there is a quorum whose first bar is not told yet."""
        levels = self.state.levels
        return bool(np.any(levels.quorum_met & np.isnan(levels.settled)))

    def recompute(self, now_ns: int) -> None:
        """Compute the bars from the active nodes as they are now."""
        scores = self.scores
        rows = np.flatnonzero(scores.states == ReportedState.ACTIVE)
        self.active_rows = rows
        self.state = step_threshold(
            self.state,
            Scores(scores.scores[rows], scores.cohort_idx[rows], scores.cohort_names),
            now_ns,
            self._settings,
            is_complete=self.roll is not None and self.roll.is_complete,
        )
        if self.roll is not None and not np.isnan(self.state.levels.settled[0]):
            self.roll = None
        self.computed_ns, self.is_dirty = now_ns, False
        self.n_recomputes += 1
        self._tell(now_ns)

    def note_facts(self, facts: PushFacts, *, is_known_state: bool) -> None:
        """Keep what a node says of itself beside its score."""
        resource = facts.resource
        node_id = resource.node_id
        is_new = self.resources.get(node_id) is not resource
        if facts.info_point is not None and (is_new or node_id not in self.gpu_models):
            self.gpu_models[node_id] = intern(facts.gpu_model[:MAX_NAME_LENGTH])
        if is_new:
            self.resources[node_id] = resource
        if facts.workload_type != self.workloads.get(node_id, ""):
            self.workloads[node_id] = intern(facts.workload_type)
        if not is_known_state:
            self.other_states[node_id] = intern(facts.state[:MAX_NAME_LENGTH])
        elif self.other_states:
            self.other_states.pop(node_id, None)

    def forget(self, node_id: str) -> None:
        """Drop what a node said of itself."""
        for known in (self.resources, self.gpu_models, self.workloads, self.other_states):
            known.pop(node_id, None)
        if self.roll is not None:
            self.roll.forget(node_id)

    def is_heard_since(self, mono_ns: int, *, but: str) -> bool:
        """Whether every active node but one pushed after this moment."""
        is_late = (self.scores.states == ReportedState.ACTIVE) & (self.scores.seen_ns <= mono_ns)
        row = self.scores.find_row(but)
        return int(is_late.sum()) <= int(row is not None and is_late[row])

    def is_remembered(self, now_ns: int) -> bool:
        """Whether there is still a bar to tell, though no node may be left."""
        told = self._told
        return told.cluster is not None and now_ns - told.last_good_ns <= self._settings.ttl_ns

    def find_answer(self, node_id: str | None, cohort_hash: str, now_ns: int) -> PushAnswer | None:
        """What this node, cohort or cluster is told.

        The bar of the node's cohort where that has a quorum, else the cluster's. Without a quorum the last good bar,
        marked so, for one TTL; then None. During panic the same for everybody: nobody is to judge itself. Any thread.
        """
        told = self._told
        if told.cluster is None or (
            not told.quorum_met and now_ns - told.last_good_ns > self._settings.ttl_ns
        ):
            return None
        if told.instead is not None:
            return told.instead
        bar: PushAnswer | None = told.cluster
        if told.by_cohort:
            cohort = None if node_id is None else self.scores.find_cohort_of(node_id)
            if cohort is not None:
                bar = told.by_cohort.get(cohort.name, bar)
            elif cohort_hash:
                bar = told.by_hash.get(cohort_hash, bar)
        return bar

    def _tell(self, now_ns: int) -> None:
        levels = self.state.levels
        bar = float(levels.thresholds[0])
        if not levels.quorum_met[0]:
            if self._told.quorum_met:
                self._told = _without_quorum(self._told)
            return
        if np.isnan(bar):
            self._told = ThresholdAnswers()  # not settled yet, or too low to be spelled
            return
        by_cohort: dict[str, PushAnswer | None] = {}
        by_hash: dict[str, PushAnswer | None] = {}
        for index in np.flatnonzero(levels.quorum_met[1:]):
            cohort: Cohort = self.scores.cohorts[index]
            value = float(levels.thresholds[1 + index])
            answer = None if np.isnan(value) else PushAnswer(value, quorum_met=True)
            by_cohort[cohort.name] = by_hash[cohort.cgroup_path_hash] = answer
        uses = Counter(cohort.cgroup_path_hash for cohort in self.scores.cohorts)
        for cgroup_path_hash in [name for name in by_hash if uses[name] > 1]:
            del by_hash[cgroup_path_hash]
        self._told = ThresholdAnswers(
            quorum_met=True,
            cluster=PushAnswer(bar, quorum_met=True),
            by_cohort=by_cohort,
            by_hash=by_hash,
            last_good_ns=now_ns,
            instead=self._told_in_panic if self.state.in_panic else None,
        )


def _without_quorum(told: ThresholdAnswers) -> ThresholdAnswers:
    """The same bars, marked as the last good ones."""

    def mark(answers: Mapping[str, PushAnswer | None]) -> dict[str, PushAnswer | None]:
        return {
            name: None if answer is None else replace(answer, quorum_met=False)
            for name, answer in answers.items()
        }

    return replace(
        told,
        quorum_met=False,
        cluster=None if told.cluster is None else replace(told.cluster, quorum_met=False),
        by_cohort=mark(told.by_cohort),
        by_hash=mark(told.by_hash),
    )
