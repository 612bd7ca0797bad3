"""What a worker's own time above its peers' went into, from counters of the kernel: no recording is needed.

Each cause is compared with the same process before it was slow, per operation: throttled time that was there before
explains nothing. What only a look at every switch tells (stopped, faults, reclaim, waits for a disk) has no time before
to be compared with; being stopped is never normal, and a wait for a disk gets only what the others leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.model.arrays import IntArray
from ingero.model.counters import OffCpuTimes, ProcessCounters, Work
from ingero.model.diagnosis import CauseKind, DiagnosedCause
from ingero.model.incidents import RuledOut
from ingero.recording.causal.attribution import NAMED_SHARE
from ingero.units import NS_PER_US, format_duration

MIN_OPS: Final = 5
"""Operations since onset below which nothing is said."""
MIN_RISE: Final = 1.1
"""Own time after by own time before, from which one may be taken as the reference of the other."""
_MAX_NAMES: Final = 3
_NAMES: Final = {
    CauseKind.CPU_QUOTA: "out of CPU quota (cgroup)",
    CauseKind.CPU_CONTENTION: "waiting for a free CPU",
    CauseKind.STOPPED: "stopped by a signal",
    CauseKind.BLOCKED_IO: "blocked on I/O",
    CauseKind.PAGE_FAULTS: "page faults",
    CauseKind.MEMORY_RECLAIM: "memory reclaim",
    CauseKind.MORE_COMPUTING: "computing on the host",
}
_NEXT_STEPS: Final = {
    CauseKind.CPU_QUOTA: (
        "raise the container's CPU limit (cpu.max), or remove it",
        "use fewer host threads",
    ),
    CauseKind.CPU_CONTENTION: (
        "move the neighbours off this node, or lower their cpu.weight",
        "give the job its own CPUs (taskset, cpuset)",
    ),
    CauseKind.STOPPED: (
        "find who sends SIGSTOP or traces it: a debugger, a profiler, a checkpointer, the freezer",
    ),
    CauseKind.BLOCKED_IO: (
        "read ahead in workers, or in more of them, and write checkpoints in the background",
        "`sudo ingero trace` on this node tells which requests",
    ),
    CauseKind.PAGE_FAULTS: ("add memory: pages are read back from a disk",),
    CauseKind.MEMORY_RECLAIM: ("free host memory or raise the memory limit",),
    CauseKind.MORE_COMPUTING: (
        "compare clocks, power and temperature with the peers",
        "`sudo ingero trace` on this node tells where in the program",
    ),
    CauseKind.UNEXPLAINED: ("`sudo ingero trace` on this node, then `ingero explain`",),
}


@dataclass(frozen=True, slots=True)
class ExcessCauses:
    """What was found.

    Attributes:
        causes: Greatest share first, ``unexplained`` last.
        ruled_out: The others that could be looked at.
        todo: Next steps.
        excess_ns: The time that was to be explained.
    """

    causes: tuple[DiagnosedCause, ...]
    ruled_out: tuple[RuledOut, ...]
    todo: tuple[str, ...]
    excess_ns: int


@dataclass(frozen=True, slots=True)
class _Part:
    """A cause before it has a share.

    Attributes:
        kind: Which.
        extra_ns: Time since onset beyond what it took before.
        evidence: What was measured.
        name: In plain words; empty for the usual.
    """

    kind: CauseKind
    extra_ns: float
    evidence: tuple[str, ...]
    name: str = ""


def find_excess_causes(
    excess_share: float, after: Work, before: Work | None, seen: OffCpuTimes | None
) -> ExcessCauses:
    """Share out a worker's excess.

    Args:
        excess_share: The part of its own time since onset that is above its peers'.
        after: What it did since onset.
        before: The same before it was slow; None when nobody looked then, and what needs it is not named.
        seen: Time off the processor while every switch was seen; None when that could not be.
    """
    excess_ns = round(excess_share * after.own_ns)
    if after.n_ops < MIN_OPS or excess_ns <= 0:
        too_long = format_duration(max(excess_ns, 0))
        why = f"{after.n_ops} operations were seen since it is slow, {too_long} too long in all"
        return _conclude([], excess_ns, why)
    if before is not None and before.n_ops < MIN_OPS:
        before = None
    parts = [] if before is None else _compare(before, after, seen)
    if seen is not None and seen.n_ops:
        parts += _scale(seen, after)
    parts = _leave_rest_to_disk(parts, excess_ns)
    why = "no reading from before it was slow" if before is None else ""
    return _conclude(parts, excess_ns, why)


def find_rise(own_ns: IntArray) -> int | None:
    """Where own times become greater: the first operation of the later part; None where they do not by `MIN_RISE`.

    Args:
        own_ns: Own time before each operation, in order, shape (n,).
    """
    return _find_step(own_ns, 1)


def find_fall(own_ns: IntArray) -> int | None:
    """Where own times become smaller, as at the end of a program's start; as `find_rise`."""
    return _find_step(own_ns, -1)


