"""Who took the time: lost intervals of one thread, shared out among what that thread was seen to wait for.

Each reason gets only what no earlier reason of the list has taken, so the shares never add up to more than one; what
remains is unexplained. A reason that is asleep is no contention.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ingero.model.events import OffCpuReason
from ingero.model.incidents import Cause, RuledOut
from ingero.model.operations import OpKind
from ingero.recording.causal.evidence import EventRows, Evidence, Process, remembered, split_by
from ingero.recording.causal.intervals import NO_TIME, Intervals, Times
from ingero.units import NS_PER_US, format_duration

NAMED_SHARE: Final = 0.20
"""Below this share of the lost time a reason is not called a cause."""

_WAKE_UP_NS: Final = 100 * NS_PER_US
"""A shorter wait for a CPU is what waking up costs on an idle machine."""
_TRANSFER_BYTES: Final = 64 * 1024
"""A socket call that moves less is taken for waiting for a request, which is no fault."""

_PREEMPTED: Final = "preempted by "
_CGROUP: Final = "cgroup"
_MAX_NAMES: Final = 3
OTHER_CGROUP: Final = f"{_PREEMPTED}{_CGROUP} "
"""How a reason begins that several tasks of one other cgroup have in common."""
WAITING: Final = "waiting for "
WORKER: Final = f"{WAITING}worker "
"""How a reason begins that is the wait for a child process."""
OWN_THREAD: Final = f"{WAITING}another thread of its process"
ON_CPU: Final = "computing on the host"
SLEEPING: Final = "sleeping"
NO_REASON: Final = "off the CPU, reason not recorded"


@dataclass(frozen=True, slots=True)
class Waits:
    """One thread's time by reason.

    Attributes:
        by_reason: Disjoint sets; their names are those of causes.
        is_off_cpu_known: Whether this thread's switches were recorded, so that no span means on a CPU.
    """

    by_reason: dict[str, Intervals]
    is_off_cpu_known: bool


@remembered
def find_waits(evidence: Evidence, process: Process, tid: int) -> Waits:
    """Every recorded reason for which a thread did not compute, in order of precedence."""
    rows = process.thread(tid)
    off = rows.of(OpKind.OFF_CPU)
    reasons = evidence.column("reason", off)
    is_preempted = reasons == OffCpuReason.PREEMPTED
    reads = rows.of(OpKind.READ).intervals
    writes = rows.of(OpKind.WRITE).intervals
    left = off.where(~is_preempted).intervals
    found = dict(_preemptors(evidence, process, off.where(is_preempted)))
    found["out of CPU quota (cgroup)"] = off.where(
        reasons == OffCpuReason.THROTTLED
    ).intervals.union(rows.of(OpKind.QUOTA).intervals)
    sleeps = off.where(reasons == OffCpuReason.SLEEP)
    found["waiting for a free CPU"] = _queued(evidence, off).union(
        _queued_helpers(evidence, process, sleeps)
    )
    found["blocked on disk reads"] = _intersection(reads, left)
    found["blocked on disk writes"] = _intersection(writes, left)
    found["page faults"] = rows.of(OpKind.FAULT).intervals
    found["memory reclaim"] = rows.of(OpKind.RECLAIM).intervals
    network = rows.of(OpKind.NETWORK)
    network = network.where(evidence.column("arg1", network) >= _TRANSFER_BYTES)
    found["waiting on the network"] = _intersection(network.intervals, left)
    found["blocked on I/O"] = off.where(reasons == OffCpuReason.BLOCKED_IO).intervals
    found |= dict(_workers(evidence, process, sleeps))
    found[SLEEPING] = sleeps.intervals
    found[NO_REASON] = off.where(reasons == OffCpuReason.UNKNOWN).intervals
    return Waits(found, bool(len(off)))


def _queued(evidence: Evidence, off: EventRows) -> Intervals:
    """Time that a thread was ready, and no CPU was free for it, after it had left its own by itself."""
    waits = evidence.column("wait_ns", off)
    is_preempted = evidence.column("reason", off) == OffCpuReason.PREEMPTED
    queued = off.where(~is_preempted & (waits >= _WAKE_UP_NS))
    return Intervals.of(queued.ends - evidence.column("wait_ns", queued), queued.ends)


def _queued_helpers(evidence: Evidence, process: Process, sleeps: EventRows) -> Intervals:
    """Sleep during which the thread of its own process that ended it was ready, and no CPU was free for that one.

    CUDA wakes a thread that waits for a GPU by one of its own threads.
    """
    own = sleeps.where(evidence.column("other_pid", sleeps) == process.pid)
    found = NO_TIME
    for helper, mine in _iter_helpers(evidence, process, own) if len(own) else ():
        found = found.union(_intersection(mine.intervals, _queued(evidence, helper)))
    return found


def _preemptors(
    evidence: Evidence, process: Process, spans: EventRows
) -> list[tuple[str, Intervals]]:
    """Preempted time by who took the CPU, most time first; names shared by several pids are one."""
    others = evidence.column("other_pid", spans)
    pids, counts = np.unique(others, return_counts=True)
    by_count = pids[np.argsort(-counts, kind="stable")].tolist()
    names = {pid: evidence.process_name(process.node, pid) for pid in by_count}
    names[0] = "another task"
    names |= _name_other_cgroups(evidence, process, {pid: names[pid] for pid in by_count})
    by_name: dict[str, Intervals] = {}
    for pid, name in sorted(names.items()):
        mine = spans.where(others == pid).intervals
        by_name[name] = by_name[name].union(mine) if name in by_name else mine
    ordered = sorted(by_name.items(), key=lambda item: (-item[1].total_ns, item[0]))
    return [(f"{_PREEMPTED}{name}", spans_) for name, spans_ in ordered if len(spans_)]


def _name_other_cgroups(
    evidence: Evidence, process: Process, names: dict[int, str]
) -> dict[int, str]:
    """What tasks of another cgroup are called when there are several of them; `names` by how often they were met."""
    own = evidence.cgroups.get((process.node, process.pid), 0)
    members: dict[int, list[int]] = {}
    for pid in names:
        cgroup = evidence.cgroups.get((process.node, pid), 0)
        if own and cgroup not in {0, own}:
            members.setdefault(cgroup, []).append(pid)
    found: dict[int, str] = {}
    for cgroup, pids in members.items():
        who = list(dict.fromkeys(names[pid] for pid in pids))
        shown = ", ".join(who[:_MAX_NAMES]) + (", …" if len(who) > _MAX_NAMES else "")
        if len(pids) > 1:
            found |= dict.fromkeys(pids, f"{_CGROUP} {cgroup} ({len(pids)} tasks: {shown})")
    return found


def _workers(
    evidence: Evidence, process: Process, sleeps: EventRows
) -> list[tuple[str, Intervals]]:
    """Sleep that a child or another thread of the process ended: waiting for that one's result.

    While that other thread itself slept until a child woke it, both waited for the child: so it is where a thread of
    its own takes the batches of a data loader's workers.
    """
    family = evidence.children.get((process.node, process.pid), frozenset())
    wakers = evidence.column("other_pid", sleeps)
    by_name: dict[str, Intervals] = {}
    for name, spans in _by_child(evidence, process, sleeps, family):
        by_name[name] = by_name.get(name, NO_TIME).union(spans)
    own = sleeps.where(wakers == process.pid)
    for helper, mine in _iter_helpers(evidence, process, own) if len(family) and len(own) else ():
        asleep = helper.where(evidence.column("reason", helper) == OffCpuReason.SLEEP)
        for name, spans in _by_child(evidence, process, asleep, family):
            by_name[name] = by_name.get(name, NO_TIME).union(_intersection(mine.intervals, spans))
    found = [(f"{WORKER}{name}", spans) for name, spans in sorted(by_name.items()) if len(spans)]
    return [*found, (OWN_THREAD, own.intervals)] if len(own) else found


def find_strangers(evidence: Evidence, process: Process, tid: int) -> dict[int, Intervals]:
    """Sleep of a thread by the process that ended it, where nobody noted whose child that one is.

    A process whose own parent was noted has none: its children were read with it, or its forks watched from the first.
    """
    born = {
        child
        for (node, _), pids in evidence.children.items()
        if node == process.node
        for child in pids
    }
    if process.pid in born:
        return {}
    known = {0, process.pid} | born
    off = process.thread(tid).of(OpKind.OFF_CPU)
    sleeps = off.where(evidence.column("reason", off) == OffCpuReason.SLEEP)
    wakers = evidence.column("other_pid", sleeps)
    return {
        pid: sleeps.where(wakers == pid).intervals
        for pid in np.unique(wakers).tolist()
        if pid not in known and not evidence.is_observer(process.node, pid)
    }


def _by_child(
    evidence: Evidence, process: Process, sleeps: EventRows, family: frozenset[int]
) -> Iterator[tuple[str, Intervals]]:
    """Sleep that each child ended."""
    wakers = evidence.column("other_pid", sleeps)
    for waker in np.unique(wakers).tolist():
        if waker in family:
            name = evidence.process_name(process.node, waker)
            yield name, sleeps.where(wakers == waker).intervals


def _iter_helpers(
    evidence: Evidence, process: Process, woken: EventRows
) -> Iterator[tuple[EventRows, EventRows]]:
    """Time off the CPU of each other thread of the process, and those sleeps of ours that it ended.

    Rows say which process woke a thread, not which of its threads: that one was on a CPU, and of those the one that got
    there last is taken.
    """
    off = process.rows.of(OpKind.OFF_CPU)
    wake_ns = woken.ends - evidence.column("wait_ns", woken)
    mine = woken.tids[:1]
    others = [one for one in split_by(off, [off.tids.astype(np.int64)]) if one.tids[0] not in mine]
    since = np.array([_on_cpu_since(rows, wake_ns) for rows in others]).reshape(-1, len(woken))
    if not len(since):
        return
    chosen = np.where(since.max(axis=0) > 0, since.argmax(axis=0), -1)
    for i in np.unique(chosen[chosen >= 0]).tolist():
        yield others[i], woken.where(chosen == i)


def _on_cpu_since(off: EventRows, moments: Times) -> Times:
    """Since when a thread had been on a CPU at each moment, by its off-CPU spans; 0 where it was not."""
    last = np.searchsorted(off.ends, moments, side="right") - 1
    begins = np.append(off.starts, np.iinfo(np.int64).max)
    is_on = (last >= 0) & (begins[last + 1] >= moments)
    since: Times = np.where(is_on, off.ends[np.maximum(last, 0)], 0)
    return since


def _intersection(a: Intervals, b: Intervals) -> Intervals:
    """What two sets have in common."""
    if not len(a) or not len(b):
        return NO_TIME
    edges = np.unique(np.concatenate((a.starts, a.ends, b.starts, b.ends)))
    starts, ends = edges[:-1], edges[1:]
    is_both = (a.covered_ns(starts, ends) > 0) & (b.covered_ns(starts, ends) > 0)
    return Intervals.of(starts[is_both], ends[is_both])


@dataclass(frozen=True, slots=True)
class Attribution:
    """Lost time shared out.

    Attributes:
        total_ns: All of it.
        shares: Share of each reason, greatest first; zero shares are left out.
    """

    total_ns: int
    shares: tuple[tuple[str, float], ...]

    def share(self, name: str) -> float:
        """Share of one reason; 0 when it took nothing."""
        return dict(self.shares).get(name, 0.0)

    def causes(
        self, *, without: tuple[str, ...] = (), facts: Iterable[str] = ()
    ) -> tuple[Cause, ...]:
        """What may be named: reasons with at least `NAMED_SHARE`, then what is unexplained.

        Args:
            without: Reasons that are no cause.
            facts: Evidence of the first one, before its own.
        """
        named = [
            Cause(
                name,
                round(share, 4),
                (f"{format_duration(share * self.total_ns)} of the lost time",),
            )
            for name, share in self.shares
            if share >= NAMED_SHARE and name not in without
        ]
        rest = 1.0 - sum(cause.share for cause in named)
        if rest >= NAMED_SHARE or not named:
            named.append(Cause("unexplained", round(rest, 4)))
        first = named[0]
        named[0] = replace(first, evidence=(*facts, *first.evidence))
        return tuple(named)

    def ruled_out(self) -> tuple[RuledOut, ...]:
        """Reasons that were looked for and took too little."""
        return tuple(
            RuledOut(name, round(share, 4), f"explains {share:.1%} of the lost time")
            for name, share in sorted(self.shares)
            if share < NAMED_SHARE
        )


def _join_minor(shares: dict[str, float]) -> dict[str, float]:
    """Shares with the tasks that each took too little to be named put together as one reason."""
    minor = {
        name: share
        for name, share in shares.items()
        if name.startswith(_PREEMPTED) and share < NAMED_SHARE
    }
    if len(minor) < 2:
        return shares
    joined = {name: share for name, share in shares.items() if name not in minor}
    return joined | {f"{_PREEMPTED}{len(minor)} other tasks": sum(minor.values())}


def attribute(waits: Waits, starts: Times, ends: Times, *, uncertain_ns: int = 0) -> Attribution:
    """Share lost intervals out among a thread's waits.

    Args:
        waits: The thread's time by reason, in order of precedence.
        starts: First moment of each lost interval.
        ends: Last moment.
        uncertain_ns: Off-CPU time that was measured but has no row: taken off what is called computing.
    """
    lost = Intervals.of(starts, ends)
    total = lost.total_ns
    if not total:
        return Attribution(0, ())
    shares: dict[str, float] = {}
    taken = NO_TIME
    before = 0
    for name, spans in waits.by_reason.items():
        taken = taken.union(spans)
        now = lost.within(taken)
        if now > before:
            shares[name] = (now - before) / total
        before = now
    if waits.is_off_cpu_known:
        computing = max(total - before - uncertain_ns, 0) / total
        if computing:
            shares[ON_CPU] = computing
    preempted = sum(share for name, share in shares.items() if name.startswith(_PREEMPTED))
    if waits.is_off_cpu_known and not preempted:
        shares.setdefault("preemption", 0.0)
    ordered = tuple(sorted(_join_minor(shares).items(), key=lambda item: (-item[1], item[0])))
    return Attribution(total, ordered)
