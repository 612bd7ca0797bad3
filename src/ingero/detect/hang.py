"""Names the ranks that never arrived, apart from those that merely wait.

Members of a communicator that have not entered the operation others wait in are *missed*. A missed rank that itself
waits elsewhere is a victim of that other group, so the wait-for graph is walked to its roots. No clocks are compared:
sequence numbers alone decide.

Pure functions over `ingero.model.hang.RankState`; sizes are a few operations per rank, so plain Python is enough.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ingero.model.hang import (
    HangCause,
    HangReport,
    HangRoot,
    PendingOp,
    RankState,
    StoppedGroup,
    Wait,
)


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
        """Whether the first operation it is in is one that a peer has left."""
        if not state.pending or state.pending[0].peer is not None:
            return False
        first = state.pending[0]
        group = self.groups[first.group]
        return any(self.has_left(rank, first) for rank in group.ranks if rank != state.rank)

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
    job = _Job(states)
    waits: dict[int, tuple[PendingOp, set[int]]] = {}
    missed: dict[int, _Missed] = {}
    waiting = {rank: state for rank, state in sorted(job.states.items()) if state.pending}
    stuck = {
        rank: _Missed(HangCause.STUCK, job.groups[state.pending[0].group], state.pending[0].seq)
        for rank, state in waiting.items()
        if job.is_stuck(state)
    }
    for rank, state in waiting.items():
        if rank not in stuck:
            waits[rank] = (state.pending[0], _waited_for(job, rank, missed, stuck))
    roots = _roots(waits, missed, stuck | _stopped_on_their_own(job, waits), job)
    return HangReport(
        roots=roots,
        deadlocks=_circles(waits, {root.rank for root in roots}),
        waits=tuple(
            Wait(rank, op, tuple(sorted(targets))) for rank, (op, targets) in sorted(waits.items())
        ),
        ranks_read=tuple(sorted(job.states)),
        ranks_known=tuple(sorted(job.known)),
    )


def _waited_for(
    job: _Job, rank: int, missed: dict[int, _Missed], stuck: Mapping[int, _Missed]
) -> set[int]:
    """Which ranks this one waits for in the first operation it is in; notes where each of them is missed."""
    op = job.states[rank].pending[0]
    group = job.groups[op.group]
    members = (
        [op.peer] if op.peer is not None else [member for member in group.ranks if member != rank]
    )
    absent = {
        member
        for member in members
        if member not in job.states or (op.peer is None and job.has_entered(member, op) is False)
    }
    # Where all entered, a rank that is still in something earlier holds the rest.
    behind = absent or {member for member in members if not job.is_held_here(member, op)}
    for member in behind:
        cause = HangCause.ABSENT if member in job.states else HangCause.SILENT
        known = missed.get(member)
        if known is None or (known.is_p2p and op.peer is None):
            missed[member] = _Missed(cause, group, op.seq, op.peer is not None)
    return behind | {member for member in members if member in stuck}


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
                if is_held_alike and job.has_entered(rank, later) is False:
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
        why = at_fault.get(rank) or missed[rank]
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
