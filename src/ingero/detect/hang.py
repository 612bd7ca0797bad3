"""Names the ranks that never arrived, apart from those that merely wait.

Members of a communicator that have not entered the operation others wait in are *missed*. A missed rank that itself
waits elsewhere is a victim of that other group, so the wait-for graph is walked to its roots. Clocks of ranks are not
compared: sequence numbers decide whom a rank waits for, and what each entered whether they are of the same operation.

Pure functions over `ingero.model.hang.RankState`; sizes are a few operations per rank, so plain Python is enough.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from ingero.detect.mismatches import find_mismatches
from ingero.detect.snapshots import (
    MIN_HANG_NS,
    Contradiction,
    find_contradiction,
    find_longest_wait,
    restore_given_up,
)
from ingero.model.hang import (
    HangCause,
    HangReport,
    HangRoot,
    PendingOp,
    RankState,
    StoppedGroup,
    Wait,
    Whereabouts,
)
from ingero.units import NS_PER_S

_SURE: Final = frozenset({HangCause.STUCK, HangCause.MISMATCHED, HangCause.STOPPED})
"""Causes that a wait which is not recorded cannot excuse."""


@dataclass(frozen=True, slots=True)
class _Missed:
    """Why a rank is waited for: the first place it is missed."""

    cause: HangCause
    group: StoppedGroup
    seq: int
    is_p2p: bool = False


class _Job:
    """The states by rank, and the questions the rules ask of them."""

    def __init__(self, states: Iterable[RankState]) -> None:
        self.states = {state.rank: state for state in states}
        self.groups: dict[str, StoppedGroup] = {}
        for state in self.states.values():
            self.groups.update(state.groups)
        # Where point-to-point operations run, one rank's counters mean another thing than its peer's.
        self.mixed = {
            op.group
            for state in self.states.values()
            for op in state.pending
            if op.peer is not None
        }
        self.known = {rank for group in self.groups.values() for rank in group.ranks} | set(
            self.states
        )
        self.mismatches = find_mismatches(self.states.values())

    def has_entered(self, rank: int, op: PendingOp) -> bool | None:
        """Whether the rank entered a collective; None when that is not known."""
        state = self.states.get(rank)
        if state is None or op.group in self.mixed:
            return None
        entered = state.entered.get(op.group)
        return None if entered is None else entered >= op.seq

    def find_left(self, rank: int, group: str) -> int | None:
        """The last collective of a group that the rank finished; None when that is not known."""
        state = self.states.get(rank)
        return None if state is None or group in self.mixed else state.left.get(group)

    def has_left(self, rank: int, op: PendingOp) -> bool:
        """Whether the rank is known to have left a collective."""
        left = self.find_left(rank, op.group)
        return left is not None and left >= op.seq

    def is_stuck(self, state: RankState) -> bool:
        """Whether the first operation it is in is one that a peer has left and every member entered.

        A member that need not wait for all, such as one that only sends, leaves before the last one enters. Where
        leaving may also mean an error, each member must be known to have entered.
        """
        if not state.pending or state.pending[0].peer is not None:
            return False
        first = state.pending[0]
        peers = [rank for rank in self.groups[first.group].ranks if rank != state.rank]
        doubts = {False} if state.sees_p2p else {False, None}
        return any(self.has_left(rank, first) for rank in peers) and not any(
            self.has_entered(rank, first) in doubts for rank in peers
        )

    def find_disputed(self) -> set[int]:
        """Ranks that entered different operations, none of which most entered, where somebody waits there or behind."""
        return {
            rank
            for state in self.states.values()
            for op in state.pending
            if self.is_beyond_mismatch(op) and not self.mismatches[op.group].odd
            for rank in self.mismatches[op.group].entered
        }

    def find_mismatched(self) -> dict[int, _Missed]:
        """Ranks that entered another operation than most, where somebody waits in it or behind it."""
        found = {}
        for name, mismatch in self.mismatches.items():
            if any(self.is_beyond_mismatch(op) for s in self.states.values() for op in s.pending):
                why = _Missed(HangCause.MISMATCHED, self.groups[name], mismatch.seq)
                found.update(dict.fromkeys(mismatch.odd, why))
        return found

    def find_stopped(self, waiting: Mapping[int, RankState]) -> dict[int, _Missed]:
        """Stopped ranks, each with the first operation of theirs that a rank waits in which is not stopped."""
        found: dict[int, _Missed] = {}
        for state in waiting.values():
            op = state.pending[0]
            for member in self.groups[op.group].ranks:
                mine = self.states.get(member)
                if mine is not None and mine.is_stopped and not self.has_left(member, op):
                    why = _Missed(HangCause.STOPPED, self.groups[op.group], op.seq)
                    found.setdefault(member, why)
        return found

    def is_beyond_mismatch(self, op: PendingOp) -> bool:
        """Whether the members of the operation's group had entered different ones before it or in its place."""
        mismatch = self.mismatches.get(op.group)
        return op.peer is None and mismatch is not None and op.seq >= mismatch.seq

    def find_behind_mismatch(self, rank: int, op: PendingOp, members: Iterable[int]) -> set[int]:
        """Whom a rank waits for in an operation that is beyond a mismatch, apart from the odd ones."""
        mismatch = self.mismatches[op.group]
        there = PendingOp(op.group, mismatch.seq, op.op)
        absent = {m for m in members if m not in self.states or self.has_entered(m, there) is False}
        mine = mismatch.entered.get(rank)
        others = {m for m, entered in mismatch.entered.items() if entered != mine and m != rank}
        return absent | (set() if mismatch.odd else others)

    def is_held_here(self, rank: int, op: PendingOp) -> bool:
        """Whether this collective is the very first thing the rank waits in."""
        state = self.states.get(rank)
        return state is not None and bool(state.pending) and _is_same(state.pending[0], op)


