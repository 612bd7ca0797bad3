"""Asks why a culprit is slow and keeps what its agent answers: one question an episode, until it is answered.

An episode is the time for which a worker is called a culprit without a break of `REOPEN_NS`. The question rides on
every answer to a push of the worker's node, so that a lost answer or an agent that starts again is asked again.

Threads. The judge thread opens and ends episodes, pushes bring answers, answers to pushes look for a question.

Lossy: beyond `MAX_OPEN` episodes of a cluster nobody is asked, and after `ASK_NS` nobody is asked any more; both are
counted.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from ingero.fleet.processors.collectives import telemetry
from ingero.fleet.processors.collectives.engine import Conclusion
from ingero.model.collectives import Worker
from ingero.model.diagnosis import Diagnosis, DiagnosisRequest
from ingero.model.verdicts import Verdict
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_S
from ingero.wire.diagnosis import write_request

REOPEN_NS: Final = 60 * NS_PER_S
"""A culprit that is named again within this time is in the same episode."""
ASK_NS: Final = 300 * NS_PER_S
"""After this the question is given up: the agent is of an older version, or away."""
MAX_OPEN: Final = 256
"""Episodes of one cluster that wait for their answer."""


@dataclass(slots=True)
class CulpritEpisode:
    """One culprit.

    Attributes:
        id: Names it to the agent.
        verdict: As it was first.
        began_ns: Monotonic time.
        named_ns: When the worker was last called a culprit.
        diagnosis: What its agent answered; None before that.
        is_asked: Whether the question rides on answers.
    """

    id: str
    verdict: Verdict
    began_ns: int
    named_ns: int
    diagnosis: Diagnosis | None = None
    is_asked: bool = True

    @property
    def question(self) -> str:
        """What its agent is asked."""
        verdict, onset = self.verdict, self.verdict.onset
        own_ns = max(verdict.since_onset_ns, 1)
        request = DiagnosisRequest(
            self.id,
            verdict.rank.rank,
            verdict.rank.job,
            min(max(verdict.excess_ns / own_ns, 0.0001), 1.0),
            0 if onset is None else max(onset.entry_ns, 0),
        )
        return write_request(request)


@dataclass(slots=True)
class _ClusterEpisodes:
    by_worker: dict[Worker, CulpritEpisode] = field(default_factory=dict)
    questions: dict[str, str] = field(default_factory=dict)

    def update_questions(self) -> None:
        """One question a node: that of the episode that waits longest."""
        found: dict[str, str] = {}
        for worker, episode in self.by_worker.items():
            if episode.is_asked:
                found.setdefault(worker.node_id, episode.question)
        self.questions = found  # replaced as a whole: readers take no lock


class DiagnosisTracker:
    """Questions that wait and answers that came, by cluster; a `QuestionSource`."""

    def __init__(self, meter: MeterRegistry) -> None:
        self._lock = threading.Lock()
        self._clusters: dict[str, _ClusterEpisodes] = {}
        self._fresh: list[tuple[Verdict, Diagnosis]] = []
        counted = meter.counter(telemetry.DIAGNOSES)
        self.count = {
            outcome: counted.bound(outcome=outcome)
            for outcome in (
                "asked",
                "answered",
                "declined",
                "repeated",
                "refused",
                "unanswered",
                "over_cap",
            )
        }

    def find_question(self, cluster_id: str, node_id: str) -> str | None:
        """What to ask the agent of a node; None for nothing."""
        cluster = self._clusters.get(cluster_id)
        return None if cluster is None else cluster.questions.get(node_id)

    def note(self, conclusions: Mapping[str, Conclusion], now_ns: int) -> None:
        """Open an episode for each new culprit and end those that are over."""
        with self._lock:
            for cluster_id in self._clusters.keys() - conclusions.keys():
                del self._clusters[cluster_id]
            for cluster_id, conclusion in conclusions.items():
                culprits = conclusion.judgement.culprits
                if culprits or cluster_id in self._clusters:
                    cluster = self._clusters.setdefault(cluster_id, _ClusterEpisodes())
                    self._note_cluster(cluster, culprits, now_ns)

    def _note_cluster(
        self, cluster: _ClusterEpisodes, culprits: Iterable[Verdict], now_ns: int
    ) -> None:
        for verdict in culprits:
            known = cluster.by_worker.get(verdict.rank.worker)
            if known is not None:
                known.named_ns = now_ns
                continue
            is_asked = sum(one.is_asked for one in cluster.by_worker.values()) < MAX_OPEN
            episode = CulpritEpisode(
                secrets.token_hex(8), verdict, now_ns, now_ns, is_asked=is_asked
            )
            cluster.by_worker[verdict.rank.worker] = episode
            self.count["asked" if is_asked else "over_cap"](1)
        for worker, episode in list(cluster.by_worker.items()):
            is_over = now_ns - episode.named_ns >= REOPEN_NS
            if episode.is_asked and (is_over or now_ns - episode.began_ns >= ASK_NS):
                episode.is_asked = False
                self.count["unanswered"](1)
            if is_over:
                del cluster.by_worker[worker]
        cluster.update_questions()

    def take(self, diagnoses: Iterable[Diagnosis]) -> tuple[int, str]:
        """Keep answers to our questions; returns how many were refused and why the last of them was."""
        n_refused, why = 0, ""
        with self._lock:
            for diagnosis in diagnoses:
                problem = self._take_one(diagnosis)
                if problem:
                    self.count["refused"](1)
                    n_refused, why = n_refused + 1, problem
        return n_refused, why

    def _take_one(self, diagnosis: Diagnosis) -> str:
        cluster = self._clusters.get(diagnosis.rank.cluster_id)
        episode = None if cluster is None else cluster.by_worker.get(diagnosis.rank.worker)
        if cluster is None or episode is None or episode.id != diagnosis.id:
            return (
                f"a diagnosis that nobody asked for: {diagnosis.id} of {diagnosis.rank.node_id:.60}"
            )
        if episode.diagnosis is not None:
            self.count["repeated"](1)
            return ""
        episode.diagnosis, episode.is_asked = diagnosis, False
        self.count["declined" if diagnosis.declined else "answered"](1)
        self._fresh.append((episode.verdict, diagnosis))
        cluster.update_questions()
        return ""

    def pop_fresh(self) -> list[tuple[Verdict, Diagnosis]]:
        """Answers since the last time, each with the verdict it explains."""
        with self._lock:
            fresh, self._fresh = self._fresh, []
        return fresh

    def find(self, cluster_id: str) -> dict[Worker, Diagnosis]:
        """What is known of each worker of a cluster."""
        with self._lock:
            cluster = self._clusters.get(cluster_id, _ClusterEpisodes())
            return {
                worker: episode.diagnosis
                for worker, episode in cluster.by_worker.items()
                if episode.diagnosis is not None
            }
