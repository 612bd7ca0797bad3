"""What a worker's own time above its peers' went into, from counters of the kernel: no recording is needed.

Each cause is compared with the same process before it was slow, per operation: throttled time that was there before
explains nothing. What only a look at every switch tells (stopped, faults, reclaim, waits for a disk) has no time before
to be compared with; being stopped is never normal. A wait for a disk may have been there before, as far as that time
was long enough for it: that much gets only what the others leave, and what is longer is new.

A quota that did not change holds a process back when the process itself does more. That time belongs to what it does
more: computing, making room in memory, reading pages back; as much of it as what it does more takes of the quota.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ingero.model.arrays import IntArray
from ingero.model.counters import (
    BLOCKED,
    RUNNING,
    STOPPED,
    CodeLines,
    CudaWait,
    OffCpuTimes,
    QuotaMember,
    Work,
    WorkRates,
)
from ingero.model.diagnosis import CauseKind
from ingero.recording.causal.conclusions import CausePart, ExcessCauses, conclude
from ingero.recording.causal.stolen import add_stolen
from ingero.recording.causal.work_facts import (
    describe_faults,
    describe_neighbours,
    describe_place,
    describe_quota,
    describe_then,
    describe_unknown,
    name_worst,
)
from ingero.recording.causal.work_rates import MIN_OPS, find_rates
from ingero.units import NS_PER_US, format_duration

MIN_RISE: Final = 1.1
"""Own time after by own time before, from which one may be taken as the reference of the other."""
_MAX_NAMES: Final = 3
_SWITCHING: Final = 0.25
"""Growth of computing that goes with a smaller quota or with neighbours; a fifth was measured."""
_NOISE: Final = 0.01
"""Part of a quota below which nobody uses more of it than before."""
_MIN_LOOKS: Final = 20
"""At a program's lines, below which nothing is said of them."""
_MIN_SHARE: Final = 0.1
"""Of the looks, below which a line is not named."""
_GPU_STANDS: Final = "waiting for its GPU"
_GPU_NEXT_STEPS: Final = (
    "look for Xid errors (`dmesg`), and at what its GPU does (`nvidia-smi`)",
    "its GPU may wait for another group's collective: look whether ranks of that group stand too",
)
_FAULTS_NEXT_STEPS: Final = (
    "let the process keep what it frees: MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ of glibc, or jemalloc",
    "look at the lines at which it runs, and whether its data are more than its peers'",
)
_UNREAD: Final = "no reading from before it was slow, and none of a peer"


def find_excess_causes(
    excess_share: float,
    after: Work,
    before: WorkRates | None,
    seen: OffCpuTimes | None,
    lines: CodeLines | None = None,
) -> ExcessCauses:
    """Share out a worker's excess.

    Args:
        excess_share: The part of its own time since onset that is above its peers'.
        after: What it did since onset.
        before: What it is compared with: itself before it was slow, or its peers; None when nobody looked,
            and what needs it is not named.
        seen: Time off the processor while every switch was seen; None when that could not be.
        lines: Where in its program it was; None when nobody looked.
    """
    excess_ns = round(excess_share * after.own_ns)
    now = find_rates(after, None if before is None or before.is_of_peers else before.cgroup)
    if now is None or excess_ns <= 0:
        too_long = format_duration(max(excess_ns, 0))
        why = f"{after.n_ops} operations were seen since it is slow, {too_long} too long in all"
        return conclude([], excess_ns, why)
    parts, own_throttled_ns = ([], 0.0) if before is None else _compare(before, now, after, seen)
    if seen is not None and seen.n_ops:
        parts += _scale(seen, after)
    parts = _add_throttled(parts, own_throttled_ns, after)
    whole_ns, new_ns = float(excess_ns), 0.0
    if before is not None:
        whole_ns = max(whole_ns, (now.own_ns - before.own_ns) * now.n_ops)
        parts = add_stolen(parts, before, now, after, whole_ns)
        new_ns = 0.0 if seen is None else _find_new_waits(before, now, seen)
    parts = _leave_rest_to_disk(parts, whole_ns, new_ns)
    if lines is not None:
        parts = [_add_lines(part, lines) for part in parts]
    unread = [] if before is not None else [_UNREAD]
    asleep = [] if lines is None else describe_lines("asleep", lines.waiting, lines)
    return conclude(parts, excess_ns, *unread, *asleep)


