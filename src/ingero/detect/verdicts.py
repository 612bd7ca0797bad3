"""From evidence and waits to one verdict per worker, with costs that add up."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ingero.detect.charges import SlowSpan, align_spans, charge_wait, invert_charges
from ingero.detect.episodes import AlarmEpisode
from ingero.detect.evidence import WorkerEvidence
from ingero.detect.facts import Facts
from ingero.detect.findings import MIN_OPS, WorkerFinding, judge_alone, judge_links
from ingero.detect.groups import PeerGroup
from ingero.detect.left_behind import find_left_behind
from ingero.detect.member_readings import MemberReading
from ingero.detect.peers import role_of
from ingero.detect.ranks.settings import ALARM
from ingero.model.collectives import Rank
from ingero.model.verdicts import Bet, Judgement, Onset, Verdict, VerdictKind
from ingero.units import format_duration

ROTATING: Final = 0.5
"""Share of operations that must be spread out, and that no single worker may exceed as their slowest."""

_WHY_IN_TURNS: Final = "their work differs, or something holds now one back and now another"
_JUDGED: Final = frozenset({VerdictKind.CULPRIT, VerdictKind.DRAG, VerdictKind.NETWORK})


def natural_order(rank: Rank) -> tuple[tuple[tuple[str, int, str], ...], str, int, str]:
    """A sort key that puts ``stage 10`` behind ``stage 2``."""
    labels = tuple(
        (name, int(value) if value.isdecimal() else -1, value) for name, value in rank.labels
    )
    return labels, rank.job, rank.rank, rank.node_id


def build_judgements(
    facts: Facts, counts: Mapping[str, int], *, with_history: bool
) -> list[Judgement]:
    """One judgement per job, jobs and workers in natural order."""
    left = find_left_behind(facts)
    jobs = [
        _judge_job(facts, job, counts, left, with_history=with_history) for job in _find_jobs(facts)
    ]
    return sorted(
        jobs, key=lambda job: (job.cluster_id, [natural_order(v.rank) for v in job.verdicts[:1]])
    )


def _find_jobs(facts: Facts) -> list[list[int]]:
    """Workers that share communicators or peers, directly or through others."""
    parent = list(range(len(facts.workers)))

    def root(worker: int) -> int:
        while parent[worker] != worker:
            parent[worker] = parent[parent[worker]]
            worker = parent[worker]
        return worker

    groups = {id(w.group): w.group.members for w in facts.workers if w.group is not None}
    for members in (*facts.registry.members.values(), *groups.values()):
        for other in members[1:]:
            parent[root(other)] = root(members[0])
    jobs: dict[int, list[int]] = {}
    for worker in range(len(facts.workers)):
        jobs.setdefault(root(worker), []).append(worker)
    return [
        sorted(job, key=lambda worker: natural_order(facts.workers[worker].rank))
        for job in jobs.values()
    ]


def _judge_job(
    facts: Facts,
    job: list[int],
    counts: Mapping[str, int],
    left: Collection[int],
    *,
    with_history: bool,
) -> Judgement:
    groups = _find_groups(facts, job)
    members = _read_groups(facts, groups)
    findings = {w: judge_alone(facts, w, members, with_history=with_history) for w in job}
    for worker in job if not with_history else ():
        if worker in left:
            findings[worker] = WorkerFinding(VerdictKind.UNKNOWN, "its peers went on without it")
    for worker in job:
        if findings[worker].kind is VerdictKind.ORDINARY:
            findings[worker] = judge_links(facts, worker) or findings[worker]
    excess: Mapping[int, Sequence[SlowSpan]] = {
        worker: found.spans
        for worker, found in findings.items()
        if found.kind in _JUDGED and found.excess_ns > 0
    }
    lags_ns = {w: facts.clocks.read_lag(w) for w in excess if facts.has_reported_often(w)}
    excess = align_spans(excess, lags_ns, facts.patience_ns)
    charges = {w: _charge(facts, w, excess) for w in job}
    present = _find_groups(facts, [worker for worker in job if worker not in left])
    _judge_together(facts, job, present, findings, charges)
    shared = _Shared(charges, invert_charges(charges), _list_peers(facts, groups), members)
    verdicts = tuple(_verdict(facts, w, findings[w], shared) for w in job)
    total = sum(v.wait_ns * v.rank.n_gpus for v in verdicts)
    charged = sum(sum(v.charged_to.values()) * v.rank.n_gpus for v in verdicts)
    return Judgement(
        cluster_id=facts.workers[job[0]].rank.cluster_id,
        verdicts=verdicts,
        total_wait_gpu_ns=total,
        charged_gpu_ns=charged,
        unattributed_gpu_ns=total - charged,
        counts=dict(counts),
    )


def _charge(facts: Facts, worker: int, excess: Mapping[int, Sequence[SlowSpan]]) -> dict[int, int]:
    """To whom a worker's waiting is charged: of those with an excess, to whom it can have met."""
    here = facts.workers[worker]
    others = (w for w in excess if facts.met(here.seen_ns, facts.workers[w].seen_ns))
    return charge_wait(here.wait_ns, worker, {other: excess[other] for other in others})


