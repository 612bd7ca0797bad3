"""The decision: a pure function over the policy, a finding, what is known, and the time; its reasons are data.

Every clause is judged, also after one that stops: a person asks for all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import Any, Final

from ingero.model.verdicts import VerdictKind
from ingero.remediation.config import BrakesConfig, RemediatorConfig
from ingero.remediation.findings import ClusterReading, CulpritFinding, NodeView
from ingero.remediation.pair_tests import PairTestRecord, judge_confirmation
from ingero.remediation.records import HOLDING, ActionRecord, ActionState, Moment
from ingero.units import NS_PER_S, format_duration

HOUR_NS: Final = 3600 * NS_PER_S
PAIR_TEST_CLAUSE: Final = "confirm.pair_test"
MAX_VOID: Final = 3
"""Tries of one finding that took no effect, before it is given up."""


@dataclass(frozen=True, slots=True)
class ClauseOutcome:
    """One clause of the policy and what it said.

    Attributes:
        clause: The key of the policy, such as ``findings.min_evidence``, or a rule that is no setting.
        is_met: Whether it lets the action through.
        description: What was compared, for a person.
        is_assumed: It could not be judged and was taken as met, which only dry-run does.
        outcome: Where a clause is that takes more than a poll to judge; empty for others.
    """

    clause: str
    is_met: bool
    description: str
    is_assumed: bool = False
    outcome: str = ""

    def as_json(self) -> dict[str, Any]:
        """For the journal."""
        return {
            "clause": self.clause,
            "met": self.is_met,
            "says": self.description,
            **({"assumed": True} if self.is_assumed else {}),
            **({"outcome": self.outcome} if self.outcome else {}),
        }


@dataclass(frozen=True, slots=True)
class Ruling:
    """What the policy says of one finding.

    Attributes:
        finding: The finding.
        target: The node as the scheduler names it; empty when it has none.
        clauses: Every clause.
    """

    finding: CulpritFinding
    target: str
    clauses: tuple[ClauseOutcome, ...]

    @property
    def is_allowed(self) -> bool:
        """Whether nothing stops the action."""
        return all(clause.is_met for clause in self.clauses)

    @property
    def stops(self) -> tuple[ClauseOutcome, ...]:
        """What stops it."""
        return tuple(clause for clause in self.clauses if not clause.is_met)


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known at one moment.

    Attributes:
        now: The moment.
        clusters: What Fleet says, by cluster; None while it does not answer.
        nodes: What the scheduler says; None while it does not answer.
        can_read_nodes: Whether the scheduler can be asked at all.
        targets: The scheduler's name by cluster and node of Fleet's; a node without one of its own is missing.
        records: Every action of the journal.
        settled_ns: By cluster, since when everything answered without panic, on the monotonic clock.
        jumped_ns: When the wall clock jumped last, on the monotonic clock; None for never.
        stop_file: The stop file that is there; empty for none.
        is_single_poll: Whether persistence cannot be known, because this poll is the only one.
        tests: Every pair test of the journal, oldest first.
    """

    now: Moment
    clusters: dict[str, ClusterReading] | None
    nodes: dict[str, NodeView] | None
    can_read_nodes: bool
    targets: dict[tuple[str, str], str]
    records: tuple[ActionRecord, ...]
    settled_ns: dict[str, int]
    jumped_ns: int | None = None
    stop_file: str = ""
    is_single_poll: bool = False
    tests: tuple[PairTestRecord, ...] = ()

    @property
    def is_stopped(self) -> bool:
        """Whether a stop file is there."""
        return bool(self.stop_file)


def rule_all(
    config: RemediatorConfig, findings: Sequence[CulpritFinding], situation: Situation
) -> tuple[Ruling, ...]:
    """What the policy says of each finding; each that is allowed counts for the next.

    What a person approved comes first, then the costliest.
    """
    rulings = []
    approved = {one.episode for one in situation.records if one.state is ActionState.APPROVED}
    ordered = sorted(
        findings,
        key=lambda one: (one.episode not in approved, -one.verdict.lost_gpu_ns, one.episode),
    )
    for finding in ordered:
        ruling = rule(config, finding, situation)
        rulings.append(ruling)
        if ruling.is_allowed:
            situation = replace(
                situation, records=(*situation.records, _planned(ruling, situation.now))
            )
    return tuple(rulings)


def _planned(ruling: Ruling, now: Moment) -> ActionRecord:
    finding = ruling.finding
    return ActionRecord(
        action_id="",
        episode=finding.episode,
        cluster_id=finding.cluster_id,
        node_id=finding.node_id,
        target=ruling.target,
        kind="",
        state=ActionState.BEGUN,
        began=now,
        changed=now,
    )


