"""Names the ranks that never arrived, apart from those that merely wait.

Members of a communicator that have not entered the operation others wait in are *missed*. A missed rank that itself
waits elsewhere is a victim of that other group, so the wait-for graph is walked to its roots. Clocks of ranks are not
compared: sequence numbers decide whom a rank waits for, and what each entered whether they are of the same operation.

Pure functions over `ingero.model.hang.RankState`; sizes are a few operations per rank, so plain Python is enough. What
holds for an operation, such as who never entered it, is found once for it and not for each rank that waits there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from ingero.detect.group_members import GroupMembers
from ingero.detect.mismatches import find_mismatches
from ingero.detect.other_runs import describe_other_run
from ingero.detect.snapshots import (
    MIN_HANG_NS,
    Contradiction,
    find_contradiction,
    find_longest_wait,
    find_waiting,
    restore_given_up,
)
from ingero.detect.wait_graph import WaitGraph
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

_Waits: TypeAlias = dict[int, tuple[PendingOp, frozenset[int]]]
"""By rank, in which operation it waits and for whom."""
_Key: TypeAlias = tuple[str, int, bool]
"""Group and number of an operation, and whether it is a collective."""
_Place: TypeAlias = tuple[str, int, str | None]
"""Group and number of a collective, and what the rank entered where members disagree."""


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
        self.stopped = frozenset(r for r, state in self.states.items() if state.is_stopped)
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
        named = {rank for group in self.groups.values() for rank in group.ranks}
        self.known = named | self.states.keys()
        self.mismatches = find_mismatches(self.states.values())
        self.first_in: dict[_Key, set[int]] = defaultdict(set)
        for state in self.states.values():
            if state.pending:
                self.first_in[_key_of(state.pending[0])].add(state.rank)
        self._members: dict[str, GroupMembers] = {}

    def get_members(self, group: str) -> GroupMembers:
        """What the members of a communicator entered and left."""
        found = self._members.get(group)
        if found is None:
            entered: dict[int, int] = {}
            left: dict[int, int] = {}
            ranks = self.groups[group].ranks
            for rank in ranks if group not in self.mixed else ():
                state = self.states.get(rank)
                if state is not None and group in state.entered:
                    entered[rank] = state.entered[group]
                if state is not None and group in state.left:
                    left[rank] = state.left[group]
            found = self._members[group] = GroupMembers(ranks, entered, left)
        return found

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

    def find_peers(self, rank: int, key: _Key) -> set[int]:
        """With whom a rank is in point-to-point operations of one number."""
        pending = self.states[rank].pending
        return {op.peer for op in pending if op.peer is not None and _key_of(op) == key}

    def has_left(self, rank: int, op: PendingOp) -> bool:
        """Whether the rank is known to have left a collective."""
        left = self.find_left(rank, op.group)
        return left is not None and left >= op.seq

    def is_stuck(self, state: RankState) -> bool:
        """Whether a peer has left the first operation it is in, which every member entered and no stopped one is in.

        A member that need not wait for all, such as one that only sends, leaves before the last one enters. Where
        leaving may also mean an error, each member must be known to have entered.
        """
        if not state.pending or state.pending[0].peer is not None:
            return False
        first, rank = state.pending[0], state.rank
        members = self.get_members(first.group)
        is_member = rank in members.ranks
        own = self.has_entered(rank, first)
        n_left = members.count_left(first.seq) - (is_member and self.has_left(rank, first))
        n_absent = members.count_absent(first.seq) - (is_member and own is False)
        n_unknown = members.count_unknown() - (is_member and own is None)
        is_left_by_some = n_left > 0 and n_absent == 0 and (state.sees_p2p or n_unknown == 0)
        return is_left_by_some and not members.find_held(self.stopped, first.seq)

    def find_disputed(self) -> set[int]:
        """Ranks that entered different operations, none of which most entered, where somebody waits there or behind."""
        disputed = {
            op.group
            for state in self.states.values()
            for op in state.pending
            if self.is_beyond_mismatch(op) and not self.mismatches[op.group].odd
        }
        return {rank for group in disputed for rank in self.mismatches[group].entered}

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
        firsts = {_key_of(state.pending[0]): state.pending[0] for state in waiting.values()}
        for op in sorted(firsts.values(), key=lambda op: op.seq) if self.stopped else ():
            for member in self.get_members(op.group).find_held(self.stopped, op.seq):
                found.setdefault(member, _Missed(HangCause.STOPPED, self.groups[op.group], op.seq))
        return found

    def is_beyond_mismatch(self, op: PendingOp) -> bool:
        """Whether the members of the operation's group had entered different ones before it or in its place."""
        mismatch = self.mismatches.get(op.group)
        return op.peer is None and mismatch is not None and op.seq >= mismatch.seq

    def find_absent(self, op: PendingOp) -> set[int]:
        """Members that left no state, or are known not to have entered a collective."""
        members = self.get_members(op.group)
        silent = (rank for rank in members.ranks if rank not in self.states)
        return {*silent, *members.find_absent(op.seq)}

    def find_behind_mismatch(self, entered: str | None, op: PendingOp) -> set[int]:
        """Whom a rank waits for in an operation that is beyond a mismatch, apart from the odd ones.

        Args:
            entered: What the rank entered at the mismatch; None where that is not known.
            op: In which it waits.
        """
        mismatch = self.mismatches[op.group]
        absent = self.find_absent(PendingOp(op.group, mismatch.seq, op.op))
        others = {m for m, theirs in mismatch.entered.items() if theirs != entered}
        return absent | (set() if mismatch.odd else others)


