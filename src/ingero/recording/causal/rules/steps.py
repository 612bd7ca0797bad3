"""Step time: from some moment on, every step takes longer than before.

Steps are bounded by what the busiest thread waits for again and again: the synchronising call, blocking copy or
collective that it makes most often. Blocks of five steps are ranked, and the split at which the ranks differ most is
tested (Mann and Whitney 1947, with Bonferroni's correction for the choice of the split): a series whose blocks are
exchangeable is split with a probability below `_FALSE_ALARMS`. A split counts only when both sides last, when the
later median is a quarter longer, and when the loss is worth an incident.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import erfc, sqrt
from typing import Final

import numpy as np

from ingero.model.arrays import FloatArray
from ingero.model.events import NcclOp, Source
from ingero.model.incidents import Cause
from ingero.model.operations import BLOCKING_COPIES, OpKind
from ingero.recording.causal.attribution import (
    NO_REASON,
    OWN_THREAD,
    SLEEPING,
    WORKER,
    find_waits,
)
from ingero.recording.causal.evidence import EventRows, Evidence, Process
from ingero.recording.causal.finding import Finding, Needs, rule
from ingero.recording.causal.intervals import NO_TIME, Intervals, Times
from ingero.units import NS_PER_MS, NS_PER_S, format_duration

STEPS_CHANGED: Final = "step_time_changed"
_FALSE_ALARMS: Final = 1e-4
_BLOCK: Final = 5
_MIN_BLOCKS: Final = 8
"""On either side of a split."""
_MIN_RATIO: Final = 1.25
_MIN_AFTER_NS: Final = NS_PER_S
_MIN_EXTRA_NS: Final = NS_PER_MS // 5
_NAMED_SHARE: Final = 0.20
_MARKERS: Final = (OpKind.SYNC, OpKind.COLLECTIVE)
_BLOCKING: Final = list(BLOCKING_COPIES)
_BARRIER: Final = int(Source.NCCL) << 8 | int(NcclOp.BARRIER)


@dataclass(frozen=True, slots=True)
class Change:
    """Steps that became slower.

    Attributes:
        markers: What ends each step, in time order.
        watched_ns: When each of them ended, by a clock that stands still while nobody watches.
        first: Index of the first slow step's end.
        last: Index after the last slow step's end.
        start: Index of the first step that is compared with.
        before_ns: Median step until then.
        after_ns: Median step from then on.
    """

    markers: EventRows
    watched_ns: Times
    first: int
    last: int
    start: int
    before_ns: float
    after_ns: float

    @property
    def taken_ns(self) -> int:
        """Time that the slow steps took."""
        return int(self.watched_ns[self.last - 1] - self.watched_ns[self.first - 1])

    @property
    def lost_ns(self) -> int:
        """Time that the slow steps took beyond what they would have taken before."""
        return max(round(self.taken_ns - (self.last - self.first) * self.before_ns), 0)


@rule(
    STEPS_CHANGED, "From some moment on every step takes longer", Needs(_MARKERS, max_missing=0.02)
)
def step_time_changed(evidence: Evidence) -> list[Finding]:
    """The change that cost most, once per process; of ranks that wait for each other, the one that does most else."""
    found: dict[tuple[object, ...], tuple[float, Finding]] = {}
    for process in evidence.gpu_processes:
        change = find_change(process)
        if change is None or change.lost_ns < process.worth_ns:
            continue
        finding, own_ns = _describe(evidence, process, change)
        key = _group_of(evidence, process)
        if key not in found or own_ns > found[key][0]:
            found[key] = own_ns, finding
    return [finding for _, (_, finding) in sorted(found.items(), key=lambda item: str(item[0]))]


def _group_of(evidence: Evidence, process: Process) -> tuple[object, ...]:
    """The communicator that a process meets others in, or itself."""
    comms = evidence.column("arg1", process.calls.of(OpKind.COLLECTIVE))
    return ("comm", int(comms[0])) if len(comms) else (process.node, process.pid)


def find_change(process: Process) -> Change | None:
    """Where the steps of a process's busiest thread became slower, or None."""
    markers = _find_markers(process)
    n_blocks = (len(markers) - 1) // _BLOCK
    if n_blocks < 2 * _MIN_BLOCKS:
        return None
    watched_ns = process.to_watched(markers.ends)
    blocks = np.diff(watched_ns[::_BLOCK][: n_blocks + 1]).astype(np.float64)
    edges = [0, *sorted(_split(blocks, 0)), n_blocks]
    steps = np.diff(watched_ns)
    medians = [
        float(np.median(steps[a * _BLOCK : b * _BLOCK])) for a, b in itertools.pairwise(edges)
    ]
    changes = [
        _build((markers, watched_ns), edges, medians, i)
        for i in range(1, len(medians))
        if medians[i] >= max(_MIN_RATIO * medians[i - 1], medians[i - 1] + _MIN_EXTRA_NS)
    ]
    return max((c for c in changes if _is_persistent(c)), key=lambda c: c.lost_ns, default=None)


