"""What an undisturbed process spends its time on: copying, waiting in tiny steps, launching tiny kernels."""

from __future__ import annotations

from typing import Final

import numpy as np

from ingero.model.events import CopyKind, HostMemory
from ingero.model.incidents import Cause, RuledOut
from ingero.model.operations import OpKind
from ingero.recording.causal.attribution import NAMED_SHARE
from ingero.recording.causal.evidence import EventRows, Evidence, Process
from ingero.recording.causal.finding import Finding, Needs, name_cause, process_rule
from ingero.units import NS_PER_MS, NS_PER_S, NS_PER_US, format_duration, format_size

_MIN_LOST_NS: Final = 50 * NS_PER_MS
_COPY_SHARE: Final = 0.30
_MIN_COPIES: Final = 10
_MIN_RATE: Final = 0.2e9  # bytes/s: a slower "copy" waits for the GPU inside, and is no transfer
_PINNED_RATE: Final = 8e9  # bytes/s: pinned memory over PCIe 3.0 x16 is faster, pageable is not
_DIRECTION: Final = {
    CopyKind.HOST_TO_HOST: "host-to-host",
    CopyKind.HOST_TO_DEVICE: "host-to-device",
    CopyKind.DEVICE_TO_HOST: "device-to-host",
    CopyKind.DEVICE_TO_DEVICE: "device-to-device",
}
_MIN_SYNCS: Final = 200
_MIN_WAITED_NS: Final = 20 * NS_PER_MS
_SYNC_RATE_HZ: Final = 300
_SYNC_SHARE: Final = 0.30
_LAUNCHES_PER_SYNC: Final = 3
_MIN_LAUNCHES: Final = 1000
_LAUNCH_SHARE: Final = 0.40
_IDLE_SYNC_SHARE: Final = 0.05
_SHORT_LAUNCH_NS: Final = 100 * NS_PER_US


@process_rule(
    "copy_bound", "Copies take a third of the time or more", Needs((OpKind.COPY,), is_time=True)
)
def copy_bound(evidence: Evidence, process: Process) -> Finding | None:
    """Copies that take a third of the time, by direction and kind of memory."""
    copies = process.calls.of(OpKind.COPY)
    n_bytes = evidence.column("arg0", copies)
    is_transfer = n_bytes >= _MIN_RATE * copies.durations / NS_PER_S
    copies, n_bytes = copies.where(is_transfer), n_bytes[is_transfer]
    lost_ns = copies.intervals.total_ns
    share = lost_ns / process.active_length_ns
    if len(copies) < _MIN_COPIES or lost_ns < _MIN_LOST_NS or share < _COPY_SHARE:
        return None
    rate = n_bytes.sum() / max(copies.durations.sum(), 1)
    return Finding(
        title=(
            f"Copy-bound: {share:.0%} of the time of {process.name} is spent in {len(copies)} copies of "
            f"{format_size(int(n_bytes.sum()))} at {rate:.1f} GB/s"
        ),
        span_ns=copies.span_ns,
        lost_ns=lost_ns,
        causes=_by_direction(evidence, copies),
        process=process,
        tid=process.busiest_tid,
        op=copies.op,
        n_cases=len(copies),
        ruled_out=(
            RuledOut("waiting for the GPU inside the copies", 0.0, f"they move {rate:.1f} GB/s"),
        ),
        fix=(
            "use pinned memory and non_blocking copies, so that they overlap with kernels",
            "keep data on the device between steps; copy smaller types",
            "copy in fewer, larger pieces and prefetch the next batch on its own stream",
        ),
    )


def _by_direction(evidence: Evidence, copies: EventRows) -> tuple[Cause, ...]:
    directions = evidence.column("arg1", copies)
    memory = evidence.column("arg3", copies)
    n_bytes = evidence.column("arg0", copies)
    total = max(int(copies.durations.sum()), 1)
    found = []
    for direction in np.unique(directions).tolist():
        is_mine = directions == direction
        spent, moved = int(copies.durations[is_mine].sum()), int(n_bytes[is_mine].sum())
        rate = moved / max(spent, 1)
        name = f"{_DIRECTION.get(direction, 'undirected')} copies"
        kinds = set(memory[is_mine].tolist())
        over_bus = direction in {CopyKind.HOST_TO_DEVICE, CopyKind.DEVICE_TO_HOST}
        if kinds == {HostMemory.PAGEABLE}:
            name += " from pageable memory"
        elif kinds == {HostMemory.UNKNOWN} and over_bus and rate * 1e9 < _PINNED_RATE:
            name += " at the speed of pageable memory"
        facts = (
            f"{int(is_mine.sum())} copies, {format_size(moved)} in {format_duration(spent)}: {rate:.1f} GB/s",
        )
        found.append(Cause(name, round(spent / total, 4), facts))
    named = [cause for cause in found if cause.share >= NAMED_SHARE]
    return tuple(sorted(named, key=lambda cause: (-cause.share, cause.name)))