def _key_of(op: PendingOp) -> _Key:
    return op.group, op.seq, op.peer is None


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
    other_run = describe_other_run(job.states.values())
    if other_run:
        return replace(report, roots=(), deadlocks=(), suspects=(), note=other_run)
    contradiction = find_contradiction(list(job.states.values()), job.mismatches)
    if contradiction is not None:
        return _report_movement(job, report, contradiction)
    longest = find_longest_wait(job.states.values())
    if longest is not None and longest[0] < longest[1]:
        return _report_short_wait(report, *longest)
    return report


def _follow_waits(job: _Job) -> HangReport:
    """Judge as if the states showed one moment of a job that stands."""
    waits: _Waits = {}
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
    targets = _Targets(job, missed, stuck)
    for rank, state in waiting.items():
        if rank not in stuck:
            waits[rank] = (state.pending[0], targets.find(rank))
    graph = WaitGraph({rank: waited_for for rank, (_, waited_for) in waits.items()})
    at_fault = stuck | _stopped_on_their_own(job, waits)
    roots = _roots(graph, missed, at_fault, job)
    roots, suspects = _set_aside(job, roots, set(waits) | set(stuck))
    by_peers = {rank for rank, why in missed.items() if why.is_p2p and rank not in at_fault}
    unsure = _find_unsure(waits, roots, by_peers)
    roots = tuple(root for root in roots if root.rank not in unsure)
    suspects = tuple(sorted({*suspects, *unsure}))
    deadlocks = graph.find_circles({root.rank for root in roots} | unsure)
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
            Wait(rank, op, graph.get_targets(rank)) for rank, (op, _) in sorted(waits.items())
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
    missed = [r for r in roots if r.cause not in _SURE and r.rank not in hidden]
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


def _find_unsure(waits: _Waits, roots: tuple[HangRoot, ...], missed_by_peers: set[int]) -> set[int]:
    """Absent ranks of several roots that only batches wait for, which another of their peers may hold."""
    if len(roots) < 2:
        return set()
    absent = {root.rank for root in roots if root.cause is HangCause.ABSENT} & missed_by_peers
    alone = set[int]()
    for op, waits_for in waits.values() if absent else ():
        if op.peer is not None and len(waits_for) == 1:
            alone |= waits_for
    return absent - alone


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
        waiting = find_waiting(job.states.values(), seen)
        if waiting:
            note = f"{where} had not entered when it was looked at: its dump is older than what others wait in"
            suspects = tuple(sorted(job.known - waiting))
            return replace(report, roots=(), deadlocks=(), suspects=suspects, note=note)
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


