"""One cluster: its scores, its thresholds, its episodes.

Above scores and episodes, below the registry that holds every cluster. The statistics themselves are
`ingero.detect.threshold`; this keeps their state between pushes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from sys import intern
from typing import Final

import numpy as np

from ingero.detect.threshold import (
    STRICTNESS,
    Scores,
    ThresholdSettings,
    ThresholdState,
    step_threshold,
)
from ingero.fleet.component import WITHHELD, Hardware, PushAnswer
from ingero.fleet.processors.peer_threshold.answers import ThresholdAnswers
from ingero.fleet.processors.peer_threshold.episodes import EpisodeTracker
from ingero.fleet.processors.peer_threshold.scores import ClusterScores, ReportedState
from ingero.model.arrays import IntArray
from ingero.wire.names import MAX_ID_LENGTH
from ingero.wire.push import PushFacts, ResourceFacts

RECOVERED_ABOVE: Final = 0.02
"""How far over its threshold a straggler is well again: the hysteresis that agents have when nothing else is set."""
RECOVERED_INTERVALS: Final = 3
"""Push intervals of such scores that end an episode without a word of the agent, which repeats itself in each."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """How one cluster is judged and answered.

    Attributes:
        threshold: Of the statistics.
        panic_answer: What every node is answered during panic.
    """

    threshold: ThresholdSettings
    panic_answer: PushAnswer = WITHHELD


class NodeDescriptions:
    """What each node of a cluster says of itself beside its score. Not thread-safe, but for `find_hardware`.

    Attributes:
        resources: Its identity, from its latest push.
        workloads: What it works on, where it says so.
        other_states: The state that it gave, where that is none of `ReportedState`.
    """

    __slots__ = ("_gpu_models", "other_states", "resources", "workloads")

    def __init__(self) -> None:
        self.resources: dict[str, ResourceFacts] = {}
        self.workloads: dict[str, str] = {}
        self.other_states: dict[str, str] = {}
        self._gpu_models: dict[str, str] = {}

    def note(self, facts: PushFacts, *, is_known_state: bool) -> None:
        """Keep what a push says."""
        resource = facts.resource
        node_id = resource.node_id
        is_new = self.resources.get(node_id) is not resource
        if facts.info_point is not None and (is_new or node_id not in self._gpu_models):
            self._gpu_models[node_id] = intern(facts.gpu_model[:MAX_ID_LENGTH])
        if is_new:
            self.resources[node_id] = resource
        if facts.workload_type != self.workloads.get(node_id, ""):
            self.workloads[node_id] = intern(facts.workload_type)
        if not is_known_state:
            self.other_states[node_id] = intern(facts.state[:MAX_ID_LENGTH])
        elif self.other_states:
            self.other_states.pop(node_id, None)

    def forget(self, node_id: str) -> None:
        """Drop a node."""
        known: Mapping[str, object]
        for known in (self.resources, self._gpu_models, self.workloads, self.other_states):
            known.pop(node_id, None)

    def find_hardware(self, node_id: str) -> Hardware | None:
        """What a node computes with; None for an unknown node. Any thread."""
        resource = self.resources.get(node_id)
        if resource is None:
            return None
        return Hardware(resource.provider, self._gpu_models.get(node_id, ""))


class FirstReports:
    """Whether every node reported again since the newest one joined: then no further node is expected to join.

    Not thread-safe; of use until a cluster has its first threshold.
    """

    __slots__ = ("_n_again", "_n_joined", "_seen_at")

    def __init__(self) -> None:
        self._n_joined = 0
        self._n_again = 0
        self._seen_at: dict[str, int] = {}

    def note(self, node_id: str) -> None:
        """Note that a node reported."""
        seen_at = self._seen_at.get(node_id)
        if seen_at is None:
            self._n_joined += 1  # from now on every node has to report again
            self._n_again = 0
            self._seen_at[node_id] = 0
        elif seen_at != self._n_joined:
            self._seen_at[node_id] = self._n_joined
            self._n_again += 1

    def forget(self, node_id: str) -> None:
        """A node is gone."""
        seen_at = self._seen_at.pop(node_id, None)
        self._n_again -= seen_at == self._n_joined

    @property
    def is_complete(self) -> bool:
        """Whether every node that reported did so again."""
        return 0 < len(self._seen_at) == self._n_again


class ClusterState:
    """State of one cluster. Not thread-safe except `find_answer`; the registry locks.

    Attributes:
        cluster_id: Its name.
        settings: How it is judged and answered.
        scores: The latest report of each node.
        nodes: What each node says of itself.
        episodes: Its straggler episodes.
        state: What `step_threshold` returned last.
        active_rows: Rows of ``scores`` that ``state`` is about, in its order.
        computed_ns: Monotonic time at which that was; 0 before the first time.
        is_dirty: A push or an expiry since then changes the result.
        panic_wall_ns: When the panic that holds began; None without one.
        first_reports: Until the first threshold is settled; None since.
    """

    __slots__ = (
        "_answers",
        "active_rows",
        "cluster_id",
        "computed_ns",
        "episodes",
        "first_reports",
        "is_dirty",
        "nodes",
        "panic_wall_ns",
        "scores",
        "settings",
        "state",
    )

    def __init__(self, cluster_id: str, settings: ClusterSettings) -> None:
        self.cluster_id: Final = cluster_id
        self.settings = settings
        self.scores = ClusterScores()
        self.nodes = NodeDescriptions()
        self.episodes = EpisodeTracker(cluster_id)
        self.state = ThresholdState()
        self.active_rows: IntArray = np.zeros(0, np.int64)
        self.computed_ns = 0
        self.is_dirty = False
        self.panic_wall_ns: int | None = None
        self.first_reports: FirstReports | None = FirstReports()
        self._answers = ThresholdAnswers()

    @property
    def has_quorum(self) -> bool:
        """Whether enough nodes voted when the thresholds were computed last."""
        return bool(self.state.levels.quorum_met[0])

    @property
    def is_waiting(self) -> bool:
        """Whether there is a quorum whose first threshold is not settled yet."""
        levels = self.state.levels
        return bool(np.any(levels.quorum_met & np.isnan(levels.settled)))

    def recompute(self, now_ns: int) -> None:
        """Compute the thresholds from the active nodes as they are now."""
        scores = self.scores
        rows = np.flatnonzero(scores.states == ReportedState.ACTIVE)
        self.active_rows = rows
        self.state = step_threshold(
            self.state,
            Scores(scores.scores[rows], scores.cohort_idx[rows], scores.cohort_names),
            now_ns,
            self.settings.threshold,
            is_complete=self.first_reports is not None and self.first_reports.is_complete,
        )
        if self.first_reports is not None and not np.isnan(self.state.levels.settled[0]):
            self.first_reports = None
        self.computed_ns, self.is_dirty = now_ns, False
        panic_answer = self.settings.panic_answer
        self._answers = self._answers.update(self.state, scores.cohorts, now_ns, panic_answer)

    def expire(self, before_ns: int) -> list[str]:
        """Drop each node whose last push is older than ``before_ns``; returns their ids."""
        gone = self.scores.expire(before_ns)
        for node_id in gone:
            self.nodes.forget(node_id)
            if self.first_reports is not None:
                self.first_reports.forget(node_id)
        self.is_dirty = self.is_dirty or bool(gone)
        return gone

    def is_reported_since(self, mono_ns: int, *, but: str) -> bool:
        """Whether every active node but one pushed after this moment."""
        is_late = (self.scores.states == ReportedState.ACTIVE) & (self.scores.seen_ns <= mono_ns)
        row = self.scores.find_row(but)
        return int(is_late.sum()) <= int(row is not None and is_late[row])

    def is_recovered(self, node_id: str, score: float, now_ns: int) -> bool:
        """Note an active node's score; True when it ends the node's episode, though the agent said nothing of an end.

        Nothing is concluded in panic, nor without a quorum or a threshold: the wait starts again then.
        """
        if not self.episodes.is_open(node_id):
            return False
        answer = self.find_answer(node_id, "", now_ns)  # in panic one without a quorum
        bar = answer.threshold if answer is not None and answer.quorum_met else None
        is_good = bar is not None and score + STRICTNESS >= bar + RECOVERED_ABOVE
        good_ns = self.episodes.note_score(node_id, now_ns, is_good=is_good)
        return good_ns >= RECOVERED_INTERVALS * self.settings.threshold.push_interval_ns

    def is_remembered(self, now_ns: int) -> bool:
        """Whether there is still a threshold to answer with, though no node may be left."""
        answers, ttl_ns = self._answers, self.settings.threshold.ttl_ns
        return answers.cluster is not None and now_ns - answers.last_good_ns <= ttl_ns

    def find_answer(self, node_id: str | None, cohort_hash: str, now_ns: int) -> PushAnswer | None:
        """What this node, cohort or cluster is answered; None when there is no threshold. Any thread."""
        answers = self._answers
        if not answers.is_valid(now_ns, self.settings.threshold.ttl_ns):
            return None
        cohort = None
        if answers.by_cohort and node_id is not None:
            cohort = self.scores.find_cohort_of(node_id)
        return answers.find(cohort, cohort_hash)
