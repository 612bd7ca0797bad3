"""A collective that somebody did not enter: the others went in and made no call until the recording ends.

A call that never returned has no row, so this is read from what is missing: the last number each rank entered, and the
silence of those that are ahead. Silence with equal numbers is no proof, and gives nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.agent.causal.evidence import Evidence, Process, Rows
from ingero.agent.causal.finding import Finding, Rule
from ingero.agent.causal.rules.groups import Members, find_members
from ingero.model.events import HostOp, NcclOp, Source
from ingero.model.incidents import Cause, RuledOut, Severity
from ingero.units import NS_PER_S, format_duration

_MIN_SILENCE_NS: Final = 5 * NS_PER_S
_MIN_STEPS: Final = 20
_MIN_OPS: Final = 3
_ENDINGS: Final = [
    int(Source.NCCL) << 8 | int(op)
    for op in (NcclOp.COMM_DESTROY, NcclOp.COMM_ABORT, NcclOp.COMM_FINALIZE, NcclOp.COMM_REVOKE)
]
_EXIT: Final = int(Source.HOST) << 8 | int(HostOp.EXIT)


@dataclass(frozen=True, slots=True)
class _Stand:
    """How far one rank came.

    Attributes:
        rank: In the communicator.
        process: It.
        ops: Its collectives, in time order.
        last_seq: The greatest number it entered.
        silent_ns: From its last call to the end of its node's recording.
        is_over: It left in order, or its process ended.
    """

    rank: int
    process: Process
    ops: Rows
    last_seq: int
    silent_ns: int
    is_over: bool


def find(evidence: Evidence) -> list[Finding]:
    """At most one finding per communicator."""
    return [
        finding
        for _, members in sorted(find_members(evidence).items())
        if len(members) > 1 and (finding := _judge(evidence, members)) is not None
    ]


def _judge(evidence: Evidence, members: Members) -> Finding | None:
    stands = [_stand(evidence, rank, *members[rank]) for rank in sorted(members)]
    reached = max(stand.last_seq for stand in stands)
    ahead = [stand for stand in stands if stand.last_seq == reached]
    behind = [stand for stand in stands if stand.last_seq < reached]
    if not behind or any(len(stand.ops) < _MIN_OPS for stand in ahead):
        return None
    step_ns = float(np.median(np.diff(ahead[0].ops.starts)))
    least_ns = max(_MIN_SILENCE_NS, _MIN_STEPS * step_ns)
    if any(stand.is_over or stand.silent_ns < least_ns for stand in ahead):
        return None
    return _describe(evidence, ahead, behind, step_ns)


def _stand(evidence: Evidence, rank: int, process: Process, ops: Rows) -> _Stand:
    is_node = evidence.recording.events["node"] == process.node
    end_ns = int(evidence.rows.ends[is_node].max())
    node = evidence.recording.nodes[process.node]
    stops = [s.stopped_wall_ns for s in evidence.recording.sessions if s.node == node]
    end_ns = max([end_ns, *stops])
    codes = process.rows.codes
    last_ns = int(process.calls.ends.max())
    return _Stand(
        rank, process, ops, int(evidence.column("arg2", ops).max()), end_ns - last_ns,
        bool(np.isin(codes, _ENDINGS).any() or (codes == _EXIT).any()),
    )  # fmt: skip


def _describe(
    evidence: Evidence, ahead: list[_Stand], behind: list[_Stand], step_ns: float
) -> Finding:
    first = ahead[0]
    is_it = evidence.column("arg2", first.ops) == first.last_seq
    op = first.ops.where(is_it)
    silent_ns = min(stand.silent_ns for stand in ahead)
    who = f"rank{'s' * (len(behind) > 1)} {', '.join(str(s.rank) for s in behind)}"
    waiting = ", ".join(str(stand.rank) for stand in ahead)
    stood = "; ".join(
        f"rank {s.rank} of {s.process.name} last entered number {s.last_seq}"
        + (", then its process ended" if s.is_over else "")
        for s in behind
    )
    return Finding(
        title=(
            f"Hang: {who} did not enter {op.op} number {first.last_seq}; rank{'s' * (len(ahead) > 1)} {waiting} "
            f"made no call for {format_duration(silent_ns)} after it"
        ),
        span_ns=(int(op.starts[0]), int(first.process.calls.ends.max()) + silent_ns),
        lost_ns=silent_ns,
        causes=(
            Cause(
                f"{who} missing from a collective",
                1.0,
                (
                    stood,
                    f"a step took {format_duration(step_ns)} until then (median)",
                ),
            ),
        ),
        process=behind[0].process,
        op=op.op,
        n_cases=1,
        ruled_out=(
            RuledOut("a slow collective", 0.0, f"not every rank of {len(ahead + behind)} is in it"),
        ),
        fix=(
            f"look at the stacks of {who}: py-spy dump, or `ingero hang` while it lasts",
            "a data-dependent branch around a collective, an exception on one rank, or a dead node are the usual reasons",
        ),
        severity=Severity.HIGH,
    )


RULE: Final = Rule(
    "collective_hang", "Ranks wait in a collective that another one never entered", find
)
