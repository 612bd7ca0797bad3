"""A collective that somebody did not enter: the others went in and made no call until the recording ends.

Who entered what is read from the rows of the collectives, also of those that had not returned, so every collective of
every member has to have a row; where one is missing nobody is named. Silence with equal numbers is no proof, and gives
nothing. Which of those that are missing only waits elsewhere decides `ingero.detect.hang`, as for dumps and live jobs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Final, TypeAlias

import numpy as np

from ingero.detect.hang import find_hang
from ingero.model.events import EventFlag, HostOp, NcclOp, OffCpuReason, Source
from ingero.model.hang import PendingOp, RankState, StoppedGroup
from ingero.model.incidents import RuledOut, Severity
from ingero.model.operations import OpKind
from ingero.recording.causal.evidence import EventRows, Evidence, Process, remembered
from ingero.recording.causal.finding import Finding, Needs, name_cause, rule
from ingero.recording.causal.rules.groups import find_members
from ingero.units import NS_PER_S, format_duration

_MIN_SILENCE_NS: Final = 5 * NS_PER_S
_MIN_STEPS: Final = 20
_MIN_OPS: Final = 3
_ENDINGS: Final = [
    int(Source.NCCL) << 8 | int(op)
    for op in (NcclOp.COMM_DESTROY, NcclOp.COMM_ABORT, NcclOp.COMM_FINALIZE, NcclOp.COMM_REVOKE)
]
_STOPPED: Final = "it was stopped (SIGSTOP, a debugger or a freezer)"
_EXIT: Final = int(Source.HOST) << 8 | int(HostOp.EXIT)
_Key: TypeAlias = tuple[int, int]
"""A process: its node and its number there."""


@dataclass(frozen=True, slots=True)
class _Stand:
    """How far one rank came.

    Attributes:
        rank: In the communicator.
        process: Its process.
        ops: Its collectives, in time order.
        last_seq: The greatest number it entered.
        is_inside: It had not returned from that one when recording ended.
        silent_ns: From its last row of a call's beginning or end to the end of the run of the agent that saw it.
        is_over: It left in order, or its process ended.
        state: What else its rows say of it; empty when nothing.
    """

    rank: int
    process: Process
    ops: EventRows
    last_seq: int
    is_inside: bool
    silent_ns: int
    is_over: bool
    state: str

    @property
    def is_stopped(self) -> bool:
        """It may not run: a signal, a debugger or a freezer stopped it."""
        return self.state == _STOPPED


@dataclass(frozen=True, slots=True)
class _Silent:
    """A communicator that stands still: who came furthest, who did not, and how long a step took until then."""

    ahead: list[_Stand]
    behind: list[_Stand]
    step_ns: float


@rule(
    "collective_hang",
    "Ranks wait in a collective that another one never entered",
    Needs((OpKind.COLLECTIVE,), is_absence=True),
)
def collective_hang(evidence: Evidence) -> list[Finding]:
    """At most one finding per communicator."""
    return _find_hangs(evidence)


@remembered
def _find_hangs(evidence: Evidence) -> list[Finding]:
    silent = {}
    for comm, members in sorted(find_members(evidence, has_open=True).items()):
        stands = [_stand(evidence, rank, *members[rank]) for rank in sorted(members)]
        if (stopped := _find_silent(stands)) is not None:
            silent[comm] = stopped
    at_fault = _find_at_fault(evidence, silent)
    found = []
    for comm, one in silent.items():
        behind = [stand for stand in one.behind if (comm, _key(stand)) in at_fault]
        if behind:
            blocked = {key for stand in behind for key in at_fault[comm, _key(stand)]}
            elsewhere = {
                _key(stand): stand.process
                for other in silent.values()
                for stand in (*other.ahead, *other.behind)
                if _key(stand) in blocked
            }
            found.append(_describe(evidence, replace(one, behind=behind), elsewhere))
    return found


def find_hung(evidence: Evidence) -> dict[tuple[int, int], int]:
    """When each member of a hung communicator began to wait, Unix ns, by (node, pid): no problem of its own."""
    found = _find_hangs(evidence)
    return {(one.node, one.pid): hang.span_ns[0] for hang in found for one in hang.others}


def _key(stand: _Stand) -> _Key:
    return stand.process.node, stand.process.pid


def _find_silent(stands: list[_Stand]) -> _Silent | None:
    """A communicator whose foremost members made no call for long, while others did not come so far."""
    reached = max(stand.last_seq for stand in stands)
    behind = [stand for stand in stands if stand.last_seq < reached]
    if not behind:  # all are inside of it: one that may not run keeps the others there
        behind = [stand for stand in stands if stand.is_stopped]
    missing = {stand.rank for stand in behind}
    ahead = [stand for stand in stands if stand.rank not in missing]
    if not behind or not ahead or any(len(stand.ops) < _MIN_OPS for stand in ahead):
        return None
    step_ns = float(np.median(np.diff(ahead[0].ops.starts)))
    least_ns = max(_MIN_SILENCE_NS, _MIN_STEPS * step_ns)
    if any(stand.is_over or stand.silent_ns < least_ns for stand in ahead):
        return None
    return _Silent(ahead, behind, step_ns)


def _find_at_fault(
    evidence: Evidence, silent: Mapping[int, _Silent]
) -> dict[tuple[int, _Key], set[_Key]]:
    """Who keeps others waiting and waits for none itself, with all who wait for it, as `ingero hang` decides it.

    A member that is behind in one communicator because it waits in another one is not at fault; where all who are
    behind wait for each other in a circle, all are named.
    """
    groups: dict[str, StoppedGroup] = {}
    entered: dict[_Key, dict[str, int]] = defaultdict(dict)
    pending: dict[_Key, list[tuple[int, PendingOp]]] = defaultdict(list)
    ids: dict[_Key, int] = {}
    stopped = set()
    for comm, one in silent.items():
        name, members = str(comm), (*one.ahead, *one.behind)
        ranks = [ids.setdefault(_key(stand), len(ids)) for stand in members]
        groups[name] = StoppedGroup(name, tuple(ranks))
        stopped |= {_key(stand) for stand in members if stand.is_stopped}
        for stand in members:
            entered[_key(stand)][name] = stand.last_seq
        for stand in one.ahead:
            last = stand.ops.where(evidence.column("arg2", stand.ops) == stand.last_seq)
            op = PendingOp(name, stand.last_seq, last.op)
            pending[_key(stand)].append((int(last.starts[0]), op))
    report = find_hang(
        RankState(
            rank,
            {name: group for name, group in groups.items() if rank in group.ranks},
            entered[key],
            pending=tuple(op for _, op in sorted(pending[key], key=itemgetter(0))),
            is_stopped=key in stopped,
        )
        for key, rank in ids.items()
    )
    keys = list(ids)
    at_fault = {
        (int(root.group.name), keys[root.rank]): {keys[rank] for rank in root.blocks}
        for root in report.roots
    }
    for circle in report.deadlocks:
        waiting = {keys[rank] for rank in circle}
        for comm, one in silent.items():
            if all(_key(stand) in waiting for stand in one.behind):
                at_fault |= {(comm, _key(stand)): waiting for stand in one.behind}
    return at_fault


def _stand(evidence: Evidence, rank: int, process: Process, ops: EventRows) -> _Stand:
    seqs = evidence.column("arg2", ops)
    last_seq = int(seqs.max())
    is_open = (evidence.column("flags", ops) & EventFlag.IN_FLIGHT) != 0
    last_ns = max(int(process.calls.ends.max(initial=0)), int(process.open.starts.max(initial=0)))
    until_ns = evidence.watches[process.node].until(last_ns)
    asked_ns = evidence.recording.asked_ns[1] or until_ns
    codes = process.rows.codes
    is_over = bool(np.isin(codes, _ENDINGS).any() or (codes == _EXIT).any())
    return _Stand(
        rank, process, ops, last_seq, bool((is_open & (seqs == last_seq)).any()),
        min(until_ns, asked_ns) - last_ns, is_over, _find_state(evidence, process),
    )  # fmt: skip


def _find_state(evidence: Evidence, process: Process) -> str:
    """What a process was seen in at the end: ended, stopped, inside a call."""
    if (process.rows.codes == _EXIT).any():
        return "its process ended"
    off = process.rows.of(OpKind.OFF_CPU)
    is_open = (evidence.column("flags", off) & EventFlag.IN_FLIGHT) != 0
    is_stopped = evidence.column("reason", off) == OffCpuReason.STOPPED
    if (is_open & is_stopped).any():
        return _STOPPED
    if len(process.open):
        last = process.open.where(np.array([len(process.open) - 1]))
        return f"it was inside {last.op} for {format_duration(int(last.durations[0]))}"
    return ""


def _describe(evidence: Evidence, silent: _Silent, blocked: dict[_Key, Process]) -> Finding:
    ahead, behind, step_ns = silent.ahead, silent.behind, silent.step_ns
    first = ahead[0]
    is_it = evidence.column("arg2", first.ops) == first.last_seq
    op = first.ops.where(is_it)
    silent_ns = min(stand.silent_ns for stand in ahead)
    who = f"rank{'s' * (len(behind) > 1)} {', '.join(str(s.rank) for s in behind)}"
    is_inside = behind[0].last_seq == first.last_seq
    what = "was stopped inside" if is_inside else "did not enter"
    waiting = ", ".join(str(stand.rank) for stand in ahead)
    stood = "; ".join(
        f"rank {s.rank} of {s.process.name} last entered number {s.last_seq}"
        + (f", then {s.state}" if s.state else "")
        for s in behind
    )
    inside = [str(stand.rank) for stand in ahead if stand.is_inside]
    facts = [stood, f"a step took {format_duration(step_ns)} until then (median)"]
    if inside:
        facts.append(f"rank{'s' * (len(inside) > 1)} {', '.join(inside)} had not returned from it")
    processes = {_key(stand): stand.process for stand in (*ahead, *behind)}
    n_elsewhere = len(blocked.keys() - processes.keys())
    if n_elsewhere:
        facts.append(
            f"{n_elsewhere} process{'es' * (n_elsewhere > 1)} of other communicators wait for them"
        )
    return Finding(
        title=(
            f"Hang: {who} {what} {op.op} number {first.last_seq}; rank{'s' * (len(ahead) > 1)} {waiting} "
            f"made no call for {format_duration(silent_ns)} after it"
        ),
        span_ns=(int(op.starts[0]), int(op.starts[0]) + silent_ns),
        lost_ns=silent_ns,
        causes=name_cause(
            f"{who} {'stopped inside' if is_inside else 'missing from'} a collective", 1.0, *facts
        ),
        process=behind[0].process,
        others=tuple((processes | blocked).values()),
        op=op.op,
        n_cases=1,
        ruled_out=(
            RuledOut("a slow collective", 0.0, f"not every rank of {len(ahead + behind)} is in it"),
        ),
        fix=(
            f"look at the stacks of {who}: py-spy dump, or `ingero hang` while it lasts",
            (
                "a data-dependent branch around a collective, an exception on one rank, or a dead node are the "
                "usual reasons"
            ),
        ),
        severity=Severity.HIGH,
        stacks=evidence.stacks_of(*(stand.process.open for stand in behind)),
    )
