"""Device memory held by each process over time, from its allocations and frees."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
import numpy as np

from ingero.model.arrays import BoolArray, IntArray
from ingero.model.operations import OpKind, find_codes
from ingero.model.untrusted import clean
from ingero.recording.causal.evidence import EventRows, Evidence, Process
from ingero.recording.causal.rules.leaks import pair_memory

_MAX_POINTS: Final = 300
_CODES: Final = find_codes((OpKind.ALLOC, OpKind.FREE))


class HeldSize(msgspec.Struct, frozen=True):
    """Allocations of one size that were still held at the end."""

    bytes: int
    count: int


class ProcessMemory(msgspec.Struct, frozen=True):
    """One process: what it held, counted from the start of the part; of rows, for no other count knows the pointers."""

    node: str
    process: str
    pid: int
    is_exact: Annotated[bool, msgspec.Meta(description="every allocation and free has a row")]
    row_share: Annotated[
        float | None,
        msgspec.Meta(
            description="part of the allocations and frees that has a row: every number here is of those; null: nobody "
            "counted the others"
        ),
    ]
    allocations: int
    frees: int
    frees_unmatched: Annotated[
        int,
        msgspec.Meta(description="frees of what was allocated before the part, or not recorded"),
    ]
    failed: int
    allocated_bytes: int
    held_bytes: Annotated[int, msgspec.Meta(description="at the end")]
    peak_bytes: int
    held: list[HeldSize]
    series: Annotated[
        list[tuple[float, int]],
        msgspec.Meta(description="seconds from the first event, most bytes held around then"),
    ]


class MemoryAnswer(msgspec.Struct, frozen=True):
    """Every process that allocates device memory, most held first."""

    processes: list[ProcessMemory]


def balance_memory(evidence: Evidence) -> MemoryAnswer:
    """Add up every process's allocations and frees."""
    found = []
    for process in evidence.gpu_processes:
        memory = process.calls.of(OpKind.ALLOC, OpKind.FREE)
        if len(memory) or evidence.counts.gap(process.node, process.pid, _CODES).seen:
            found.append(_balance(evidence, process, memory))
    return MemoryAnswer(sorted(found, key=lambda one: (-one.held_bytes, one.node, one.pid)))


def _balance(evidence: Evidence, process: Process, memory: EventRows) -> ProcessMemory:
    failed = evidence.column("ret_code", memory) != 0
    gap = evidence.counts.gap(process.node, process.pid, _CODES)
    is_known = evidence.counts.has_counts and gap.is_known
    done = memory.where(~failed)
    is_alloc = done.kinds == OpKind.ALLOC
    sizes = np.where(is_alloc, evidence.column("arg0", done), 0)
    partner = pair_memory(evidence, done)
    has_partner = partner >= 0
    changes = np.where(has_partner & ~is_alloc, -sizes[partner], sizes)
    at = np.argsort(done.ends, kind="stable")
    held = np.cumsum(changes[at])
    is_kept = is_alloc & ~has_partner
    kept, counts = np.unique(sizes[is_kept], return_counts=True)
    largest = np.argsort(-(kept * counts), kind="stable")[:5].tolist()
    return ProcessMemory(
        node=clean(evidence.recording.nodes[process.node]),
        process=clean(process.name),
        pid=process.pid,
        is_exact=is_known and gap.unstored == 0,
        row_share=round(gap.stored / max(gap.seen, 1), 4) if is_known else None,
        allocations=int(is_alloc.sum()),
        frees=int((~is_alloc).sum()),
        frees_unmatched=int((~is_alloc & ~has_partner & _has_pointer(evidence, done)).sum()),
        failed=int(failed.sum()),
        allocated_bytes=int(sizes.sum()),
        held_bytes=int(held[-1]) if len(held) else 0,
        peak_bytes=max(int(held.max()), 0) if len(held) else 0,
        held=[HeldSize(int(kept[i]), int(counts[i])) for i in largest],
        series=_thin(done.ends[at], held, evidence.recording.window_ns),
    )


def _has_pointer(evidence: Evidence, rows: EventRows) -> BoolArray:
    """Which rows name a pointer: freeing none is allowed and does nothing."""
    is_alloc = rows.kinds == OpKind.ALLOC
    return np.where(is_alloc, True, evidence.column("arg0", rows) != 0)  # noqa: FBT003 -- numpy's own


def _thin(at_ns: IntArray, held: IntArray, window_ns: tuple[int, int]) -> list[tuple[float, int]]:
    """The course in at most so many points: the peak of each equal part of the time, and the last."""
    if not len(at_ns):
        return []
    first, last = window_ns
    part = (at_ns - first) * _MAX_POINTS // max(last - first + 1, 1)
    edges = np.flatnonzero(np.diff(part, prepend=-1))
    peaks = np.maximum.reduceat(held, edges)
    where = [
        int(edge + held[edge:end].argmax())
        for edge, end in zip(edges, [*edges[1:], len(held)], strict=True)
    ]
    points = [
        ((int(at_ns[i]) - first) / 1e9, int(peak)) for i, peak in zip(where, peaks, strict=True)
    ]
    points.append(((int(at_ns[-1]) - first) / 1e9, int(held[-1])))
    return points