class _Targets:
    """Whom ranks wait for in the first operation they are in; notes where each of those is missed.

    Args:
        job: The states.
        missed: Filled.
        stuck: Ranks that are at fault wherever they are.
    """

    def __init__(self, job: _Job, missed: dict[int, _Missed], stuck: Mapping[int, _Missed]) -> None:
        self._job = job
        self._missed = missed
        self._stuck = frozenset(stuck)
        self._behind: dict[_Place, frozenset[int]] = {}
        self._shared: dict[_Place, frozenset[int]] = {}

    def find(self, rank: int) -> frozenset[int]:
        """Whom one waiting rank waits for."""
        job, op = self._job, self._job.states[rank].pending[0]
        if op.peer is not None:
            return self._find_peers(rank, op)
        is_beyond = job.is_beyond_mismatch(op)
        entered = job.mismatches[op.group].entered.get(rank) if is_beyond else None
        place = (op.group, op.seq, entered)
        behind = self._behind.get(place)
        if behind is None:
            behind = frozenset(
                job.find_behind_mismatch(entered, op) if is_beyond else job.find_absent(op)
            )
            self._behind[place] = behind
        if rank in behind:
            return self._note(op, behind - {rank}, is_beyond=is_beyond)
        if place not in self._shared:
            self._shared[place] = self._note(op, behind, is_beyond=is_beyond)
        return self._shared[place]

    def _note(self, op: PendingOp, behind: frozenset[int], *, is_beyond: bool) -> frozenset[int]:
        """Note where those are missed that are behind, and add those that are stuck."""
        job, members = self._job, self._job.get_members(op.group)
        if is_beyond:
            missed = behind - job.mismatches[op.group].entered.keys()
        else:
            # Where all entered, a stopped rank or one that is still in something earlier holds the rest.
            held = members.find_held(job.stopped, op.seq)
            behind = missed = behind or held or members.ranks - job.first_in[_key_of(op)]
        _note_missed(job, op, missed, self._missed)
        return behind | (members.ranks & self._stuck)

    def _find_peers(self, rank: int, op: PendingOp) -> frozenset[int]:
        """Whom the rank waits for in a point-to-point operation, and in all that ends with it as one batch."""
        key = _key_of(op)
        first_in = self._job.first_in[key]
        peers = self._job.find_peers(rank, key)
        behind = frozenset(
            p for p in peers if p not in first_in or rank not in self._job.find_peers(p, key)
        )
        _note_missed(self._job, op, behind, self._missed)
        return behind | (peers & self._stuck)


def _note_missed(
    job: _Job, op: PendingOp, behind: Iterable[int], missed: dict[int, _Missed]
) -> None:
    group = job.groups[op.group]
    for member in behind:
        cause = HangCause.ABSENT if member in job.states else HangCause.SILENT
        known = missed.get(member)
        if known is None or (known.is_p2p and op.peer is None):
            missed[member] = _Missed(cause, group, op.seq, op.peer is not None)


def _stopped_on_their_own(job: _Job, waits: _Waits) -> dict[int, _Missed]:
    """Waiting ranks whose wait does not excuse that they are missed elsewhere.

    Entering is the host's work and goes on while the device waits. When a peer waits in the *same* operation and
    entered a later one all the same, waiting there did not keep the missed rank from entering it.
    """
    guilty: dict[int, _Missed] = {}
    held: dict[_Key, set[int]] = defaultdict(set)
    for rank, (op, _) in waits.items():
        held[_key_of(op)].add(rank)
    seen = set[tuple[_Key, _Key]]()
    for peer, (held_in, _) in sorted(waits.items()):
        for later in job.states[peer].pending[1:]:
            places = _key_of(held_in), _key_of(later)
            if later.peer is not None or places in seen:
                continue
            seen.add(places)
            why = _Missed(HangCause.ABSENT, job.groups[later.group], later.seq)
            for rank in job.get_members(later.group).find_absent(later.seq):
                if rank in held[places[0]] and not _is_inside(job.states[rank]):
                    guilty.setdefault(rank, why)
    return guilty


def _roots(
    graph: WaitGraph,
    missed: Mapping[int, _Missed],
    at_fault: Mapping[int, _Missed],
    job: _Job,
) -> tuple[HangRoot, ...]:
    """Ranks that are waited for and have no wait of their own to excuse it."""
    roots = []
    for rank in sorted(graph.find_awaited() | at_fault.keys()):
        why = at_fault.get(rank) or missed.get(rank)
        if why is None:  # it disagrees with a peer, and nothing says which of them is wrong
            continue
        last_left = None if why.is_p2p else job.find_left(rank, why.group.name)
        blocks = graph.find_blocked(rank)
        roots.append(HangRoot(rank, why.cause, why.group, why.seq, last_left, blocks))
    return tuple(roots)
