"""What a process did for one operation, from two readings of its counters; of several peers the median. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Final

from ingero.model.counters import OTHERS, Work, WorkRates

MIN_OPS: Final = 5
"""Operations below which nothing is said."""


def find_rates(work: Work) -> WorkRates | None:
    """Averages over the operations between two readings; None where these are fewer than `MIN_OPS`."""
    n_ops, last = work.n_ops, work.last
    if n_ops < MIN_OPS:
        return None
    tid = _find_busiest(work)
    computing_ns, ready_ns = _grown(work, tid)
    return WorkRates(
        n_ops,
        (last.mono_ns - work.first.mono_ns) / n_ops,
        work.own_ns / n_ops,
        computing_ns / n_ops,
        ready_ns / n_ops,
        _throttled(work) / n_ops,
        None if last.quota is None else last.quota.n_processors,
        _rates_of_others(work),
        last.n_processors_allowed,
        last.nice,
        tid if tid in last.children else 0,
    )


def find_median(peers: Iterable[WorkRates]) -> WorkRates | None:
    """Each figure's median over peers that do the same; None without a peer."""
    found = list(peers)
    if not found:
        return None
    quotas = [one.n_processors for one in found if one.n_processors is not None]
    used = median(sum(one.others.values()) for one in found)
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
    )


def _find_busiest(work: Work) -> int:
    """The thread that wanted a processor longest: of the process, or of a child that works for it.

    A worker that is busier than the process itself is what the process waits for. Workers are others with each epoch.
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


def _rates_of_others(work: Work) -> dict[str, float]:
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