def _is_same(left: PendingOp, right: PendingOp) -> bool:
    return (
        left.group == right.group
        and left.seq == right.seq
        and (left.peer is None) == (right.peer is None)
    )


def find_hang(states: Iterable[RankState]) -> HangReport:
    """Find the ranks that a hung job waits for.

    Args:
        states: One per rank that could be read; ranks that only groups name count as silent when they are missed.

    Returns:
        The roots with what each blocks, circles without a root, and every wait. Without roots and waits no
        rank was seen to wait.
    """
    job = _Job(restore_given_up(states))
    report = _follow_waits(job)
    contradiction = find_contradiction(list(job.states.values()), job.mismatches)
    if contradiction is not None:
        return _report_movement(job, report, contradiction)
    longest = find_longest_wait(job.states.values())
    if longest is not None and longest[0] < longest[1]:
        return _report_short_wait(report, *longest)
    return report


def _follow_waits(job: _Job) -> HangReport:
    """Judge as if the states showed one moment of a job that stands."""
    waits: dict[int, tuple[PendingOp, set[int]]] = {}
    missed: dict[int, _Missed] = {}
    waiting = {
        rank: state
        for rank, state in sorted(job.states.items())
        if state.pending and not state.is_stopped
    }
    stopped = job.find_stopped(waiting)
    stuck = (
        stopped
        | job.find_mismatched()
        | {
            rank: _Missed(HangCause.STUCK, job.groups[state.pending[0].group], state.pending[0].seq)
            for rank, state in waiting.items()
            if job.is_stuck(state) and not job.is_beyond_mismatch(state.pending[0])
        }
    )
    for rank, state in waiting.items():
        if rank not in stuck:
            waits[rank] = (state.pending[0], _waited_for(job, rank, missed, stuck))
    roots = _roots(waits, missed, stuck | _stopped_on_their_own(job, waits), job)
    roots, suspects = _set_aside(job, roots, set(waits) | set(stuck))
    deadlocks = _circles(waits, {root.rank for root in roots})
    if not roots:
        suspects = tuple(
            sorted({
                *suspects,
                *(rank for circle in deadlocks for rank in circle),
                *job.find_disputed(),
            })
        )
    return HangReport(
        roots=roots,
        deadlocks=deadlocks,
        waits=tuple(
            Wait(rank, op, tuple(sorted(targets))) for rank, (op, targets) in sorted(waits.items())
        ),
        ranks_read=tuple(sorted(job.states)),
        ranks_known=tuple(sorted(job.known)),
        suspects=suspects,
        hidden_waits=tuple(
            rank
            for rank, state in sorted(job.states.items())
            if rank not in waiting and _is_inside(state)
        ),
        note=_describe_unseen(job) if not roots and not waits else "",
    )


