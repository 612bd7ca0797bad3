"""From a recording to its incidents: run every rule, keep one incident per problem, order them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.model.events import op_name
from ingero.model.incidents import Coverage, Explanation, Incident, Severity, Unknown
from ingero.model.operations import CALLS, find_codes
from ingero.model.recording import Recording
from ingero.recording.causal.coverage import Gap
from ingero.recording.causal.evidence import Evidence, Process
from ingero.recording.causal.finding import Finding, Rule, Unjudged
from ingero.recording.causal.frames import name_place
from ingero.recording.causal.gaps import build_unknown, find_subjects, is_blocked, join_unknowns
from ingero.recording.causal.rules import RULES
from ingero.recording.causal.rules.steps import STEPS_CHANGED
from ingero.units import NS_PER_S

_SHORT_NS: Final = NS_PER_S
"""Watched for less than this, a share says little about the job: such an incident is never HIGH."""
_HIGH_SHARE: Final = 0.20
_MEDIUM_SHARE: Final = 0.05
_SAME_SPAN: Final = 0.80
_EXPLAINED: Final = 0.50  # of the time that a change of step time cost
_ORDER: Final = {Severity.HIGH: 0, Severity.MEDIUM: 1, Severity.LOW: 2}


def explain(recording: Recording) -> Explanation:
    """Name what went wrong in a recording, each problem once, worst first.

    The same recording always gives the same answer. An empty list means that the rules in ``judged`` found nothing;
    those in ``unknown`` could not tell.
    """
    evidence = Evidence(recording)
    outcomes = [_ask(evidence, rule) for rule in RULES]
    incidents = [incident for one in outcomes for incident in one.incidents]
    incidents.sort(key=lambda incident: (_ORDER[incident.severity], -incident.lost_ns, incident.id))
    unknown = join_unknowns(open_ for one in outcomes for open_ in one.unknown)
    open_rules = {name for one in unknown for name in one.rules}
    start_ns, end_ns = recording.window_ns
    return Explanation(
        incidents=tuple(_without_explained(_without_repeats(incidents))),
        start_ns=start_ns,
        end_ns=end_ns,
        n_events=len(recording.events),
        n_events_stored=recording.n_events_stored,
        n_processes=len(evidence.processes),
        judged=tuple(
            one.rule.name for one in outcomes if one.is_relevant and one.rule.name not in open_rules
        ),
        unknown=unknown,
        groups=evidence.counts.groups(),
        not_checked=tuple(
            (one.rule.name, _nothing(one.rule)) for one in outcomes if not one.is_relevant
        ),
    )


@dataclass(frozen=True, slots=True)
class _RuleOutcome:
    """What one rule found.

    Attributes:
        rule: The rule.
        incidents: What it found.
        unknown: What it could not decide.
        is_relevant: Whether the recording has anything that it looks at.
    """

    rule: Rule
    incidents: list[Incident]
    unknown: list[Unknown]
    is_relevant: bool


def _ask(evidence: Evidence, rule: Rule) -> _RuleOutcome:
    """One rule's findings where the recording holds what it needs, and where it does not."""
    subjects = find_subjects(evidence, rule)
    processes = {(p.node, p.pid): p for p in evidence.processes}
    blocked = {key for key, gap in subjects.items() if is_blocked(rule, processes[key], gap)}
    incidents: list[Incident] = []
    unknown: list[Unknown] = []
    for found in rule.find(evidence):
        if isinstance(found, Unjudged):
            reason = found.missing, found.how
            unknown.append(build_unknown(evidence, rule, found.process, reason=reason))
            continue
        who = [p for p in (found.process, *found.others) if p is not None]
        keys = {(p.node, p.pid) for p in who}
        if rule.needs.is_time or rule.needs.is_proof or not keys & blocked:
            severity = _severity(rule, found, [subjects[key] for key in keys & set(subjects)])
            if severity is None and found.process:
                title = found.title
                unknown.append(build_unknown(evidence, rule, found.process, title=title))
            else:
                incidents.append(_finish(evidence, rule, found, severity or Severity.LOW))
            blocked -= keys
    unknown += [build_unknown(evidence, rule, processes[key]) for key in sorted(blocked)]
    return _RuleOutcome(rule, incidents, unknown, bool(subjects) or not rule.needs.kinds)


def _nothing(rule: Rule) -> str:
    kinds = ", ".join(kind.name.lower().replace("_", " ") for kind in rule.needs.kinds)
    return f"nothing of this kind was recorded: {kinds}"


def _without_repeats(incidents: list[Incident]) -> list[Incident]:
    """Drop an incident that a worse one of the same process already contains and explains by the same cause."""
    kept: list[Incident] = []
    for incident in incidents:
        if not any(_contains(worse, incident) for worse in kept):
            kept.append(incident)
    return kept


def _without_explained(incidents: list[Incident]) -> list[Incident]:
    """Drop a change of step time that another incident of its process or its node already gives a reason for."""
    return [
        one
        for one in incidents
        if one.rule != STEPS_CHANGED or not any(_explains(other, one) for other in incidents)
    ]


