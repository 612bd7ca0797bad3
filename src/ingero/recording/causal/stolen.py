"""Time in which a hypervisor had a worker's processors: beside the other parts of what an operation takes longer.

A kernel that was built to account for it (``CONFIG_PARAVIRT_TIME_ACCOUNTING``) leaves that time out of what its threads
ran; with any other it is time on a processor too. Which one it is cannot be seen from a program, and need not be: what
the other parts leave no room for was counted as computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ingero.model.counters import Work, WorkRates
from ingero.model.diagnosis import CauseKind
from ingero.recording.causal.conclusions import CausePart
from ingero.recording.causal.work_facts import describe_then
from ingero.units import format_duration


def add_stolen(
    parts: Sequence[CausePart], then: WorkRates, now: WorkRates, after: Work, whole_ns: float
) -> list[CausePart]:
    """Put it beside the others; nothing is added where it is not known.

    Args:
        parts: The others.
        then: What the worker is compared with. Peers on other nodes do not tell theirs, and what is taken from all
            alike explains nothing, so that it is not known then.
        now: What an operation takes it.
        after: What it did.
        whole_ns: What its operations took longer.
    """
    if now.stolen_ns is None or then.stolen_ns is None:
        return list(parts)
    stolen_ns = max(now.stolen_ns - then.stolen_ns, 0.0) * now.n_ops
    known_ns = sum(part.extra_ns for part in parts if part.kind is not CauseKind.BLOCKED_IO)
    counted_ns = max(stolen_ns - max(whole_ns - known_ns, 0.0), 0.0)
    others = [
        replace(part, extra_ns=max(part.extra_ns - counted_ns, 0.0))
        if part.kind is CauseKind.MORE_COMPUTING
        else part
        for part in parts
    ]
    took, was = (format_duration(round(one)) for one in (now.stolen_ns, then.stolen_ns))
    facts = (f"taken {took} an operation, {describe_then(then, was)}", *_describe_processors(after))
    return [*others, CausePart(CauseKind.CPU_STEAL, stolen_ns, facts)]


def _describe_processors(after: Work) -> tuple[str, ...]:
    """For how much of the time all that it may run on were taken: nearer to what other tools show."""
    first, last = after.first.processors, after.last.processors
    if first is None or last is None or last.stolen_ns == first.stolen_ns:
        return ()
    stolen_ns = last.stolen_ns - first.stolen_ns
    share = stolen_ns / (stolen_ns + max(last.worked_ns - first.worked_ns, 0))
    n_allowed = after.last.n_processors_allowed
    return (f"its {n_allowed} processors: {share:.0%} of the time in which they had work",)
