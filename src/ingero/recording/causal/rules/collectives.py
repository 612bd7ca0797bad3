"""Ranks meet in collectives: the last to arrive has the shortest call, and everybody must agree on what comes next."""

from __future__ import annotations

from typing import Final

import numpy as np

from ingero.model.arrays import FloatArray, IntArray
from ingero.model.events import NcclOp, Source, op_name
from ingero.model.incidents import RuledOut, Severity
from ingero.model.operations import OpKind
from ingero.recording.causal.evidence import Evidence
from ingero.recording.causal.finding import Finding, Needs, name_cause, rule
from ingero.recording.causal.rules.groups import MIN_OPS, Group, find_groups, has_collectives
from ingero.units import NS_PER_MS, format_duration, format_size

_MIN_LATE_NS: Final = NS_PER_MS
_MIN_LATE_SHARE: Final = 0.10
_MIN_SKEW_SHARE: Final = 0.20  # some unevenness is in every job
_MIN_SAME_RANK: Final = 0.60
_SAME_SIZE: Final = [
    int(Source.NCCL) << 8 | int(op)
    for op in (
        NcclOp.ALL_REDUCE,
        NcclOp.ALL_GATHER,
        NcclOp.REDUCE_SCATTER,
        NcclOp.BROADCAST,
        NcclOp.REDUCE,
    )
]
"""NCCL asks every rank for the same count here (NCCL user guide, "Collective Operations")."""


MEETINGS: Final = Needs((OpKind.COLLECTIVE, OpKind.SYNC), max_missing=0.01, applies=has_collectives)
"""Rows of both: a call that only enqueues is timed by the synchronisation that follows."""


@rule("late_rank", "One rank arrives last at the collectives and the others wait for it", MEETINGS)
def late_rank(evidence: Evidence) -> list[Finding]:
    """One rank that the others wait for."""
    return [f for group in find_groups(evidence) if (f := _judge_late(group, is_one=True))]


@rule("rank_skew", "Ranks arrive apart at the collectives, another one last each time", MEETINGS)
def rank_skew(evidence: Evidence) -> list[Finding]:
    """Ranks that arrive apart, another one last each time."""
    return [f for group in find_groups(evidence) if (f := _judge_late(group, is_one=False))]


def _judge_late(group: Group, *, is_one: bool) -> Finding | None:
    group = group.timed()
    if len(group.seqs) < MIN_OPS:
        return None
    last = group.inside_ns.argmin(axis=0)
    late_ns = np.median(group.inside_ns, axis=0) - group.inside_ns.min(axis=0)
    step_ns = np.median(np.diff(group.entries_ns, axis=1))
    counts = np.bincount(last, minlength=len(group.ranks))
    is_steady = counts.max() >= _MIN_SAME_RANK * len(last)
    least = _MIN_LATE_SHARE if is_one else _MIN_SKEW_SHARE
    is_apart = float(np.median(late_ns)) >= max(_MIN_LATE_NS, least * step_ns)
    if not is_apart or bool(is_steady) is not is_one:
        return None
    return _describe_late(group, late_ns, last) if is_one else _describe_skew(group, late_ns, last)


def _describe_late(group: Group, late_ns: FloatArray, last: IntArray) -> Finding:
    counts = np.bincount(last, minlength=len(group.ranks))
    worst = int(counts.argmax())
    lost_ns = round(float(late_ns.sum()))
    mine_ns = float(late_ns[last == worst].sum())
    process = group.processes[worst]
    return Finding(
        title=(
            f"Rank {group.ranks[worst]} is late: the others wait {format_duration(float(np.median(late_ns)))} "
            f"for it in "
            f"{int(counts[worst])} of {len(last)} collectives"
        ),
        span_ns=(int(group.entries_ns[worst].min()), int(group.entries_ns[worst].max())),
        lost_ns=lost_ns,
        causes=name_cause(
            f"rank {group.ranks[worst]} arrives last",
            mine_ns / max(lost_ns, 1),
            f"time inside, median: {_inside(group)}",
            "the last to arrive has the shortest call",
        ),
        process=process,
        others=group.processes,
        n_cases=int(counts[worst]),
        fix=(
            f"look at what {process.name} on that rank does between collectives: its own incidents say why",
        ),
    )


def _describe_skew(group: Group, late_ns: FloatArray, last: IntArray) -> Finding:
    counts = np.bincount(last, minlength=len(group.ranks))
    turns = ", ".join(
        f"rank {rank} in {n}" for rank, n in zip(group.ranks, counts.tolist(), strict=True)
    )
    most = int(counts.argmax())
    return Finding(
        title=(
            f"Ranks arrive apart: they wait {format_duration(float(np.median(late_ns)))} for the last one, "
            f"another each "
            f"time, in {len(last)} collectives"
        ),
        span_ns=(int(group.entries_ns[0].min()), int(group.entries_ns[0].max())),
        lost_ns=round(float(late_ns.sum())),
        causes=name_cause(
            "work of uneven length between collectives, on all ranks",
            1.0,
            f"last to arrive: {turns}",
            f"time inside, median: {_inside(group)}",
        ),
        process=group.processes[0],
        others=group.processes,
        n_cases=len(last),
        ruled_out=(
            RuledOut(
                f"rank {group.ranks[most]} alone",
                round(int(counts[most]) / len(last), 4),
                f"last in {int(counts[most])} of {len(last)}",
            ),
        ),
        fix=(
            "balance the work of a step over the ranks: sort or pack samples by length",
            "keep what happens now and then (garbage collection, logging, evaluation) in the same step on all ranks",
        ),
    )


def _inside(group: Group) -> str:
    return ", ".join(
        f"rank {rank} {format_duration(float(np.median(row)))}"
        for rank, row in zip(group.ranks, group.inside_ns, strict=True)
    )


@rule(
    "collective_disagreement",
    "Ranks call different collectives, or sizes, under one number",
    Needs((OpKind.COLLECTIVE,), is_proof=True),
)
def collective_disagreement(evidence: Evidence) -> list[Finding]:
    """Ranks that call different operations, or sizes, under the same sequence number."""
    found = []
    for group in find_groups(evidence):
        differs = (group.codes != group.codes[0]).any(axis=0)
        is_sized = np.isin(group.codes, _SAME_SIZE).all(axis=0)
        differs |= is_sized & (group.n_bytes != group.n_bytes[0]).any(axis=0)
        if differs.any():
            found.append(_describe_disagreement(group, int(differs.argmax()), int(differs.sum())))
    return found


def _describe_disagreement(group: Group, at: int, n_ops: int) -> Finding:
    called = [
        f"rank {rank} {op_name(code >> 8, code & 0xFF)} of {format_size(n_bytes)}"
        for rank, code, n_bytes in zip(
            group.ranks, group.codes[:, at].tolist(), group.n_bytes[:, at].tolist(), strict=True
        )
    ]
    is_op = bool((group.codes[:, at] != group.codes[0, at]).any())
    what = "operations" if is_op else "sizes"
    return Finding(
        title=f"Ranks disagree on the collective with sequence number {int(group.seqs[at])}",
        span_ns=(int(group.entries_ns[0, at]), int(group.entries_ns[0, -1])),
        lost_ns=0,
        causes=name_cause(f"different {what} under one sequence number", 1.0, ", ".join(called)),
        process=group.processes[0],
        n_cases=n_ops,
        fix=(
            "make every rank call the same collectives in the same order: data-dependent branches are the usual reason",
        ),
        severity=Severity.HIGH,
    )
