"""Ranks meet in collectives: the last to arrive has the shortest call, and everybody must agree on what comes next.

Needs rows of more than one rank: a merged recording, or several ranks on one node. A call that only enqueues says
nothing about the time inside; then the synchronisation that follows it on the same thread does, and operations that no
synchronisation follows are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ingero.agent.causal.evidence import Evidence, Process, Rows
from ingero.agent.causal.finding import Finding, Rule
from ingero.agent.causal.kinds import Kind
from ingero.model.incidents import Cause, Severity
from ingero.units import NS_PER_MS, format_duration

_MIN_OPS: Final = 20
_MIN_LATE_NS: Final = NS_PER_MS
_MIN_LATE_SHARE: Final = 0.10
_MIN_SAME_RANK: Final = 0.60
_RANK_SHIFT: Final = 32


@dataclass(frozen=True, slots=True)
class _Group:
    """One communicator: operations that every member's rows hold.

    Attributes:
        processes: Members, by rank.
        ranks: Their ranks in the communicator.
        seqs: Sequence numbers, ascending.
        inside_ns: Time inside, shape (ranks, operations); 0 where nothing says.
        entries_ns: Entry on each rank's own clock, same shape.
        codes: What each rank called, same shape.
    """

    processes: tuple[Process, ...]
    ranks: tuple[int, ...]
    seqs: npt.NDArray[np.int64]
    inside_ns: npt.NDArray[np.int64]
    entries_ns: npt.NDArray[np.int64]
    codes: npt.NDArray[np.int64]


def _find_groups(evidence: Evidence) -> list[_Group]:
    members: dict[int, dict[int, tuple[Process, Rows]]] = {}
    for process in evidence.gpu_processes:
        ops = process.calls.of(Kind.COLLECTIVE)
        comms = evidence.column("arg1", ops)
        for comm in np.unique(comms).tolist():
            mine = ops.where(comms == comm)
            rank = int(evidence.column("arg3", mine)[0]) >> _RANK_SHIFT
            members.setdefault(comm, {})[rank] = (process, mine)
    return [
        group
        for _, ranks in sorted(members.items())
        if len(ranks) > 1 and (group := _align(evidence, ranks)) is not None
    ]


def _align(evidence: Evidence, ranks: dict[int, tuple[Process, Rows]]) -> _Group | None:
    rows = [ranks[rank][1] for rank in sorted(ranks)]
    seqs = [evidence.column("arg2", ops) for ops in rows]
    shared = seqs[0]
    for other in seqs[1:]:
        shared = np.intersect1d(shared, other)
    if len(shared) < _MIN_OPS:
        return None
    at = [np.searchsorted(mine, shared, sorter=np.argsort(mine, kind="stable")) for mine in seqs]
    picked = [
        ops.where(np.argsort(s, kind="stable")[i]) for ops, s, i in zip(rows, seqs, at, strict=True)
    ]
    return _Group(
        tuple(ranks[rank][0] for rank in sorted(ranks)),
        tuple(sorted(ranks)),
        shared,
        np.stack([
            _time_inside(ranks[rank][0], ops)
            for rank, ops in zip(sorted(ranks), picked, strict=True)
        ]),
        np.stack([ops.starts for ops in picked]),
        np.stack([ops.codes for ops in picked]),
    )


def _time_inside(process: Process, ops: Rows) -> npt.NDArray[np.int64]:
    """Time inside each operation: the call's own when it blocks, else until the synchronisation that follows ends."""
    if np.median(ops.durations) >= _MIN_LATE_NS:
        return ops.durations
    calls = process.calls.where(np.isin(process.calls.tids, np.unique(ops.tids)))
    syncs, all_ops = calls.of(Kind.SYNC), calls.of(Kind.COLLECTIVE)
    if not len(syncs):
        return np.zeros(len(ops), np.int64)
    after = np.searchsorted(syncs.starts, ops.starts)
    at = np.minimum(after, len(syncs) - 1)
    following = np.searchsorted(all_ops.starts, ops.starts, side="right")
    next_op = np.append(all_ops.starts, np.iinfo(np.int64).max)[following]
    is_followed = (after < len(syncs)) & (syncs.starts[at] < next_op)
    return np.where(is_followed, syncs.ends[at] - ops.starts, 0)


