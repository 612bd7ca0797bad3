"""Whether states of ranks that were looked at one after the other show one moment, and for how long they stand.

Pure functions over `ingero.model.hang.RankState`. How long a rank stands is known from its own clock alone: when it
entered an operation and when it was looked at. What ranks say of each other follows from what collectives mean: a
rank that left one that needs every member proves that every member entered it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Final

from ingero.model.hang import PendingOp, RankState, RecordedOp
from ingero.units import NS_PER_S

SYNCHRONISING: Final = frozenset({
    "all_reduce", "all_reduce_barrier", "barrier", "all_gather", "_all_gather_base", "reduce_scatter",
    "_reduce_scatter_base",
})  # fmt: skip
"""Collectives that no member can leave with a result before every member entered; roots of others may leave early."""

MIN_HANG_NS: Final = 3 * NS_PER_S
"""A rank that entered something later than this before it was looked at does not hang yet."""
CLOCK_STEP_NS: Final = NS_PER_S
"""A file's time may be this much before the entry that it holds: file systems keep time in steps."""
PERIODS: Final = 10
"""How many of its usual periods a rank must stand before it counts as hanging, where that many periods are known."""


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A rank left what another had not entered when that other was looked at.

    Attributes:
        behind: The rank that had not entered it.
        ahead: The rank that had left it.
        group: The communicator.
        seq: The operation.
        is_older: Whether the first was looked at before the second entered the operation, by their wall clocks.
    """

    behind: int
    ahead: int
    group: str
    seq: int
    is_older: bool


def restore_given_up(states: Iterable[RankState]) -> list[RankState]:
    """The same states, with operations that ended in a timeout as the waits that they were.

    Gloo's recorder marks an operation that failed like one that succeeded. The last operation of a rank that needs a
    member which did not enter it cannot have succeeded, and when its time was up, the timeout ended it.
    """
    before = list(states)
    entered = {state.rank: state.entered for state in before}
    after = []
    for state in before:
        given_up = {
            group: seq
            for group, ops in state.recorded.items()
            if (seq := max(ops, default=None)) is not None
            and _is_time_up(ops[seq], state.read_wall_ns)
            and any(mine.get(group, seq) < seq for mine in entered.values())
        }
        after.append(_reopen(state, given_up) if given_up else state)
    return after


def _is_time_up(op: RecordedOp, read_wall_ns: int | None) -> bool:
    if not op.is_finished or op.kind not in SYNCHRONISING or not op.timeout_ns:
        return False
    if read_wall_ns is None or op.entered_wall_ns is None:
        return False
    return read_wall_ns - op.entered_wall_ns >= op.timeout_ns


def _reopen(state: RankState, given_up: Mapping[str, int]) -> RankState:
    ops = [
        PendingOp(group, seq, op.kind, None, op.entered_wall_ns)
        for group, seq in given_up.items()
        for op in (state.recorded[group][seq],)
    ]
    recorded = {
        group: {
            seq: replace(op, is_finished=op.is_finished and given_up.get(group) != seq)
            for seq, op in mine.items()
        }
        for group, mine in state.recorded.items()
    }
    pending = sorted((*state.pending, *ops), key=lambda op: op.entered_wall_ns or 0)
    left = {**state.left, **{group: seq - 1 for group, seq in given_up.items()}}
    return replace(state, pending=tuple(pending), left=left, recorded=recorded)


def find_contradiction(
    states: Sequence[RankState], disputed: Iterable[str]
) -> Contradiction | None:
    """The furthest that one rank left behind another that every member must have entered; None when there is none.

    Args:
        states: One per rank.
        disputed: Communicators in which sequence numbers are not comparable.
    """
    found: list[tuple[int, Contradiction]] = []
    last_left: dict[str, tuple[int, RankState]] = {}
    skipped = set(disputed)
    for state in states:
        for group, ops in state.recorded.items():
            seqs = [s for s, op in ops.items() if op.is_finished and op.kind in SYNCHRONISING]
            if group not in skipped and seqs and max(seqs) > last_left.get(group, (-1, None))[0]:
                last_left[group] = (max(seqs), state)
    for group, (seq, ahead) in last_left.items():
        for state in states:
            gap = seq - state.entered.get(group, seq)
            if gap > 0:
                op_ns = ahead.recorded[group][seq].entered_wall_ns
                read_ns = state.read_wall_ns
                is_older = read_ns is not None and op_ns is not None and read_ns < op_ns
                found.append((gap, Contradiction(state.rank, ahead.rank, group, seq, is_older)))
    return max(found, key=lambda one: one[0])[1] if found else None


def find_longest_wait(states: Iterable[RankState]) -> tuple[int, int] | None:
    """For how long the longest wait had lasted, and how long it must last to count as a hang, both in nanoseconds.

    Returns:
        None when nothing waits, or when it is not known of some wait when it began or when it was looked at.
    """
    stood = []
    for state in states:
        if not state.pending:
            continue
        entered_ns = state.pending[0].entered_wall_ns
        if entered_ns is None or state.read_wall_ns is None:
            return None
        stood_ns = state.read_wall_ns - entered_ns
        if stood_ns < -CLOCK_STEP_NS:
            return None
        stood.append((max(0, stood_ns), _needed_ns(state)))
    return max(stood, default=None)


def find_waiting(states: Iterable[RankState], seen: Contradiction) -> set[int]:
    """Ranks that stand, among those that entered what an older state denies: a job that moved may stand since."""
    present = [one for one in states if one.entered.get(seen.group, -1) >= seen.seq]
    longest = find_longest_wait(present)
    is_short = longest is not None and longest[0] < longest[1]
    return set() if is_short else {one.rank for one in present if one.pending}


def _needed_ns(state: RankState) -> int:
    times = sorted(
        op.entered_wall_ns
        for ops in state.recorded.values()
        for op in ops.values()
        if op.entered_wall_ns is not None
    )
    gaps = [later - earlier for earlier, later in pairwise(times)]
    usual_ns = int(median(gaps)) if len(gaps) >= PERIODS else 0
    return max(MIN_HANG_NS, PERIODS * usual_ns)
