"""What a rule hands back, before the engine gives it an id, a severity and its coverage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ingero.agent.causal.evidence import Evidence, Process
from ingero.model.incidents import Cause, RuledOut, Severity


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem as a rule sees it.

    Attributes:
        title: One line.
        span_ns: First and last moment, Unix time.
        lost_ns: Time it took.
        causes: With shares of `lost_ns`.
        process: Who suffered; None for the whole node.
        node: Index of the node, when there is no process.
        tid: Thread that suffered; 0 for the process.
        op: Operation that suffered.
        n_cases: How often.
        ruled_out: What was checked.
        fix: Next steps.
        severity: Fixed by the rule; None takes it from the share of watched time.
    """

    title: str
    span_ns: tuple[int, int]
    lost_ns: int
    causes: tuple[Cause, ...]
    process: Process | None = None
    node: int = 0
    tid: int = 0
    op: str = ""
    n_cases: int = 1
    ruled_out: tuple[RuledOut, ...] = ()
    fix: tuple[str, ...] = ()
    severity: Severity | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that goes wrong.

    Attributes:
        name: Stable identifier.
        says: What it finds, for people.
        find: Looks at the evidence and returns its findings; an empty list on a healthy recording.
    """

    name: str
    says: str
    find: Callable[[Evidence], list[Finding]]