def _find_markers(process: Process) -> EventRows:
    """The waits of the busiest thread that it makes most often."""
    calls = process.busiest_calls
    is_marker = np.isin(calls.kinds, _MARKERS) | np.isin(calls.codes, _BLOCKING)
    markers = calls.where(is_marker & (calls.codes != _BARRIER))
    if not len(markers):
        return markers
    codes, counts = np.unique(markers.codes, return_counts=True)
    return markers.where(markers.codes == codes[counts.argmax()])


def _split(blocks: FloatArray, offset: int) -> list[int]:
    """Where a series of block times falls into parts that differ, by binary segmentation."""
    n = len(blocks)
    if n < 2 * _MIN_BLOCKS:
        return []
    order = np.argsort(blocks, kind="stable")
    ranks = np.empty(n)
    ranks[order] = np.arange(1, n + 1)
    _, which, counts = np.unique(blocks, return_inverse=True, return_counts=True)
    ranks = (np.bincount(which, ranks) / counts)[which]  # ties share their mean rank
    sizes = np.arange(_MIN_BLOCKS, n - _MIN_BLOCKS + 1)
    sums = np.cumsum(ranks)[sizes - 1]
    spread = np.sqrt(sizes * (n - sizes) * (n + 1) / 12.0)
    z = np.abs(sums - sizes * (n + 1) / 2.0) / spread
    best = int(z.argmax())
    if erfc(float(z[best]) / sqrt(2)) * len(sizes) > _FALSE_ALARMS:
        return []
    at = int(sizes[best])
    left, right = blocks[:at], blocks[at:]
    ratio = float(np.median(right) / max(np.median(left), 1.0))
    found = [at + offset] if max(ratio, 1 / max(ratio, 1e-9)) >= _MIN_RATIO else []
    return [*_split(left, offset), *found, *_split(right, offset + at)]


def _build(
    series: tuple[EventRows, Times], edges: list[int], medians: list[float], at: int
) -> Change:
    """The change at one edge, to where steps are as fast as before again."""
    markers, watched_ns = series
    before = medians[at - 1]
    until = at + 1
    while until < len(medians) and medians[until] >= _MIN_RATIO * before:
        until += 1
    last = len(markers) if until == len(medians) else edges[until] * _BLOCK + 1
    first, start = edges[at] * _BLOCK + 1, edges[at - 1] * _BLOCK
    every = np.diff(watched_ns)
    first = _first_slow(every, first, (before, medians[at]))
    steps = every[first - 1 : last - 1]
    return Change(markers, watched_ns, first, last, start, before, float(np.median(steps)))


def _first_slow(steps: Times, first: int, medians: tuple[float, float]) -> int:
    """The step at which the change lies: within two blocks of the edge, where fast ones end and slow ones begin."""
    limit = sqrt(medians[0] * medians[1])
    low = max(first - 2 * _BLOCK, 1)
    high = min(first + 2 * _BLOCK, len(steps))
    is_slow = steps[low - 1 : high] >= limit
    # The split that puts most fast steps before it and most slow ones after it.
    score = np.concatenate(([0], np.cumsum(np.where(is_slow, -1, 1))))
    return low + int(score.argmax())


def _is_persistent(change: Change) -> bool:
    return change.taken_ns >= _MIN_AFTER_NS and change.last - change.first >= _MIN_BLOCKS * _BLOCK