def rule(config: RemediatorConfig, finding: CulpritFinding, situation: Situation) -> Ruling:
    """What the policy says of one finding."""
    target = situation.targets.get((finding.cluster_id, finding.node_id), "")
    clauses = (
        *_judge_finding(config, finding, situation),
        *_judge_fleet(config, finding, situation),
        *_judge_target(config, finding, target, situation),
        *_judge_times(config.brakes, situation),
        *_judge_history(config.brakes, finding, target, situation),
        *_judge_answers(config, finding, situation),
        *_judge_budgets(config.brakes, finding, target, situation),
        *_judge_confirmation(config, finding, situation),
    )
    return Ruling(finding, target, clauses)


def still_lets(
    config: RemediatorConfig,
    record: ActionRecord,
    findings: Mapping[str, CulpritFinding],
    situation: Situation,
) -> bool:
    """Whether the policy would begin this action now, had it not been begun.

    Args:
        config: The policy.
        record: The action.
        findings: What there is now, by episode.
        situation: What is known.
    """
    finding = findings.get(record.episode)
    if finding is None:
        return False
    others = tuple(one for one in situation.records if one.action_id != record.action_id)
    ruling = rule(config, finding, replace(situation, records=others))
    return ruling.is_allowed and ruling.target == record.target


def _judge_finding(
    config: RemediatorConfig, finding: CulpritFinding, situation: Situation
) -> Iterator[ClauseOutcome]:
    wanted, verdict, now_ns = config.findings, finding.verdict, situation.now.mono_ns
    yield ClauseOutcome(
        "culprit", verdict.kind is VerdictKind.CULPRIT, f"the verdict is {verdict.kind.value}"
    )
    yield ClauseOutcome(
        "findings.min_evidence",
        verdict.evidence >= wanted.min_evidence,
        f"evidence 10^{verdict.evidence:.1f}, wanted 10^{wanted.min_evidence:.1f}",
    )
    slowdown = verdict.slowdown.median if verdict.slowdown else None
    yield ClauseOutcome(
        "findings.min_slowdown",
        slowdown is not None and slowdown >= wanted.min_slowdown,
        f"{'unknown' if slowdown is None else f'{slowdown:.2f}'} times its median peer,"
        f" wanted {wanted.min_slowdown:.2f}",
    )
    yield ClauseOutcome(
        "findings.min_lost_gpu_time",
        verdict.lost_gpu_ns >= wanted.min_lost_gpu_time,
        f"{format_duration(verdict.lost_gpu_ns)} of GPU time lost,"
        f" wanted {format_duration(wanted.min_lost_gpu_time)}",
    )
    yield ClauseOutcome(
        "findings.min_peers",
        len(verdict.peers) >= wanted.min_peers,
        f"compared with {len(verdict.peers)} ranks, itself included, wanted {wanted.min_peers}",
    )
    seen_for_ns = now_ns - finding.seen_ns
    is_enough = seen_for_ns >= wanted.min_persistence
    yield ClauseOutcome(
        "findings.min_persistence",
        is_enough or situation.is_single_poll,
        f"a culprit for {format_duration(seen_for_ns)}, wanted {format_duration(wanted.min_persistence)}",
        is_assumed=situation.is_single_poll and not is_enough,
    )
    yield _judge_progress(finding, wanted.max_age, situation)


def _judge_progress(
    finding: CulpritFinding, max_age_ns: int, situation: Situation
) -> ClauseOutcome:
    if finding.progressed_ns is None:
        description = "the rank was not seen to work yet: it takes two polls"
        is_single = situation.is_single_poll
        return ClauseOutcome(
            "findings.max_age: works", is_single, description, is_assumed=is_single
        )
    age_ns = situation.now.mono_ns - finding.progressed_ns
    return ClauseOutcome(
        "findings.max_age: works",
        age_ns <= max_age_ns,
        f"the rank worked {format_duration(age_ns)} ago, at most {format_duration(max_age_ns)}",
    )


def _judge_fleet(
    config: RemediatorConfig, finding: CulpritFinding, situation: Situation
) -> Iterator[ClauseOutcome]:
    wanted, clusters = config.findings, situation.clusters
    reading = None if clusters is None else clusters.get(finding.cluster_id)
    if reading is None:
        description = (
            "Fleet does not answer" if clusters is None else "Fleet does not know the cluster"
        )
        yield ClauseOutcome("fleet answers", is_met=False, description=description)
        return
    yield ClauseOutcome("fleet answers", is_met=True, description="Fleet answers")
    yield ClauseOutcome(
        "findings.max_age",
        reading.judged_age_ns <= wanted.max_age,
        f"judged {format_duration(reading.judged_age_ns)} ago, at most {format_duration(wanted.max_age)}",
    )
    yield ClauseOutcome(
        "no panic", not reading.in_panic, "panic" if reading.in_panic else "no panic"
    )
    yield ClauseOutcome(
        "findings.require_quorum",
        reading.has_quorum or not wanted.require_quorum,
        "a quorum" if reading.has_quorum else "no quorum",
    )
    yield ClauseOutcome(
        "findings.min_coverage",
        reading.coverage >= wanted.min_coverage,
        f"{reading.n_active} of {reading.n_known} known nodes are active, wanted {wanted.min_coverage:.0%}",
    )
    yield from _judge_cause(wanted.causes, finding, reading)


