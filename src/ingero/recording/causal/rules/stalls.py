"""The thread that feeds the GPU is kept from running: by another task, a quota, the disk, the memory.

One search for all of them. A stall is reported over the episode in which it is dense, its lost time is the slow calls
it overlaps and the waits between calls, and the share is what overlap shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.model.incidents import Cause
from ingero.model.operations import OpKind, find_codes
from ingero.recording.causal.attribution import (
    NO_REASON,
    ON_CPU,
    OTHER_CGROUP,
    SLEEPING,
    Attribution,
    attribute,
    find_waits,
)
from ingero.recording.causal.evidence import EventRows, Evidence, Process
from ingero.recording.causal.finding import Contrast, Finding, Needs, Rule
from ingero.recording.causal.intervals import NO_TIME, Intervals
from ingero.recording.causal.rules.first_use import one_time_calls
from ingero.recording.causal.slow import find_slow
from ingero.recording.causal.weights import Weighing, weigh
from ingero.units import NS_PER_MS, NS_PER_S, format_duration, format_size

_PREEMPTED: Final = "preempted by "
_SECTOR_BYTES: Final = 512
_DISK: Final = {"blocking_io": OpKind.READ, "blocking_writes": OpKind.WRITE}
_EPISODE_GAP_NS: Final = NS_PER_S
_MIN_STALL_NS: Final = 10 * NS_PER_MS
_MIN_EPISODE_SHARE: Final = 0.05
_MIN_QUEUED_SHARE: Final = 0.10  # some waiting for a CPU is normal on a machine that is used
_MIN_SPANS: Final = 3


@dataclass(frozen=True, slots=True)
class _Stall:
    """What to look for among a thread's waits, and what to say about it."""

    rule: str
    reason: str
    description: str
    title: str
    fix: tuple[str, ...]
    min_share: float = _MIN_EPISODE_SHARE
    kinds: tuple[OpKind, ...] = (OpKind.OFF_CPU,)
    is_loading: bool = (
        False  # what reading code from the disk looks like: inside first uses it is their cost
    )

    def matches(self, name: str) -> bool:
        is_other_cgroup = name.startswith(OTHER_CGROUP)
        return name.startswith(self.reason) and is_other_cgroup is (self.reason == OTHER_CGROUP)


_STALLS: Final = (
    _Stall(
        "preemption",
        _PREEMPTED,
        "Another task takes the CPU from the thread that feeds the GPU",
        "CPU taken from {process}",
        (
            "give the training threads their own CPUs (taskset, cpuset) and keep other work off them",
            "lower the other task's priority (nice 19, cpu.weight) or move it off the node",
        ),
    ),
    _Stall(
        "noisy_neighbour",
        OTHER_CGROUP,
        "The tasks of another cgroup take the CPU from the thread that feeds the GPU",
        "Noisy neighbour: CPU taken from {process}",
        (
            "give the job its own CPUs: cpuset, static CPU manager with whole CPUs (guaranteed QoS)",
            "cap the neighbour (cpu.max) or lower its cpu.weight; see /proc/PID/cgroup for its name",
        ),
    ),
    _Stall(
        "runnable_wait",
        "waiting for a free CPU",
        "The thread is ready and no CPU is free for it",
        "Run queue full: {process} waits for a CPU",
        (
            "run fewer busy threads than CPUs: OMP_NUM_THREADS, DataLoader workers",
            "ask for more CPUs for the job",
        ),
        _MIN_QUEUED_SHARE,
    ),
    _Stall(
        "cgroup_throttling",
        "out of CPU quota (cgroup)",
        "The container's CPU quota is used up",
        "CPU quota used up: {process} is throttled by its cgroup",
        ("raise the container's CPU limit (cpu.max), or remove it", "use fewer host threads"),
        kinds=(OpKind.OFF_CPU, OpKind.QUOTA),
    ),
    _Stall(
        "blocking_io",
        "blocked on disk reads",
        "Synchronous disk reads keep the training thread off its CPU",
        "Synchronous disk reads block {process}",
        (
            "read ahead in workers instead of in the training thread (DataLoader num_workers, prefetch)",
            "keep the data in the page cache or in /dev/shm; use local NVMe",
            "read larger blocks: fewer, longer requests",
        ),
        kinds=(OpKind.OFF_CPU, OpKind.READ),
        is_loading=True,
    ),
    _Stall(
        "blocking_writes",
        "blocked on disk writes",
        "Synchronous disk writes keep the training thread off its CPU",
        "Synchronous disk writes block {process}",
        (
            "write checkpoints in the background (torch.distributed.checkpoint.async_save) or from another process",
            "write to local NVMe first and copy from there",
        ),
        kinds=(OpKind.OFF_CPU, OpKind.WRITE),
    ),
    _Stall(
        "page_fault_stall",
        "page faults",
        "Page faults stop the thread that feeds the GPU",
        "Page faults stop {process}",
        (
            "lock or pre-touch the buffers; use pinned memory",
            "add memory: pages are read back from disk",
        ),
        kinds=(OpKind.FAULT,),
        is_loading=True,
    ),
    _Stall(
        "reclaim_stall",
        "memory reclaim",
        "The kernel reclaims memory inside the thread that feeds the GPU",
        "Memory reclaim stops {process}",
        (
            "free host memory or raise the memory limit",
            "lower the page-cache pressure of data loading",
        ),
        kinds=(OpKind.RECLAIM,),
    ),
    _Stall(
        "network_wait",
        "waiting on the network",
        "Socket calls keep the training thread waiting",
        "Network reads block {process}",
        (
            "fetch data in workers, ahead of use",
            "check the storage network: latency and retransmits",
        ),
        kinds=(OpKind.OFF_CPU, OpKind.NETWORK),
    ),
)


