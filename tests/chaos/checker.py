"""Decides over a `History`: a pure function.

A verdict is *lost* when a rank that was slow for long enough was not named, or when a record says that it replaces one
that never came; *doubled* when a record repeats the one before it. A culprit is *false* when the rank was not slow
then.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

CULPRIT = "culprit"
ENDED = {"", "ordinary", "unknown"}
"""Kinds of which a Fleet that takes over knows nothing: they say nothing against a rank."""


@dataclass(frozen=True)
class Limits:
    """What is allowed.

    Attributes:
        name_s: A rank that was slow for this long must have been named `tell_s` after it ceased to be.
        tell_s: How long after a change a record of it may come, faults included.
        gap_s: Longest time between two answers with a threshold, of one node.
    """

    name_s: float = 30.0
    tell_s: float = 30.0
    gap_s: float = 5.0


@dataclass(frozen=True)
class Violation:
    """What must not be: its kind, and what it is about."""

    kind: str
    detail: str


def check(history, limits=Limits()):
    """Every violation."""
    return [
        *find_lost_verdicts(history, limits),
        *find_broken_chains(history),
        *find_false_culprits(history, limits),
        *find_lost_rows(history),
        *find_gaps(history, limits),
    ]


def find_lost_verdicts(history, limits):
    """Ranks that were slow for long and were not named."""
    for slowed in history.slowed:
        if slowed.end_s - slowed.start_s < limits.name_s:
            continue
        named = any(
            verdict.rank == slowed.rank
            and verdict.kind == CULPRIT
            and slowed.start_s <= verdict.at_s <= slowed.end_s + limits.tell_s
            for verdict in history.verdicts
        )
        if not named:
            yield Violation("verdict lost", f"rank {slowed.rank}, slow from {slowed.start_s:.1f} s")


def find_broken_chains(history):
    """Records of one rank that do not follow from each other."""
    by_rank = {}
    for verdict in history.verdicts:
        by_rank.setdefault(verdict.rank, []).append(verdict)
    for rank, verdicts in by_rank.items():
        for one, following in pairwise(verdicts):
            where = f"rank {rank}: {following.kind} at {following.at_s:.1f} s"
            if following.kind == one.kind:
                yield Violation("verdict doubled", where)
            elif following.before != one.kind and not {following.before, one.kind} <= ENDED:
                yield Violation(
                    "verdict lost", f"{where} replaces {following.before!r}, not {one.kind!r}"
                )


def find_false_culprits(history, limits):
    """Ranks that were named and were not slow."""
    for verdict in history.verdicts:
        was_slow = any(
            slowed.rank == verdict.rank
            and slowed.start_s <= verdict.at_s <= slowed.end_s + limits.tell_s
            for slowed in history.slowed
        )
        if verdict.kind == CULPRIT and not was_slow:
            yield Violation("false culprit", f"rank {verdict.rank} at {verdict.at_s:.1f} s")


def find_lost_rows(history):
    """Rows that were acknowledged and are not there."""
    for writer, numbers in history.acknowledged.items():
        lost = set(numbers) - set(history.stored.get(writer, ()))
        if lost:
            yield Violation(
                "acknowledged rows lost",
                f"{len(lost)} of {writer}, first {min(lost)}, last {max(lost)}",
            )


def list_gaps(history):
    """By node, the longest time without an answer that carries a threshold, and when it began."""
    gaps = {}
    for node in range(history.n_nodes):
        times = sorted(
            one.at_s
            for one in history.thresholds
            if one.node == node and history.start_s <= one.at_s <= history.end_s
        )
        edges = [history.start_s, *times, history.end_s]
        gaps[node] = max((later - earlier, earlier) for earlier, later in pairwise(edges))
    return gaps


def find_gaps(history, limits):
    """Nodes that were without a threshold for too long."""
    for node, (gap_s, since_s) in list_gaps(history).items():
        if gap_s > limits.gap_s:
            yield Violation("threshold gap", f"node {node}: {gap_s:.1f} s from {since_s:.1f} s")


def tally(history):
    """Lines for people: what was done and seen."""
    by_kind = Counter(fault.kind for fault in history.faults)
    faults = ", ".join(f"{kind} {count}" for kind, count in sorted(by_kind.items()))
    named = sum(verdict.kind == CULPRIT for verdict in history.verdicts)
    n_rows = sum(len(set(numbers)) for numbers in history.acknowledged.values())
    n_stored = sum(
        len(set(numbers) & set(history.stored.get(writer, ())))
        for writer, numbers in history.acknowledged.items()
    )
    longest = max((gap_s for gap_s, _ in list_gaps(history).values()), default=0.0)
    return [
        f"faults: {len(history.faults)} in {history.end_s - history.start_s:.0f} s ({faults or 'none'})",
        (
            f"verdicts: {len(history.slowed)} ranks slowed one after the other, {named} times a culprit named,"
            f" {len(history.verdicts)} records"
        ),
        f"rows: {n_rows} acknowledged, {n_stored} of them stored",
        f"thresholds: {len(history.thresholds)} answers to {history.n_nodes} nodes, longest gap {longest:.1f} s",
    ]