def _judge_cause(
    wanted: tuple[str, ...], finding: CulpritFinding, reading: ClusterReading
) -> Iterator[ClauseOutcome]:
    """Only where the policy asks for one."""
    if not wanted:
        return
    cause = reading.causes.get(finding.verdict.rank.worker)
    description = (
        "its agent has not said why yet"
        if cause is None
        else f"its agent says {cause or 'nothing'}"
    )
    yield ClauseOutcome(
        "findings.causes", cause in wanted, f"{description}, wanted {' or '.join(wanted)}"
    )


def _judge_target(
    config: RemediatorConfig, finding: CulpritFinding, target: str, situation: Situation
) -> Iterator[ClauseOutcome]:
    brakes, what = config.brakes, "device" if config.action.kubernetes_device else "node"
    view = (situation.nodes or {}).get(target)
    names = (finding.node_id, target, view.node if view else "")
    is_protected = any(brakes.protects(name) for name in names if name)
    yield ClauseOutcome(
        "brakes.protected_nodes",
        not is_protected,
        f"{finding.node_id} is {'' if is_protected else 'not '}protected",
    )
    if not situation.can_read_nodes:
        yield ClauseOutcome(
            "node in service",
            is_met=True,
            description="nobody can say whether this action took effect",
        )
        return
    if situation.nodes is None:
        yield ClauseOutcome(
            "scheduler answers", is_met=False, description="the scheduler does not answer"
        )
        return
    yield ClauseOutcome("scheduler answers", is_met=True, description="the scheduler answers")
    if view is None:
        description = f"the scheduler has no {what} for {finding.node_id}, several, or one for two nodes of Fleet's"
        yield ClauseOutcome("node known", is_met=False, description=description)
        return
    yield ClauseOutcome("node known", is_met=True, description=f"the scheduler's {target}")
    yield ClauseOutcome("node in service", view.in_service, f"{target} is {view.state}")


def _judge_times(brakes: BrakesConfig, situation: Situation) -> Iterator[ClauseOutcome]:
    yield ClauseOutcome(
        "brakes.stop_file",
        not situation.is_stopped,
        f"{situation.stop_file or brakes.stop_file} is {'' if situation.is_stopped else 'not '}there",
    )
    now = situation.now
    jumped_ago_ns = None if situation.jumped_ns is None else now.mono_ns - situation.jumped_ns
    is_calm = jumped_ago_ns is None or jumped_ago_ns >= brakes.after_clock_jump
    yield ClauseOutcome(
        "brakes.after_clock_jump",
        is_calm,
        "the clock has not jumped"
        if jumped_ago_ns is None
        else f"the clock jumped {format_duration(jumped_ago_ns)} ago,"
        f" wanted {format_duration(brakes.after_clock_jump)}",
    )
    in_work = any(window.includes(now.wall_ns) for window in brakes.maintenance)
    yield ClauseOutcome(
        "brakes.maintenance", not in_work, "maintenance" if in_work else "no maintenance"
    )
    is_hour = not brakes.hours or any(window.includes(now.wall_ns) for window in brakes.hours)
    yield ClauseOutcome(
        "brakes.hours", is_hour, "acting is allowed at this hour" if is_hour else "not at this hour"
    )


def _judge_history(
    brakes: BrakesConfig, finding: CulpritFinding, target: str, situation: Situation
) -> Iterator[ClauseOutcome]:
    now = situation.now
    settled_ns = situation.settled_ns.get(finding.cluster_id)
    settled_for_ns = 0 if settled_ns is None else now.mono_ns - settled_ns
    is_settled = settled_ns is not None and settled_for_ns >= brakes.settle_time
    yield ClauseOutcome(
        "brakes.settle_time",
        is_settled or situation.is_single_poll,
        f"all answer without panic for {format_duration(settled_for_ns)},"
        f" wanted {format_duration(brakes.settle_time)}",
        is_assumed=situation.is_single_poll and not is_settled,
    )
    begun = [one for one in situation.records if _is_begun(one)]
    same = [one for one in begun if one.episode == finding.episode]
    n_void = sum(one.state is ActionState.VOID for one in same)
    is_first = len(same) == n_void and n_void < MAX_VOID
    yield ClauseOutcome(
        "one action per episode",
        is_first,
        f"acted on {finding.episode} {len(same)} times, {n_void} of them without effect",
    )
    last = [
        min(now.since(one.began), now.since(one.changed))
        for one in begun
        if _is_same_node(one, finding, target) and one.state is not ActionState.VOID
    ]
    yield ClauseOutcome(
        "brakes.cool_down",
        not last or min(last) >= brakes.cool_down,
        f"acted on {finding.node_id} {format_duration(min(last))} ago, wanted"
        f" {format_duration(brakes.cool_down)}"
        if last
        else f"never acted on {finding.node_id}",
    )


