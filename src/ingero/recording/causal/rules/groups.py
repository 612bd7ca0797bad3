"""Communicators: the same operation of every rank side by side. Not a rule; what the rules of collectives stand on.

Needs rows of more than one rank: a merged recording, or several ranks on one node. A call that only enqueues says
nothing about the time inside; then the synchronisation that follows it on the same thread does, and operations that no
synchronisation follows are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ingero.model.arrays import BoolArray, IntArray
from ingero.model.events import EventFlag
from ingero.model.operations import OpKind
from ingero.recording.causal.evidence import EventRows, Evidence, Process, remembered
from ingero.units import NS_PER_MS

MIN_OPS: Final = 20
_BLOCKS_NS: Final = NS_PER_MS
_RANK_SHIFT: Final = 32
_N_RANKS: Final = (1 << _RANK_SHIFT) - 1


@dataclass(frozen=True, slots=True)
class Group:
    """One communicator: operations that every member's rows hold.

    Attributes:
        comm: Its id hash.
        processes: Members, by rank.
        ranks: Their ranks in the communicator.
        seqs: Sequence numbers, ascending.
        inside_ns: Time inside, shape (ranks, operations); 0 where nothing says.
        entries_ns: Entry on each rank's own clock, same shape.
        codes: What each rank called, same shape.
        n_bytes: With how many bytes, same shape.
    """

    comm: int
    processes: tuple[Process, ...]
    ranks: tuple[int, ...]
    seqs: IntArray
    inside_ns: IntArray
    entries_ns: IntArray
    codes: IntArray
    n_bytes: IntArray

    def at(self, is_chosen: BoolArray) -> Group:
        """The same communicator with some of its operations."""
        return replace(
            self,
            seqs=self.seqs[is_chosen],
            inside_ns=self.inside_ns[:, is_chosen],
            entries_ns=self.entries_ns[:, is_chosen],
            codes=self.codes[:, is_chosen],
            n_bytes=self.n_bytes[:, is_chosen],
        )

    def timed(self) -> Group:
        """The operations whose time inside is known on every rank."""
        return self.at(np.all(self.inside_ns > 0, axis=0))


def has_collectives(_evidence: Evidence, process: Process) -> bool:
    """Whether a process takes part in collectives."""
    return bool((process.calls.kinds == OpKind.COLLECTIVE).any())


Members = dict[int, tuple[Process, EventRows]]
"""Processes of one communicator with their operations, by rank."""


def find_members(evidence: Evidence, *, has_open: bool = False) -> dict[int, Members]:
    """Every communicator whose members' places are known, by its id hash.

    Args:
        evidence: The recording.
        has_open: Also operations that had not returned.
    """
    members: dict[int, Members] = {}
    for process in evidence.gpu_processes:
        ops = process.calls.of(OpKind.COLLECTIVE)
        if has_open:
            ops = evidence.join(ops, process.open.of(OpKind.COLLECTIVE))
        # What a collective calls inside is the same one again.
        ops = ops.where((evidence.column("flags", ops) & EventFlag.NESTED) == 0)
        # Without a place in the communicator (it was made before the probes) nothing can be paired.
        ops = ops.where((evidence.column("arg3", ops) & _N_RANKS) > 0)
        comms = evidence.column("arg1", ops)
        for comm in np.unique(comms).tolist():
            mine = ops.where(comms == comm)
            rank = int(evidence.column("arg3", mine)[0]) >> _RANK_SHIFT
            members.setdefault(comm, {})[rank] = (process, mine)
    return members


@remembered
def find_groups(evidence: Evidence) -> list[Group]:
    """Communicators of which the recording holds at least two ranks and enough operations."""
    return [
        group
        for comm, ranks in sorted(find_members(evidence).items())
        if len(ranks) > 1 and (group := _align(evidence, comm, ranks)) is not None
    ]


def _align(evidence: Evidence, comm: int, ranks: Members) -> Group | None:
    rows = [ranks[rank][1] for rank in sorted(ranks)]
    seqs = [evidence.column("arg2", ops) for ops in rows]
    shared = seqs[0]
    for other in seqs[1:]:
        shared = np.intersect1d(shared, other)
    if len(shared) < MIN_OPS:
        return None
    at = [np.searchsorted(mine, shared, sorter=np.argsort(mine, kind="stable")) for mine in seqs]
    picked = [
        ops.where(np.argsort(s, kind="stable")[i]) for ops, s, i in zip(rows, seqs, at, strict=True)
    ]
    return Group(
        comm,
        tuple(ranks[rank][0] for rank in sorted(ranks)),
        tuple(sorted(ranks)),
        shared,
        np.stack([
            _time_inside(ranks[rank][0], ops)
            for rank, ops in zip(sorted(ranks), picked, strict=True)
        ]),
        np.stack([ops.starts for ops in picked]),
        np.stack([ops.codes for ops in picked]),
        np.stack([evidence.column("arg0", ops) for ops in picked]),
    )


def _time_inside(process: Process, ops: EventRows) -> IntArray:
    """Time inside each operation: the call's own when it blocks, else until the synchronisation that follows ends."""
    if np.median(ops.durations) >= _BLOCKS_NS:
        return ops.durations
    calls = process.calls.where(np.isin(process.calls.tids, np.unique(ops.tids)))
    syncs, all_ops = calls.of(OpKind.SYNC), calls.of(OpKind.COLLECTIVE)
    if not len(syncs):
        return np.zeros(len(ops), np.int64)
    after = np.searchsorted(syncs.starts, ops.starts)
    at = np.minimum(after, len(syncs) - 1)
    following = np.searchsorted(all_ops.starts, ops.starts, side="right")
    next_op = np.append(all_ops.starts, np.iinfo(np.int64).max)[following]
    is_followed = (after < len(syncs)) & (syncs.starts[at] < next_op)
    return np.where(is_followed, syncs.ends[at] - ops.starts, 0)