def can_be_compared(
    before: WorkRates, after: Work, excess_share: float, peers_ns: float | None = None
) -> bool:
    """Whether a process's own earlier time is a reference: it was nearer to what its peers take than to its own now.

    One that was slow from its first operation on has no such time. Where all of them were quicker then, as on a machine
    that has become slower, it was as far above its peers as now.

    Args:
        before: What it did earlier.
        after: What it did since onset.
        excess_share: As in `find_excess_causes`.
        peers_ns: Own time of an operation of its median peer at that earlier time; None where that is not known.
    """
    now_ns = after.own_ns / max(after.n_ops, 1)
    half_ns = now_ns * excess_share / 2
    if peers_ns is not None and before.own_ns > peers_ns + half_ns:
        return False
    return before.own_ns <= now_ns - half_ns


def describe_wait(call: CudaWait, now_ns: int) -> str:
    """A call of CUDA that does not return, for a person."""
    return f"in {call.op} for {format_duration(now_ns - call.since_ns)}"


def find_hang_causes(lines: CodeLines, window_ns: int, waiting: str = "") -> ExcessCauses:
    """What a worker does that others wait for: its state and its lines in many looks.

    Args:
        lines: What was seen.
        window_ns: For how long.
        waiting: The call of CUDA in which it was all that time, where it waits for its GPU, spinning or asleep.
    """
    n_looks = sum(lines.states.values())
    if n_looks < MIN_OPS:
        return conclude([], window_ns, "its process ended meanwhile")
    kinds = dict.fromkeys(STOPPED, CauseKind.STOPPED)
    kinds |= {RUNNING: CauseKind.MORE_COMPUTING, BLOCKED: CauseKind.BLOCKED_IO}
    took_ns: dict[CauseKind, float] = {}
    for state, n_seen in lines.states.items():
        kind = kinds.get(state, CauseKind.ASLEEP)
        if waiting and kind in {CauseKind.MORE_COMPUTING, CauseKind.ASLEEP}:
            kind = CauseKind.GPU_COMPUTING
        took_ns[kind] = took_ns.get(kind, 0.0) + window_ns * n_seen / n_looks
    parts = []
    for kind, spent_ns in took_ns.items():
        if kind is CauseKind.GPU_COMPUTING:
            looks = Counter(lines.running) + Counter(lines.waiting)
            facts = (waiting, *describe_lines("waiting", looks, lines))
            parts.append(CausePart(kind, spent_ns, facts, _GPU_STANDS, _GPU_NEXT_STEPS))
        elif kind is CauseKind.MORE_COMPUTING:
            facts = tuple(describe_lines("running", lines.running, lines))
            parts.append(CausePart(kind, spent_ns, facts))
        else:
            facts = tuple(describe_lines("waiting", lines.waiting, lines))
            parts.append(CausePart(kind, spent_ns, facts))
    return conclude(parts, window_ns)


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


def _add_throttled(parts: list[CausePart], throttled_ns: float, after: Work) -> list[CausePart]:
    """Give the time that a process was held back for doing more to what it does more.

    Making room and reading pages back are work of the same thread, and were counted as computing too.
    """
    others = (CauseKind.MEMORY_RECLAIM, CauseKind.PAGE_FAULTS)
    known_ns = sum(part.extra_ns for part in parts if part.kind in others)
    doing_ns = {
        part.kind: max(part.extra_ns - known_ns, 0.0)
        if part.kind is CauseKind.MORE_COMPUTING
        else part.extra_ns
        for part in parts
        if part.kind in {CauseKind.MORE_COMPUTING, *others}
    }
    whole_ns = max(sum(doing_ns.values()), 1.0)
    added = []
    for part in parts:
        if part.kind not in doing_ns:
            added.append(part)
            continue
        held_ns = throttled_ns * doing_ns[part.kind] / whole_ns
        per_op = format_duration(round(held_ns / after.n_ops))
        description = (
            (f"held back for it by its quota {per_op} an operation",) if held_ns > 0 else ()
        )
        added.append(
            replace(
                part,
                extra_ns=doing_ns[part.kind] + held_ns,
                evidence=(*part.evidence, *description),
            )
        )
    return added


def _add_lines(part: CausePart, lines: CodeLines) -> CausePart:
    """Where in the program a part of the time went."""
    if part.kind in {CauseKind.MORE_COMPUTING, CauseKind.GPU_COMPUTING}:
        facts = describe_lines("running", lines.running, lines)
    elif part.kind is CauseKind.BLOCKED_IO:
        facts = describe_lines("waiting", lines.waiting, lines)
    else:
        return part
    return replace(part, evidence=(*part.evidence, *facts))


