"""Asks why a worker, a link or a stage is slow, or a rank that others wait for stands; keeps the answers.

One question an episode, until it is answered.

An episode is the time for which a worker is called a culprit or an end of a slow link, or others wait for it, without
a break of `REOPEN_NS`. Of peers that are slow in turns, and of a stage that works longer than the others, one is asked:
the one that worked longest at first.

The question rides on every answer to a push of the node, so that a lost answer, or an agent that starts again, is asked
again.

Threads. The judge thread opens and ends episodes, pushes bring answers, answers to pushes look for a question.

Lossy: beyond `MAX_OPEN` episodes of a cluster nobody is asked, and after `ASK_NS` nobody is asked any more; both are
counted.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from ingero.fleet.processors.collectives import telemetry
from ingero.fleet.processors.collectives.conclusions import Conclusion
from ingero.model.collectives import Rank, Worker
from ingero.model.counters import WorkRates
from ingero.model.diagnosis import Diagnosis, DiagnosisRequest, PeerWork, Subject
from ingero.model.hang import HangCause, HangReport, HangRoot
from ingero.model.verdicts import IMBALANCES, Verdict, VerdictKind
from ingero.recording.causal.work_rates import find_median
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_S
from ingero.wire.diagnosis import write_request

REOPEN_NS: Final = 60 * NS_PER_S
"""A culprit that is named again within this time is in the same episode."""
SETTLED_NS: Final = 10 * NS_PER_S
"""Peers that are slow in turns, or as a stage, for so long are asked about it."""
ASK_NS: Final = 300 * NS_PER_S
"""After this the question is given up: the agent is of an older version, or away."""
AGAIN_NS: Final = 1200 * NS_PER_S
"""After this an agent that declined is asked again: it may follow the rank by then, and looks three times an hour."""
MAX_OPEN: Final = 256
"""Episodes of one cluster that wait for their answer."""
N_PEERS: Final = 3
"""Peers with whose work a culprit's is compared."""


@dataclass(slots=True)
class NamedEpisode:
    """A culprit, an end of a slow link, a rank that others wait for, or one of peers that are slow together.

    Attributes:
        id: Names it to the agent.
        named: The verdict or the root of the hang, as it was first.
        asked_ns: Since when its agent is asked.
        named_ns: When the worker was last named.
        diagnosis: What its agent answered last; None before that.
        is_asked: Whether the question rides on answers.
        others: Of a slow stage those that do not belong to it: with them it was compared.
        local_peers: Ranks on its node that it was compared with; its agent knows their work.
        peers_work: Where there are none, such workers of other nodes, with what their agents answered.
    """

    id: str
    named: Verdict | HangRoot
    asked_ns: int
    named_ns: int
    diagnosis: Diagnosis | None = None
    is_asked: bool = True
    others: tuple[Rank, ...] = ()
    local_peers: tuple[int, ...] = ()
    peers_work: dict[Worker, WorkRates | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.named, HangRoot) or self.about is not Subject.SLOW:
            return
        rank, waited = self.named.rank, set(self.named.victims)
        compared = self.others or self.named.peers
        peers = [one for one in compared if one.worker != rank.worker]
        peers.sort(key=lambda one: one not in waited)  # one that waited is not slow itself
        here = [one.rank for one in peers if (one.node_id, one.job) == (rank.node_id, rank.job)]
        self.local_peers = tuple(number for number in here if number >= 0)[:N_PEERS]
        if not self.local_peers:
            by_node: dict[str, Worker] = {}
            for one in peers:
                by_node.setdefault(one.node_id, one.worker)
            by_node.pop(rank.node_id, None)
            self.peers_work = dict.fromkeys(list(by_node.values())[:N_PEERS])

    @property
    def about(self) -> Subject:
        """What its agent is asked about."""
        return _subject_of(self.named)

    @property
    def question(self) -> str:
        """What its agent is asked."""
        if isinstance(self.named, HangRoot):
            root = self.named
            return write_request(DiagnosisRequest(self.id, root.rank, root.job, 0.0, 0, self.about))
        if self.about is not Subject.SLOW:
            rank = self.named.rank
            return write_request(DiagnosisRequest(self.id, rank.rank, rank.job, 0.0, 0, self.about))
        verdict, onset = self.named, self.named.onset
        own_ns = max(verdict.since_onset_ns, 1)
        known = [rates for rates in self.peers_work.values() if rates is not None]
        request = DiagnosisRequest(
            self.id,
            verdict.rank.rank,
            verdict.rank.job,
            min(max(verdict.excess_ns / own_ns, 0.0001), 1.0),
            0 if onset is None else max(onset.entry_ns, 0),
            peers=self.local_peers,
            peers_work=find_median(known),
            is_work_asked=bool(self.peers_work) and not known,
        )
        return write_request(request)

    def can_be_asked_again(self, now_ns: int) -> bool:
        """Whether its agent declined, long enough ago."""
        has_declined = self.diagnosis is not None and bool(self.diagnosis.declined)
        return has_declined and not self.is_asked and now_ns - self.asked_ns >= AGAIN_NS

    def ask_again(self, now_ns: int) -> None:
        """By another id: the agent has answered what it was asked."""
        self.id, self.asked_ns, self.is_asked = secrets.token_hex(8), now_ns, True

    def list_questions(self) -> Iterator[tuple[str, str]]:
        """Nodes of its peers whose work is not known, each with what its agent is asked."""
        for peer, rates in self.peers_work.items():
            if rates is None:
                request = DiagnosisRequest(self.id, peer.rank, peer.job, 0.0, 0, Subject.WORK)
                yield peer.node_id, write_request(request)