def _find_step(own_ns: IntArray, sign: int) -> int | None:
    """Where own times step up (sign 1) or down (sign -1).

    The split with the greatest difference of the mean logarithms, in units of its standard error (least squares for one
    step). A start with a few very long operations is damped by the logarithm.
    """
    n = len(own_ns)
    if n < 2 * MIN_OPS:
        return None
    logs = np.log1p(own_ns / NS_PER_US)
    n_before = np.arange(MIN_OPS, n - MIN_OPS + 1)
    sums = np.cumsum(logs)
    means = sums[n_before - 1] / n_before
    later = (sums[-1] - sums[n_before - 1]) / (n - n_before)
    is_so = sign * (later - means) > 0
    gain = np.where(is_so, (later - means) ** 2 * n_before * (n - n_before), 0.0)
    at = int(n_before[np.argmax(gain)])
    before_ns, after_ns = float(own_ns[:at].mean()), float(own_ns[at:].mean())
    low_ns, high_ns = (before_ns, after_ns)[::sign]
    return at if high_ns >= MIN_RISE * max(low_ns, 1.0) else None


def _conclude(parts: list[_Part], excess_ns: int, why: str) -> ExcessCauses:
    whole_ns = max(float(excess_ns), sum(part.extra_ns for part in parts), 1.0)
    shares = {part.kind: part.extra_ns / whole_ns for part in parts}
    found, ruled_out = [], []
    for part in sorted(parts, key=lambda part: (-part.extra_ns, part.kind)):
        name, share = part.name or _NAMES[part.kind], round(shares[part.kind], 3)
        if shares[part.kind] >= NAMED_SHARE:
            found.append(DiagnosedCause(part.kind, name, share, part.evidence))
        else:
            ruled_out.append(RuledOut(_NAMES[part.kind], share, "; ".join(part.evidence)))
    todo = [step for cause in found for step in _NEXT_STEPS[CauseKind(cause.kind)]]
    rest = round(1.0 - sum(cause.share for cause in found), 3)
    if not found or rest >= NAMED_SHARE:
        evidence = (why,) if why else ()
        found.append(DiagnosedCause(CauseKind.UNEXPLAINED, "unexplained", rest, evidence))
        todo += _NEXT_STEPS[CauseKind.UNEXPLAINED]
    return ExcessCauses(tuple(found), tuple(ruled_out), tuple(todo), max(excess_ns, 0))


def _leave_rest_to_disk(parts: list[_Part], excess_ns: int) -> list[_Part]:
    """Waits for a disk may be the job's normal reading, so that they take no part that others explain."""
    others_ns = sum(part.extra_ns for part in parts if part.kind is not CauseKind.BLOCKED_IO)
    rest_ns = max(excess_ns - others_ns, 0.0)
    return [
        _Part(part.kind, min(part.extra_ns, rest_ns), part.evidence)
        if part.kind is CauseKind.BLOCKED_IO
        else part
        for part in parts
    ]


def _scale(seen: OffCpuTimes, after: Work) -> list[_Part]:
    """What was seen for some seconds, as if for all the time since onset."""
    lost = (f"{seen.n_lost} switches were not seen",) if seen.n_lost else ()

    def part(kind: CauseKind, took_ns: int, *further: str) -> _Part:
        per_op_ns = took_ns / seen.n_ops
        says = (
            f"{format_duration(round(per_op_ns))} an operation, of {seen.n_ops} that were watched"
        )
        return _Part(kind, per_op_ns * after.n_ops, (says, *further, *lost))

    by_workers_ns = round(seen.worker_io_ns / seen.n_ops)
    workers = f"of it {format_duration(by_workers_ns)} waiting for its worker processes, which are never idle"

    return [
        part(CauseKind.STOPPED, seen.stopped_ns),
        part(
            CauseKind.BLOCKED_IO,
            seen.io_ns + seen.worker_io_ns,
            *((workers,) if by_workers_ns else ()),
        ),
        part(CauseKind.PAGE_FAULTS, seen.faults_ns),
        part(CauseKind.MEMORY_RECLAIM, seen.reclaim_ns),
    ]


def _compare(before: Work, after: Work, seen: OffCpuTimes | None) -> list[_Part]:
    """What counters of then and now tell of the thread that does most: workers are others with each epoch."""
    tids = [_find_busiest(work) for work in (before, after)]
    of_whom = (f"in its child process {tids[1]}",) if tids[1] in after.last.children else ()
    spent = [_grown(work, tid) for work, tid in zip((before, after), tids, strict=True)]
    computing, ready = (
        _Change.of((spent[0][column], spent[1][column]), before, after) for column in (0, 1)
    )
    held = _Change.of((_throttled(before), _throttled(after)), before, after)
    throttled_ns = min(held.extra_ns, ready.extra_ns)
    neighbours = _find_neighbours(before, after)
    by_others = _share_of_others(before, after, sum(neighbours.values()))
    queued_ns = ready.extra_ns - throttled_ns
    others = {} if seen is None else seen.by_others_ns
    who = _name_worst(neighbours if by_others else others)
    return [
        _Part(
            CauseKind.CPU_QUOTA,
            throttled_ns * (1.0 - by_others),
            (f"throttled {held.says}", *of_whom, *_describe_quota(before, after)),
        ),
        _Part(
            CauseKind.CPU_CONTENTION,
            throttled_ns * by_others + queued_ns,
            (
                f"ready to run and not running {ready.says}",
                *of_whom,
                *(_describe_neighbours(neighbours, after) if by_others else ()),
                *_describe_place(before.last, after.last),
            ),
            f"preempted by {who}" if who else "",
        ),
        _Part(
            CauseKind.MORE_COMPUTING,
            computing.extra_ns,
            (f"on a processor {computing.says}", *of_whom),
        ),
    ]


