"""The GPU waits for its input: silence between calls while the thread that feeds it is busy with something else.

Silence counts only when it proves an idle GPU: the work before it had been waited for, the first synchronisation
after it returned at once, or an event that was recorded after it was done when first asked. A loop that synchronises
seldom, and a recording that holds some of its queries, prove it for some gaps; these speak for the others. Silence
while the thread sleeps is a pause, not a fault.

Starvation recurs, batch after batch. What happens once or twice is another rule's, and what ends with the loading of
new code (start-up, a compiler) is no stall of a running job.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ingero.model.arrays import BoolArray
from ingero.model.events import CudaOp
from ingero.model.incidents import Severity
from ingero.model.operations import BLOCKING_COPIES, CALLS, OpKind, code_of, find_codes
from ingero.recording.causal.attribution import (
    NAMED_SHARE,
    NO_REASON,
    ON_CPU,
    SLEEPING,
    WORKER,
    Attribution,
    attribute,
    find_strangers,
    find_waits,
)
from ingero.recording.causal.evidence import EventRows, Evidence, Process
from ingero.recording.causal.finding import Finding, Needs, Unjudged, rule
from ingero.recording.causal.gaps import describe_gap
from ingero.recording.causal.intervals import NO_TIME, Intervals, Times
from ingero.recording.causal.rules.inference import is_serving
from ingero.units import NS_PER_MS, NS_PER_S, format_duration

_MIN_GAP_NS: Final = 10 * NS_PER_MS
_MIN_SILENCE_NS: Final = 100 * NS_PER_MS
_MIN_RECURRING: Final = (
    2.5  # gaps of one length that lose as much: more like three than like two, which may be chance
)
_ALONE_NS: Final = NS_PER_S
_MIN_PHASE_SHARE: Final = 0.20
_RETURNED_AT_ONCE: Final = 0.10
_MIN_ASKED: Final = 3
_MAX_WAKERS: Final = 3
_NOTE_PARENTS: Final = (
    "record with this version: it notes the children that a process has when it is first seen"
)
_WORK: Final = (OpKind.LAUNCH, OpKind.GRAPH_LAUNCH, OpKind.COPY)
_ALIKE: Final = 0.10
"""Gaps within this factor of the phase's median, either way, are of one kind: shorter ones are part of the busy time,
and longer ones are judged by themselves."""
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
_FIX_LOADER: Final = (
    "give the loader more workers while CPUs are free (DataLoader num_workers, prefetch_factor, persistent_workers)",
    "look at what a worker does for one batch: it is the slow one; move decoding and augmentation to the GPU",
)
_FIX_RARE: Final = (
    "look at what the program does then: evaluation, a checkpoint, garbage collection, a new epoch's workers",
    "do it beside the training, in another thread or process, or less often",
)
_FIX_OTHER: Final = ("look at what it waits for: that is the slow part",)


@dataclass(frozen=True, slots=True)
class _Phase:
    """A stretch of time that is mostly silence."""

    gaps: Intervals

    @property
    def span_ns(self) -> tuple[int, int]:
        return int(self.gaps.starts[0]), int(self.gaps.ends[-1])

    @property
    def is_recurring(self) -> bool:
        """Whether its gaps lose as much as three equal ones would: one that makes most of the loss counts as one.

        The measure is the inverse of the sum of squared shares: n for n equal gaps, near 1 where one outweighs all.
        """
        shares = (self.gaps.ends - self.gaps.starts) / self.gaps.total_ns
        return bool(1 / (shares**2).sum() >= _MIN_RECURRING)


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
    "Again and again no GPU call is made while the thread that makes them computes, reads or waits for a worker",
    Needs(CALLS, max_missing=1.0, is_absence=True, is_proof=True),
)
def input_starvation(evidence: Evidence) -> list[Finding | Unjudged]:
    """One finding per silent phase of a process whose gaps recur."""
    return _find(evidence, is_recurring=True)


@rule(
    "one_off_stall",
    "Once or twice in a run no GPU call is made for a second or more while the thread that makes them is kept",
    Needs(CALLS, max_missing=1.0, is_absence=True, is_proof=True),
)
def one_off_stall(evidence: Evidence) -> list[Finding | Unjudged]:
    """One finding per silent phase of a process whose gaps are too few to recur."""
    return _find(evidence, is_recurring=False)


def _find(evidence: Evidence, *, is_recurring: bool) -> list[Finding | Unjudged]:
    return [
        finding
        for process in evidence.gpu_processes
        for phase in _iter_phases(process)
        if phase.is_recurring is is_recurring
        for finding in _judge(evidence, process, phase)
    ]


def _iter_phases(process: Process) -> Iterator[_Phase]:
    """Long gaps between calls, joined while what lies between two of them is shorter than they are."""
    gaps = _find_gaps(process)
    if not len(gaps):
        return
    lengths = gaps.ends - gaps.starts
    between = process.to_watched(gaps.starts)[1:] - process.to_watched(gaps.ends)[:-1]
    shorter = np.minimum(lengths[1:], lengths[:-1])
    for group in np.split(np.arange(len(gaps)), np.flatnonzero(between > shorter) + 1):
        for one_kind in _split_kinds(lengths[group]):
            phase = _Phase(Intervals(gaps.starts[group[one_kind]], gaps.ends[group[one_kind]]))
            if _is_candidate(process, phase):
                yield phase


def _find_gaps(process: Process) -> Intervals:
    """Long gaps between calls of a running job.

    Those of its start lie before the first launch, or end with new code: a gap counts as such where a module is loaded
    before as much time has passed again. So does the time in which a compiler runs. It ends with the
    last launch, copy or wait. One in which nobody watched is none.
    """
    calls = process.calls
    busy = Intervals.of(
        calls.starts, np.maximum(calls.ends, calls.starts + 1)
    )  # some have no length
    starts, ends = busy.ends[:-1], busy.starts[1:]
    lengths = ends - starts
    loads = calls.of(OpKind.MODULE).starts
    n_loads = np.searchsorted(loads, ends + lengths) - np.searchsorted(loads, ends)
    is_watched = process.unwatched.covered_ns(starts, ends) == 0
    is_gap = (lengths >= _MIN_GAP_NS) & (n_loads == 0) & is_watched
    launches = calls.of(OpKind.LAUNCH, OpKind.GRAPH_LAUNCH)
    if len(launches):
        is_gap &= (starts >= launches.starts[0]) & (
            ends <= calls.of(*_WORK, OpKind.SYNC).starts[-1]
        )
    return Intervals(starts[is_gap], ends[is_gap])


def _split_kinds(lengths: Times) -> list[BoolArray]:
    """Which gaps of a phase are judged together: those like its median, and the far longer ones."""
    typical = np.median(lengths)
    alike: BoolArray = (lengths >= _ALIKE * typical) & (lengths <= typical / _ALIKE)
    long: BoolArray = lengths > typical / _ALIKE
    return [one for one in (alike, long) if one.any()]


def _is_candidate(process: Process, phase: _Phase) -> bool:
    silence = phase.gaps.total_ns
    is_often = phase.is_recurring or silence >= _ALONE_NS
    is_much = silence >= _MIN_PHASE_SHARE * process.active_length_ns and silence >= _MIN_SILENCE_NS
    return is_often and is_much


def _judge(evidence: Evidence, process: Process, phase: _Phase) -> list[Finding | Unjudged]:
    is_idle, is_shown_after = _is_idle_proven(evidence, process.calls, phase.gaps)
    if not is_idle or evidence.counts.is_off_cpu_overwritten(process.node, process.pid):
        return []
    silent_ns, n_unseen = _least_silence(evidence, process, phase, is_shown_after=is_shown_after)
    if silent_ns < phase.gaps.total_ns / 2:
        return [Unjudged(process, describe_gap(evidence, process, find_codes(CALLS)))]
    tid = _feeding_thread(process, phase.gaps)
    uncertain = evidence.counts.unstored_off_cpu_ns(process.node, process.pid, phase.span_ns)
    waits = find_waits(evidence, process, tid)
    found = attribute(waits, phase.gaps.starts, phase.gaps.ends, uncertain_ns=uncertain)
    top, share = found.shares[0] if found.shares else (NO_REASON, 0.0)
    if top == SLEEPING:
        return _suspect_workers(evidence, process, tid, phase.gaps)
    if top == NO_REASON or top.startswith("preempt") or share < NAMED_SHARE:
        return []
    is_known = evidence.gap(process, find_codes(CALLS)).is_known
    title = _name(process, phase, silent_ns if is_known else None, top)
    were = "may have been made" if evidence.recording.is_cut else "were counted"
    finding = _describe(process, phase, found, (title, silent_ns, n_unseen, tid), were)
    if is_serving(evidence, process):
        finding = replace(finding, fix=_FIX_SERVING)
    if is_known:
        return [replace(finding, range_ns=(silent_ns, phase.gaps.total_ns))]
    # The rows of a recording that does not say how many calls have no row prove no silence.
    first, *others = finding.causes
    doubt = "nobody counted the calls that have no row: some may lie in these gaps"
    first = replace(first, evidence=(doubt, *first.evidence))
    return [replace(finding, causes=(first, *others), most=Severity.MEDIUM)]


def _suspect_workers(
    evidence: Evidence, process: Process, tid: int, gaps: Intervals
) -> list[Finding | Unjudged]:
    """Nothing for a pause; unknown where other processes ended it and may be workers that were forked unseen."""
    ended = {
        pid: gaps.within(spans) for pid, spans in find_strangers(evidence, process, tid).items()
    }
    if sum(ended.values()) < gaps.total_ns / 2:
        return []
    longest = sorted(ended, key=lambda pid: (-ended[pid], pid))[:_MAX_WAKERS]
    names = dict.fromkeys(evidence.process_name(process.node, pid) for pid in longest)
    missing = f"whether what ended its sleep is a worker of its own ({', '.join(names)}): nobody noted the parent"
    return [Unjudged(process, missing, _NOTE_PARENTS)]


def _name(process: Process, phase: _Phase, silent_ns: int | None, top: str) -> str:
    """The title; without `silent_ns` nobody counted the calls that have no row."""
    n_gaps, span_ns = len(phase.gaps), process.watched_within(*phase.span_ns)
    lost_ns = phase.gaps.total_ns if silent_ns is None else silent_ns
    if silent_ns is None:
        what = f"no GPU call of {process.name} has a row for"
    else:
        what = f"{process.name} made no GPU call for"
    if not phase.is_recurring:
        times = "once" if n_gaps == 1 else f"in {n_gaps} gaps"
        return f"Stall: {what} {format_duration(lost_ns)} {times} while it was {top}"
    return (
        f"Input starvation: {what} {lost_ns / span_ns:.0%} of a {span_ns / NS_PER_S:.1f} s "
        f"phase in {n_gaps} gaps while it was {top}"
    )


def _is_idle_proven(evidence: Evidence, calls: EventRows, gaps: Intervals) -> tuple[bool, bool]:
    """Whether the GPU had nothing to do in the gaps, and whether what came after them says so alone.

    That is half of their length, or of the length of those that something tells of where there are three at least.
    """
    lengths = gaps.ends - gaps.starts
    was_waited, at_once, is_soon = _find_waits(calls, gaps)
    is_done = _find_done(evidence, calls, gaps)
    is_idle, is_asked = at_once | is_done, is_soon | is_done

    def is_most(idle: BoolArray, asked: BoolArray) -> bool:
        whole_ns = lengths[asked].sum() if asked.sum() >= _MIN_ASKED else lengths.sum()
        return bool(lengths[idle].sum() >= whole_ns / 2)

    return is_most(is_idle | was_waited, is_asked | was_waited), is_most(is_idle, is_asked)


def _find_waits(calls: EventRows, gaps: Intervals) -> tuple[BoolArray, BoolArray, BoolArray]:
    """Which gaps the GPU was waited for before; which a wait after them ended at once; which have a wait soon after."""
    by_end = np.argsort(calls.ends, kind="stable")
    before = by_end[np.searchsorted(calls.ends[by_end], gaps.starts, side="right") - 1]
    was_waited: BoolArray = (calls.kinds[before] == OpKind.SYNC) | np.isin(
        calls.codes[before], list(BLOCKING_COPIES)
    )
    syncs = calls.of(OpKind.SYNC)
    if not len(syncs):
        none = np.zeros(len(gaps), bool)
        return was_waited, none, none
    after = np.minimum(np.searchsorted(syncs.starts, gaps.ends, side="left"), len(syncs) - 1)
    waited = syncs.durations[after]
    is_soon = syncs.starts[after] - gaps.ends < gaps.ends - gaps.starts
    is_soon &= syncs.starts[after] >= gaps.ends
    at_once = waited <= _RETURNED_AT_ONCE * (gaps.ends - gaps.starts)
    return was_waited, is_soon & at_once, is_soon


def _find_done(evidence: Evidence, calls: EventRows, gaps: Intervals) -> BoolArray:
    """After which gaps an event, recorded after them, was done within their length: so was all work before them."""
    records = calls.where(calls.codes == code_of(CudaOp.EVENT_RECORD))
    queries = calls.where(calls.codes == code_of(CudaOp.EVENT_QUERY))
    queries = queries.where(evidence.column("ret_code", queries) == 0)
    recorded_ns = np.zeros(
        len(queries), np.int64
    )  # when the event that a query found done was recorded last
    handles, asked = evidence.column("arg0", records), evidence.column("arg0", queries)
    for handle in np.unique(asked).tolist():
        times = records.starts[handles == handle]
        mine = np.flatnonzero(asked == handle)
        last = np.searchsorted(times, queries.starts[mine]) - 1
        known = last >= 0
        recorded_ns[mine[known]] = times[last[known]]
    at = (
        np.searchsorted(gaps.starts, recorded_ns, side="right") - 1
    )  # the gap that each event was recorded after
    is_after = (at >= 0) & (recorded_ns >= gaps.ends[at])
    at, ends = at[is_after], queries.ends[is_after]
    is_soon = ends - gaps.ends[at] < (gaps.ends - gaps.starts)[at]
    is_done = np.zeros(len(gaps), bool)
    is_done[at[is_soon]] = True
    return is_done


def _least_silence(
    evidence: Evidence, process: Process, phase: _Phase, *, is_shown_after: bool
) -> tuple[int, int]:
    """Silence that is certain although some calls have no row, and how many those are.

    Each call without a row may have kept the GPU as busy as the calls with one did outside the phase. But none was made
    while every thread that makes calls was off its CPU and not inside one, and what was launched before that had been
    done where what came after shows it.
    """
    count = evidence.counts.gpu_calls(process.node, process.pid, phase.span_ns)
    busy_ns = process.active_length_ns - phase.gaps.total_ns
    hidden_ns = busy_ns / max(count.stored, 1) * count.unstored
    syncs = process.calls.of(OpKind.SYNC)
    waits = evidence.gap(process, find_codes((OpKind.SYNC,)))
    begin_ns, end_ns = phase.span_ns
    n_within = int(((syncs.ends > begin_ns) & (syncs.starts <= end_ns)).sum())
    if n_within >= len(phase.gaps) / 2 and not waits.unstored and waits.is_known:
        # Every wait has a row, so a gap holds no whole batch: what was launched in it is waited for at its end.
        hidden_ns = min(hidden_ns, len(phase.gaps) * float(np.median(syncs.durations)))
    if is_shown_after:
        inside_ns = evidence.gap(process, find_codes(CALLS)).missing_ns
        asleep_ns = _off_cpu_ns(process, phase.gaps) - inside_ns
        hidden_ns = min(hidden_ns, phase.gaps.total_ns - asleep_ns)
    return max(round(phase.gaps.total_ns - hidden_ns), 0), count.unstored


def _off_cpu_ns(process: Process, gaps: Intervals) -> int:
    """How much of the gaps all threads that make calls towards the GPU spent off their CPUs together."""
    on_cpu = NO_TIME
    first, last = int(gaps.starts[0]), int(gaps.ends[-1])
    for tid in np.unique(process.calls.tids).tolist():
        on_cpu = on_cpu.union(process.thread(tid).of(OpKind.OFF_CPU).intervals.gaps(first, last))
    return gaps.total_ns - gaps.within(on_cpu)


def _feeding_thread(process: Process, gaps: Intervals) -> int:
    """The thread that launches or copies first after most gaps: it was expected to feed the GPU."""
    calls = process.calls.of(*_WORK)
    if not len(calls):
        calls = process.calls
    at = np.minimum(np.searchsorted(calls.starts, gaps.ends, side="left"), len(calls) - 1)
    tids, counts = np.unique(calls.tids[at], return_counts=True)
    return int(tids[counts.argmax()])


def _describe(
    process: Process,
    phase: _Phase,
    found: Attribution,
    facts: tuple[str, int, int, int],
    were: str,
) -> Finding:
    title, silent_ns, n_unseen, tid = facts
    n_gaps = len(phase.gaps)
    top = found.shares[0][0]
    lengths = phase.gaps.ends - phase.gaps.starts
    gap_range = f"{format_duration(lengths.min())} to {format_duration(lengths.max())}"
    silence = format_duration(phase.gaps.total_ns)
    evidence = [
        f"no GPU call has a row for {silence}: {n_gaps} gaps of {gap_range}"
        if n_unseen
        else f"no GPU call for {silence}: {n_gaps} gaps of {gap_range}",
        f"thread {tid} of {process.name}: {found.share(ON_CPU):.1%} of the silence on a CPU",
    ]
    evidence.append(
        "time without calls is the most that the GPU can have been idle: work launched before may run on into it"
    )
    if n_unseen:
        evidence.append(
            f"{n_unseen} calls {were} without a row; in these gaps they fill at most "
            f"{format_duration(phase.gaps.total_ns - silent_ns)}"
        )
    return Finding(
        title=title,
        span_ns=phase.span_ns,
        lost_ns=silent_ns,
        causes=found.causes(without=(SLEEPING, NO_REASON), facts=evidence),
        process=process,
        tid=tid,
        n_cases=n_gaps,
        ruled_out=found.ruled_out(),
        fix=_choose_fix(top) if phase.is_recurring else _FIX_RARE,
    )


def _choose_fix(top: str) -> tuple[str, ...]:
    return _FIX_LOADER if top.startswith(WORKER) else _FIX.get(top, _FIX_OTHER)