def _is_inside(state: RankState | None) -> bool:
    return state is not None and state.whereabouts is Whereabouts.INSIDE


def _set_aside(
    job: _Job, roots: tuple[HangRoot, ...], known_waiting: set[int]
) -> tuple[tuple[HangRoot, ...], tuple[int, ...]]:
    """Roots that may themselves wait in something that is not recorded are suspects and not roots.

    Where point-to-point operations leave no record, of several ranks that never arrived one may wait for the other.
    A stack settles it; so does being the only one: all others are known to wait.
    """
    hidden = {rank for rank, state in job.states.items() if _is_inside(state)} - known_waiting
    sure = [r for r in roots if r.cause in _SURE]
    missed = [r for r in roots if r not in sure and r.rank not in hidden]
    if not roots or (not missed and not sure):
        # Somebody waits and the one that it waits for is not among those that are known to be waited for.
        suspects = sorted(job.known - known_waiting - hidden) if known_waiting or hidden else ()
        return (), tuple(suspects)
    if all(state.sees_p2p for state in job.states.values()):
        return tuple(sorted((*sure, *missed), key=lambda root: root.rank)), ()
    early = _find_early(job, missed)
    is_unsure = len(missed) > 1 and any(
        r.cause is HangCause.ABSENT and job.states[r.rank].whereabouts is None for r in missed
    )
    if early or is_unsure:
        return tuple(sure), tuple(sorted({root.rank for root in missed} | early))
    return tuple(sorted((*sure, *missed), key=lambda root: root.rank)), ()


def _find_early(job: _Job, missed: Iterable[HangRoot]) -> set[int]:
    """Ranks that entered what more ranks never entered: those may have entered one operation too many."""
    absent: dict[tuple[str, int], set[int]] = defaultdict(set)
    for root in missed:
        if root.cause is HangCause.ABSENT:
            absent[root.group.name, root.missing_seq].add(root.rank)
    early = set()
    for (group, seq), ranks in absent.items():
        op = PendingOp(group, seq, "")
        entered = {rank for rank in job.groups[group].ranks if job.has_entered(rank, op)}
        if len(ranks) > len(entered):
            early |= entered
    return early


def _describe_unseen(job: _Job) -> str:
    """Why no wait in any dump does not mean that nobody waits; empty when it does mean that."""
    silent = sorted(job.known - set(job.states))
    if silent:
        return f"no rank is in a recorded operation, and rank {silent[0]} left nothing to read"
    unseen = [state for state in job.states.values() if state.whereabouts is None]
    if unseen and not any(state.entered or state.left for state in job.states.values()):
        return "no rank recorded an operation; a stack of each rank would tell whether one waits"
    if any(not state.sees_p2p for state in unseen):
        return (
            "no rank is in a recorded operation; what Gloo does not record (point to point, monitored barriers, making"
            " groups) a stack of each rank would tell"
        )
    return ""


def _report_movement(job: _Job, report: HangReport, seen: Contradiction) -> HangReport:
    """Nobody stands in what is not one moment; only who is older by its own clock proves that the job moved."""
    where = f"rank {seen.ahead} left operation {seen.seq} of group {seen.group or 'default'}, which rank {seen.behind}"
    if seen.is_older and job.known == set(job.states):
        return replace(
            report, roots=(), deadlocks=(), waits=(), suspects=(), hidden_waits=(), note=""
        )
    note = f"{where} had not entered: they were not read at one moment, or the operation failed"
    return replace(report, roots=(), deadlocks=(), suspects=(), note=note)


def _report_short_wait(report: HangReport, stood_ns: int, needed_ns: int) -> HangReport:
    """Nobody hangs yet; between a hang's least time and what is usual for this job it is not known."""
    stood_s = stood_ns / NS_PER_S
    if stood_ns < MIN_HANG_NS:
        return replace(
            report, roots=(), deadlocks=(), waits=(), suspects=(), hidden_waits=(), note=""
        )
    note = (
        f"the longest wait had lasted {stood_s:.1f} s, and operations of this job usually come so slowly that only"
        f" {needed_ns / NS_PER_S:.0f} s would mean something"
    )
    suspects = tuple(sorted({*report.suspects, *report.missing_ranks}))
    return replace(report, roots=(), suspects=suspects, note=note)


