"""Follows findings over polls: which episode a culprit belongs to, how long it has lasted, whether its rank works."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from ingero.model.collectives import Worker
from ingero.model.verdicts import Verdict, VerdictKind
from ingero.remediation.findings import ClusterReading, CulpritFinding, group_by_node
from ingero.remediation.records import FindingRecord, Moment
from ingero.units import NS_PER_S

BREAK_NS: Final = 600 * NS_PER_S
"""A culprit that comes back within this belongs to the same episode."""
NodeKey = tuple[str, str]
_ORDINARY: Final = frozenset({VerdictKind.ORDINARY, VerdictKind.VICTIM})
"""Verdicts that hold nothing against a rank."""


@dataclass(slots=True)
class _Followed:
    """One node's episode.

    Attributes:
        episode: Its id.
        opened_wall_ns: When it began.
        missed_ns: Monotonic time of the last poll at which it was known.
        seen_ns: Since when it has been a culprit without a break; None while it is not.
        progressed_ns: When its rank was last seen to have worked.
        n_ops: Operations of the rank by then.
        rank: Which rank; another one starts over.
        verdict: The last.
    """

    episode: str
    opened_wall_ns: int
    missed_ns: int
    seen_ns: int | None = None
    progressed_ns: int | None = None
    n_ops: int = -1
    rank: object = None
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class _AtWork:
    """A rank against which nothing is held.

    Attributes:
        since_ns: Monotonic time since which that is so, and it has been at work without a break.
        worked_ns: When it was last seen to have worked.
        n_ops: Its operations by then.
    """

    since_ns: int
    worked_ns: int
    n_ops: int


class CulpritTracker:
    """What has been seen of each node.

    Args:
        max_age_ns: A rank that has not worked for longer stands still.
    """

    def __init__(self, max_age_ns: int) -> None:
        self._max_age_ns = max_age_ns
        self._followed: dict[NodeKey, _Followed] = {}
        self._ordinary: dict[tuple[str, Worker], _AtWork] = {}

    def restore(self, records: Iterable[FindingRecord], now: Moment) -> None:
        """Take up the episodes that were open and not over since: their ids go on, their persistence starts over."""
        for record in records:
            missed_for_ns = max(0, now.wall_ns - record.judged_wall_ns)
            if record.is_open and missed_for_ns <= BREAK_NS:
                self._followed[record.cluster_id, record.node_id] = _Followed(
                    record.episode, record.opened_wall_ns, now.mono_ns - missed_for_ns
                )

    def break_off(self) -> None:
        """Fleet did not answer: nothing has lasted without a break."""
        self._ordinary.clear()
        for followed in self._followed.values():
            followed.seen_ns = followed.progressed_ns = None
            followed.n_ops = -1

    def update(self, clusters: Mapping[str, ClusterReading], now: Moment) -> list[CulpritFinding]:
        """Take one poll; the findings of now, one per node with a culprit.

        Args:
            clusters: What Fleet says; what it does not say any more is over.
            now: When.
        """
        culprits = dict(_iter_culprits(clusters))
        for key, followed in list(self._followed.items()):
            if key not in culprits:
                followed.seen_ns = followed.progressed_ns = None
                if now.mono_ns - followed.missed_ns > BREAK_NS:
                    del self._followed[key]
        self._follow_ordinary(clusters, now.mono_ns)
        return [self._follow(key, verdict, now) for key, verdict in culprits.items()]

    def _follow(self, key: NodeKey, verdict: Verdict, now: Moment) -> CulpritFinding:
        followed = self._followed.get(key)
        if followed is None:
            episode = _name_episode(key, verdict, now.wall_ns)
            followed = self._followed[key] = _Followed(episode, now.wall_ns, now.mono_ns)
        is_other = verdict.rank.worker != followed.rank or verdict.n_ops < followed.n_ops
        if followed.seen_ns is None or is_other:
            followed.seen_ns, followed.progressed_ns = now.mono_ns, None
        elif verdict.n_ops > followed.n_ops:
            followed.progressed_ns = now.mono_ns
        followed.rank, followed.n_ops, followed.verdict = (
            verdict.rank.worker,
            verdict.n_ops,
            verdict,
        )
        followed.missed_ns = now.mono_ns
        cluster_id, node_id = key
        return CulpritFinding(
            followed.episode, cluster_id, node_id, verdict, followed.seen_ns, followed.progressed_ns
        )

    def _follow_ordinary(self, clusters: Mapping[str, ClusterReading], now_ns: int) -> None:
        self._ordinary = {
            key: self._go_on(self._ordinary.get(key), verdict.n_ops, now_ns)
            for cluster_id, reading in clusters.items()
            if not reading.in_panic
            for verdict in reading.judgement.verdicts
            if verdict.kind in _ORDINARY
            for key in [(cluster_id, verdict.rank.worker)]
        }

    def _go_on(self, before: _AtWork | None, n_ops: int, now_ns: int) -> _AtWork:
        """What Fleet says of a rank that stands still is what it found earlier, however long it says so."""
        if before is None or n_ops < before.n_ops:
            return _AtWork(now_ns, now_ns, n_ops)
        if n_ops == before.n_ops:
            return before
        stood_still = now_ns - before.worked_ns > self._max_age_ns
        return _AtWork(now_ns if stood_still else before.since_ns, now_ns, n_ops)

    def retracted_for(self, cluster_id: str, workers: Collection[Worker]) -> int | None:
        """How long these ranks were seen at work without a break, with nothing held against one of them.

        None when there is none, or when Fleet does not say so of each.
        """
        found = [self._ordinary.get((cluster_id, worker)) for worker in workers]
        known = [one for one in found if one is not None]
        if not known or len(known) < len(found):
            return None
        return min(one.worked_ns for one in known) - max(one.since_ns for one in known)

    @property
    def open_episodes(self) -> Mapping[str, int]:
        """When each episode that is not over began, in nanoseconds since the epoch."""
        return {one.episode: one.opened_wall_ns for one in self._followed.values()}


def _iter_culprits(clusters: Mapping[str, ClusterReading]) -> Iterator[tuple[NodeKey, Verdict]]:
    for cluster_id, reading in clusters.items():
        for node_id, verdicts in group_by_node(reading.judgement).items():
            if verdicts[0].kind is VerdictKind.CULPRIT:
                yield (cluster_id, node_id), verdicts[0]


def _name_episode(key: NodeKey, verdict: Verdict, wall_ns: int) -> str:
    """The same for one onset of one rank, at every poll."""
    when = verdict.onset.entry_ns if verdict.onset else wall_ns
    text = "\0".join((*key, verdict.rank.job, str(verdict.rank.rank), str(when)))
    return "e" + hashlib.sha256(text.encode()).hexdigest()[:10]


def name_action(episode: str, node_id: str, count: int) -> str:
    """The id of the ``count``-th action on an episode."""
    return "a" + hashlib.sha256(f"{episode}\0{node_id}\0{count}".encode()).hexdigest()[:10]
