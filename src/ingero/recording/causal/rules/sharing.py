"""Several processes on one GPU: one waits longer exactly while the other runs.

A device's number is the process's own (`ingero.model.gpu_view`): two that are not known to mean the same one are not
said to share it.
Ranks of one NCCL communicator are never said to share one: NCCL refuses two ranks of a host on one device (init.cc,
``Duplicate GPU detected``), and each waits while the other runs whatever device it has.
"""

from __future__ import annotations

from itertools import permutations, product
from typing import Final

import numpy as np

from ingero.model.events import Source
from ingero.model.gpu_view import find_same
from ingero.model.operations import OpKind
from ingero.recording.causal.evidence import EventRows, Evidence, Process, remembered
from ingero.recording.causal.finding import Contrast, Finding, Needs, name_cause, rule
from ingero.units import NS_PER_MS, format_duration

_MIN_CASES: Final = 10
_MIN_RATIO: Final = 1.5
_MIN_LOST_NS: Final = 20 * NS_PER_MS
_WORKS: Final = (OpKind.SYNC, OpKind.GRAPH_LAUNCH, OpKind.COLLECTIVE)
"""While a process is in one of these the GPU works for it; the others only hand work over, and are sampled."""


def _gpus(evidence: Evidence, process: Process) -> set[int]:
    """Devices of a process."""
    return set(np.unique(evidence.column("gpu_id", process.calls)).tolist())


@remembered
def _communicators(evidence: Evidence, process: Process) -> set[int]:
    """NCCL's communicators of a process, by id hash; those made before the probes have none."""
    is_nccl = process.calls.codes >> 8 == Source.NCCL
    return set(np.unique(evidence.column("arg1", process.calls.where(is_nccl))).tolist()) - {0}


def _shared_gpus(evidence: Evidence, one: Process, other: Process) -> set[tuple[int, int]]:
    """Devices that two processes of a node share, by the number that each has for it."""
    if one is other or one.node != other.node:
        return set()
    if _communicators(evidence, one) & _communicators(evidence, other):
        return set()
    views = evidence.recording.gpu_views
    return find_same(
        views.get((one.node, one.pid)),
        views.get((other.node, other.pid)),
        product(_gpus(evidence, one), _gpus(evidence, other)),
    )


def _has_company(evidence: Evidence, process: Process) -> bool:
    """Whether another process of the node may use one of its devices."""
    return evidence.recording.has_gpu_ids and any(
        _shared_gpus(evidence, process, other) for other in evidence.gpu_processes
    )


@rule(
    "gpu_sharing",
    "A second process on the same GPU makes the first one wait",
    Needs(_WORKS, max_missing=0.02, applies=_has_company),
)
def gpu_sharing(evidence: Evidence) -> list[Finding]:
    """The victim that loses most, once per GPU; nothing without real device numbers."""
    if not evidence.recording.has_gpu_ids:
        return []
    found: dict[tuple[int, str], Finding] = {}
    for victim, other in permutations(evidence.gpu_processes, 2):
        for gpu, theirs in _shared_gpus(evidence, victim, other):
            finding = _judge(evidence, victim, other, (gpu, theirs))
            key = (victim.node, _describe_device(evidence, victim, gpu))
            best = found.get(key)
            if finding is not None and (best is None or finding.lost_ns > best.lost_ns):
                found[key] = finding
    return [found[key] for key in sorted(found)]


def _describe_device(evidence: Evidence, process: Process, gpu: int) -> str:
    """A text of a device that is the same for all processes that share it."""
    view = evidence.recording.gpu_views.get((process.node, process.pid))
    return str(gpu if view is None else view.find(gpu))


def _on(evidence: Evidence, rows: EventRows, gpu: int) -> EventRows:
    return rows.where(evidence.column("gpu_id", rows) == gpu)


def _judge(
    evidence: Evidence, victim: Process, other: Process, numbers: tuple[int, int]
) -> Finding | None:
    gpu, theirs = numbers
    syncs = _on(evidence, victim.calls.of(OpKind.SYNC), gpu)
    busy = _on(evidence, other.calls.of(*_WORKS), theirs).intervals
    # At the moment the wait begins: a long wait overlaps more of anything, which would prove nothing.
    is_shared = busy.covered_ns(syncs.starts, syncs.starts + 1) > 0
    response = Contrast.of(syncs.durations, is_shared, _MIN_CASES)
    if response is None:
        return None
    lost_ns = round(response.extra_ns(syncs.durations[is_shared]))
    late_ns = round(response.extra_ns(syncs.durations))
    if response.hit_ns < _MIN_RATIO * response.free_ns or lost_ns < _MIN_LOST_NS:
        return None
    return Finding(
        title=(
            f"GPU {gpu} is shared: {victim.name} waits {format_duration(response.hit_ns)} instead of "
            f"{format_duration(response.free_ns)} while {other.name} (pid {other.pid}) runs"
        ),
        span_ns=syncs.span_ns,
        lost_ns=lost_ns,
        causes=name_cause(
            f"time slices taken by {other.name} (pid {other.pid})",
            lost_ns / max(late_ns, 1),
            f"{response.n_hit} waits while it runs, {response.n_free} without it",
            f"its {len(other.calls)} calls on the same GPU overlap {lost_ns / max(late_ns, 1):.0%} of the extra wait",
        ),
        process=victim,
        others=(other,),
        tid=victim.busiest_tid,
        op=syncs.op,
        n_cases=response.n_hit,
        fix=(
            "give each process its own GPU, or a MIG slice",
            "run them under MPS if they must share, with CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        ),
    )
