"""Things the kernel, the driver or the orchestrator said outright: no inference is needed, only the name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.model.events import GpuOp, HostOp, Source
from ingero.model.incidents import Severity
from ingero.model.operations import OpKind
from ingero.recording.causal.evidence import EventRows, Evidence, split_by
from ingero.recording.causal.finding import Contrast, Finding, Rule, name_cause
from ingero.recording.causal.intervals import Intervals
from ingero.units import NS_PER_MS, format_duration

_MIN_THROTTLED_SHARE: Final = 0.05
_MIN_THROTTLED_NS: Final = 100 * NS_PER_MS


@dataclass(frozen=True, slots=True)
class _Fact:
    """One kind of statement."""

    rule: str
    description: str
    source: Source
    op: int
    title: str
    cause: str
    fix: tuple[str, ...]

    @property
    def code(self) -> int:
        return int(self.source) << 8 | self.op


_FACTS: Final = (
    _Fact(
        "oom_kill",
        "The kernel killed a process for lack of memory",
        Source.HOST,
        HostOp.OOM_KILL,
        "Out of memory: the kernel killed {victim}",
        "host memory ran out",
        (
            "give the job more memory, or use less: fewer workers, smaller prefetch",
            "look for a host-side leak",
        ),
    ),
    _Fact(
        "pod_oom_kill",
        "A container went over its memory limit",
        Source.HOST,
        HostOp.POD_OOM_KILL,
        "Out of memory: a container was killed at its limit",
        "the container's memory limit was reached",
        ("raise the container's memory limit, or use less",),
    ),
    _Fact(
        "pod_restart",
        "A pod restarted",
        Source.HOST,
        HostOp.POD_RESTART,
        "A pod of this node restarted",
        "the container restarted",
        ("kubectl describe pod and kubectl logs --previous say why",),
    ),
    _Fact(
        "pod_eviction",
        "A pod was evicted",
        Source.HOST,
        HostOp.POD_EVICTION,
        "A pod was evicted from this node",
        "node pressure",
        ("look at node pressure, requests and limits, and the pod's PriorityClass",),
    ),
    _Fact(
        "gpu_xid",
        "The driver reported a GPU error (Xid)",
        Source.GPU,
        GpuOp.XID,
        "GPU error: the driver reported Xid {value}",
        "Xid {value}",
        ("look Xid {value} up in NVIDIA's table; drain the node if it is a hardware one",),
    ),
    _Fact(
        "gpu_ecc",
        "Uncorrected memory errors on the GPU",
        Source.GPU,
        GpuOp.ECC_UNCORRECTED,
        "GPU memory: {value} uncorrected ECC errors",
        "uncorrected ECC errors",
        ("drain the node, reset the GPU, run its diagnostics; replace it if the errors return",),
    ),
)


def _finder(fact: _Fact) -> Rule:
    def find(evidence: Evidence) -> list[Finding]:
        rows = evidence.rows.where(evidence.rows.codes == fact.code)
        keys = [evidence.column("node", rows), _subject(evidence, fact, rows)]
        return [_describe(evidence, fact, same) for same in split_by(rows, keys)]

    return Rule(fact.rule, fact.description, find)


def _subject(
    evidence: Evidence, fact: _Fact, rows: EventRows
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """What tells two facts of a kind apart: the victim, the code, the pod's process."""
    if fact.source == Source.GPU:
        return evidence.column("arg0", rows) * (1 if fact.op == GpuOp.XID else 0)
    if fact.op == HostOp.OOM_KILL:
        victims = evidence.column("arg1", rows)
        return np.where(victims != 0, victims, evidence.column("pid", rows))
    return evidence.column("pid", rows)


def _describe(evidence: Evidence, fact: _Fact, rows: EventRows) -> Finding:
    node = int(evidence.column("node", rows)[0])
    who = int(_subject(evidence, fact, rows)[0])
    values = evidence.column("arg0", rows)
    value = int(values[0] if fact.op == GpuOp.XID else values.sum())
    words = {"victim": evidence.process_name(node, who), "value": value}
    pid = f" (pid {who})" if fact.op == HostOp.OOM_KILL and fact.source == Source.HOST else ""
    return Finding(
        title=fact.title.format(**words) + pid,
        span_ns=rows.span_ns,
        lost_ns=0,
        causes=name_cause(fact.cause.format(**words), 1.0, f"reported {len(rows)} times"),
        node=node,
        op=rows.op,
        n_cases=len(rows),
        fix=tuple(step.format(**words) for step in fact.fix),
        severity=Severity.HIGH,
    )


_THROTTLES: Final = {
    GpuOp.THROTTLE_POWER: (
        "power",
        "raise the power limit (nvidia-smi -pl) or look at the node's power supply",
    ),
    GpuOp.THROTTLE_THERMAL: (
        "heat",
        "look at the node's cooling: fans, airflow, inlet temperature",
    ),
    GpuOp.THROTTLE_HARDWARE: (
        "hardware slowdown",
        "drain the node and have its power and cooling looked at",
    ),
}


def find_throttling(evidence: Evidence) -> list[Finding]:
    """Clocks held down for a noticeable part of the recording."""
    rows = evidence.rows.of(OpKind.FACT)
    rows = rows.where(
        (rows.codes >> 8 == Source.GPU) & np.isin(rows.codes & 0xFF, list(_THROTTLES))
    )
    keys = [evidence.column("node", rows), evidence.column("gpu_id", rows), rows.codes]
    return [f for same in split_by(rows, keys) if (f := _judge_throttle(evidence, same))]


def _judge_throttle(evidence: Evidence, rows: EventRows) -> Finding | None:
    node, gpu = int(evidence.column("node", rows)[0]), int(evidence.column("gpu_id", rows)[0])
    on_node = evidence.rows.where(evidence.recording.events["node"] == node)
    first, last = int(on_node.starts[0]), int(on_node.ends.max())
    held = rows.intervals
    if held.total_ns < max(_MIN_THROTTLED_SHARE * (last - first), _MIN_THROTTLED_NS):
        return None
    why, fix = _THROTTLES[GpuOp(int(rows.codes[0]) & 0xFF)]
    part = held.total_ns / max(last - first, 1)
    return Finding(
        title=f"GPU {gpu} throttled by {why} for {part:.0%} of the time",
        span_ns=rows.span_ns,
        lost_ns=held.total_ns,
        causes=name_cause(f"clocks held down by {why}", 1.0, *_response(evidence, node, held)),
        node=node,
        op=rows.op,
        n_cases=len(rows),
        fix=(fix, "compare clocks with the other nodes: nvidia-smi -q -d CLOCK,PERFORMANCE"),
        severity=Severity.HIGH if part >= 0.20 else Severity.MEDIUM,
    )


def _response(evidence: Evidence, node: int, held: Intervals) -> tuple[str, ...]:
    """How much longer the GPU is waited for while its clocks are held down."""
    facts = [f"{format_duration(held.total_ns)} in all"]
    for process in evidence.gpu_processes:
        syncs = process.calls.of(OpKind.SYNC)
        is_held = held.covered_ns(syncs.starts, syncs.ends) > 0
        response = Contrast.of(syncs.durations, is_held, n_least=3)
        if process.node == node and response is not None:
            facts.append(f"{process.name} waits {response.format('for the GPU then')}")
    return tuple(facts)


RULES: Final = (
    *(_finder(fact) for fact in _FACTS),
    Rule("gpu_throttling", "Power, heat or hardware holds the GPU's clocks down", find_throttling),
)