def _find_groups(facts: Facts, job: Sequence[int]) -> dict[int, PeerGroup]:
    """The groups of a job's workers, by identity."""
    return {id(g): g for g in (facts.workers[w].group for w in job) if g is not None}


def _read_groups(facts: Facts, groups: Mapping[int, PeerGroup]) -> dict[int, MemberReading]:
    return {
        at: facts.evidence.read_members(group)
        for at, group in groups.items()
        if facts.evidence.of_group(group) is not None
    }


def _first_noticed_ns(evidence: WorkerEvidence, episode: AlarmEpisode) -> int:
    """When either tier's evidence first sufficed in what is one slowdown with this episode."""
    others = [*evidence.past, *evidence.current]
    cleared_ns = math.inf if episode.cleared_ns is None else episode.cleared_ns
    overlapping = [
        other.detected_ns
        for other in others
        if other is not None
        and other.detected_ns <= cleared_ns
        and (other.cleared_ns is None or other.cleared_ns >= episode.detected_ns)
    ]
    return min(overlapping, default=episode.detected_ns)


def _judge_together(
    facts: Facts,
    job: list[int],
    groups: Mapping[int, PeerGroup],
    findings: dict[int, WorkerFinding],
    charges: Mapping[int, Mapping[int, int]],
) -> None:
    """Turn ordinary workers into victims, or explain them by what their stage, data or cluster does."""
    explained = _explain_groups(facts, groups)
    slow_ns = {w: found.find_slow_ns(facts.workers[w].last_ns) for w, found in findings.items()}
    for worker in job:
        found = findings[worker]
        if found.kind is not VerdictKind.ORDINARY:
            continue
        charged = sum(charges[worker].values())
        known = facts.workers[worker]
        if charged > 0 and (
            charged >= facts.settings.notice_slowdown * known.span_ns
            or any(
                _is_hit(facts, worker, amount, slow_ns[other])
                for other, amount in charges[worker].items()
            )
        ):
            reason = f"own work is ordinary; waited {format_duration(charged)} for slower workers"
            findings[worker] = replace(found, kind=VerdictKind.VICTIM, reason=reason)
        elif id(known.group) in explained:
            findings[worker] = explained[id(known.group)].apply_to(found, known.own_ns)


def _is_hit(facts: Facts, worker: int, charged_ns: int, slow_ns: float) -> bool:
    """Whether a wait is worth naming: by the time for which the other was slow, however long the job ran before."""
    span_ns = min(facts.workers[worker].span_ns, slow_ns)
    return charged_ns >= facts.settings.notice_slowdown * span_ns


@dataclass(frozen=True, slots=True)
class _Explanation:
    """Why the members of a group are slow together or in turns.

    Attributes:
        kind: What it is.
        reason: One line for a person.
        excess_share: Of a stage that works longer than the others, the part of its own time beyond theirs.
    """

    kind: VerdictKind
    reason: str
    excess_share: float = 0.0

    def apply_to(self, found: WorkerFinding, own_ns: int) -> WorkerFinding:
        """The finding about a member that worked for so long in all."""
        known = replace(found, kind=self.kind, reason=self.reason)
        beyond_ns = round(self.excess_share * own_ns)
        return replace(known, excess_ns=beyond_ns, own_ns=own_ns) if beyond_ns else known


def _explain_groups(facts: Facts, groups: Mapping[int, PeerGroup]) -> dict[int, _Explanation]:
    """Groups whose members are slow together or in turns: identity of the group → why."""
    typical = {}
    for at, group in groups.items():
        evidence = facts.evidence.of_group(group)
        if evidence is not None and evidence.n_ops >= MIN_OPS:
            typical[at] = evidence.typical_ns
    explained: dict[int, _Explanation] = {}
    moved = {at: _against_past(facts, groups[at]) for at in typical}
    if moved and all(ratio >= 1.0 + facts.settings.alarm_slowdown for ratio in moved.values()):
        for at, ratio in moved.items():
            reason = f"everybody works {ratio:.2f}× as long as in the beginning"
            explained[at] = _Explanation(VerdictKind.CLUSTER, reason)
    for at in typical:
        reason = _find_rotation(facts, groups[at])
        if reason:
            explained[at] = _Explanation(VerdictKind.IMBALANCE_DATA, reason)
    for at, own in typical.items():
        others = [
            value
            for other, value in typical.items()
            if other != at and facts.met(groups[other].seen_ns, groups[at].seen_ns)
        ]
        usual = float(np.median(others)) if others else float(own)
        if usual and own >= (1.0 + facts.settings.alarm_slowdown) * usual:
            role = ", ".join(
                f"{name} {value}"
                for name, value in role_of(facts.workers[groups[at].members[0]].rank)
            )
            reason = (
                f"all of {role or 'its group'} work {own / usual:.2f}× as long as the other stages"
            )
            if moved[at] >= 1.0 + facts.settings.alarm_slowdown:
                reason += (
                    f", and {moved[at]:.2f}× as long as in the beginning: something changed there"
                )
            explained[at] = _Explanation(VerdictKind.IMBALANCE_STAGE, reason, 1.0 - usual / own)
    return explained


