"""What is known of each worker by itself: whether its own work or its links were slow, and what that took."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from ingero.detect.charges import ALWAYS, SlowSpan
from ingero.detect.episodes import AlarmEpisode, Took
from ingero.detect.evidence import WorkerEvidence
from ingero.detect.facts import Facts
from ingero.detect.groups import PeerGroup
from ingero.detect.member_readings import MemberReading
from ingero.detect.ranks.settings import ALARM, MIN_PEERS, NOTICE
from ingero.model.verdicts import Slowdown, VerdictKind
from ingero.units import format_duration

MIN_OPS: Final = 10
"""Compared operations below which nothing is said."""
SLOW_LINK: Final = 1.5
"""Transfers this many times slower than the peers' make a slow link."""
MIN_TRANSFERS: Final = 30
_GRAVEST_FIRST: Final = (
    (VerdictKind.CULPRIT, ALARM),
    (VerdictKind.DRAG, NOTICE),  # a drag is dated by the tier that notices drags
    (VerdictKind.DRAG, ALARM),
)


@dataclass(frozen=True, slots=True)
class WorkerFinding:
    """What is known of a worker by itself, before its job is looked at as a whole.

    Attributes:
        kind: The verdict, unless the others of its job explain it.
        reason: One line for a person.
        episode: Its slowdown; None without one.
        slowdown: Against the median peer; None when it was not compared.
        excess_ns: What it took beyond its peers.
        own_ns: Own time in that.
        spans: The times in which it took that, whose excesses add up to it.
    """

    kind: VerdictKind
    reason: str
    episode: AlarmEpisode | None = None
    slowdown: Slowdown | None = None
    excess_ns: int = 0
    own_ns: int = 0
    spans: tuple[SlowSpan, ...] = ()

    def find_slow_ns(self, last_ns: int) -> float:
        """For how long it was slow in all, by its clock; infinite where that has no dates.

        Args:
            last_ns: Until when it is known.
        """
        return sum(max(min(span.end_ns, last_ns) - span.start_ns, 0.0) for span in self.spans)


class _Sum(NamedTuple):
    """What slowdowns that do not overlap took, the last of which was over at that time; more excess is greater."""

    excess_ns: int = 0
    own_ns: int = 0
    n_slowdowns: int = 0
    until_ns: float = -math.inf
    spans: tuple[SlowSpan, ...] = ()


def judge_alone(
    facts: Facts, worker: int, members: Mapping[int, MemberReading], *, with_history: bool
) -> WorkerFinding:
    """What a worker's own work says.

    Args:
        facts: What the Judge summed up.
        worker: Whose.
        members: What the members of the groups show, by identity of the group.
        with_history: Slowdowns that are over count too, and the worker is charged with all of them.
    """
    why_not = _find_why_unknown(facts, worker)
    group = facts.workers[worker].group
    evidence = facts.evidence.of_worker(worker)
    if not with_history and not why_not and facts.workers[worker].is_stale:
        why_not = "for long nothing that it reports could be compared with its peers'"
    # What was found before its peers became too few stands.
    has_found = with_history and (evidence.past or evidence.compared_among)
    if group is None or (why_not and not has_found):
        return WorkerFinding(VerdictKind.UNKNOWN, why_not)
    slowdown = members[id(group)].read_slowdown(worker)
    nothing = WorkerFinding(VerdictKind.ORDINARY, "works like its peers", slowdown=slowdown)
    if why_not:
        nothing = WorkerFinding(VerdictKind.UNKNOWN, why_not)
    weighed = [
        found
        for episode in _episodes(evidence, with_history=with_history)
        if facts.evidence.still_stands(group, episode)
        and (found := _weigh(facts, worker, episode)) is not None
    ]
    for kind, tier in _GRAVEST_FIRST:
        for found in weighed:
            if found.episode is not None and (found.kind, found.episode.tier) == (kind, tier):
                return _add_up(found, weighed) if with_history else found
    for found in weighed:
        return replace(found, slowdown=slowdown)
    return nothing