def _finder(stall: _Stall) -> Rule:
    def find(evidence: Evidence) -> list[Finding]:
        return [
            finding
            for process, tid in _iter_threads(evidence)
            for finding in _judge(evidence, process, tid, stall)
        ]

    return Rule(
        stall.rule, stall.description, find, Needs(stall.kinds, is_time=True, applies=_is_judged)
    )


def _is_judged(evidence: Evidence, process: Process) -> bool:
    """Whether a process feeds a GPU, or its node has none in the recording."""
    gpu_nodes = {one.node for one in evidence.gpu_processes}
    return bool(len(process.calls)) or process.node not in gpu_nodes


def _iter_threads(evidence: Evidence) -> Iterator[tuple[Process, int]]:
    """Threads that feed a GPU; on a node without GPU calls in the recording, main threads that were watched."""
    gpu_nodes = {process.node for process in evidence.gpu_processes}
    for process in evidence.processes:
        if len(process.calls):
            yield process, process.busiest_tid
        elif process.node not in gpu_nodes and len(process.thread(process.pid).of(OpKind.OFF_CPU)):
            yield process, process.pid


def _judge(evidence: Evidence, process: Process, tid: int, stall: _Stall) -> list[Finding]:
    waits = find_waits(evidence, process, tid)
    spans = NO_TIME
    for name, found in waits.by_reason.items():
        spans = spans.union(found) if stall.matches(name) else spans
    if stall.is_loading:
        once = one_time_calls(evidence, process).by(tid).intervals
        is_outside = once.covered_ns(spans.starts, spans.ends) < spans.ends - spans.starts
        spans = Intervals(spans.starts[is_outside], spans.ends[is_outside])
    basis = process.thread(tid).of(stall.kinds[-1])
    weighing = weigh(evidence, process, basis, (spans, find_codes(stall.kinds)))
    episodes = _dense_episodes(spans, stall.min_share, weighing.factor)
    if not len(episodes):
        return []
    stalled = spans.within(episodes) * weighing.factor
    if stalled < max(_MIN_STALL_NS, process.worth_ns):
        return []
    lost = _lost_intervals(evidence, process, tid, episodes, spans)
    found_shares = attribute(waits, lost.starts, lost.ends)
    causes = found_shares.causes(without=(ON_CPU, SLEEPING, NO_REASON))
    if not stall.matches(causes[0].name):
        return []
    shown = _StallEvidence(episodes, spans, found_shares, causes, weighing)
    return [_describe(evidence, process, tid, stall, shown)]


@dataclass(frozen=True, slots=True)
class _StallEvidence:
    episodes: Intervals
    spans: Intervals
    shares: Attribution
    causes: tuple[Cause, ...]
    weighing: Weighing


def _dense_episodes(spans: Intervals, min_share: float, factor: float) -> Intervals:
    """Stretches in which the stall takes a noticeable part of the time.

    Where a span stands for `factor` of them, spans lie that much further apart and weigh that much more.
    """
    if len(spans) < _MIN_SPANS:
        return NO_TIME
    breaks = np.flatnonzero(spans.starts[1:] - spans.ends[:-1] > _EPISODE_GAP_NS * factor) + 1
    groups = [g for g in np.split(np.arange(len(spans)), breaks) if len(g) >= _MIN_SPANS]
    starts = np.array([spans.starts[g[0]] for g in groups], np.int64)
    ends = np.array([spans.ends[g[-1]] for g in groups], np.int64)
    covered = spans.covered_ns(starts, ends)
    is_dense = covered * factor >= min_share * (ends - starts)
    return Intervals.of(starts[is_dense], ends[is_dense])


