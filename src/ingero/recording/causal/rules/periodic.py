"""The same call is slow again and again at a fixed distance: something with that period is behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.model.arrays import IntArray
from ingero.model.events import HostMemory
from ingero.model.operations import OpKind
from ingero.recording.causal.evidence import EventRows, Evidence, Process
from ingero.recording.causal.finding import Finding, Needs, Unjudged, name_cause, rule
from ingero.recording.causal.gaps import describe_gap
from ingero.recording.causal.rules.first_use import one_time_calls
from ingero.recording.causal.slow import iter_classes
from ingero.units import NS_PER_MS, NS_PER_US, format_duration

_LAUNCHES: Final = (OpKind.LAUNCH, OpKind.GRAPH_LAUNCH)
_BACKLOG_SHARE: Final = 0.20
_RATIO: Final = 5.0
_MIN_EXTRA_NS: Final = 100 * NS_PER_US
_MIN_CALLS: Final = 50
_MIN_SPIKES: Final = 4
_JOIN_CALLS: Final = 3
_MAX_SPREAD: Final = 0.10
_MIN_PERIOD_CALLS: Final = 10
_MIN_LOST_NS: Final = 10 * NS_PER_MS
_MIN_LOST_SHARE: Final = 0.01


@dataclass(frozen=True, slots=True)
class _Rhythm:
    """Spikes at a fixed distance.

    Attributes:
        firsts: Position of each spike's first call in its class.
        period_calls: Median distance in calls.
        period_ns: Median distance in time.
        is_by_count: The distance in calls is the steadier one.
    """

    firsts: IntArray
    period_calls: float
    period_ns: float
    is_by_count: bool


@rule(
    "periodic_spike",
    "One call is slow again and again at a fixed distance",
    Needs((*_LAUNCHES, OpKind.ALLOC, OpKind.COPY), is_time=True),
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
    first, last = process.active_ns
    waited_ns = process.calls.of(OpKind.SYNC).intervals.total_ns
    is_judged = calls.kinds == OpKind.ALLOC
    is_judged |= (calls.kinds == OpKind.COPY) & (
        evidence.column("arg3", calls) == HostMemory.PINNED
    )
    if waited_ns < _BACKLOG_SHARE * (last - first):
        is_judged |= np.isin(calls.kinds, _LAUNCHES)
    return calls.where(is_judged)


def _judge(evidence: Evidence, process: Process, calls: EventRows) -> Finding | Unjudged | None:
    if len(calls) < _MIN_CALLS:
        return None
    durations = calls.durations
    typical = float(np.median(durations))
    is_slow = durations > max(_RATIO * typical, typical + _MIN_EXTRA_NS)
    lost_ns = round(float((durations[is_slow] - typical).sum()))
    first, last = process.active_ns
    codes = np.unique(calls.codes).tolist()
    if evidence.gap(process, codes).unstored:
        # Neither the usual duration nor the distance in calls is that of all calls.
        is_open = lost_ns >= _MIN_LOST_NS and int(is_slow.sum()) >= _MIN_SPIKES
        return Unjudged(process, describe_gap(evidence, process, codes)) if is_open else None
    rhythm = _find_rhythm(calls, np.flatnonzero(is_slow))
    if rhythm is None or lost_ns < max(_MIN_LOST_NS, _MIN_LOST_SHARE * (last - first)):
        return None
    every = f"every {rhythm.period_calls:.0f} calls ({format_duration(rhythm.period_ns)})"
    slow = format_duration(float(np.median(durations[is_slow])))
    return Finding(
        title=f"Periodic spike: {calls.op} of {process.name} takes {slow} instead of "
        f"{format_duration(typical)} {every}",
        span_ns=(int(calls.starts[is_slow][0]), int(calls.ends[is_slow].max())),
        lost_ns=lost_ns,
        causes=name_cause(
            f"something that happens {every}",
            1.0,
            f"{len(rhythm.firsts)} spikes of {int(is_slow.sum())} calls among {len(calls)}",
            f"steady in {'calls: the program itself' if rhythm.is_by_count else 'time: a timer'}",
        ),
        process=process,
        op=calls.op,
        n_cases=len(rhythm.firsts),
        fix=_fix(calls, rhythm),
    )


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


def _find_rhythm(calls: EventRows, slow_idx: IntArray) -> _Rhythm | None:
    """Spikes (slow calls close together are one) with the same distance in calls or in time, or None."""
    if len(slow_idx) < _MIN_SPIKES:
        return None
    is_first = np.concatenate(([True], np.diff(slow_idx) > _JOIN_CALLS))
    firsts = slow_idx[is_first]
    if len(firsts) < _MIN_SPIKES:
        return None
    by_count, by_time = np.diff(firsts), np.diff(calls.starts[firsts])
    count_spread, time_spread = _spread(by_count), _spread(by_time)
    period_calls = float(np.median(by_count))
    if min(count_spread, time_spread) > _MAX_SPREAD or period_calls < _MIN_PERIOD_CALLS:
        return None
    return _Rhythm(firsts, period_calls, float(np.median(by_time)), count_spread <= time_spread)


def _spread(distances: IntArray) -> float:
    """Largest deviation from the median distance, as a part of it: one missing spike breaks the rhythm."""
    median = float(np.median(distances))
    return float(np.abs(distances - median).max()) / max(median, 1.0)
