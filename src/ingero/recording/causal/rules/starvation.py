"""The GPU waits for its input: silence between calls while the thread that feeds it is busy with something else.

Silence counts only when it proves an idle GPU: the work before it had been waited for, or the first synchronisation
after it returned at once. Silence while the thread sleeps is a pause, not a fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ingero.model.arrays import BoolArray
from ingero.model.incidents import Severity
from ingero.model.operations import BLOCKING_COPIES, CALLS, OpKind, find_codes
from ingero.recording.causal.attribution import (
    NAMED_SHARE,
    NO_REASON,
    ON_CPU,
    SLEEPING,
    Attribution,
    attribute,
    find_waits,
)
from ingero.recording.causal.evidence import EventRows, Evidence, Process
from ingero.recording.causal.finding import Finding, Needs, Unjudged, rule
from ingero.recording.causal.gaps import describe_gap
from ingero.recording.causal.intervals import Intervals
from ingero.recording.causal.rules.inference import is_serving
from ingero.units import NS_PER_MS, NS_PER_S, format_duration

_MIN_GAP_NS: Final = 10 * NS_PER_MS
_MIN_SILENCE_NS: Final = 100 * NS_PER_MS
_MIN_GAPS: Final = 3
_ALONE_NS: Final = NS_PER_S
_MIN_PHASE_SHARE: Final = 0.20
_RETURNED_AT_ONCE: Final = 0.10
_ALIKE: Final = 0.10  # of the phase's median gap: shorter ones are part of the busy time
_FIX: Final = {
    ON_CPU: (
        "prepare batches off the training thread: DataLoader workers, prefetch_factor, persistent_workers",
        "profile the host code between two batches; index whole batches instead of single samples",
        "move decoding and augmentation to the GPU",
    ),
    "blocked on disk reads": (
        "read ahead in workers instead of in the training thread",
        "keep the data set on local NVMe or in memory (/dev/shm)",
    ),
}
_FIX_OTHER: Final = ("look at what the worker does between two batches: it is the slow one",)


@dataclass(frozen=True, slots=True)
class _Phase:
    """A stretch of time that is mostly silence."""

    gaps: Intervals

    @property
    def span_ns(self) -> tuple[int, int]:
        return int(self.gaps.starts[0]), int(self.gaps.ends[-1])


_FIX_SERVING: Final = (
    (
        "look at the engine's host thread between two steps: scheduling, sampling, tokenising and detokenising; "
        "py-spy shows which"
    ),
    "give the engine its own CPUs, and move tokenising and HTTP to processes of their own",
    "let the next step be prepared while this one runs (asynchronous scheduling, multi-step scheduling)",
)


@rule(
    "input_starvation",
    "The GPU is silent while the thread that feeds it computes, reads or waits for a worker",
    Needs(CALLS, max_missing=1.0, is_absence=True, is_proof=True),
)
def input_starvation(evidence: Evidence) -> list[Finding | Unjudged]:
    """One finding per silent phase of a process."""
    return [
        finding
        for process in evidence.gpu_processes
        for phase in _iter_phases(process)
        for finding in _judge(evidence, process, phase)
    ]


def _iter_phases(process: Process) -> Iterator[_Phase]:
    """Long gaps between calls, joined while what lies between two of them is shorter than they are."""
    busy = process.calls.intervals
    starts, ends = busy.ends[:-1], busy.starts[1:]
    is_long = ends - starts >= _MIN_GAP_NS
    starts, ends = starts[is_long], ends[is_long]
    if not len(starts):
        return
    between = starts[1:] - ends[:-1]
    shorter = np.minimum((ends - starts)[1:], (ends - starts)[:-1])
    for group in np.split(np.arange(len(starts)), np.flatnonzero(between > shorter) + 1):
        lengths = (ends - starts)[group]
        alike = group[lengths >= _ALIKE * np.median(lengths)]
        phase = _Phase(Intervals(starts[alike], ends[alike]))
        if _is_candidate(process, phase):
            yield phase


def _is_candidate(process: Process, phase: _Phase) -> bool:
    first, last = process.active_ns
    silence = phase.gaps.total_ns
    is_often = len(phase.gaps) >= _MIN_GAPS or silence >= _ALONE_NS
    is_much = silence >= _MIN_PHASE_SHARE * (last - first) and silence >= _MIN_SILENCE_NS
    return is_often and is_much


def _judge(evidence: Evidence, process: Process, phase: _Phase) -> list[Finding | Unjudged]:
    is_idle = _is_idle_proven(process.calls, phase.gaps)
    lengths = phase.gaps.ends - phase.gaps.starts
    if lengths[is_idle].sum() < lengths.sum() / 2:
        return []
    if evidence.counts.is_off_cpu_overwritten(process.node, process.pid):
        return []
    silent_ns, n_unseen = _least_silence(evidence, process, phase)
    if silent_ns < phase.gaps.total_ns / 2:
        return [Unjudged(process, describe_gap(evidence, process, find_codes(CALLS)))]
    tid = _feeding_thread(process, phase.gaps)
    uncertain = evidence.counts.unstored_off_cpu_ns(process.node, process.pid, phase.span_ns)
    waits = find_waits(evidence, process, tid)
    found = attribute(waits, phase.gaps.starts, phase.gaps.ends, uncertain_ns=uncertain)
    top, share = found.shares[0] if found.shares else (NO_REASON, 0.0)
    if top in {SLEEPING, NO_REASON} or top.startswith("preempt") or share < NAMED_SHARE:
        return []
    finding = _describe(process, phase, found, (silent_ns, n_unseen, tid))
    if is_serving(evidence, process):
        finding = replace(finding, fix=_FIX_SERVING)
    if evidence.gap(process, find_codes(CALLS)).is_known:
        return [replace(finding, range_ns=(silent_ns, phase.gaps.total_ns))]
    return [_without_counts(finding, process, phase)]


def _without_counts(finding: Finding, process: Process, phase: _Phase) -> Finding:
    """The same in a recording that does not say how many calls have no row: the rows prove no silence."""
    top, span_ns = finding.causes[0], phase.span_ns[1] - phase.span_ns[0]
    doubt = "nobody counted the calls that have no row: some may lie in these gaps"
    return replace(
        finding,
        title=(
            f"Input starvation: no GPU call of {process.name} has a row for {finding.lost_ns / span_ns:.0%} of a "
            f"{span_ns / NS_PER_S:.1f} s phase of {len(phase.gaps)} batches while it was {top.name}"
        ),
        causes=(replace(top, evidence=(doubt, *top.evidence)), *finding.causes[1:]),
        most=Severity.MEDIUM,
    )


def _is_idle_proven(calls: EventRows, gaps: Intervals) -> BoolArray:
    """Which gaps the GPU had nothing to do in: waited for before, or done when first asked after."""
    by_end = np.argsort(calls.ends, kind="stable")
    before = by_end[np.searchsorted(calls.ends[by_end], gaps.starts, side="right") - 1]
    was_waited: BoolArray = (calls.kinds[before] == OpKind.SYNC) | np.isin(
        calls.codes[before], list(BLOCKING_COPIES)
    )
    syncs = calls.of(OpKind.SYNC)
    if not len(syncs):
        return was_waited
    after = np.minimum(np.searchsorted(syncs.starts, gaps.ends, side="left"), len(syncs) - 1)
    waited = syncs.durations[after]
    is_soon = syncs.starts[after] - gaps.ends < gaps.ends - gaps.starts
    at_once = waited <= _RETURNED_AT_ONCE * (gaps.ends - gaps.starts)
    was_done: BoolArray = is_soon & at_once & (syncs.starts[after] >= gaps.ends)
    return np.logical_or(was_waited, was_done)


def _least_silence(evidence: Evidence, process: Process, phase: _Phase) -> tuple[int, int]:
    """Silence that is certain although some calls have no row, and how many those are.

    Each call without a row may have kept the GPU as busy as the calls with one did outside the phase.
    """
    first, last = process.active_ns
    count = evidence.counts.gpu_calls(process.node, process.pid, phase.span_ns)
    busy_ns = (last - first) - phase.gaps.total_ns
    hidden_ns = busy_ns / max(count.stored, 1) * count.unstored
    syncs = process.calls.of(OpKind.SYNC)
    waits = evidence.gap(process, find_codes((OpKind.SYNC,)))
    if len(syncs) and not waits.unstored and waits.is_known:
        # Every wait has a row, so a gap holds no whole batch: what was launched in it is waited for at its end.
        hidden_ns = min(hidden_ns, len(phase.gaps) * float(np.median(syncs.durations)))
    return max(round(phase.gaps.total_ns - hidden_ns), 0), count.unstored


def _feeding_thread(process: Process, gaps: Intervals) -> int:
    """The thread whose calls end the gaps: it was expected to feed the GPU."""
    calls = process.calls
    at = np.minimum(np.searchsorted(calls.starts, gaps.ends, side="left"), len(calls) - 1)
    tids, counts = np.unique(calls.tids[at], return_counts=True)
    return int(tids[counts.argmax()])


def _describe(
    process: Process, phase: _Phase, found: Attribution, facts: tuple[int, int, int]
) -> Finding:
    silent_ns, n_unseen, tid = facts
    first, last = phase.span_ns
    span_ns = last - first
    n_batches = len(phase.gaps)
    top = found.shares[0][0]
    lengths = phase.gaps.ends - phase.gaps.starts
    gap_range = f"{format_duration(lengths.min())} to {format_duration(lengths.max())}"
    silence = format_duration(phase.gaps.total_ns)
    evidence = [
        f"no GPU call has a row for {silence}: {n_batches} gaps of {gap_range}"
        if n_unseen
        else f"no GPU call for {silence}: {n_batches} gaps of {gap_range}",
        f"thread {tid} of {process.name}: {found.share(ON_CPU):.1%} of the silence on a CPU",
    ]
    if n_unseen:
        evidence.append(
            f"{n_unseen} calls were counted without a row; at the busy rate they fill at most "
            f"{format_duration(phase.gaps.total_ns - silent_ns)}"
        )
    return Finding(
        title=(
            f"Input starvation: the GPU was silent for {silent_ns / span_ns:.0%} of a {span_ns / NS_PER_S:.1f} s "
            f"phase of {n_batches} batches while {process.name} was {top}"
        ),
        span_ns=(first, last),
        lost_ns=silent_ns,
        causes=found.causes(without=(SLEEPING, NO_REASON), facts=evidence),
        process=process,
        tid=tid,
        n_cases=n_batches,
        ruled_out=found.ruled_out(),
        fix=_FIX.get(top, _FIX_OTHER),
    )