def _describe(evidence: Evidence, process: Process, change: Change) -> tuple[Finding, float]:
    """The finding, and how much of the extra time lies outside of waits for the GPU and for other ranks."""
    ends = change.markers.ends
    start_ns, end_ns = int(ends[change.first - 1]), int(ends[change.last - 1])
    n_slow = change.last - change.first
    extra = _share_out(evidence, process, change)
    total = max(sum(extra.values()), 1.0)
    named = sorted(
        ((name, ns / total) for name, ns in extra.items() if ns >= _NAMED_SHARE * total),
        key=lambda item: (-item[1], item[0]),
    )
    facts = (
        (
            f"{format_duration(change.before_ns)} a step in {change.first - change.start} steps before, "
            f"{format_duration(change.after_ns)} in {n_slow} since (medians)"
        ),
        f"a step ends with {change.markers.op} of thread {process.busiest_tid}",
    )
    causes = [Cause(name, round(share, 4), ()) for name, share in named]
    rest = 1 - sum(cause.share for cause in causes)
    if rest >= _NAMED_SHARE or not causes:
        causes.append(Cause("unexplained", round(rest, 4), ()))
    causes[0] = Cause(causes[0].name, causes[0].share, facts)
    back = "" if change.last == len(change.markers) else f" until {_at(evidence, end_ns)}"
    finding = Finding(
        title=(
            f"Steps of {process.name} take {format_duration(change.after_ns)} instead of "
            f"{format_duration(change.before_ns)} since {_at(evidence, start_ns)}{back}: "
            f"{change.after_ns / max(change.before_ns, 1):.1f} times as long"
        ),
        span_ns=(start_ns, end_ns),
        lost_ns=change.lost_ns,
        causes=tuple(causes),
        process=process,
        tid=process.busiest_tid,
        op=change.markers.op,
        n_cases=n_slow,
        fix=(
            "look at what changed at that moment: data, checkpointing, logging, another job, clocks",
            "compare a step before and after: ingero export --format perfetto",
        ),
        stacks=_stacks(evidence, process, (start_ns, end_ns)),
    )
    return finding, sum(ns for name, ns in extra.items() if not name.startswith(_INSIDE))


_INSIDE: Final = "longer inside "
_ASLEEP: Final = "the host thread sleeps between its calls"
_BUSY: Final = "the host thread computes between its calls"


def _share_out(evidence: Evidence, process: Process, change: Change) -> dict[str, float]:
    """Extra time of the slow steps by what the thread spent it on, ns."""
    ends, tid = change.markers.ends, process.busiest_tid
    slow = Intervals.of(ends[change.first - 1 : change.last - 1], ends[change.first : change.last])
    fast = Intervals.of(
        ends[change.start : change.first - 1], ends[change.start + 1 : change.first]
    )
    slow, fast = slow.without(process.unwatched), fast.without(process.unwatched)
    n_slow, n_fast = change.last - change.first, max(change.first - 1 - change.start, 1)
    waits = find_waits(evidence, process, tid)
    calls = process.calls.by(tid)
    parts = {
        name: spans
        for name, spans in waits.by_reason.items()
        if name not in {SLEEPING, NO_REASON} and not name.startswith((WORKER, OWN_THREAD))
    }
    for code in np.unique(calls.codes).tolist():
        same = calls.where(calls.codes == code)
        parts[f"{_INSIDE}{same.op}"] = same.intervals
    for name, spans in waits.by_reason.items():
        if name not in parts:
            parts[_ASLEEP if name == SLEEPING else name] = spans
    extra: dict[str, float] = {}
    taken = NO_TIME
    before = (0, 0)
    for name, spans in parts.items():
        taken = taken.union(spans)
        now = slow.within(taken), fast.within(taken)
        grown = (now[0] - before[0]) - (now[1] - before[1]) * n_slow / n_fast
        if grown > 0:
            extra[name] = grown
        before = now
    rest = (slow.total_ns - before[0]) - (fast.total_ns - before[1]) * n_slow / n_fast
    if rest > 0:
        extra[_BUSY if waits.is_off_cpu_known else "unexplained"] = rest
    return extra


def _stacks(evidence: Evidence, process: Process, span_ns: tuple[int, int]) -> tuple[int, ...]:
    """Stacks of the thread's rows in the slow stretch, longest first."""
    rows = process.thread(process.busiest_tid)
    is_in = (rows.starts >= span_ns[0]) & (rows.starts < span_ns[1])
    return evidence.stacks_of(rows.where(is_in))


def _at(evidence: Evidence, moment_ns: int) -> str:
    """A moment as a distance from the first event, as every window is asked for."""
    return f"{(moment_ns - evidence.recording.window_ns[0]) / NS_PER_S:.3f} s"