def _against_past(facts: Facts, group: PeerGroup) -> float:
    evidence = facts.evidence.of_group(group)
    return evidence.against_own_past() if evidence is not None else float("nan")


def _find_rotation(facts: Facts, group: PeerGroup) -> str:
    """Why a group's members are slow in turns; empty when it is not, or when one worker leads."""
    evidence = facts.evidence.of_group(group)
    if evidence is None or evidence.detector is None or not evidence.n_ops:
        return ""
    share = evidence.n_spread / evidence.n_ops
    lost = evidence.spread_ns / max(evidence.typical_ns, 1)
    slowest = max(facts.evidence.of_worker(worker).n_slowest for worker in group.members)
    leads = slowest > ROTATING * max(evidence.n_spread, 1)
    stretch = float(evidence.detector.persistence.block_length[ALARM, evidence.row])
    slower = f"the slowest of the peers takes {lost:.0%} longer than the median, in turns"
    why = _WHY_IN_TURNS + _describe_limits(facts, group)
    if stretch > facts.settings.dependent_ops and lost >= facts.settings.alarm_slowdown:
        return f"{slower} and for stretches of about {stretch:.0f} operations: {why}"
    if share < ROTATING or lost < facts.settings.alarm_slowdown or leads:
        return ""
    return f"{slower}: {why}"


def _describe_limits(facts: Facts, group: PeerGroup) -> str:
    """How far the members' CPU limits are used up, where these leave too little for any of them to be named."""
    all_took = [facts.evidence.of_worker(worker).took for worker in group.members]
    used = 1.0 - sum(took.slack_ns for took in all_took) / max(
        sum(took.span_ns for took in all_took), 1
    )
    if used * (1.0 + 2 * facts.settings.alarm_slowdown) < 1.0:
        return ""
    return f"; their CPU limits are used up to {used:.0%}"


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the verdicts of a job have in common: nothing in a verdict may cost as much as the job has workers.

    Attributes:
        charges: Worker → to whom its wait is charged → nanoseconds.
        owed: The same the other way round.
        peers: Members by identity of the group.
        members: What they show, likewise.
    """

    charges: Mapping[int, Mapping[int, int]]
    owed: Mapping[int, Mapping[int, int]]
    peers: Mapping[int, tuple[Rank, ...]]
    members: Mapping[int, MemberReading]


def _list_peers(facts: Facts, groups: Mapping[int, PeerGroup]) -> dict[int, tuple[Rank, ...]]:
    return {at: tuple(facts.workers[w].rank for w in g.members) for at, g in groups.items()}


def _verdict(facts: Facts, worker: int, found: WorkerFinding, shared: _Shared) -> Verdict:
    known, evidence = facts.workers[worker], facts.evidence.of_worker(worker)
    group, episode = known.group, found.episode
    peers = () if group is None else shared.peers[id(group)]
    charges, owed = shared.charges, shared.owed.get(worker, {})
    worst_first = sorted(owed, key=lambda w: (-owed[w], natural_order(facts.workers[w].rank)))
    slow_ns = found.find_slow_ns(known.last_ns)
    victims = [w for w in worst_first if _is_hit(facts, w, owed[w], slow_ns)]
    evidence_log10 = 0.0
    if group is not None and (reading := shared.members.get(id(group))) is not None:
        tier = ALARM if episode is None else episode.tier
        evidence_log10 = reading.read_evidence(worker, tier)
        if episode is not None:
            evidence_log10 = max(evidence_log10, episode.log10_evidence)
    return Verdict(
        rank=known.rank,
        kind=found.kind,
        reason=found.reason,
        peers=peers,
        onset=None
        if episode is None
        else Onset(
            comm=facts.registry.comm_names[facts.registry.view_comms[episode.onset.view]],
            seq=episode.onset.seq,
            entry_ns=facts.read_clock(worker, episode.onset.entry_ns),
            op_index=episode.onset_op,
        ),
        detected_entry_ns=None
        if episode is None
        else facts.read_clock(worker, episode.detected_ns),
        n_ops_to_detect=None if episode is None else episode.n_ops_to_detect,
        noticed_entry_ns=None
        if episode is None
        else facts.read_clock(worker, _first_noticed_ns(evidence, episode)),
        slowdown=found.slowdown,
        evidence=round(evidence_log10, 6),
        bet=None if episode is None else Bet.POOLED if episode.is_pooled else Bet.RANK,
        own_ns=known.own_ns,
        wait_ns=known.wait_ns,
        excess_ns=found.excess_ns,
        n_ops=evidence.n_ops,
        victims=tuple(facts.workers[w].rank for w in victims),
        charged_to={facts.workers[w].rank: share for w, share in charges[worker].items()},
        lost_gpu_ns=sum(amount * facts.workers[w].rank.n_gpus for w, amount in owed.items()),
        since_onset_ns=found.own_ns,
    )