def find_late(evidence: Evidence) -> list[Finding]:
    """One rank that the others wait for."""
    return [f for group in _find_groups(evidence) if (f := _judge_late(group)) is not None]


def _judge_late(group: _Group) -> Finding | None:
    is_known = (group.inside_ns > 0).all(axis=0)
    if is_known.sum() < _MIN_OPS:
        return None
    group = _Group(
        group.processes, group.ranks, group.seqs[is_known], group.inside_ns[:, is_known],
        group.entries_ns[:, is_known], group.codes[:, is_known],
    )  # fmt: skip
    last = group.inside_ns.argmin(axis=0)
    late_ns = np.median(group.inside_ns, axis=0) - group.inside_ns.min(axis=0)
    step_ns = np.median(np.diff(group.entries_ns, axis=1))
    counts = np.bincount(last, minlength=len(group.ranks))
    worst = int(counts.argmax())
    typical = float(np.median(late_ns))
    is_steady = counts[worst] >= _MIN_SAME_RANK * len(last)
    if not is_steady or typical < max(_MIN_LATE_NS, _MIN_LATE_SHARE * step_ns):
        return None
    lost_ns = round(float(late_ns.sum()))
    mine_ns = float(late_ns[last == worst].sum())
    process = group.processes[worst]
    inside = ", ".join(
        f"rank {rank} {format_duration(float(np.median(row)))}"
        for rank, row in zip(group.ranks, group.inside_ns, strict=True)
    )
    return Finding(
        title=(
            f"Rank {group.ranks[worst]} is late: the others wait {format_duration(typical)} for it in "
            f"{int(counts[worst])} of {len(last)} collectives"
        ),
        span_ns=(int(group.entries_ns[worst].min()), int(group.entries_ns[worst].max())),
        lost_ns=lost_ns,
        causes=(
            Cause(
                f"rank {group.ranks[worst]} arrives last",
                round(mine_ns / max(lost_ns, 1), 4),
                (f"time inside, median: {inside}", "the last to arrive has the shortest call"),
            ),
        ),
        process=process,
        n_cases=int(counts[worst]),
        fix=(
            f"look at what {process.name} on that rank does between collectives: its own incidents say why",
        ),
    )


def find_disagreement(evidence: Evidence) -> list[Finding]:
    """Ranks that call different operations under the same sequence number."""
    found = []
    for group in _find_groups(evidence):
        differs = (group.codes != group.codes[0]).any(axis=0)
        if differs.any():
            found.append(
                _describe_disagreement(evidence, group, int(differs.argmax()), int(differs.sum()))
            )
    return found


def _describe_disagreement(evidence: Evidence, group: _Group, at: int, n_ops: int) -> Finding:
    from_ns = int(group.entries_ns[0, at])
    names = ", ".join(
        f"rank {rank} {_op(evidence, process, group, i, at)}"
        for i, (rank, process) in enumerate(zip(group.ranks, group.processes, strict=True))
    )
    return Finding(
        title=f"Ranks disagree on the collective with sequence number {int(group.seqs[at])}",
        span_ns=(from_ns, int(group.entries_ns[0, -1])),
        lost_ns=0,
        causes=(Cause("different operations under one sequence number", 1.0, (names,)),),
        process=group.processes[0],
        n_cases=n_ops,
        fix=(
            "make every rank call the same collectives in the same order: data-dependent branches are the usual reason",
        ),
        severity=Severity.HIGH,
    )


def _op(evidence: Evidence, process: Process, group: _Group, i: int, at: int) -> str:
    ops = process.calls.of(Kind.COLLECTIVE)
    mine = ops.where(
        (evidence.column("arg2", ops) == group.seqs[at]) & (ops.codes == group.codes[i, at])
    )
    return mine.op


RULES: Final = (
    Rule(
        "late_rank",
        "One rank arrives last at the collectives and the others wait for it",
        find_late,
    ),
    Rule(
        "collective_disagreement",
        "Ranks call different collectives under one number",
        find_disagreement,
    ),
)
