"""One cluster: its scores, its bars, its episodes, and the answer that each of its nodes is given.

Above scores and episodes, below the board that holds every cluster. The statistics themselves are
`ingero.detect.threshold`; this keeps their state between pushes and decides what is told when quorum is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ingero.detect.threshold import Scores, ThresholdSettings, ThresholdState, step_threshold
from ingero.fleet.component import PushAnswer
from ingero.fleet.processors.ingero.episodes import EpisodeBook
from ingero.fleet.processors.ingero.scores import ClusterScores, Cohort, NodeState
from ingero.wire.otlp.push import ResourceFacts


@dataclass(frozen=True, slots=True)
class Told:
    """The bars as nodes are told them, replaced as a whole, so that an answer needs no lock.

    Attributes:
        quorum_met: Of the cluster, when these were computed.
        cluster: What the cluster's nodes are told.
        by_cohort: What a cohort is told by its name, where it has a bar of its own.
        by_hash: The same by cgroup hash, where one workload type has it.
        last_good_ns: Monotonic time at which there last was a quorum.
    """

    quorum_met: bool = False
    cluster: PushAnswer | None = None
    by_cohort: Mapping[str, PushAnswer] = field(default_factory=dict)
    by_hash: Mapping[str, PushAnswer] = field(default_factory=dict)
    last_good_ns: int = 0


class ClusterBook:
    """State of one cluster. Not thread-safe except `find_answer`; the board locks.

    Attributes:
        cluster_id: Its name.
        scores: The latest report of each node.
        resources: Who each node says it is, from its latest push.
        gpu_models: What its GPUs are, where it said so.
        episodes: Stragglers' stories.
        state: What `step_threshold` returned last.
        active_rows: Rows of ``scores`` that ``state`` is about, in its order.
        computed_ns: When that was; 0 before the first time.
        is_dirty: A push or an expiry since then changes the result.
        n_recomputes: How often it was computed.
    """

    __slots__ = (
        "_settings",
        "_told",
        "active_rows",
        "cluster_id",
        "computed_ns",
        "episodes",
        "gpu_models",
        "is_dirty",
        "n_recomputes",
        "resources",
        "scores",
        "state",
    )

    def __init__(self, cluster_id: str, settings: ThresholdSettings) -> None:
        self.cluster_id: Final = cluster_id
        self.scores = ClusterScores()
        self.resources: dict[str, ResourceFacts] = {}
        self.gpu_models: dict[str, str] = {}
        self.episodes = EpisodeBook(cluster_id)
        self.state = ThresholdState()
        self.active_rows: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.computed_ns = 0
        self.is_dirty = False
        self.n_recomputes = 0
        self._settings = settings
        self._told = Told()

    def recompute(self, now_ns: int) -> None:
        """Compute the bars from the active nodes as they are now."""
        scores = self.scores
        rows = np.flatnonzero(scores.states == NodeState.ACTIVE)
        self.active_rows = rows
        self.state = step_threshold(
            self.state,
            Scores(scores.scores[rows], scores.cohort_idx[rows], scores.cohort_names),
            now_ns,
            self._settings,
        )
        self.computed_ns, self.is_dirty = now_ns, False
        self.n_recomputes += 1
        self._tell(now_ns)

    def is_remembered(self, now_ns: int) -> bool:
        """Whether there is still a bar to tell, though no node may be left."""
        told = self._told
        return told.cluster is not None and now_ns - told.last_good_ns <= self._settings.ttl_ns

    def find_answer(self, node_id: str | None, cohort_hash: str, now_ns: int) -> PushAnswer | None:
        """What this node, cohort or cluster is told.

        The bar of the node's cohort where that has a quorum, else the cluster's. Without a quorum the last good bar,
        marked so, for one TTL; then None. Any thread.
        """
        told = self._told
        if told.cluster is None or (
            not told.quorum_met and now_ns - told.last_good_ns > self._settings.ttl_ns
        ):
            return None
        bar = told.cluster
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
        if not levels.quorum_met[0] or np.isnan(bar):
            if self._told.quorum_met:
                self._told = _without_quorum(self._told)
            return
        by_cohort: dict[str, PushAnswer] = {}
        by_hash: dict[str, PushAnswer] = {}
        for index in np.flatnonzero(levels.quorum_met[1:]):
            cohort: Cohort = self.scores.cohorts[index]
            answer = PushAnswer(float(levels.thresholds[1 + index]), quorum_met=True)
            by_cohort[cohort.name] = by_hash[cohort.cgroup_path_hash] = answer
        uses = Counter(cohort.cgroup_path_hash for cohort in self.scores.cohorts)
        for cgroup_path_hash in [name for name in by_hash if uses[name] > 1]:
            del by_hash[cgroup_path_hash]
        self._told = Told(
            quorum_met=True,
            cluster=PushAnswer(bar, quorum_met=True),
            by_cohort=by_cohort,
            by_hash=by_hash,
            last_good_ns=now_ns,
        )


def _without_quorum(told: Told) -> Told:
    """The same bars, marked as the last good ones."""

    def mark(answers: Mapping[str, PushAnswer]) -> dict[str, PushAnswer]:
        return {name: replace(answer, quorum_met=False) for name, answer in answers.items()}

    return replace(
        told,
        quorum_met=False,
        cluster=None if told.cluster is None else replace(told.cluster, quorum_met=False),
        by_cohort=mark(told.by_cohort),
        by_hash=mark(told.by_hash),
    )
