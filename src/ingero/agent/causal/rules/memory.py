"""Device memory: what is never given back, and what is given back and taken again in every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ingero.agent.causal.evidence import Evidence, Process, Rows
from ingero.agent.causal.finding import Finding, Rule
from ingero.agent.causal.kinds import Kind
from ingero.agent.causal.rules.first_use import one_time_calls
from ingero.model.incidents import Cause, RuledOut, Severity
from ingero.units import NS_PER_MS, NS_PER_S, format_duration, format_size

_MIN_UNFREED: Final = 10
_MIN_GROWTH_BYTES: Final = 16 * 1024 * 1024
_MIN_UNFREED_SHARE: Final = 0.20
_QUARTERS: Final = 4
_MIN_QUARTER_SHARE: Final = 0.10
_OUT_OF_MEMORY: Final = 2  # cudaErrorMemoryAllocation and CUDA_ERROR_OUT_OF_MEMORY (CUDA headers)
_MIN_HOLES: Final = 4
_MIN_PAIRS: Final = 100
_MIN_CHURN_HZ: Final = 20
_CHURN_SHARE: Final = 0.05
_MIN_CHURN_NS: Final = 20 * NS_PER_MS


@dataclass(frozen=True, slots=True)
class _Balance:
    """Allocations with known pointers, in time order, and which of them were freed."""

    starts_ns: npt.NDArray[np.int64]
    n_bytes: npt.NDArray[np.int64]
    is_freed: npt.NDArray[np.bool_]


def find_leaks(evidence: Evidence) -> list[Finding]:
    """Memory that keeps growing, from an exact balance by pointer; no balance, no claim."""
    return [f for process in evidence.gpu_processes if (f := _judge_leak(evidence, process))]


def _judge_leak(evidence: Evidence, process: Process) -> Finding | None:
    memory = process.calls.of(Kind.ALLOC, Kind.FREE)
    if len(memory) < _MIN_UNFREED or not _is_exact(evidence, process, memory):
        return None
    balance = _match(evidence, memory)
    first, last = process.active_ns
    edges = np.linspace(first, last, _QUARTERS + 1)[1:-1]
    quarter = np.searchsorted(edges, balance.starts_ns, side="right")
    kept = np.where(balance.is_freed, 0, balance.n_bytes)
    growth = np.array([int(kept[quarter == q].sum()) for q in range(_QUARTERS)])
    is_late = quarter >= _QUARTERS // 2
    n_unfreed = int((~balance.is_freed & is_late).sum())
    is_steady = bool((growth[1:] >= _MIN_QUARTER_SHARE * max(int(growth.sum()), 1)).all())
    is_large = n_unfreed >= _MIN_UNFREED and growth[_QUARTERS // 2 :].sum() >= _MIN_GROWTH_BYTES
    if not is_large or not is_steady or n_unfreed < _MIN_UNFREED_SHARE * max(int(is_late.sum()), 1):
        return None
    leaked = int(kept.sum())
    per_s = leaked / max((last - first) / NS_PER_S, 1e-9)
    return Finding(
        title=(
            f"Device memory leak: {process.name} keeps {format_size(leaked)} in {int((~balance.is_freed).sum())} "
            f"allocations that it never frees, {format_size(per_s)}/s"
        ),
        span_ns=(first, last),
        lost_ns=0,
        causes=(
            Cause(
                "allocations without a free",
                round(leaked / max(int(balance.n_bytes.sum()), 1), 4),
                (
                    f"{len(balance.n_bytes)} allocations, {int(balance.is_freed.sum())} freed, every call recorded",
                    "kept per quarter of the run: "
                    + ", ".join(format_size(int(g)) for g in growth),
                ),
            ),
        ),
        process=process,
        n_cases=int((~balance.is_freed).sum()),
        ruled_out=(RuledOut("warm-up", 0.0, "the last quarter still grows"),),
        fix=(
            "keep no tensors across steps: lists of losses, hooks, caches, graphs kept by retain_graph",
            "compare torch.cuda.memory_allocated() between steps; take a memory snapshot",
        ),
        severity=Severity.MEDIUM,
    )


def _is_exact(evidence: Evidence, process: Process, memory: Rows) -> bool:
    """Whether every allocation and free that happened has a row."""
    if not evidence.books.has_counts:
        return False
    ops = tuple({(int(code) >> 8, int(code) & 0xFF) for code in np.unique(memory.codes)})
    coverage = evidence.books.coverage(process.node, process.pid, process.window_ns, len(memory))
    count = evidence.books.count(process.node, process.pid, ops, process.window_ns)
    is_counted = coverage.state == "exact" or coverage.lost is None
    return count.unstored == 0 and is_counted


def _match(evidence: Evidence, memory: Rows) -> _Balance:
    """Pair each allocation with the next free of its pointer."""
    is_alloc = memory.kinds == Kind.ALLOC
    pointers = np.where(is_alloc, evidence.column("arg1", memory), evidence.column("arg0", memory))
    order = np.lexsort((memory.starts, pointers))
    is_freed = np.zeros(len(memory), bool)
    same = pointers[order][1:] == pointers[order][:-1]
    is_freed[order[:-1]] = same & is_alloc[order][:-1] & ~is_alloc[order][1:]
    chosen = is_alloc & (pointers != 0)
    return _Balance(
        memory.starts[chosen], evidence.column("arg0", memory)[chosen], is_freed[chosen]
    )


def find_churn(evidence: Evidence) -> list[Finding]:
    """Allocating and freeing in every step: each free waits for the device."""
    return [f for process in evidence.gpu_processes if (f := _judge_churn(evidence, process))]


def _judge_churn(evidence: Evidence, process: Process) -> Finding | None:
    memory = process.calls.of(Kind.ALLOC, Kind.FREE)
    memory = memory.where(~np.isin(memory.idx, one_time_calls(evidence, process).idx))
    n_alloc = int((memory.kinds == Kind.ALLOC).sum())
    n_free = len(memory) - n_alloc
    first, last = process.active_ns
    active_ns = max(last - first, 1)
    lost_ns = memory.intervals.total_ns
    is_often = min(n_alloc, n_free) >= max(_MIN_PAIRS, _MIN_CHURN_HZ * active_ns / NS_PER_S)
    if not is_often or lost_ns < max(_MIN_CHURN_NS, _CHURN_SHARE * active_ns):
        return None
    frees = memory.of(Kind.FREE)
    return Finding(
        title=(
            f"Allocation churn: {process.name} allocates and frees device memory "
            f"{min(n_alloc, n_free) / (active_ns / NS_PER_S):.0f} times a second"
        ),
        span_ns=(int(memory.starts[0]), int(memory.ends.max())),
        lost_ns=lost_ns,
        causes=(
            Cause(
                "allocation and free in every step",
                1.0,
                (
                    f"{n_alloc} allocations, {n_free} frees, {format_duration(lost_ns)} in them",
                    f"a free takes {format_duration(float(np.median(frees.durations)))} (median): it waits for the device",
                ),
            ),
        ),
        process=process,
        tid=process.busiest_tid,
        n_cases=min(n_alloc, n_free),
        fix=(
            "reuse buffers, or use the caching or stream-ordered allocator (cudaMallocAsync)",
            "do not call torch.cuda.empty_cache() in the loop",
        ),
    )


def find_failures(evidence: Evidence) -> list[Finding]:
    """Allocations that the device refused: full, or full of holes."""
    return [f for p in evidence.gpu_processes if (f := _judge_failure(evidence, p)) is not None]


def _judge_failure(evidence: Evidence, process: Process) -> Finding | None:
    memory = process.calls.of(Kind.ALLOC, Kind.FREE)
    is_refused = (evidence.column("ret_code", memory) == _OUT_OF_MEMORY) & (
        memory.kinds == Kind.ALLOC
    )
    refused = memory.where(is_refused)
    if not len(refused):
        return None
    wanted = int(evidence.column("arg0", refused)[0])
    holes, held = _holes(evidence, memory, int(refused.starts[0]))
    is_exact = _is_exact(evidence, process, memory)
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
        span_ns=(int(refused.starts[0]), int(refused.ends.max())),
        lost_ns=0,
        causes=(Cause(cause, 1.0, tuple(facts)),),
        process=process,
        op=refused.op,
        n_cases=len(refused),
        fix=fix,
        severity=Severity.HIGH,
    )


def _holes(evidence: Evidence, memory: Rows, at_ns: int) -> tuple[npt.NDArray[np.int64], int]:
    """Sizes of the freed stretches between blocks still held at a moment, and how much is held.

    Address order of the device's own pointers; neighbouring free blocks are one stretch.
    """
    known = memory.where((memory.starts < at_ns) & (evidence.column("ret_code", memory) == 0))
    is_alloc = known.kinds == Kind.ALLOC
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


RULES: Final = (
    Rule(
        "device_memory",
        "The device refuses an allocation: it is full, or full of holes",
        find_failures,
    ),
    Rule("memory_leak", "Device memory grows through the whole run and is not freed", find_leaks),
    Rule("allocation_churn", "Device memory is allocated and freed in every step", find_churn),
)