def _waited_for(
    job: _Job, rank: int, missed: dict[int, _Missed], stuck: Mapping[int, _Missed]
) -> set[int]:
    """Which ranks this one waits for in the first operation it is in; notes where each of them is missed."""
    op = job.states[rank].pending[0]
    group = job.groups[op.group]
    members = (
        [op.peer] if op.peer is not None else [member for member in group.ranks if member != rank]
    )
    if job.is_beyond_mismatch(op):
        behind = job.find_behind_mismatch(rank, op, members)
        _note_missed(job, op, behind - job.mismatches[op.group].entered.keys(), missed)
        return behind | {member for member in members if member in stuck}
    absent = {
        member
        for member in members
        if member not in job.states or (op.peer is None and job.has_entered(member, op) is False)
    }
    # Where all entered, a rank that is still in something earlier holds the rest.
    behind = absent or {member for member in members if not job.is_held_here(member, op)}
    _note_missed(job, op, behind, missed)
    return behind | {member for member in members if member in stuck}


def _note_missed(
    job: _Job, op: PendingOp, behind: Iterable[int], missed: dict[int, _Missed]
) -> None:
    group = job.groups[op.group]
    for member in behind:
        cause = HangCause.ABSENT if member in job.states else HangCause.SILENT
        known = missed.get(member)
        if known is None or (known.is_p2p and op.peer is None):
            missed[member] = _Missed(cause, group, op.seq, op.peer is not None)


def _stopped_on_their_own(
    job: _Job, waits: Mapping[int, tuple[PendingOp, set[int]]]
) -> dict[int, _Missed]:
    """Waiting ranks whose wait does not excuse that they are missed elsewhere.

    Entering is the host's work and goes on while the device waits. When a peer waits in the *same* operation and
    entered a later one all the same, waiting there did not keep the missed rank from entering it.
    """
    guilty: dict[int, _Missed] = {}
    for peer, (held_in, _) in sorted(waits.items()):
        for later in job.states[peer].pending[1:]:
            if later.peer is not None:
                continue
            group = job.groups[later.group]
            for rank in group.ranks:
                is_held_alike = rank in waits and _is_same(waits[rank][0], held_in)
                if (
                    is_held_alike
                    and job.has_entered(rank, later) is False
                    and not _is_inside(job.states[rank])
                ):
                    guilty.setdefault(rank, _Missed(HangCause.ABSENT, group, later.seq))
    return guilty


def _roots(
    waits: Mapping[int, tuple[PendingOp, set[int]]],
    missed: Mapping[int, _Missed],
    at_fault: Mapping[int, _Missed],
    job: _Job,
) -> tuple[HangRoot, ...]:
    """Ranks that are waited for and have no wait of their own to excuse it."""
    waiters: dict[int, set[int]] = defaultdict(set)
    for rank, (_, targets) in waits.items():
        for target in targets:
            waiters[target].add(rank)
    roots = []
    for rank in sorted((waiters.keys() - waits.keys()) | at_fault.keys()):
        why = at_fault.get(rank) or missed.get(rank)
        if why is None:  # it disagrees with a peer, and nothing says which of them is wrong
            continue
        last_left = None if why.is_p2p else job.find_left(rank, why.group.name)
        blocks = tuple(sorted(_reach(rank, waiters) - {rank}))
        roots.append(HangRoot(rank, why.cause, why.group, why.seq, last_left, blocks))
    return tuple(roots)


def _reach(start: int, edges: Mapping[int, set[int]]) -> set[int]:
    seen, stack = set[int](), [start]
    while stack:
        for following in edges.get(stack.pop(), ()):
            if following not in seen:
                seen.add(following)
                stack.append(following)
    return seen


def _circles(
    waits: Mapping[int, tuple[PendingOp, set[int]]], roots: set[int]
) -> tuple[tuple[int, ...], ...]:
    """Sets of ranks that reach each other and no root: a deadlock, or a link that carries nothing."""
    edges = {rank: targets for rank, (_, targets) in waits.items()}
    reached = {rank: _reach(rank, edges) for rank in edges}
    circles = {
        tuple(sorted(other for other in reached[rank] if rank in reached.get(other, ())))
        for rank in edges
        if rank in reached[rank] and not reached[rank] & roots
    }
    return tuple(sorted(circles))
