"""Memory of the device, or pinned memory of the host, that grows to the end and is not given back.

Where every allocation and every free has a row, by pointer: what is held, and when it was taken. Where rows are
missing, by the bytes that the recorder counted in each minute, which need no rows. What was freed while nobody watched
is not known: of a process that was watched several times, the longest of them is judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.model.arrays import BoolArray, IntArray
from ingero.model.events import Source
from ingero.model.incidents import RuledOut, Severity
from ingero.model.operations import OpKind, find_codes
from ingero.recording.causal.evidence import EventRows, Evidence, Process
from ingero.recording.causal.finding import Finding, Needs, Unjudged, name_cause, process_rule
from ingero.recording.causal.gaps import describe_gap
from ingero.units import NS_PER_S, format_size

_MIN_UNFREED: Final = 10
_MIN_GROWTH_BYTES: Final = 16 * 1024 * 1024
_MIN_UNFREED_SHARE: Final = 0.20
_QUARTERS: Final = 4
_MIN_QUARTER_SHARE: Final = 0.10
_MIN_MINUTES: Final = 5
_MINUTE_NS: Final = 60 * NS_PER_S
_ALLOCATIONS: Final = (OpKind.ALLOC, OpKind.HOST_ALLOC)


@dataclass(frozen=True, slots=True)
class _Memory:
    """One kind of memory: what takes it, what gives it back, its name, and what to do where it leaks."""

    alloc: OpKind
    free: OpKind
    name: str
    fix: tuple[str, ...]

    @property
    def kinds(self) -> tuple[OpKind, OpKind]:
        return self.alloc, self.free


_DEVICE: Final = _Memory(
    OpKind.ALLOC,
    OpKind.FREE,
    "Device memory",
    (
        "keep no tensors across steps: lists of losses, hooks, caches, graphs kept by retain_graph",
        "compare torch.cuda.memory_allocated() between steps; take a memory snapshot",
    ),
)
_PINNED: Final = _Memory(
    OpKind.HOST_ALLOC,
    OpKind.HOST_FREE,
    "Pinned host memory",
    (
        "keep no pinned batches across steps: queues of pin_memory, copies that are never waited for",
        "reuse pinned buffers of one size; pinned memory cannot be swapped out, so the host runs full",
    ),
)


def pair_memory(evidence: Evidence, rows: EventRows) -> IntArray:
    """Position of the free of each allocation, and of the allocation of each free, by pointer; -1 for none."""
    is_alloc = np.isin(rows.kinds, _ALLOCATIONS)
    pointers = np.where(is_alloc, evidence.column("arg1", rows), evidence.column("arg0", rows))
    order = np.lexsort((rows.starts, pointers))
    partner = np.full(len(rows), -1, np.int64)
    first, second = order[:-1], order[1:]
    is_pair = (pointers[first] == pointers[second]) & (pointers[first] != 0)
    is_pair &= is_alloc[first] & ~is_alloc[second]
    partner[first[is_pair]] = second[is_pair]
    partner[second[is_pair]] = first[is_pair]
    return partner


def _match(evidence: Evidence, memory: EventRows) -> _Balance:
    """Allocations with the next free of their pointers."""
    chosen = np.isin(memory.kinds, _ALLOCATIONS) & (evidence.column("arg1", memory) != 0)
    return _Balance(
        memory.starts[chosen], evidence.column("arg0", memory)[chosen],
        pair_memory(evidence, memory)[chosen] >= 0, memory.idx[chosen],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Balance:
    """Allocations with known pointers, in time order, and which of them were freed."""

    starts_ns: IntArray
    n_bytes: IntArray
    is_freed: BoolArray
    idx: IntArray


@process_rule(
    "memory_leak",
    "Device memory grows through the whole run and is not freed",
    Needs(_DEVICE.kinds, max_missing=1.0, is_absence=True),
)
def memory_leak(evidence: Evidence, process: Process) -> Finding | Unjudged | None:
    """Memory that keeps growing, from an exact balance; no balance, no claim."""
    return _judge(evidence, process, _DEVICE)


@process_rule(
    "pinned_memory_leak",
    "Pinned host memory grows through the whole run and is not freed",
    Needs(_PINNED.kinds, max_missing=1.0, is_absence=True),
)
def pinned_memory_leak(evidence: Evidence, process: Process) -> Finding | Unjudged | None:
    """The same of pinned host memory, which says nothing of the device."""
    return _judge(evidence, process, _PINNED)


def _judge(evidence: Evidence, process: Process, memory: _Memory) -> Finding | Unjudged | None:
    rows = process.calls.of(*memory.kinds)
    gap = evidence.gap(process, find_codes(memory.kinds))
    if not gap.seen or not gap.is_known:
        return None
    if evidence.recording.asked_ns[1]:
        return Unjudged(
            process, "what was freed after the end of the asked window is not looked at"
        )
    if gap.unstored:
        return _judge_bytes(evidence, process, memory)
    return _judge_pointers(evidence, process, memory, rows) if len(rows) >= _MIN_UNFREED else None


def _longest_watch(process: Process) -> tuple[int, int]:
    """The longest part of the time of its GPU calls in which a process was watched all the time."""
    parts = process.unwatched.gaps(*process.active_ns)
    at = int((parts.ends - parts.starts).argmax()) if len(parts) else 0
    return (int(parts.starts[at]), int(parts.ends[at])) if len(parts) else process.active_ns


def _judge_pointers(
    evidence: Evidence, process: Process, memory: _Memory, rows: EventRows
) -> Finding | None:
    first, last = _longest_watch(process)
    rows = rows.where((rows.starts >= first) & (rows.starts <= last))
    balance = _match(evidence, rows)
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
            f"{memory.name} leak: {process.name} keeps {format_size(leaked)} in {int((~balance.is_freed).sum())} "
            f"allocations that it never frees, {format_size(per_s)}/s"
        ),
        span_ns=(first, last),
        lost_ns=0,
        causes=name_cause(
            "allocations without a free",
            leaked / max(int(balance.n_bytes.sum()), 1),
            f"{len(balance.n_bytes)} allocations, {int(balance.is_freed.sum())} freed, every call recorded",
            "kept per quarter of the run: " + ", ".join(map(format_size, growth.tolist())),
        ),
        process=process,
        n_cases=int((~balance.is_freed).sum()),
        ruled_out=(RuledOut("warm-up", 0.0, "the last quarter still grows"),),
        fix=memory.fix,
        severity=Severity.HIGH,
        stacks=evidence.stacks_of(rows.where(np.isin(rows.idx, balance.idx[~balance.is_freed]))),
    )


def _judge_bytes(
    evidence: Evidence, process: Process, memory: _Memory
) -> Finding | Unjudged | None:
    """Growth minute by minute, from counted bytes; the runtime's calls where there are any, else the driver's."""
    table = evidence.recording.aggregates
    span_ns = _longest_watch(process)
    table = table[(table["node"] == process.node) & (table["pid"] == process.pid)]
    is_in = table["bucket_ns"] > span_ns[0] - _MINUTE_NS
    table = table[is_in & (table["bucket_ns"] <= span_ns[1])]
    missing = describe_gap(evidence, process, find_codes(memory.kinds))
    codes = table["source"].astype(np.int64) << 8 | table["op"]
    is_alloc, is_free = (np.isin(codes, list(find_codes((kind,)))) for kind in memory.kinds)
    source = Source.CUDA if (is_alloc & (table["source"] == Source.CUDA)).any() else Source.DRIVER
    is_alloc, is_free = (mask & (table["source"] == source) for mask in (is_alloc, is_free))
    is_sized = not table["count"][is_free].sum() or table["sum_arg0"][is_free].sum()
    minutes = table["bucket_ns"] // _MINUTE_NS
    first = int(minutes.min()) if len(minutes) else 0
    n_minutes = int(minutes.max()) - first + 1 if len(minutes) else 0
    if not is_sized or n_minutes < _MIN_MINUTES:
        return Unjudged(process, missing)
    signed = np.where(is_alloc, 1, 0) - np.where(is_free, 1, 0)
    growth = np.zeros(n_minutes, np.int64)
    np.add.at(growth, minutes - first, signed * table["sum_arg0"])
    quarters = [int(part.sum()) for part in np.array_split(growth, _QUARTERS)]
    total = sum(quarters)
    is_steady = all(part >= _MIN_QUARTER_SHARE * total for part in quarters[1:])
    taken = int(table["sum_arg0"][is_alloc].sum())
    if total < max(_MIN_GROWTH_BYTES, _MIN_UNFREED_SHARE * taken) or not is_steady:
        return None
    return _describe_bytes(process, memory, quarters, (taken, n_minutes), span_ns)


def _describe_bytes(
    process: Process,
    memory: _Memory,
    quarters: list[int],
    totals: tuple[int, int],
    span_ns: tuple[int, int],
) -> Finding:
    taken, n_minutes = totals
    total = sum(quarters)
    per_s = total / (n_minutes * 60)
    return Finding(
        title=(
            f"{memory.name} grows: {process.name} took {format_size(total)} more than it gave back in "
            f"{n_minutes} minutes, "
            f"{format_size(per_s)}/s to the end"
        ),
        span_ns=span_ns,
        lost_ns=0,
        causes=name_cause(
            "more bytes allocated than freed",
            total / max(taken, 1),
            "kept per quarter of the run: " + ", ".join(map(format_size, quarters)),
            "counted in every call, also in those without a row",
        ),
        process=process,
        ruled_out=(RuledOut("warm-up", 0.0, "the last quarter still grows"),),
        fix=memory.fix,
        severity=Severity.HIGH,
    )
