"""From a recording to its incidents: run every rule, keep one incident per problem, order them."""

from __future__ import annotations

import hashlib
from typing import Final

from ingero.agent.causal.evidence import Evidence, Process
from ingero.agent.causal.finding import Finding, Rule
from ingero.agent.causal.rules import RULES
from ingero.model.incidents import Coverage, Explanation, Incident, Severity
from ingero.model.recording import Recording
from ingero.units import NS_PER_S

_SHORT_NS: Final = NS_PER_S
"""Watched for less than this, a share says little about the job: such an incident is never HIGH."""
_HIGH_SHARE: Final = 0.20
_MEDIUM_SHARE: Final = 0.05
_SAME_SPAN: Final = 0.80
_ORDER: Final = {Severity.HIGH: 0, Severity.MEDIUM: 1, Severity.LOW: 2}


def explain(recording: Recording) -> Explanation:
    """Name what went wrong in a recording, each problem once, worst first.

    The same recording always gives the same answer; an empty list means that every rule looked and found nothing.
    """
    evidence = Evidence(recording)
    incidents = [
        _finish(evidence, rule, finding) for rule in RULES for finding in rule.find(evidence)
    ]
    incidents.sort(key=lambda incident: (_ORDER[incident.severity], -incident.lost_ns, incident.id))
    start_ns, end_ns = recording.window_ns
    return Explanation(
        incidents=tuple(_without_repeats(incidents)),
        start_ns=start_ns,
        end_ns=end_ns,
        n_events=len(recording.events),
        n_events_stored=recording.n_events_stored,
        n_processes=len(evidence.processes),
    )


def _without_repeats(incidents: list[Incident]) -> list[Incident]:
    """Drop an incident that a worse one of the same process already contains and explains by the same cause."""
    kept: list[Incident] = []
    for incident in incidents:
        if not any(_contains(worse, incident) for worse in kept):
            kept.append(incident)
    return kept


def _contains(worse: Incident, incident: Incident) -> bool:
    if (worse.node, worse.pid) != (incident.node, incident.pid) or not incident.causes:
        return False
    overlap = min(worse.end_ns, incident.end_ns) - max(worse.start_ns, incident.start_ns)
    is_inside = overlap >= _SAME_SPAN * max(incident.end_ns - incident.start_ns, 1)
    return is_inside and incident.causes[0].name in {cause.name for cause in worse.causes}


def _finish(evidence: Evidence, rule: Rule, finding: Finding) -> Incident:
    process = finding.process
    node = process.node if process else finding.node
    node_name = evidence.recording.nodes[node]
    pid = process.pid if process else 0
    place = evidence.recording.ranks.get((node, pid))
    watched_ns = process.watched_ns if process else 0
    share = min(finding.lost_ns / watched_ns, 1.0) if process else 0.0
    return Incident(
        id=_build_id(rule.name, node_name, pid, finding),
        rule=rule.name,
        severity=finding.severity or _severity(share, watched_ns),
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
        window_share=round(share, 4),
        watched_ns=watched_ns,
        n_cases=finding.n_cases,
        causes=finding.causes,
        ruled_out=finding.ruled_out,
        fix=finding.fix,
        coverage=_coverage(evidence, process, finding),
    )


def _coverage(evidence: Evidence, process: Process | None, finding: Finding) -> Coverage:
    if process is None:
        return Coverage("unknown", finding.n_cases, None, None)
    return evidence.books.coverage(process.node, process.pid, finding.span_ns, len(process.rows))


def _severity(share: float, watched_ns: int) -> Severity:
    if share >= _HIGH_SHARE and watched_ns >= _SHORT_NS:
        return Severity.HIGH
    return Severity.MEDIUM if share >= _MEDIUM_SHARE else Severity.LOW


def _build_id(rule: str, node: str, pid: int, finding: Finding) -> str:
    """Rule and a short digest of whom it struck and when it began."""
    key = f"{node}|{pid}|{finding.tid}|{finding.op}|{finding.span_ns[0]}"
    return f"{rule}-{hashlib.blake2s(key.encode(), digest_size=4).hexdigest()}"