_SUBJECTS: Final = {
    VerdictKind.NETWORK: Subject.LINK,
    VerdictKind.IMBALANCE_DATA: Subject.UNEVEN,
}
"""What is asked of a worker with a verdict of that kind; of others why it is slow."""

_Key = tuple[Worker, Subject | VerdictKind]
"""A worker, and what its agent is asked about. That it is slow and that its stage is are two questions."""
_TOPICS: Final = (*Subject, VerdictKind.IMBALANCE_STAGE)
_LAST: Final = (Subject.UNEVEN, VerdictKind.IMBALANCE_STAGE)
_ALIKE: Final = (VerdictKind.ORDINARY, VerdictKind.VICTIM)


def _subject_of(named: Verdict | HangRoot) -> Subject:
    if isinstance(named, HangRoot):
        return Subject.HANG
    return _SUBJECTS.get(named.kind, Subject.SLOW)


def _key_of(named: Verdict | HangRoot) -> _Key:
    if isinstance(named, HangRoot):
        return Worker(named.node_id, named.job, named.rank), Subject.HANG
    if named.kind is VerdictKind.IMBALANCE_STAGE:
        return named.rank.worker, named.kind
    return named.rank.worker, _subject_of(named)


@dataclass(slots=True)
class _ClusterEpisodes:
    """What is known of one cluster.

    Attributes:
        by_key: Open episodes.
        questions: What the next answer to each node asks.
        together_ns: Since when peers are slow in turns, or as a stage, without a break, by the first of them.
    """

    by_key: dict[_Key, NamedEpisode] = field(default_factory=dict)
    questions: dict[str, str] = field(default_factory=dict)
    together_ns: dict[_Key, int] = field(default_factory=dict)

    @property
    def has_room(self) -> bool:
        """Whether one more may be asked."""
        return sum(one.is_asked for one in self.by_key.values()) < MAX_OPEN

    def pick_members(self, verdicts: Iterable[Verdict], now_ns: int) -> list[Verdict]:
        """Of peers that are slow together for `SETTLED_NS` one: the one asked already, else that which worked longest.

        A job that starts is uneven for some seconds, and that is no question.
        """
        groups: dict[_Key, list[Verdict]] = {}
        for verdict in verdicts:
            if verdict.kind in IMBALANCES and verdict.peers:
                groups.setdefault((verdict.peers[0].worker, verdict.kind), []).append(verdict)
        self.together_ns = {first: self.together_ns.get(first, now_ns) for first in groups}
        return [
            max(members, key=lambda one: (_key_of(one) in self.by_key, one.own_ns))
            for first, members in groups.items()
            if now_ns - self.together_ns[first] >= SETTLED_NS
        ]

    def update_questions(self) -> None:
        """One question a node: that of the episode that waits longest, else one for another's episode.

        What peers have in common comes last: it is no single node's fault.
        """
        found: dict[str, str] = {}
        waiting = [(key, one) for key, one in self.by_key.items() if one.is_asked]
        asked = dict(sorted(waiting, key=lambda item: item[0][1] in _LAST))
        for (worker, _), episode in asked.items():
            found.setdefault(worker.node_id, episode.question)
        for episode in asked.values():
            for node_id, question in episode.list_questions():
                found.setdefault(node_id, question)
        self.questions = found  # replaced as a whole: readers take no lock


