"""The same call is slow again and again at a fixed distance: something with that period is behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.model.arrays import BoolArray, IntArray
from ingero.model.events import HostMemory
from ingero.model.operations import OpKind
from ingero.recording.causal.evidence import EventRows, Evidence, Process
from ingero.recording.causal.finding import Finding, Needs, Unjudged, name_cause, rule
from ingero.recording.causal.gaps import describe_gap
from ingero.recording.causal.rules.first_use import one_time_calls
from ingero.recording.causal.slow import iter_classes
from ingero.units import NS_PER_MS, NS_PER_US, format_duration

_LAUNCHES: Final = (OpKind.LAUNCH, OpKind.GRAPH_LAUNCH)
_ALLOCATIONS: Final = (OpKind.ALLOC, OpKind.HOST_ALLOC)
_BACKLOG_SHARE: Final = 0.20
_RATIO: Final = 5.0
_MIN_EXTRA_NS: Final = 100 * NS_PER_US
_MIN_CALLS: Final = 50
_MIN_SPIKES: Final = 4
_SPIKES_PER_STRAY: Final = 5
_MIN_OF_SPIKE: Final = 0.25
_JOIN_CALLS: Final = 3
_MAX_SPREAD: Final = 0.10
_MIN_PERIOD_CALLS: Final = 10
_MIN_LOST_NS: Final = 10 * NS_PER_MS
_MIN_LOST_SHARE: Final = 0.01


@dataclass(frozen=True, slots=True)
class _Rhythm:
    """Spikes at a fixed distance.

    Attributes:
        slow: Positions of their calls in the class.
        n_spikes: How many spikes; one may be several calls.
        period_calls: Median distance in calls.
        period_ns: Median distance in time.
        is_by_count: The distance in calls is the steadier one.
    """

    slow: IntArray
    n_spikes: int
    period_calls: float
    period_ns: float
    is_by_count: bool


@rule(
    "periodic_spike",
    "One call is slow again and again at a fixed distance",
    Needs((*_LAUNCHES, *_ALLOCATIONS, OpKind.COPY), is_time=True),
)
def periodic_spike(evidence: Evidence) -> list[Finding | Unjudged]:
    """Periodic spikes of one operation, one size class and one stream."""
    return [
        finding
        for process in evidence.gpu_processes
        for calls in iter_classes(evidence, _judged_calls(evidence, process))
        if (finding := _judge(evidence, process, calls)) is not None
    ]


def _judged_calls(evidence: Evidence, process: Process) -> EventRows:
    """Calls that do not wait for the GPU by nature.

    Copies from pageable memory and frees wait for the stream; launches wait when the GPU's queue is full, so they are
    judged only where the GPU is not what the process waits for.
    """
    once = one_time_calls(evidence, process)
    calls = process.calls.where(~np.isin(process.calls.idx, once.idx))
    waited_ns = process.calls.of(OpKind.SYNC).intervals.total_ns
    is_judged = np.isin(calls.kinds, _ALLOCATIONS)
    is_judged |= (calls.kinds == OpKind.COPY) & (
        evidence.column("arg3", calls) == HostMemory.PINNED
    )
    if waited_ns < _BACKLOG_SHARE * process.active_length_ns:
        is_judged |= np.isin(calls.kinds, _LAUNCHES)
    return calls.where(is_judged)


def _judge(evidence: Evidence, process: Process, calls: EventRows) -> Finding | Unjudged | None:
    if len(calls) < _MIN_CALLS:
        return None
    durations = calls.durations
    typical = float(np.median(durations))
    is_slow = durations > max(_RATIO * typical, typical + _MIN_EXTRA_NS)
    codes = np.unique(calls.codes).tolist()
    if evidence.gap(process, codes).unstored:
        # Neither the usual duration nor the distance in calls is that of all calls.
        is_open = (
            _lost_ns(durations[is_slow], typical) >= _MIN_LOST_NS
            and int(is_slow.sum()) >= _MIN_SPIKES
        )
        return Unjudged(process, describe_gap(evidence, process, codes)) if is_open else None
    slow_idx = _find_spikes(durations, typical, np.flatnonzero(is_slow))
    starts = calls.starts[slow_idx]
    is_after_hole = process.unwatched.covered_ns(np.append(starts[:1], starts[:-1]), starts) > 0
    rhythm = _find_rhythm(calls, slow_idx, is_after_hole)
    if rhythm is None:
        return None
    lost_ns = _lost_ns(durations[rhythm.slow], typical)
    if lost_ns < max(_MIN_LOST_NS, _MIN_LOST_SHARE * process.active_length_ns):
        return None
    every = f"every {rhythm.period_calls:.0f} calls ({format_duration(rhythm.period_ns)})"
    slow = format_duration(float(np.median(durations[rhythm.slow])))
    return Finding(
        title=f"Periodic spike: {calls.op} of {process.name} takes {slow} instead of "
        f"{format_duration(typical)} {every}",
        span_ns=(int(calls.starts[rhythm.slow][0]), int(calls.ends[rhythm.slow].max())),
        lost_ns=lost_ns,
        causes=name_cause(
            f"something that happens {every}",
            1.0,
            f"{rhythm.n_spikes} spikes of {len(rhythm.slow)} calls among {len(calls)}",
            f"steady in {'calls: the program itself' if rhythm.is_by_count else 'time: a timer'}",
        ),
        process=process,
        op=calls.op,
        n_cases=rhythm.n_spikes,
        fix=_fix(calls, rhythm),
    )


def _lost_ns(durations: IntArray, typical: float) -> int:
    return round(float((durations - typical).sum()))


def _fix(calls: EventRows, rhythm: _Rhythm) -> tuple[str, ...]:
    every = f"every {rhythm.period_calls:.0f} calls"
    what = f"look for what the program does {every}: logging, evaluation, checkpoint, cache flush"
    if not rhythm.is_by_count:
        what = f"look for a timer of {format_duration(rhythm.period_ns)}: cron, monitoring, garbage collection"
    if calls.kinds[0] == OpKind.ALLOC:
        return (
            what,
            "allocate the largest shape first; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )
    return (what,)


def _find_spikes(durations: IntArray, typical: float, slow_idx: IntArray) -> IntArray:
    """Slow calls without the small ones among them, which are slow for a reason of their own and lose next to nothing.

    Half of what was lost is in calls that took at least as long as the one that the others are compared with.
    """
    lost = durations[slow_idx] - typical
    if not len(lost):
        return slow_idx
    longest = np.sort(lost)[::-1]
    half = longest[np.searchsorted(np.cumsum(longest), longest.sum() / 2)]
    is_spike: BoolArray = lost >= _MIN_OF_SPIKE * half
    return slow_idx[is_spike]


def _find_rhythm(calls: EventRows, slow_idx: IntArray, is_after_hole: BoolArray) -> _Rhythm | None:
    """The rhythm of most spikes, in calls or in time, or None.

    Between slow calls before and after a hole, in which nobody watched, the distance says nothing.

    Slow calls close together are one spike. What is slow for a reason of its own, such as a call that was preempted, is
    outside of the rhythm; only few may be.
    """
    spikes = np.cumsum((np.diff(slow_idx, prepend=slow_idx[:1]) > _JOIN_CALLS) | is_after_hole)
    first_of_each = np.flatnonzero(np.diff(spikes, prepend=-1))
    if len(first_of_each) < _MIN_SPIKES:
        return None
    counts = _close_holes(slow_idx, first_of_each, is_after_hole)
    starts = _close_holes(calls.starts[slow_idx], first_of_each, is_after_hole)
    by_count = _find_longest_chain(counts, first_of_each)
    by_time = _find_longest_chain(starts, first_of_each)
    is_by_count = _order(counts[by_count]) >= _order(starts[by_time])
    members = by_count if is_by_count else by_time
    n_spikes = len(members)
    n_strays = len(first_of_each) - n_spikes
    if n_spikes < max(_MIN_SPIKES, _SPIKES_PER_STRAY * n_strays):
        return None
    period_calls = float(np.median(np.diff(counts[members])))
    if period_calls < _MIN_PERIOD_CALLS:
        return None
    is_member = np.isin(spikes, spikes[members])
    period_ns = float(np.median(np.diff(starts[members])))
    return _Rhythm(slow_idx[is_member], n_spikes, period_calls, period_ns, is_by_count)


def _close_holes(
    positions: IntArray, first_of_each: IntArray, is_after_hole: BoolArray
) -> IntArray:
    """Positions moved so that the distance of spikes over each hole is the usual one."""
    usual = int(np.median(np.diff(positions[first_of_each])))
    distances = np.diff(positions, prepend=positions[:1])
    moved: IntArray = positions[:1] + np.cumsum(np.where(is_after_hole, usual, distances))
    return moved


def _find_longest_chain(positions: IntArray, first_of_each: IntArray) -> IntArray:
    """Indexes of as many positions as possible that follow each other at the usual distance of spikes."""
    period = float(np.median(np.diff(positions[first_of_each])))
    lows = np.searchsorted(positions, positions - (1 + _MAX_SPREAD) * period)
    highs = np.searchsorted(positions, positions - (1 - _MAX_SPREAD) * period, side="right")
    lengths = np.ones(len(positions), dtype=np.int64)
    before = np.full(len(positions), -1)
    for i, (low, high) in enumerate(zip(lows.tolist(), highs.tolist(), strict=True)):
        if low < high:
            best = low + int(np.argmax(lengths[low:high]))
            lengths[i], before[i] = lengths[best] + 1, best
    chain = [int(np.argmax(lengths))]
    while before[chain[-1]] >= 0:
        chain.append(int(before[chain[-1]]))
    return np.array(chain[::-1])


def _order(chain: IntArray) -> tuple[int, float]:
    """The longer chain counts, of two as long the steadier one."""
    distances = np.diff(chain)
    median = float(np.median(distances)) if len(distances) else 1.0
    spread = float(np.abs(distances - median).max(initial=0)) / max(median, 1.0)
    return len(chain), -spread
