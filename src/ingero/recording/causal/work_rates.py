"""What a process did for one operation, from two readings of its counters; of several peers the median. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median
from typing import Final

from ingero.model.counters import (
    OTHERS,
    ProcessCounters,
    Quota,
    QuotaMember,
    TaskTimes,
    ThrottledTotals,
    Work,
    WorkRates,
)

MIN_OPS: Final = 5
"""Operations below which nothing is said."""


def find_rates(work: Work, cgroup: int | None = None) -> WorkRates | None:
    """Averages over the operations between two readings; None where these are fewer than `MIN_OPS`.

    Args:
        work: What was done.
        cgroup: Whose quota counts, as `find_held` has it; None for the one that held this work back longest.
    """
    n_ops, last = work.n_ops, work.last
    if n_ops < MIN_OPS:
        return None
    tid = _find_doer(work)
    grown = find_growth(work.first, work.last, tid) or TaskTimes(0, 0)
    cgroup = find_held(work) if cgroup is None else cgroup
    throttled = find_throttled(work, cgroup)
    others, n_unknown = _rates_of_others(work, cgroup)
    is_own = tid not in last.children
    period_ns = (last.mono_ns - work.first.mono_ns) / n_ops
    own_ns = work.own_ns / n_ops
    return WorkRates(
        n_ops,
        period_ns,
        own_ns,
        grown.ran_ns / n_ops,
        grown.ready_ns / n_ops,
        0.0 if throttled is None else throttled.took_ns / n_ops,
        min(find_limits(work, cgroup), default=None),
        others,
        last.n_processors_allowed,
        last.nice,
        0 if is_own else tid,
        end_ticks=last.boot_ticks,
        n_unknown_others=n_unknown,
        n_unknown_threads=sum(
            find_growth(work.first, last, one) is None for one in (*last.threads, *last.children)
        ),
        device_ns=None
        if work.cuda_ns is None
        else _find_device_ns(work.cuda_ns / n_ops, period_ns, own_ns),
        cgroup=cgroup,
        parallel=_find_parallel(work, grown.ran_ns),
        kernel_ns=(last.kernel_ns - work.first.kernel_ns) / n_ops if is_own else None,
        minor_faults=(last.n_minor_faults - work.first.n_minor_faults) / n_ops if is_own else None,
        stolen_ns=_find_stolen_ns(work, grown.ran_ns),
    )


def _find_stolen_ns(work: Work, ran_ns: int) -> float | None:
    """For an operation, how long a hypervisor had the processor on which a thread was; None where that is not known.

    Of the time that was taken from the processors it may run on, its part of what these did.
    """
    first, last = work.first.processors, work.last.processors
    if first is None or last is None or first.which != last.which:
        return None
    worked_ns = last.worked_ns - first.worked_ns
    part = min(ran_ns / worked_ns, 1.0) if worked_ns > 0 else 1.0
    return max(last.stolen_ns - first.stolen_ns, 0) * part / work.n_ops


def _find_parallel(work: Work, busiest_ns: int) -> float:
    """Time on a processor of all threads and children that are known, by that of the busiest."""
    return max(_find_ran_ns(work) / busiest_ns, 1.0) if busiest_ns else 1.0


def _find_ran_ns(work: Work) -> int:
    """Time on a processor of all threads and children that are known."""
    known = (
        find_growth(work.first, work.last, tid) for tid in (*work.last.threads, *work.last.children)
    )
    return sum(one.ran_ns for one in known if one is not None)


def find_limit_use(work: Work) -> float:
    """Processor time in use under a quota between two readings, by the quota; of several the greatest, 0 without one.

    Threads that wait in calls of CUDA spin there: that time counts for nothing, as they would be no faster with less of
    it.
    """
    span_ns = max(work.last.mono_ns - work.first.mono_ns, 1)
    own = max(_find_ran_ns(work) - (work.cuda_ns or 0.0), 0.0) / span_ns
    used = (
        (own + sum(_rates_of_others(work, quota.cgroup)[0].values())) / quota.n_processors
        for quota in work.last.quotas
    )
    return max(used, default=0.0)


def _find_device_ns(cuda_ns: float, period_ns: float, own_ns: float) -> float:
    """The part of own time in calls of CUDA: what does not fit into the rest of the time, in which it waits for peers.

    A rank that waits for its peers does so in calls of CUDA too, so that these alone tell nothing.
    """
    return min(max(cuda_ns - max(period_ns - own_ns, 0.0), 0.0), own_ns)


def find_median(peers: Iterable[WorkRates]) -> WorkRates | None:
    """Each figure's median over peers that do the same; None without a peer."""
    found = list(peers)
    if not found:
        return None
    quotas = [one.n_processors for one in found if one.n_processors is not None]
    used = median(sum(one.others.values()) for one in found)
    waits = [one.device_ns for one in found if one.device_ns is not None]
    stolen = [one.stolen_ns for one in found if one.stolen_ns is not None]
    return WorkRates(
        min(one.n_ops for one in found),
        median(one.period_ns for one in found),
        median(one.own_ns for one in found),
        median(one.computing_ns for one in found),
        median(one.ready_ns for one in found),
        median(one.throttled_ns for one in found),
        median(quotas) if 2 * len(quotas) > len(found) else None,
        {OTHERS: used} if used > 0 else {},
        round(median(one.n_processors_allowed for one in found)),
        round(median(one.nice for one in found)),
        is_of_peers=True,
        device_ns=median(waits) if len(waits) == len(found) else None,
        stolen_ns=median(stolen) if len(stolen) == len(found) else None,
    )