class DiagnosisTracker:
    """Questions that wait and answers that came, by cluster; a `QuestionSource`."""

    def __init__(self, meter: MeterRegistry) -> None:
        self._lock = threading.Lock()
        self._clusters: dict[str, _ClusterEpisodes] = {}
        self._fresh: list[tuple[Verdict | HangRoot, Diagnosis]] = []
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

    def note(
        self,
        conclusions: Mapping[str, Conclusion],
        hangs: Mapping[str, tuple[HangReport, float]],
        now_ns: int,
    ) -> None:
        """Open an episode for each worker or end of a link that is newly named, and end those that are over.

        Args:
            conclusions: Of each cluster; one that is absent here and in ``hangs`` is forgotten.
            hangs: Whom its ranks wait for, and for how many seconds.
            now_ns: Monotonic time.
        """
        with self._lock:
            for cluster_id in self._clusters.keys() - conclusions.keys() - hangs.keys():
                del self._clusters[cluster_id]
            for cluster_id in conclusions.keys() | hangs.keys():
                named: list[Verdict | HangRoot] = []
                verdicts: tuple[Verdict, ...] = ()
                cluster = self._clusters.get(cluster_id) or _ClusterEpisodes()
                if cluster_id in conclusions:
                    verdicts = conclusions[cluster_id].judgement.verdicts
                    named += [verdict for verdict in verdicts if verdict.is_alarm]
                    named += cluster.pick_members(verdicts, now_ns)
                if cluster_id in hangs:
                    named += [root for root in hangs[cluster_id][0].roots if _can_be_asked(root)]
                if named or cluster.together_ns or cluster_id in self._clusters:
                    self._clusters[cluster_id] = cluster
                    self._note_cluster(cluster, named, verdicts, now_ns)

    def _note_cluster(
        self,
        cluster: _ClusterEpisodes,
        named: Iterable[Verdict | HangRoot],
        verdicts: Iterable[Verdict],
        now_ns: int,
    ) -> None:
        for one in named:
            known = cluster.by_key.get(_key_of(one))
            if known is not None:
                known.named_ns = now_ns
                continue
            is_asked = cluster.has_room
            others = _find_other_stages(one, verdicts)
            episode = NamedEpisode(
                secrets.token_hex(8), one, now_ns, now_ns, is_asked=is_asked, others=others
            )
            cluster.by_key[_key_of(one)] = episode
            self.count["asked" if is_asked else "over_cap"](1)
        for key, episode in list(cluster.by_key.items()):
            is_over = now_ns - episode.named_ns >= REOPEN_NS
            if episode.is_asked and (is_over or now_ns - episode.asked_ns >= ASK_NS):
                episode.is_asked = False
                self.count["unanswered"](1)
            if is_over:
                del cluster.by_key[key]
            elif episode.can_be_asked_again(now_ns) and cluster.has_room:
                episode.ask_again(now_ns)
                self.count["asked"](1)
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
        worker = diagnosis.rank.worker
        keys = [(worker, about) for about in _TOPICS]
        known = () if cluster is None else map(cluster.by_key.get, keys)
        episode = next((one for one in known if one is not None and one.id == diagnosis.id), None)
        if cluster is None or episode is None:
            return (
                f"a diagnosis that nobody asked for: {diagnosis.id} of {diagnosis.rank.node_id:.60}"
            )
        if episode.diagnosis is not None and not episode.is_asked:
            self.count["repeated"](1)
            return ""
        episode.diagnosis, episode.is_asked = diagnosis, False
        self.count["declined" if diagnosis.declined else "answered"](1)
        self._fresh.append((episode.named, diagnosis))
        cluster.update_questions()
        return ""

    def take_work(self, answers: Iterable[PeerWork]) -> tuple[int, str]:
        """Keep what peers' agents answered; returns how many were refused and why the last of them was."""
        n_refused, why = 0, ""
        with self._lock:
            for answer in answers:
                cluster = self._clusters.get(answer.rank.cluster_id, _ClusterEpisodes())
                worker = answer.rank.worker
                asking = [
                    one
                    for one in cluster.by_key.values()
                    if one.id == answer.id and worker in one.peers_work
                ]
                for episode in asking:
                    episode.peers_work[worker] = answer.rates
                    cluster.update_questions()
                if not asking:
                    self.count["refused"](1)
                    n_refused += 1
                    why = f"work that nobody asked for: {answer.id} of {answer.rank.node_id:.60}"
        return n_refused, why

    def pop_fresh(self) -> list[tuple[Verdict | HangRoot, Diagnosis]]:
        """Answers since the last time, each with the verdict or the root of a hang that it explains."""
        with self._lock:
            fresh, self._fresh = self._fresh, []
        return fresh

    def find_in_hang(self, cluster_id: str) -> dict[Worker, Diagnosis]:
        """What is known of each worker of a cluster that others wait for."""
        with self._lock:
            cluster = self._clusters.get(cluster_id, _ClusterEpisodes())
            return {
                worker: episode.diagnosis
                for (worker, about), episode in cluster.by_key.items()
                if episode.diagnosis is not None and about is Subject.HANG
            }

    def find_of(self, verdicts: Iterable[Verdict]) -> dict[Worker, Diagnosis]:
        """What is known of workers, each about what its verdict is now; nothing of one that says nothing to explain.

        An episode is kept for `REOPEN_NS` after its worker was named last. What was answered in it is old by then.
        """
        found = {}
        with self._lock:
            for verdict in verdicts:
                if not (verdict.is_alarm or verdict.kind in IMBALANCES):
                    continue
                cluster = self._clusters.get(verdict.rank.cluster_id, _ClusterEpisodes())
                episode = cluster.by_key.get(_key_of(verdict))
                if episode is not None and episode.diagnosis is not None:
                    found[verdict.rank.worker] = episode.diagnosis
        return found


def _can_be_asked(root: HangRoot) -> bool:
    """Whether there is a process to look at, and a node whose agent can."""
    return bool(root.node_id) and root.cause is not HangCause.ENDED


def _find_other_stages(named: Verdict | HangRoot, verdicts: Iterable[Verdict]) -> tuple[Rank, ...]:
    """Whom a member of a slow stage is compared with; nobody for what is no slow stage."""
    if isinstance(named, HangRoot) or named.kind is not VerdictKind.IMBALANCE_STAGE:
        return ()
    stage = {one.worker for one in named.peers}
    return tuple(
        one.rank for one in verdicts if one.kind in _ALIKE and one.rank.worker not in stage
    )
