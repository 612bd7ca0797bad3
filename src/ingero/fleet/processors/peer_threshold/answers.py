"""The thresholds of one cluster as answers to its nodes, replaced as a whole, so that an answer needs no lock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ingero.detect.threshold import ThresholdState
from ingero.fleet.component import PushAnswer
from ingero.fleet.processors.peer_threshold.scores import Cohort

Answers = Mapping[str, PushAnswer | None]


@dataclass(frozen=True, slots=True)
class ThresholdAnswers:
    """What nodes are answered.

    Attributes:
        quorum_met: Of the cluster, when these were computed.
        cluster: For nodes whose cohort has no threshold of its own; None where there is nothing to answer.
        by_cohort: By a cohort's name, where it has a threshold of its own.
        by_hash: The same by cgroup hash, where one workload type has it.
        last_good_ns: Monotonic time at which there last was a quorum.
        instead: For all nodes instead of the above, during panic.
    """

    quorum_met: bool = False
    cluster: PushAnswer | None = None
    by_cohort: Answers = field(default_factory=dict)
    by_hash: Answers = field(default_factory=dict)
    last_good_ns: int = 0
    instead: PushAnswer | None = None

    def is_valid(self, now_ns: int, ttl_ns: int) -> bool:
        """Whether there is an answer: without a quorum the last good one is, for one TTL."""
        return self.cluster is not None and (
            self.quorum_met or now_ns - self.last_good_ns <= ttl_ns
        )

    def find(self, cohort: Cohort | None, cohort_hash: str) -> PushAnswer | None:
        """The answer for a node of this cohort, else for this cgroup hash, else for the cluster.

        During panic the same for all nodes, because no node is to judge itself. None where a cohort's threshold is too
        low to be written.
        """
        if self.instead is not None or not self.by_cohort:
            return self.instead or self.cluster
        if cohort is not None:
            return self.by_cohort.get(cohort.name, self.cluster)
        return self.by_hash.get(cohort_hash, self.cluster) if cohort_hash else self.cluster

    def update(
        self,
        state: ThresholdState,
        cohorts: Sequence[Cohort],
        now_ns: int,
        panic_answer: PushAnswer,
    ) -> ThresholdAnswers:
        """The answers that follow these.

        Args:
            state: What was computed now.
            cohorts: The cohorts that ``state`` is about, in its order.
            now_ns: Monotonic time.
            panic_answer: The answer while ``state`` is a panic.
        """
        levels = state.levels
        if not levels.quorum_met[0]:
            return self._mark_without_quorum() if self.quorum_met else self
        if np.isnan(levels.thresholds[0]):
            return ThresholdAnswers()  # not settled yet, or too low to be written
        by_cohort: dict[str, PushAnswer | None] = {}
        by_hash: dict[str, PushAnswer | None] = {}
        for index in np.flatnonzero(levels.quorum_met[1:]):
            cohort = cohorts[int(index)]
            value = float(levels.thresholds[1 + index])
            answer = None if np.isnan(value) else PushAnswer(value, quorum_met=True)
            by_cohort[cohort.name] = by_hash[cohort.cgroup_path_hash] = answer
        uses = Counter(cohort.cgroup_path_hash for cohort in cohorts)
        return ThresholdAnswers(
            quorum_met=True,
            cluster=PushAnswer(float(levels.thresholds[0]), quorum_met=True),
            by_cohort=by_cohort,
            by_hash={name: answer for name, answer in by_hash.items() if uses[name] == 1},
            last_good_ns=now_ns,
            instead=panic_answer if state.in_panic else None,
        )

    def _mark_without_quorum(self) -> ThresholdAnswers:
        def mark(answers: Answers) -> Answers:
            return {name: one and replace(one, quorum_met=False) for name, one in answers.items()}

        return replace(
            self,
            quorum_met=False,
            cluster=self.cluster and replace(self.cluster, quorum_met=False),
            by_cohort=mark(self.by_cohort),
            by_hash=mark(self.by_hash),
        )