def _count_launches(evidence: Evidence, process: Process, *kinds: OpKind) -> tuple[int, int, float]:
    """(launches, ns in them, median ns) of a process, of every call that was counted.

    A launch that a runtime call makes inside the driver is counted once, with its parent.
    """
    rows = process.calls.of(*kinds)
    codes = np.unique(rows.codes).tolist()
    calls, total_ns = evidence.counts.total(process.node, process.pid, codes)
    nested = process.rows.where(np.isin(process.rows.codes, codes))
    if calls <= len(nested):  # every call has a row: the outermost ones are known one by one
        return (
            len(rows),
            rows.intervals.total_ns,
            float(np.median(rows.durations)) if codes else 0.0,
        )
    statistics = evidence.statistics
    medians = [
        one.quantiles[0]
        for code in codes
        if (one := statistics.get((process.node, process.pid, code)))
    ]
    share = len(rows) / max(len(nested), 1)
    return round(calls * share), round(total_ns * share), max(medians, default=0.0)


@process_rule(
    "sync_bound",
    "The GPU is waited for after every few launches",
    Needs((OpKind.SYNC,), max_missing=0.02),
)
def sync_bound(evidence: Evidence, process: Process) -> Finding | None:
    """A synchronisation after every few launches, so that the GPU drains each time."""
    syncs = process.calls.of(OpKind.SYNC)
    n_launches, _, _ = _count_launches(evidence, process, OpKind.LAUNCH, OpKind.GRAPH_LAUNCH)
    active_ns = process.active_length_ns
    lost_ns = syncs.intervals.total_ns
    rate_hz = len(syncs) / (active_ns / NS_PER_S)
    is_often = len(syncs) >= _MIN_SYNCS and rate_hz >= _SYNC_RATE_HZ
    per_sync = n_launches / max(len(syncs), 1)
    is_tight = 0 < per_sync <= _LAUNCHES_PER_SYNC and lost_ns >= _SYNC_SHARE * active_ns
    if not is_often or not is_tight or lost_ns < _MIN_WAITED_NS:
        return None
    median = format_duration(float(np.median(syncs.durations)))
    return Finding(
        title=(
            f"Sync-bound: {process.name} waits for the GPU {rate_hz:.0f} times a second, after every "
            f"{max(per_sync, 1):.1f} launches"
        ),
        span_ns=syncs.span_ns,
        lost_ns=lost_ns,
        causes=name_cause(
            "too many synchronisations",
            lost_ns / active_ns,
            f"{len(syncs)} × {syncs.op}, {median} each (median)",
            f"{n_launches} launches between them",
        ),
        process=process,
        tid=process.busiest_tid,
        op=syncs.op,
        n_cases=len(syncs),
        fix=(
            "remove .item(), .cpu(), print and assert on tensors from the loop, or do them every N steps",
            "synchronise on the event you need instead of the device",
        ),
    )


@process_rule(
    "launch_bound",
    "Launching takes longer than the kernels",
    Needs((OpKind.SYNC,), max_missing=0.02),
)
def launch_bound(evidence: Evidence, process: Process) -> Finding | None:
    """The host launches as fast as it can and the GPU is always done before it is asked."""
    calls = process.busiest_calls
    launches, syncs = calls.of(OpKind.LAUNCH), calls.of(OpKind.SYNC)
    n_launches, lost_ns, typical = _count_launches(evidence, process, OpKind.LAUNCH)
    active_ns = process.active_length_ns
    is_asked = len(syncs) >= _MIN_COPIES and n_launches >= max(10 * len(syncs), _MIN_LAUNCHES)
    if not is_asked or syncs.intervals.total_ns > _IDLE_SYNC_SHARE * active_ns:
        return None
    if lost_ns < max(_LAUNCH_SHARE * active_ns, _MIN_LOST_NS) or typical > _SHORT_LAUNCH_NS:
        return None
    median = format_duration(typical)
    waited = format_duration(float(np.median(syncs.durations)))
    return Finding(
        title=(
            f"Launch-bound: {process.name} spends {lost_ns / active_ns:.0%} of its time launching "
            f"{n_launches} kernels, and the GPU is done before it is asked"
        ),
        span_ns=launches.span_ns,
        lost_ns=lost_ns,
        causes=name_cause(
            "kernels shorter than their launch",
            lost_ns / active_ns,
            f"{median} a launch (median)",
            f"a synchronisation returns after {waited} (median)",
        ),
        process=process,
        tid=process.busiest_tid,
        op=launches.op,
        n_cases=n_launches,
        fix=(
            "capture the step as a CUDA graph (torch.cuda.graphs, mode='reduce-overhead')",
            "fuse small kernels (torch.compile), or give each more work: a larger batch",
        ),
    )