def _explains(other: Incident, change: Incident) -> bool:
    is_same = other.node == change.node and other.pid in {change.pid, 0}
    overlap = min(other.end_ns, change.end_ns) - max(other.start_ns, change.start_ns)
    is_during = overlap >= _SAME_SPAN * max(change.end_ns - change.start_ns, 1)
    is_enough = other.lost_ns >= _EXPLAINED * change.lost_ns
    return other.rule != STEPS_CHANGED and is_same and is_during and is_enough


def _contains(worse: Incident, incident: Incident) -> bool:
    if (worse.node, worse.pid) != (incident.node, incident.pid) or not incident.causes:
        return False
    overlap = min(worse.end_ns, incident.end_ns) - max(worse.start_ns, incident.start_ns)
    is_inside = overlap >= _SAME_SPAN * max(incident.end_ns - incident.start_ns, 1)
    return is_inside and incident.causes[0].name in {cause.name for cause in worse.causes}


def _finish(evidence: Evidence, rule: Rule, finding: Finding, severity: Severity) -> Incident:
    process = finding.process
    node = process.node if process else finding.node
    node_name = evidence.recording.nodes[node]
    pid = process.pid if process else 0
    place = evidence.recording.ranks.get((node, pid))
    watched_ns = process.watched_ns if process else 0
    return Incident(
        id=_build_id(rule.name, node_name, pid, finding),
        rule=rule.name,
        severity=severity,
        title=finding.title,
        node=node_name,
        pid=pid,
        process=process.name if process else "",
        tid=finding.tid,
        rank=place.rank if place and place.rank >= 0 else None,
        op=finding.op,
        start_ns=finding.span_ns[0],
        end_ns=finding.span_ns[1],
        lost_ns=finding.lost_ns,
        window_share=round(min(finding.lost_ns / watched_ns, 1.0) if process else 0.0, 4),
        watched_ns=watched_ns,
        n_cases=finding.n_cases,
        causes=finding.causes,
        ruled_out=finding.ruled_out,
        fix=finding.fix,
        coverage=_coverage(evidence, rule, process, finding),
        places=_name_code_lines(evidence, finding),
    )


def _name_code_lines(evidence: Evidence, finding: Finding) -> tuple[str, ...]:
    """Code of the rows that a finding rests on: those it names, else the slow calls of its thread in its span."""
    stacks = finding.stacks
    if not stacks and finding.process is not None and finding.tid:
        calls = finding.process.calls
        is_in = (calls.ends > finding.span_ns[0]) & (calls.starts < finding.span_ns[1])
        is_in &= calls.tids == finding.tid
        is_op = np.array(
            [finding.op in {"", op_name(c >> 8, c & 0xFF)} for c in calls.codes.tolist()], bool
        )
        stacks = evidence.stacks_of(calls.where(is_in & is_op))
    places = (name_place(evidence.recording, key) for key in stacks)
    return tuple(dict.fromkeys(place for place in places if place))


def _coverage(
    evidence: Evidence, rule: Rule, process: Process | None, finding: Finding
) -> Coverage:
    """Coverage of the operations that the rule speaks of; of all calls where it names none."""
    if process is None:
        return Coverage("unknown", finding.n_cases, None, None)
    codes = rule.needs.codes or find_codes(CALLS)
    return evidence.counts.coverage(process.node, process.pid, codes)


def _severity(rule: Rule, finding: Finding, gaps: Sequence[Gap]) -> Severity | None:
    """How bad it is; None where the rows that are missing could make it another class."""
    if finding.severity or finding.process is None:
        return finding.severity or Severity.LOW
    missing_ns = 0 if rule.needs.is_proof else sum(gap.missing_ns for gap in gaps)
    least_ns, most_ns = finding.range_ns or (finding.lost_ns, finding.lost_ns + missing_ns)
    watched_ns = finding.process.watched_ns
    least = _classify(least_ns, watched_ns)
    is_part = not rule.needs.is_proof and any(gap.unstored for gap in gaps)
    # What was watched for less than a second by its rows may have been watched for longer where rows are missing.
    most = _classify(most_ns, watched_ns, least_watched_ns=0 if is_part else _SHORT_NS)
    if least is not most:
        return None
    is_over = finding.most is not None and _ORDER[least] < _ORDER[finding.most]
    return finding.most if is_over else least


def _classify(lost_ns: int, watched_ns: int, *, least_watched_ns: int = _SHORT_NS) -> Severity:
    share = lost_ns / watched_ns
    if share >= _HIGH_SHARE and watched_ns >= least_watched_ns:
        return Severity.HIGH
    return Severity.MEDIUM if share >= _MEDIUM_SHARE else Severity.LOW


def _build_id(rule: str, node: str, pid: int, finding: Finding) -> str:
    """Rule and a short digest of whom it struck and when it began."""
    key = f"{node}|{pid}|{finding.tid}|{finding.op}|{finding.span_ns[0]}"
    return f"{rule}-{hashlib.blake2s(key.encode(), digest_size=4).hexdigest()}"