def describe_lines(doing: str, looks: Mapping[str, int], lines: CodeLines) -> list[str]:
    """What to say of lines that a program was met at most, or why there is none; nothing after too few looks.

    Args:
        doing: ``running`` or ``waiting``.
        looks: Looks by line, of those.
        lines: All looks.
    """
    if lines.reason:
        return [f"no line of its program: {lines.reason}"]
    if lines.n_looks < _MIN_LOOKS:
        return []
    often = sorted(looks, key=lambda line: (-looks[line], line))[:_MAX_NAMES]
    facts = [
        f"{line} ({looks[line] / lines.n_looks:.0%})"
        for line in often
        if looks[line] >= _MIN_SHARE * lines.n_looks
    ]
    return [f"{doing}, of {lines.n_looks} looks: {'; '.join(facts)}"] if facts else []


def _find_new_waits(then: WorkRates, now: WorkRates, seen: OffCpuTimes) -> float:
    """Waits for a disk that cannot have been there before, in nanoseconds.

    They fit neither into the own time of then nor into the time in which it waits for its peers, and are no more than
    own time has grown.
    """
    if not seen.n_ops:
        return 0.0
    waits_ns = (seen.io_ns + seen.worker_io_ns) / seen.n_ops
    elsewhere_ns = max(now.period_ns - now.own_ns, 0.0)
    new_ns = min(waits_ns - elsewhere_ns, now.own_ns) - then.own_ns
    return max(new_ns, 0.0) * now.n_ops


def _leave_rest_to_disk(parts: list[CausePart], whole_ns: float, new_ns: float) -> list[CausePart]:
    """Waits for a disk may be the job's normal reading: but for those that are new they take no part of others.

    The others are what an operation takes longer than before, so that the rest is of that, too, where it is more than
    the excess over peers: these are slower as well, or have a CPU limit that leaves them little room.
    """
    others_ns = sum(part.extra_ns for part in parts if part.kind is not CauseKind.BLOCKED_IO)
    rest_ns = max(whole_ns - others_ns, new_ns, 0.0)
    return [
        replace(part, extra_ns=min(part.extra_ns, rest_ns))
        if part.kind is CauseKind.BLOCKED_IO
        else part
        for part in parts
    ]


def _scale(seen: OffCpuTimes, after: Work) -> list[CausePart]:
    """What was seen for some seconds, as if for all the time since onset."""
    lost = (f"{seen.n_lost} switches were not seen",) if seen.n_lost else ()

    def part(kind: CauseKind, took_ns: int, *further: str) -> CausePart:
        per_op_ns = took_ns / seen.n_ops
        description = (
            f"{format_duration(round(per_op_ns))} an operation, of {seen.n_ops} that were watched"
        )
        return CausePart(kind, per_op_ns * after.n_ops, (description, *further, *lost))

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


def _compare(
    then: WorkRates, now: WorkRates, after: Work, seen: OffCpuTimes | None
) -> tuple[list[CausePart], float]:
    """What counters tell of the thread that does most, against those of another time or of peers.

    Also the time in nanoseconds that it was held back by its quota because it does more itself.
    """
    of_whom: tuple[str, ...] = (f"in its child process {now.child_pid}",) if now.child_pid else ()
    if now.n_unknown_threads:
        n_unknown = now.n_unknown_threads
        of_whom += (f"what {n_unknown} of its threads and children did is not known",)
    computing, ready, held = (
        _Change.of(was_ns, is_ns, then, now)
        for was_ns, is_ns in (
            (then.computing_ns, now.computing_ns),
            (then.ready_ns, now.ready_ns),
            (then.throttled_ns, now.throttled_ns),
        )
    )
    throttled_ns = min(held.extra_ns, ready.extra_ns)
    neighbours, n_grown = _find_neighbours(then, now)
    unknown = describe_unknown(now, n_grown) if held.extra_ns > 0 else ()
    by_quota, by_others, by_itself = _share_out(then, now, sum(neighbours.values()), computing)
    queued_ns = ready.extra_ns - throttled_ns
    others = {} if seen is None else seen.by_others_ns
    who = name_worst({one.label: rate for one, rate in neighbours.items()} if by_others else others)
    faults = describe_faults(then, now)
    device, facts = _find_device_part(then, now, ready.extra_ns)
    parts = [
        CausePart(CauseKind.GPU_COMPUTING, device, facts),
        CausePart(
            CauseKind.CPU_QUOTA,
            throttled_ns * by_quota,
            (
                f"throttled {held.description}",
                *of_whom,
                *describe_quota(then, now, after),
                *unknown,
            ),
        ),
        CausePart(
            CauseKind.CPU_CONTENTION,
            throttled_ns * by_others + queued_ns,
            (
                f"ready to run and not running {ready.description}",
                *of_whom,
                *(describe_neighbours(neighbours, now) if by_others else ()),
                *describe_place(then, now),
                *unknown,
            ),
            f"preempted by {who}" if who else "",
        ),
        CausePart(
            CauseKind.MORE_COMPUTING,
            max(computing.extra_ns - device, 0.0),
            (f"on a processor {computing.description}", *of_whom, *faults),
            todo=_FAULTS_NEXT_STEPS if faults else (),
        ),
    ]
    return parts[not facts :], min(throttled_ns * by_itself, _find_most_held(now, computing))


