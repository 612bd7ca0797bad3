"""Planted counters of a worker, and what is found in them."""

from ingero.model.counters import (
    CodeLines,
    ProcessCounters,
    Quota,
    QuotaMember,
    TaskTimes,
    ThrottledTotals,
    Work,
)
from ingero.recording.causal.excess import find_excess_causes
from ingero.recording.causal.work_rates import find_held, find_rates
from ingero.units import NS_PER_MS, NS_PER_S

MAIN = 7
HOG = QuotaMember(99, 0, "stress")


def work(n_ops, own_ms, *, run_ms=5.0, ready_ms=0.0, held_ms=0.0, quota=None, hog=0.0, **more):
    """Amounts are per operation; ``hog`` is in processors, over one second per ten operations."""
    span_ns = n_ops * NS_PER_S // 10

    def reading(mono_ns, times):
        amount = Quota(quota or 0.0, 1, {HOG: round(hog * mono_ns)} if hog else {})
        held = ThrottledTotals(round(times * held_ms * NS_PER_MS), round(times))
        threads = {
            MAIN: TaskTimes(round(times * run_ms * NS_PER_MS), round(times * ready_ms * NS_PER_MS)),
            MAIN + 1: TaskTimes(round(times * NS_PER_MS), 0),
        }
        return ProcessCounters(
            mono_ns, threads, (amount,) if quota else (), throttled={1: held}, **more
        )

    return Work(reading(0, 0), reading(span_ns, n_ops), n_ops, round(n_ops * own_ms * NS_PER_MS))


def explain(excess_share, after, before, seen, lines=None):
    reference = None if before is None else find_rates(before, find_held(after, before))
    return find_excess_causes(excess_share, after, reference, seen, lines)


def named(found):
    return [(cause.kind, cause.share) for cause in found.causes]


LINES = CodeLines(
    100,
    {"train.py:7 main → pad": 40, "train.py:3 burn": 30, "train.py:9 main": 9},
    {"train.py:5 load": 21},
)