def _add_up(named: WorkerFinding, weighed: Sequence[WorkerFinding]) -> WorkerFinding:
    """What a worker is named for, with all that its slowdowns took.

    Of those that overlap, such as one that both tiers saw, either one counts or what lies beside it: whatever is more.
    So nothing that is found later makes the sum smaller.
    """
    sums = [_Sum()]
    of_episodes = [(found.episode, found) for found in weighed if found.episode is not None]
    for episode, found in sorted(of_episodes, key=lambda one: _cleared_ns(one[0])):
        before = max(one for one in sums if one.until_ns <= episode.onset.entry_ns)
        sums.append(
            _Sum(
                before.excess_ns + found.excess_ns,
                before.own_ns + found.own_ns,
                before.n_slowdowns + 1,
                _cleared_ns(episode),
                (*before.spans, *found.spans),
            )
        )
    most = max(sums)
    reason = named.reason
    if most.n_slowdowns > 1:
        reason += f"; {format_duration(most.excess_ns)} with its other slowdowns"
    return replace(
        named, reason=reason, excess_ns=most.excess_ns, own_ns=most.own_ns, spans=most.spans
    )


def _cleared_ns(episode: AlarmEpisode) -> float:
    return math.inf if episode.cleared_ns is None else episode.cleared_ns


def _find_why_unknown(facts: Facts, worker: int) -> str:
    """What is missing for a verdict; empty when nothing is."""
    known, compared = facts.workers[worker], facts.evidence.of_worker(worker)
    if known.n_ops and known.n_enqueue == known.n_ops:
        return "only enqueue times: they say when work was submitted, not how long it took"
    if known.group is None:
        return "no collective that shows its peers"
    n_peers = len(known.group.members)
    if n_peers < MIN_PEERS:
        return _compare_pair(facts, worker, known.group)
    if compared.n_ops < MIN_OPS:
        return f"only {compared.n_ops} operations could be compared with its peers'"
    return ""


def _compare_pair(facts: Facts, worker: int, group: PeerGroup) -> str:
    others = [other for other in group.members if other != worker]
    own = facts.evidence.of_worker(worker).took.own_ns
    theirs = [facts.evidence.of_worker(other).took.own_ns for other in others]
    if not theirs or not theirs[0] or not own:
        return "no peers that do the same work"
    return f"one peer only: own time is {own / theirs[0]:.3g} of that peer's; too few to say whose fault"


def _episodes(evidence: WorkerEvidence, *, with_history: bool) -> list[AlarmEpisode]:
    """Stays in alarm, the gravest first."""
    past = list(evidence.past)[::-1] if with_history else []
    if evidence.compared_among:
        past += evidence.list_cut()
    found: list[AlarmEpisode] = []
    for tier in (ALARM, NOTICE):
        current = evidence.current[tier]
        if current is not None and not evidence.compared_among:
            found.append(current)
        found.extend(sorted((e for e in past if e.tier == tier), key=lambda e: -e.took.excess_ns))
    return found


def _weigh(facts: Facts, worker: int, episode: AlarmEpisode) -> WorkerFinding | None:
    """Culprit, drag or nothing, by how much time the episode really cost."""
    known, evidence = facts.workers[worker], facts.evidence.of_worker(worker)
    assert known.group is not None
    if episode.cleared_ns is None:
        took = evidence.took.since(episode.onset.before)
        latest = evidence.took.since(max(episode.onset.before, evidence.limits.previous, key=_span))
        slowdown = facts.evidence.slowdown(known.group, worker, episode.since_op)
    else:
        took, slowdown = episode.took, episode.slowdown
        latest = took
    settings = facts.settings
    shared, n_others = _shared_slowdown(facts, worker, episode)
    if shared > 1.0 + settings.notice_slowdown:
        took, latest = took.less(shared), latest.less(shared)
        if slowdown is not None:
            slowdown = Slowdown(
                *(x / shared for x in (slowdown.median, slowdown.low, slowdown.high))
            )
    else:
        shared = 1.0
    ratio, bound = _find_ratio(took, latest, 1.0 + 2.5 * settings.alarm_slowdown)
    excess_ns = took.counted_ns if bound else took.excess_ns
    median = 0.0 if slowdown is None else slowdown.median
    # Of what limits leave to gain the median operation says as little as of bursts.
    is_in_all = not bound and median >= 1.0 + settings.alarm_slowdown
    is_culprit = (
        episode.tier == ALARM
        and ratio >= 1.0 + settings.alarm_slowdown
        and (is_in_all or ratio >= 1.0 + 2 * settings.alarm_slowdown)
    )
    if not is_culprit and ratio < 1.0 + settings.notice_slowdown:
        if shared == 1.0:
            return None
        reason = (
            f"so do {n_others} more workers of its replica on other nodes ({shared:.2f}× their peers): the batches "
            "differ, or what that replica shares is slow; no single node"
        )
        return WorkerFinding(
            VerdictKind.IMBALANCE_DATA, f"works longer than its peers, and {reason}"
        )
    n_peers = episode.cut_among or len(known.group.members)
    ended = "" if episode.cleared_ns is None else ", and recovered"
    if episode.cut_among:
        ended = ", until its peers were too few to compare"
    beside = f", beyond the {shared:.2f}× that its replica shares" if shared > 1.0 else ""
    # What a median operation shows is less than half of what the sum does.
    in_bursts = episode.by_sums and slowdown is not None and 2 * (median - 1.0) <= ratio - 1.0
    how = (f"{beside}, in bursts" if in_bursts else beside) + bound
    return WorkerFinding(
        VerdictKind.CULPRIT if is_culprit else VerdictKind.DRAG,
        f"own time {took.ratio:.2f}× that of its {n_peers - 1} peers{how}, {format_duration(excess_ns)} in all{ended}",
        episode,
        slowdown,
        max(excess_ns, 0),
        took.own_ns,
        (SlowSpan(episode.onset.entry_ns, _cleared_ns(episode), max(excess_ns, 0)),),
    )