@dataclass(frozen=True, slots=True)
class _Change:
    """A counter's growth per operation, before and after.

    Attributes:
        extra_ns: Growth after onset beyond the former rate; 0 when it is less.
        says: For a person.
    """

    extra_ns: float
    says: str

    @classmethod
    def of(cls, grown: tuple[int, ...], before: Work, after: Work) -> _Change:
        then_ns, now_ns = grown[0] / before.n_ops, grown[1] / after.n_ops
        says = f"{format_duration(round(now_ns))} an operation, {format_duration(round(then_ns))} before"
        return cls(max(now_ns - then_ns, 0.0) * after.n_ops, says)


def _find_busiest(work: Work) -> int:
    """The thread that wanted a processor longest: of the process, or of a child that works for it.

    A worker that is busier than the process itself is what the process waits for.
    """
    tids = (*work.last.threads, *work.last.children)
    return max(tids, key=lambda tid: (sum(_grown(work, tid)), -tid), default=0)


def _grown(work: Work, tid: int) -> tuple[int, int]:
    """Time on a processor and time ready to run of one thread."""
    none = (0, 0)
    first, last = (
        one.threads.get(tid) or one.children.get(tid, none) for one in (work.first, work.last)
    )
    return max(last[0] - first[0], 0), max(last[1] - first[1], 0)


def _throttled(work: Work) -> int:
    first, last = work.first.quota, work.last.quota
    if last is None:
        return 0
    return max(last.throttled_ns - (first.throttled_ns if first else 0), 0)


def _find_neighbours(before: Work, after: Work) -> dict[str, float]:
    """Processors that others of the same quota use beyond what they used before, by name."""
    then, now = _rates(before), _rates(after)
    grown = {name: rate - then.get(name, 0.0) for name, rate in now.items()}
    return {name: rate for name, rate in grown.items() if rate > 0}


def _rates(work: Work) -> dict[str, float]:
    """Processors that other members of the cgroup use."""
    first, last = work.first.quota, work.last.quota
    span_ns = max(work.last.mono_ns - work.first.mono_ns, 1)
    if last is None:
        return {}
    known: Mapping[str, int] = first.others_ns if first else {}
    return {
        name: max(spent_ns - known.get(name, 0), 0) / span_ns
        for name, spent_ns in last.others_ns.items()
    }


def _share_of_others(before: Work, after: Work, n_taken: float) -> float:
    """The part of the throttled time that is due to neighbours, not to a smaller quota."""
    then, now = before.last.quota, after.last.quota
    if now is None:
        return 0.0
    n_before = then.n_processors if then else float(before.last.n_processors_allowed)
    n_gone = max(n_before - now.n_processors, 0.0)
    return n_taken / (n_taken + n_gone) if n_taken > 0.01 * now.n_processors else 0.0


def _name_worst(takers: Mapping[str, float]) -> str:
    """Who takes most, shortly: ``job`` for ``job (12)`` and ``job (13)``."""
    totals: dict[str, float] = {}
    for name, rate in takers.items():
        short = name.rpartition(" (")[0] or name
        totals[short] = totals.get(short, 0.0) + rate
    worst = sorted(totals, key=lambda name: (-totals[name], name))
    return ", ".join(worst[:_MAX_NAMES])


def _describe_neighbours(neighbours: Mapping[str, float], after: Work) -> tuple[str, ...]:
    worst = sorted(neighbours, key=lambda name: (-neighbours[name], name))[:_MAX_NAMES]
    quota = after.last.quota
    of = f" of {quota.n_processors:.3g}" if quota else ""
    return tuple(f"{name} uses {neighbours[name]:.2g}{of} processors" for name in worst)


def _describe_quota(before: Work, after: Work) -> tuple[str, ...]:
    quota = after.last.quota
    if quota is None:
        return ("no cgroup above it has a quota",)
    then = before.last.quota
    was = ", none before" if then is None else f", {then.n_processors:.3g} before"
    n_periods = quota.n_throttled - (after.first.quota.n_throttled if after.first.quota else 0)
    return (
        f"its cgroup may use {quota.n_processors:.3g} processors{was}",
        f"held back in {n_periods} periods since it is slow",
    )


def _describe_place(then: ProcessCounters, now: ProcessCounters) -> tuple[str, ...]:
    """Changes of where and how urgently it may run."""
    said = []
    if now.n_processors_allowed < then.n_processors_allowed:
        said.append(
            f"it may run on {now.n_processors_allowed} processors, {then.n_processors_allowed} before"
        )
    if now.nice > then.nice:
        said.append(f"its nice value is {now.nice}, {then.nice} before")
    return tuple(said)
