"""Whether a recording holds what a rule needs, process by process, and what to say where it does not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ingero.model.events import op_name
from ingero.model.incidents import Unknown
from ingero.model.operations import CALLS, find_codes
from ingero.recording.causal.coverage import Gap
from ingero.recording.causal.evidence import Evidence, Process
from ingero.recording.causal.finding import Rule

_MAX_NAMED: Final = 3
RECORD_ALL: Final = "record with --sampling-rate 1 --record-all"
_RECORD_AGAIN: Final = "record with this version: it counts every call"
Key = tuple[int, int]


def find_subjects(evidence: Evidence, rule: Rule) -> dict[Key, Gap]:
    """What a rule would look at, by (node, pid), and how much of it has no row."""
    needs = rule.needs
    found: dict[Key, Gap] = {}
    for process in evidence.processes if needs.kinds else ():
        gap = evidence.gap(process, needs.codes)
        if gap.seen and (needs.applies is None or needs.applies(evidence, process)):
            found[process.node, process.pid] = gap
    return found


def is_blocked(rule: Rule, process: Process, gap: Gap) -> bool:
    """Whether too much is missing for a verdict on a process."""
    if rule.needs.is_absence and not gap.is_known:
        return True
    if rule.needs.is_time:
        return gap.missing_ns >= process.worth_ns
    return gap.share > rule.needs.max_missing


def describe_gap(evidence: Evidence, process: Process, codes: Iterable[int]) -> str:
    """What has no row, operation by operation, most calls first."""
    counts = evidence.counts
    gaps = {code: counts.gap(process.node, process.pid, (code,)) for code in codes}
    short = sorted(
        ((gap, op_name(code >> 8, code & 0xFF)) for code, gap in gaps.items()),
        key=lambda item: (-item[0].unstored, item[0].stored - item[0].most, item[1]),
    )
    named = [
        f"{name}: {gap.stored} of {_count_calls(gap)} have a row"
        for gap, name in short[:_MAX_NAMED]
        if gap.most > gap.stored
    ]
    return "; ".join(named) or "nobody counted the calls that have no row"


def _count_calls(gap: Gap) -> str:
    if gap.most == gap.seen:
        return f"{gap.seen} calls"
    return f"about {gap.seen} calls (at most {gap.most})"


def build_unknown(
    evidence: Evidence,
    rule: Rule,
    process: Process,
    *,
    reason: tuple[str, str] = ("", ""),
    title: str = "",
) -> Unknown:
    """One rule's answer on one process that it could not judge; `reason` is what is missing, and how to record it."""
    missing, how = reason
    codes = rule.needs.codes or find_codes(CALLS)
    text = missing or describe_gap(evidence, process, codes)
    place = evidence.recording.ranks.get((process.node, process.pid))
    is_counted = evidence.gap(process, codes).is_known
    return Unknown(
        rules=(rule.name,),
        node=evidence.recording.nodes[process.node],
        pid=process.pid,
        process=process.name,
        rank=place.rank if place and place.rank >= 0 else None,
        missing=text,
        how=how or (RECORD_ALL if is_counted else _RECORD_AGAIN),
        title=title,
    )


def join_unknowns(unknowns: Iterable[Unknown]) -> tuple[Unknown, ...]:
    """The same gap of the same process once, with every rule that it keeps from judging; in order of processes."""
    joined: dict[tuple[object, ...], list[Unknown]] = {}
    for one in unknowns:
        joined.setdefault((one.node, one.pid, one.missing, one.title), []).append(one)
    found = [
        Unknown(
            tuple(dict.fromkeys(rule for one in same for rule in one.rules)),
            *(same[0].node, same[0].pid, same[0].process, same[0].rank),
            *(same[0].missing, same[0].how, same[0].title),
        )
        for same in joined.values()
    ]
    return tuple(sorted(found, key=lambda one: (one.node, one.pid, one.rules)))