def _find_most_held(now: WorkRates, computing: _Change) -> float:
    """For how long a quota can hold a process back for what it computes more: until that is paid for, and no longer.

    All its threads may have done more, as much as the one that did most.
    """
    if now.n_processors is None:
        return 0.0
    return computing.extra_ns * max(now.parallel / now.n_processors - 1.0, 0.0)


def _find_device_part(
    then: WorkRates, now: WorkRates, ready_ns: float
) -> tuple[float, tuple[str, ...]]:
    """Time that the host waited longer for its GPU, in calls of CUDA; no facts where that is not known.

    Most programs spin there, so that it is time on a processor too, and none of the host's work. Time in which it was
    ready and did not run is not the GPU's.
    """
    if then.device_ns is None or now.device_ns is None:
        return 0.0, ()
    waiting = _Change.of(then.device_ns, now.device_ns, then, now)
    return max(waiting.extra_ns - ready_ns, 0.0), (
        f"waiting for its GPU in calls of CUDA {waiting.description}",
    )


@dataclass(frozen=True, slots=True)
class _Change:
    """What an operation takes of one kind, now and then.

    Attributes:
        extra_ns: Since onset beyond what it took then; 0 when it is less.
        then_ns: An operation then.
        description: For a person.
    """

    extra_ns: float
    then_ns: float
    description: str

    @classmethod
    def of(cls, then_ns: float, now_ns: float, then: WorkRates, now: WorkRates) -> _Change:
        took, was = format_duration(round(now_ns)), format_duration(round(then_ns))
        description = f"{took} an operation, {describe_then(then, was)}"
        return cls(max(now_ns - then_ns, 0.0) * now.n_ops, then_ns, description)


def _find_neighbours(then: WorkRates, now: WorkRates) -> tuple[dict[QuotaMember, float], int]:
    """Processors that others of the same quota use beyond what they used then, and of how many that is unknown."""
    if then.is_of_peers:
        whole, of_peers = sum(now.others.values()), sum(then.others.values())
        if whole <= of_peers:
            return {}, 0
        part = 1 - of_peers / whole
        return {one: rate * part for one, rate in now.others.items() if rate > 0}, 0
    known = {
        one: rate - then.others.get(one, 0.0)
        for one, rate in now.others.items()
        if one in then.others or one.start_ticks >= then.end_ticks
    }
    return {one: rate for one, rate in known.items() if rate > 0}, len(now.others) - len(known)


def _share_out(
    then: WorkRates, now: WorkRates, n_taken: float, computing: _Change
) -> tuple[float, float, float]:
    """The parts of throttled time that are due to a smaller quota, to neighbours, and to the process itself.

    In proportion to the processors that each of them takes: the quota that is gone, what neighbours use beyond then,
    and what the process would need beyond then to keep its former pace.
    """
    if now.n_processors is None:
        return 1.0, 0.0, 0.0
    n_then = then.n_processors_allowed if then.n_processors is None else then.n_processors
    n_gone = max(n_then - now.n_processors, 0.0)
    noise = _NOISE * now.n_processors
    n_taken = n_taken if n_taken > noise else 0.0
    # Being held back and switched costs some time on a processor by itself, and that is nobody's wish.
    free_ns = _SWITCHING * computing.then_ns if n_gone > noise or n_taken else 0.0
    n_more = max(computing.extra_ns / now.n_ops - free_ns, 0.0) / max(then.period_ns, 1.0)
    n_more = n_more if n_more > noise else 0.0
    whole = n_gone + n_taken + n_more
    return (n_gone / whole, n_taken / whole, n_more / whole) if whole else (1.0, 0.0, 0.0)