def _lost_intervals(
    evidence: Evidence, process: Process, tid: int, episodes: Intervals, spans: Intervals
) -> Intervals:
    """Slow calls of the thread in the episodes that the stall touches, and the stall's own time outside calls.

    Without GPU calls to judge by, all of the thread's time off its CPU.
    """
    if not len(process.calls):
        off = process.thread(tid).of(OpKind.OFF_CPU)
        return off.where(episodes.covered_ns(off.starts, off.ends) > 0).intervals
    slow = find_slow(evidence, process)
    slow = slow.where(slow.tids == tid)
    is_touched = spans.covered_ns(slow.starts, slow.ends) > 0
    is_inside = episodes.covered_ns(slow.starts, slow.ends) > 0
    slow = slow.where(is_touched & is_inside)
    is_in_episode = episodes.covered_ns(spans.starts, spans.ends) > 0
    return Intervals.of(
        np.concatenate((slow.starts, spans.starts[is_in_episode])),
        np.concatenate((slow.ends, spans.ends[is_in_episode])),
    )


def _describe(
    evidence: Evidence, process: Process, tid: int, stall: _Stall, found: _StallEvidence
) -> Finding:
    first, last = int(found.episodes.starts[0]), int(found.episodes.ends[-1])
    weighing = found.weighing
    stalled = min(found.spans.within(found.episodes) * weighing.factor, found.episodes.total_ns)
    n_rows = int((found.episodes.covered_ns(found.spans.starts, found.spans.ends) > 0).sum())
    n_spans = round(n_rows * weighing.n_each)
    part = stalled / max(found.episodes.total_ns, 1)
    title = stall.title.format(process=process.name)
    by = _names(stall, found.causes) if stall.reason in {_PREEMPTED, OTHER_CGROUP} else ""
    facts = [
        f"{n_spans} times, {format_duration(stalled)} of {format_duration(found.episodes.total_ns)} ({part:.0%})"
    ]
    if weighing.factor > 1:
        facts.append(f"estimated: {n_rows} of about {n_spans} spans have a row")
    if stall.rule in _DISK:
        facts += _disk_facts(evidence, process.thread(tid), _DISK[stall.rule])
    facts += _response_facts(process, tid, found.spans)
    top = found.causes[0]
    return Finding(
        title=(
            f"{title}{f' by {by}' if by else ''}: {n_spans} times, "
            f"{format_duration(stalled)} in {format_duration(process.watched_within(first, last))}"
        ),
        span_ns=(first, last),
        lost_ns=min(round(found.shares.total_ns * weighing.factor), process.watched_ns),
        range_ns=weighing.range_ns(found.shares.total_ns),
        causes=(Cause(top.name, top.share, (*facts, *top.evidence)), *found.causes[1:]),
        process=process,
        tid=tid,
        n_cases=n_spans,
        ruled_out=found.shares.ruled_out(),
        fix=stall.fix,
    )


def _names(stall: _Stall, causes: tuple[Cause, ...]) -> str:
    """Who did it, those with a name first."""
    who = [c.name.removeprefix(_PREEMPTED) for c in causes if stall.matches(c.name)]
    return " and ".join(sorted(who, key=lambda name: name.endswith(" other tasks")))


def _disk_facts(evidence: Evidence, rows: EventRows, kind: OpKind) -> list[str]:
    requests, off = rows.of(kind), rows.of(OpKind.OFF_CPU).intervals
    one = kind.name.lower()
    is_waited = off.covered_ns(requests.starts, requests.ends) >= requests.durations / 2
    n_bytes = int(evidence.column("arg0", requests).sum()) * _SECTOR_BYTES
    inside = f"{int(is_waited.sum())} of {len(requests)} {one}s by this thread lie inside its off-CPU spans"
    return [
        f"{inside} ({len(off)} spans), {format_size(n_bytes)} in all",
        f"a {one} takes {format_duration(float(np.median(requests.durations)))} (median)",
    ]


def _response_facts(process: Process, tid: int, spans: Intervals) -> list[str]:
    """Dose and response: the same operation with and without the stall."""
    calls = process.calls.by(tid)
    facts = []
    for code in np.unique(calls.codes).tolist():
        same = calls.where(calls.codes == code)
        is_hit = spans.covered_ns(same.starts, same.ends) > 0
        response = Contrast.of(same.durations, is_hit, _MIN_SPANS)
        if response is not None and response.hit_ns > 2 * response.free_ns:
            facts.append(f"{same.op}: {response.format()} (medians)")
    return facts


RULES: Final = tuple(_finder(stall) for stall in _STALLS)
