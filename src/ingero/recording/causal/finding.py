"""What a rule needs, and what it hands back, before the engine gives it an id, a severity and its coverage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from ingero.model.incidents import Cause, RuledOut, Severity
from ingero.model.operations import OpKind, find_codes
from ingero.recording.causal.attribution import NAMED_SHARE
from ingero.recording.causal.evidence import Evidence, Process
from ingero.recording.causal.intervals import Times
from ingero.units import format_duration


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
        n_cases: How many times it occurred.
        ruled_out: What was checked.
        fix: Next steps.
        severity: Fixed by the rule; None takes it from the share of watched time.
        others: Further processes whose rows it stands on.
        range_ns: Least and most that `lost_ns` can be, where rows are missing and the rule knows; None leaves it to
            the engine.
        most: The severity that it may have at most, where the rows do not prove more.
        stacks: Stack hashes of the rows that show it, worst first.
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
    others: tuple[Process, ...] = ()
    range_ns: tuple[int, int] | None = None
    most: Severity | None = None
    stacks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Unjudged:
    """What a rule itself could not decide.

    Attributes:
        process: Of whom.
        missing: What it would have needed.
        how: How to record that; empty where calls have no row.
    """

    process: Process
    missing: str
    how: str = ""


@dataclass(frozen=True, slots=True)
class Needs:
    """Which operations a rule has to have rows of before it may say anything.

    Attributes:
        kinds: Roles of the rows it reads.
        max_missing: Part of the calls that may be without a row. Ignored with `is_time`.
        is_time: It speaks of the time in these rows: calls without a row matter only where their time, which was
            counted, could make or change an incident.
        is_absence: It says that something did not happen: nothing is said where nobody counted.
        is_proof: A row proves what it finds, however many others are missing; only "nothing found" needs all of them.
        applies: Whether it has anything to do with a process; None for all that have such calls.
    """

    kinds: tuple[OpKind, ...] = ()
    max_missing: float = 0.0
    is_time: bool = False
    is_absence: bool = False
    is_proof: bool = False
    applies: Callable[[Evidence, Process], bool] | None = None

    @property
    def codes(self) -> frozenset[int]:
        """Operations of these kinds, as source << 8 | op."""
        return find_codes(self.kinds)


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that goes wrong.

    Attributes:
        name: Stable identifier.
        description: What it finds, for people.
        find: Looks at the evidence and returns its findings; an empty list on a healthy recording.
        needs: What it has to have rows of. Nothing means that single rows are what it finds.
    """

    name: str
    description: str
    find: Find
    needs: Needs = Needs()


Find = Callable[[Evidence], Iterable[Finding | Unjudged]]
Judge = Callable[[Evidence, Process], Finding | Unjudged | None]


def rule(name: str, description: str, needs: Needs = Needs()) -> Callable[[Find], Rule]:
    """Make a rule of a function that looks at all of the evidence."""
    return lambda find: Rule(name, description, find, needs)


def process_rule(name: str, description: str, needs: Needs) -> Callable[[Judge], Rule]:
    """Make a rule of a function that looks at one process that uses a GPU, and finds one thing at most."""

    def build(judge: Judge) -> Rule:
        def find(evidence: Evidence) -> Iterable[Finding | Unjudged]:
            found = (judge(evidence, process) for process in evidence.gpu_processes)
            return [one for one in found if one is not None]

        return Rule(name, description, find, needs)

    return build


def name_cause(name: str, share: float, *facts: str, has_rest: bool = False) -> tuple[Cause, ...]:
    """One cause with what was measured of it.

    Args:
        name: In plain words.
        share: Part of the lost time.
        facts: What was measured.
        has_rest: Whether what it leaves of the lost time is called unexplained where that is enough to be named.
    """
    share = round(share, 4)
    rest = round(1 - share, 4)
    found = (Cause(name, share, facts),)
    return (*found, Cause("unexplained", rest)) if has_rest and 1 - share >= NAMED_SHARE else found


@dataclass(frozen=True, slots=True)
class Contrast:
    """The same kind of call in two cases.

    Attributes:
        hit_ns: Median duration of those that something happened to.
        free_ns: Median duration of the others.
        n_hit: Number of the former.
        n_free: Number of the latter.
    """

    hit_ns: float
    free_ns: float
    n_hit: int
    n_free: int

    @classmethod
    def of(cls, durations: Times, is_hit: npt.NDArray[np.bool_], n_least: int) -> Self | None:
        """Compare; None where either case has fewer calls than `n_least`."""
        n_hit = int(is_hit.sum())
        if min(n_hit, len(is_hit) - n_hit) < n_least:
            return None
        hit, free = (float(np.median(durations[mask])) for mask in (is_hit, ~is_hit))
        return cls(hit, free, n_hit, len(is_hit) - n_hit)

    def extra_ns(self, durations: Times) -> float:
        """Time that calls took beyond the median of the free ones."""
        return float(np.clip(durations - self.free_ns, 0, None).sum())

    def format(self, when: str = "when hit", else_: str = "otherwise") -> str:
        """Both medians in words."""
        return f"{format_duration(self.hit_ns)} {when}, {format_duration(self.free_ns)} {else_}"