def _span(took: Took) -> int:
    return took.span_ns


def _find_ratio(took: Took, latest: Took, at_least: float) -> tuple[float, str]:
    """How much slower a worker is than its peers are, or could be by their CPU limits; and a note where these count.

    Args:
        took: What its slowdown adds up to.
        latest: The same of its last intervals, in which limits may leave more: whether it is slow now does not
            depend on how long it was the last before without keeping anybody waiting.
        at_least: What these must show to count, more than all of it must: a moment in which all stood still leaves
            room, too.
    """
    if not took.is_bound:
        return took.ratio, ""
    ratio = took.ratio_within_limits
    if latest.ratio_within_limits >= at_least:
        ratio = max(ratio, latest.ratio_within_limits)
    return ratio, f", whose CPU limits let them be {ratio:.2f}× as fast at most"


def _shared_slowdown(facts: Facts, worker: int, episode: AlarmEpisode) -> tuple[float, int]:
    """The factor by which most others of its replica, on other nodes, slowed down in the episode; and how many."""
    here = facts.workers[worker]
    replica, todo = {worker}, [worker]
    while todo:
        fresh = set(facts.stage_links.get(todo.pop(), {}).values()) - replica
        replica |= fresh
        todo.extend(fresh)
    peers = set() if here.group is None else set(here.group.members)
    away = [
        other
        for other in sorted(replica - peers)
        if facts.workers[other].rank.node_id != here.rank.node_id
    ]
    span = (episode.onset.segment, episode.cleared_segment)
    log_shared, n = facts.evidence.replicas.shared(worker, span, facts.stage_links, away)
    return math.exp(log_shared), n


def judge_links(facts: Facts, worker: int) -> WorkerFinding | None:
    """A slow link among a worker's own, by comparison with the same links of its peers; None without one."""
    known = facts.workers[worker]
    if known.group is None:
        return None
    for slot, comm in sorted(known.links.items()):
        typical, n = facts.ledger.typical_transfer(comm)
        others = [
            facts.ledger.typical_transfer(facts.workers[peer].links[slot])[0]
            for peer in known.group.members
            if peer != worker and slot in facts.workers[peer].links
        ]
        others = [value for value in others if not np.isnan(value)]
        if n < MIN_TRANSFERS or len(others) < MIN_PEERS - 1:
            continue
        usual = float(np.median(others))
        excess_ns = facts.ledger.transfer_ns.get(comm, 0) - round(n * usual)
        if (
            typical >= SLOW_LINK * usual
            and excess_ns >= facts.settings.notice_slowdown * known.span_ns
        ):
            return WorkerFinding(
                VerdictKind.NETWORK,
                f"transfers on {facts.registry.comm_names[comm]} take {typical / usual:.2g}× "
                f"those of its peers' links, {format_duration(excess_ns)} in all; own work is ordinary",
                slowdown=Slowdown(typical / usual, typical / usual, typical / usual),
                excess_ns=excess_ns,
                spans=(SlowSpan(*ALWAYS, excess_ns),),
            )
    return None
