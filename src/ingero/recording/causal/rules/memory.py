"""Device memory: what is refused, and what is given back and taken again in every step."""

from __future__ import annotations

from typing import Final

import numpy as np

from ingero.model.arrays import IntArray
from ingero.model.incidents import Severity
from ingero.model.operations import OpKind
from ingero.recording.causal.evidence import EventRows, Evidence, Process
from ingero.recording.causal.finding import Finding, Needs, name_cause, process_rule
from ingero.recording.causal.rules.first_use import one_time_calls
from ingero.units import NS_PER_MS, NS_PER_S, format_duration, format_size

_OUT_OF_MEMORY: Final = 2  # cudaErrorMemoryAllocation and CUDA_ERROR_OUT_OF_MEMORY (CUDA headers)
_MIN_HOLES: Final = 4
_MIN_PAIRS: Final = 100
_MIN_CHURN_HZ: Final = 20
_CHURN_SHARE: Final = 0.05
_MIN_CHURN_NS: Final = 20 * NS_PER_MS


@process_rule(
    "allocation_churn",
    "Device memory is allocated and freed in every step",
    Needs((OpKind.ALLOC, OpKind.FREE), max_missing=0.02),
)
def allocation_churn(evidence: Evidence, process: Process) -> Finding | None:
    """Allocating and freeing in every step: each free waits for the device."""
    memory = process.calls.of(OpKind.ALLOC, OpKind.FREE)
    memory = memory.where(~np.isin(memory.idx, one_time_calls(evidence, process).idx))
    n_alloc = int((memory.kinds == OpKind.ALLOC).sum())
    n_free = len(memory) - n_alloc
    active_ns = process.active_length_ns
    lost_ns = memory.intervals.total_ns
    is_often = min(n_alloc, n_free) >= max(_MIN_PAIRS, _MIN_CHURN_HZ * active_ns / NS_PER_S)
    if not is_often or lost_ns < max(_MIN_CHURN_NS, _CHURN_SHARE * active_ns):
        return None
    frees = memory.of(OpKind.FREE)
    return Finding(
        title=(
            f"Allocation churn: {process.name} allocates and frees device memory "
            f"{min(n_alloc, n_free) / (active_ns / NS_PER_S):.0f} times a second"
        ),
        span_ns=memory.span_ns,
        lost_ns=lost_ns,
        causes=name_cause(
            "allocation and free in every step",
            1.0,
            f"{n_alloc} allocations, {n_free} frees, {format_duration(lost_ns)} in them",
            f"a free takes {format_duration(float(np.median(frees.durations)))} (median): it waits for the device",
        ),
        process=process,
        tid=process.busiest_tid,
        n_cases=min(n_alloc, n_free),
        fix=(
            "reuse buffers, or use the caching or stream-ordered allocator (cudaMallocAsync)",
            "do not call torch.cuda.empty_cache() in the loop",
        ),
    )


@process_rule(
    "device_memory",
    "The device refuses an allocation: it is full, or full of holes",
    Needs((OpKind.ALLOC,), is_proof=True),
)
def device_memory(evidence: Evidence, process: Process) -> Finding | None:
    """Allocations that the device refused: full, or full of holes."""
    memory = process.calls.of(OpKind.ALLOC, OpKind.FREE)
    is_refused = (evidence.column("ret_code", memory) == _OUT_OF_MEMORY) & (
        memory.kinds == OpKind.ALLOC
    )
    refused = memory.where(is_refused)
    if not len(refused):
        return None
    wanted = int(evidence.column("arg0", refused)[0])
    holes, held = _holes(evidence, memory, int(refused.starts[0]))
    gap = evidence.gap(process, np.unique(memory.codes).tolist())
    is_exact = gap.is_known and not gap.unstored
    is_fragmented = (
        is_exact and len(holes) >= _MIN_HOLES and int(holes.sum()) >= wanted > int(holes.max())
    )
    facts = [f"{len(refused)} allocations failed, the first of {format_size(wanted)}"]
    if is_exact:
        facts.append(f"{format_size(held)} held by the process at that moment")
    if is_exact and len(holes):
        facts.append(
            f"it had freed {format_size(int(holes.sum()))} in {len(holes)} pieces of at most "
            f"{format_size(int(holes.max()))}, each between blocks it still held"
        )
    cause = (
        "free memory in pieces that are too small"
        if is_fragmented
        else "no free block of that size on the device"
    )
    title = "Fragmented device memory" if is_fragmented else "Device out of memory"
    fix = (
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or allocate the large blocks first",
        "free small long-lived blocks, or keep them in one pool",
    )
    if not is_fragmented:
        fix = (
            "lower the batch or sequence length",
            "look for a leak, and for other processes on the GPU",
        )
    return Finding(
        title=f"{title}: {process.name} was refused {format_size(wanted)}",
        span_ns=refused.span_ns,
        lost_ns=0,
        causes=name_cause(cause, 1.0, *facts),
        process=process,
        op=refused.op,
        n_cases=len(refused),
        fix=fix,
        severity=Severity.HIGH,
    )


def _holes(evidence: Evidence, memory: EventRows, at_ns: int) -> tuple[IntArray, int]:
    """Sizes of the freed stretches between blocks still held at a moment, and how much is held.

    Address order of the device's own pointers; neighbouring free blocks are one stretch.
    """
    known = memory.where((memory.starts < at_ns) & (evidence.column("ret_code", memory) == 0))
    is_alloc = known.kinds == OpKind.ALLOC
    pointers = np.where(is_alloc, evidence.column("arg1", known), evidence.column("arg0", known))
    sizes: dict[int, int] = {}
    is_held: dict[int, bool] = {}
    n_bytes = evidence.column("arg0", known)
    for pointer, alloc, size in zip(
        pointers.tolist(), is_alloc.tolist(), n_bytes.tolist(), strict=True
    ):
        if alloc and pointer:
            sizes[pointer] = size
        if pointer in sizes:
            is_held[pointer] = alloc
    stretches: list[int] = [0]
    for pointer in sorted(is_held):
        if is_held[pointer]:
            stretches.append(0)
        else:
            stretches[-1] += sizes[pointer]
    held = sum(size for pointer, size in sizes.items() if is_held[pointer])
    return np.array([size for size in stretches if size], np.int64), held