def _judge_answers(
    config: RemediatorConfig, finding: CulpritFinding, situation: Situation
) -> Iterator[ClauseOutcome]:
    """Only where a person is asked, and is asked once about a finding."""
    if config.mode != "ask":
        return
    refused = [
        one
        for one in situation.records
        if one.episode == finding.episode
        and one.state in {ActionState.REJECTED, ActionState.EXPIRED}
    ]
    yield ClauseOutcome(
        "not refused before",
        not refused,
        f"{refused[-1].action_id} is {refused[-1].state}"
        if refused
        else f"nobody has refused {finding.episode}",
    )


def _is_same_node(record: ActionRecord, finding: CulpritFinding, target: str) -> bool:
    is_node = (record.cluster_id, record.node_id) == (finding.cluster_id, finding.node_id)
    return is_node or (target != "" and record.target == target)


def _is_begun(record: ActionRecord) -> bool:
    """Whether the scheduler was asked, or may have been."""
    return record.state in {*HOLDING, ActionState.UNDONE, ActionState.VOID, ActionState.LEFT}


def find_held(brakes: BrakesConfig, situation: Situation) -> dict[str, str]:
    """Nodes that are or may be out of service by us, with their cluster; it is empty where another remediator acted.

    An action that ended within the settle time counts: a late scheduler may still show it.
    """
    now = situation.now
    held = {view.name: "" for view in (situation.nodes or {}).values() if view.mark}
    for one in situation.records:
        is_late = (
            one.state in {ActionState.VOID, ActionState.LEFT, ActionState.UNDONE}
            and now.since(one.changed) < brakes.settle_time
        )
        if one.state in HOLDING or is_late or one.target in held:
            held[one.target] = one.cluster_id
    return held


def _judge_budgets(
    brakes: BrakesConfig, finding: CulpritFinding, target: str, situation: Situation
) -> Iterator[ClauseOutcome]:
    """Counts are of all clusters, which share the scheduler; shares are of the finding's own."""
    cluster_id = finding.cluster_id
    reading = (situation.clusters or {}).get(cluster_id)
    n_known = reading.n_known if reading else 0
    held = find_held(brakes, situation)
    held.pop(target, None)
    of_hour = [
        one.cluster_id
        for one in situation.records
        if _is_begun(one) and situation.now.since(one.began) < HOUR_NS
    ]
    for when, clusters, most, percent in (
        ("at_once", [*held.values()], brakes.max_nodes_at_once, brakes.max_percent_at_once),
        ("per_hour", of_hour, brakes.max_nodes_per_hour, brakes.max_percent_per_hour),
    ):
        count = len(clusters) + 1
        yield ClauseOutcome(
            f"brakes.max_nodes_{when}",
            count <= most,
            f"would be {count} {'at once' if when == 'at_once' else 'within an hour'}, at most {most}",
        )
        n_own = sum(one in {cluster_id, ""} for one in clusters) + 1
        yield _judge_share(f"brakes.max_percent_{when}", n_own, percent, n_known)


def _judge_share(clause: str, count: int, percent: float, n_known: int) -> ClauseOutcome:
    allowed = floor(n_known * percent / 100 + 1e-9)
    return ClauseOutcome(
        clause, count <= allowed, f"would be {count}; {percent:g} % of {n_known} nodes is {allowed}"
    )


def _judge_confirmation(
    config: RemediatorConfig, finding: CulpritFinding, situation: Situation
) -> Iterator[ClauseOutcome]:
    """Only where the policy asks for a test."""
    if config.confirm is None or config.confirm.pair_test is None:
        return
    test = config.confirm.pair_test
    found = judge_confirmation(test, finding.episode, situation.tests, situation.now)
    is_assumed = config.mode == "dry-run" and found.wants_test
    yield ClauseOutcome(
        PAIR_TEST_CLAUSE,
        found.lets or is_assumed,
        f"{found.description}; dry-run runs no test" if is_assumed else found.description,
        is_assumed,
        found.outcome,
    )
