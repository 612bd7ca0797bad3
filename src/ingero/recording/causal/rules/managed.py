"""Managed memory that does not fit on the device: every step brings pages in and throws others out.

The GPU's own page faults are not recorded by anybody here. What is: every managed allocation, the device's size (the
session's GPU model, "Tesla T4, 15360 MiB"), and that the GPU is waited for longer from the moment it overflows.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from ingero.model.arrays import IntArray
from ingero.model.events import CudaOp, DriverOp, Source
from ingero.model.operations import OpKind
from ingero.recording.causal.evidence import Evidence, Process
from ingero.recording.causal.finding import Contrast, Finding, Needs, name_cause, process_rule
from ingero.units import NS_PER_MS, format_size

_MODEL_MIB: Final = re.compile(r"(\d+) MiB")
_MIB: Final = 1 << 20
_MANAGED: Final = [
    int(Source.CUDA) << 8 | int(CudaOp.MALLOC_MANAGED),
    int(Source.DRIVER) << 8 | int(DriverOp.MEM_ALLOC_MANAGED),
]
_MIN_WAITS: Final = 5
_MIN_RESPONSE: Final = 2.0
_MIN_LOST_NS: Final = 20 * NS_PER_MS


def _device_bytes(evidence: Evidence, process: Process) -> int:
    """Size of the node's device; 0 when the recording does not say."""
    node = evidence.recording.nodes[process.node]
    for session in evidence.recording.sessions:
        size = _MODEL_MIB.search(session.gpu_model)
        if size and session.node in {node, ""}:
            return int(size[1]) * _MIB
    return 0


def _uses_managed(_evidence: Evidence, process: Process) -> bool:
    return bool(np.isin(process.calls.codes, _MANAGED).any())


@process_rule(
    "managed_memory",
    "Managed memory does not fit on the device and pages move in every step",
    Needs((OpKind.ALLOC, OpKind.FREE, OpKind.SYNC), applies=_uses_managed),
)
def managed_memory(evidence: Evidence, process: Process) -> Finding | None:
    """Managed memory beyond the device's size; nothing where that is not known."""
    device_bytes = _device_bytes(evidence, process)
    if not device_bytes:
        return None
    moments, held = _held(evidence, process)
    over = np.flatnonzero(held > device_bytes)
    if not len(over):
        return None
    from_ns = int(moments[over[0]])
    waits = process.calls.of(OpKind.SYNC)
    is_after = waits.starts >= from_ns
    response = Contrast.of(waits.durations, is_after, _MIN_WAITS)
    if response is None:
        return None
    lost_ns = round(response.extra_ns(waits.durations[is_after]))
    if response.hit_ns < _MIN_RESPONSE * response.free_ns or lost_ns < max(
        _MIN_LOST_NS, process.worth_ns
    ):
        return None
    return Finding(
        title=(
            f"Managed memory overflows the device: {process.name} holds {format_size(int(held.max()))} of it "
            f"on a device "
            f"of {format_size(device_bytes)}"
        ),
        span_ns=(from_ns, int(waits.ends.max())),
        lost_ns=lost_ns,
        causes=name_cause(
            "managed memory larger than the device: pages move in every step",
            lost_ns / max(response.extra_ns(waits.durations), 1),
            f"the GPU is waited for {response.format('since then', 'before')} (medians)",
            f"{len(moments)} managed allocations and frees, by pointer",
        ),
        process=process,
        tid=process.busiest_tid,
        op=waits.op,
        n_cases=response.n_hit,
        fix=(
            "make the working set fit: smaller batch, fewer tensors in managed memory",
            (
                "move what the next kernel needs ahead of it (cudaMemPrefetchAsync, cudaMemAdvise) and leave the "
                "rest on the host"
            ),
        ),
    )


def _held(evidence: Evidence, process: Process) -> tuple[IntArray, IntArray]:
    """Managed bytes held after each managed allocation and the free of each, with when."""
    made = process.calls.where(
        np.isin(process.calls.codes, _MANAGED) & (evidence.column("ret_code", process.calls) == 0)
    )
    pointers, n_bytes = evidence.column("arg1", made), evidence.column("arg0", made)
    frees = process.calls.of(OpKind.FREE)
    freed = evidence.column("arg0", frees)
    order = np.argsort(pointers, kind="stable")
    at = np.searchsorted(pointers[order], freed, side="right") - 1
    is_ours = (
        (at >= 0) & (pointers[order][np.maximum(at, 0)] == freed) & (freed != 0)
        if len(made)
        else np.zeros(len(freed), bool)
    )
    given_back = -n_bytes[order][at[is_ours]]
    moments = np.concatenate((made.ends, frees.starts[is_ours]))
    changes = np.concatenate((n_bytes, given_back))
    in_time = np.argsort(moments, kind="stable")
    return moments[in_time], np.cumsum(changes[in_time])