def _find_doer(work: Work) -> int:
    """Of which thread the process's own time is: its busiest one, or a child process that wanted a processor longer.

    The process waits for that child. Workers are others with each epoch.
    """
    first, last = work.first, work.last
    tids = (find_busiest(first, last), *last.children)
    return max(tids, key=lambda tid: (find_wanted_ns(first, last, tid), -tid))


def find_busiest(first: ProcessCounters, last: ProcessCounters) -> int:
    """The thread of a process that was on a processor longest between two readings; 0 without any.

    Not the one that wanted a processor longest: a quota that is used up keeps every thread waiting that is ready, and
    one that moves data for others waits there longer than the one that computes.
    """
    grown = {tid: find_growth(first, last, tid) for tid in last.threads}
    ran_ns = {tid: 0 if one is None else one.ran_ns for tid, one in grown.items()}
    return max(ran_ns, key=lambda tid: (ran_ns[tid], -tid), default=0)


def find_wanted_ns(first: ProcessCounters, last: ProcessCounters, tid: int) -> int:
    """How long a thread wanted a processor between two readings; 0 where that is unknown."""
    grown = find_growth(first, last, tid)
    return 0 if grown is None else grown.ran_ns + grown.ready_ns


def find_growth(first: ProcessCounters, last: ProcessCounters, tid: int) -> TaskTimes | None:
    """What a thread, or the first thread of a child, did between two readings.

    None where that is unknown: only the last reading has it, and it began before the first one.
    """
    was, now = (one.threads.get(tid) or one.children.get(tid) for one in (first, last))
    if now is None:
        return TaskTimes(0, 0)
    if was is not None and was.start_ticks == now.start_ticks:
        ran_ns, ready_ns = now.ran_ns - was.ran_ns, now.ready_ns - was.ready_ns
        return TaskTimes(max(ran_ns, 0), max(ready_ns, 0), now.start_ticks)
    return now if now.start_ticks >= first.boot_ticks else None


def find_held(work: Work, than: Work | None = None) -> int:
    """The cgroup whose quota counts: the one that held a process back longest, of alike ones the narrowest.

    A quota further out may hold back where a narrower one does not, and one may have been there only for a while.

    Args:
        work: What was done.
        than: At another time: what held back alike then does not count. None where that is unknown.

    Returns:
        Inode of its folder; 0 where there is no quota and nothing was held back.
    """
    limits = {
        quota.cgroup: quota.n_processors
        for reading in (work.first, work.last)
        for quota in reading.quotas
    }
    beyond = {
        cgroup: _find_held_ns(work, cgroup) - (0.0 if than is None else _find_held_ns(than, cgroup))
        for cgroup in (*limits, *work.last.throttled)
    }
    known = [cgroup for cgroup, held_ns in beyond.items() if cgroup in limits or held_ns > 0]
    return max(
        known, key=lambda one: (max(beyond[one], 0.0), -limits.get(one, math.inf)), default=0
    )


def _find_held_ns(work: Work, cgroup: int) -> float:
    """How long a cgroup was held back for an operation; 0 where that is unknown."""
    throttled = find_throttled(work, cgroup)
    return 0.0 if throttled is None else throttled.took_ns / max(work.n_ops, 1)


def find_limits(work: Work, cgroup: int) -> list[float]:
    """Processors that a cgroup might use at the first and at the last reading, as far as it had a quota."""
    return [
        quota.n_processors
        for reading in (work.first, work.last)
        if (quota := _find_quota(reading, cgroup)) is not None
    ]


def _find_quota(reading: ProcessCounters, cgroup: int) -> Quota | None:
    return next((one for one in reading.quotas if one.cgroup == cgroup), None)


def find_throttled(work: Work, cgroup: int) -> ThrottledTotals | None:
    """How a cgroup was held back between two readings; None where the first does not have it."""
    if not cgroup:
        return ThrottledTotals(0, 0)
    was, now = (one.throttled.get(cgroup) for one in (work.first, work.last))
    if was is None or now is None:
        return None
    return ThrottledTotals(max(now.took_ns - was.took_ns, 0), max(now.n_periods - was.n_periods, 0))


def _rates_of_others(work: Work, cgroup: int) -> tuple[dict[QuotaMember, float], int]:
    """Processors that other members of the cgroup use, no more than its quota, and of how many that is unknown."""
    first, last = (_find_quota(one, cgroup) for one in (work.first, work.last))
    span_ns = max(work.last.mono_ns - work.first.mono_ns, 1)
    if last is None:
        return {}, 0 if first is None else len(first.others_ns)
    known_ns = first.others_ns if first else {}
    spent_ns = {
        one: max(total_ns - known_ns.get(one, 0), 0)
        for one, total_ns in last.others_ns.items()
        if one in known_ns or one.start_ticks >= work.first.boot_ticks
    }
    # Ticks are coarse, and the quota may have been greater for a part of the time.
    possible = last.n_processors / max(sum(spent_ns.values()) / span_ns, last.n_processors)
    rates = {one: took_ns / span_ns * possible for one, took_ns in spent_ns.items()}
    return rates, len(last.others_ns) - len(spent_ns)
