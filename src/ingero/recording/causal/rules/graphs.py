"""CUDA graphs that cost and do not pay: captured again and again or in a crowd, never launched, or failed."""

from __future__ import annotations

from typing import Final

import numpy as np

from ingero.model.events import GraphOp, Source
from ingero.model.incidents import Severity
from ingero.model.operations import OpKind
from ingero.recording.causal.attribution import (
    NAMED_SHARE,
    NO_REASON,
    ON_CPU,
    SLEEPING,
    attribute,
    find_waits,
)
from ingero.recording.causal.evidence import EventRows, Evidence, Process
from ingero.recording.causal.finding import Finding, Needs, name_cause, process_rule
from ingero.recording.causal.intervals import NO_TIME, Intervals
from ingero.units import NS_PER_MS, NS_PER_S, format_duration

_STOLEN: Final = ("preempted by ", "waiting for a free CPU", "out of CPU quota")
_UNUSED_NS: Final = 30 * NS_PER_S
_MIN_CAPTURES: Final = 10
_MIN_REPLAYS: Final = 2
_MIN_LOST_NS: Final = 20 * NS_PER_MS
_MIN_LOST_SHARE: Final = 0.05
_GRAPHS: Final = (OpKind.GRAPH, OpKind.GRAPH_LAUNCH)


def _of(process: Process, op: GraphOp) -> EventRows:
    return process.calls.where(process.calls.codes == (int(Source.CUDA_GRAPH) << 8 | int(op)))


def _captures_graphs(_evidence: Evidence, process: Process) -> bool:
    return bool(len(_of(process, GraphOp.BEGIN_CAPTURE)))


@process_rule(
    "graph_unused", "A graph is instantiated and never launched", Needs(_GRAPHS, is_absence=True)
)
def graph_unused(evidence: Evidence, process: Process) -> Finding | None:
    """Instantiated, watched for at least half a minute after that, and never launched."""
    made = _of(process, GraphOp.INSTANTIATE)
    handles = evidence.column("arg0", made)
    launched = evidence.column("arg0", process.calls.of(OpKind.GRAPH_LAUNCH))
    last = process.active_ns[1]
    last_watched, made_watched = process.to_watched(np.array([last])), process.to_watched(made.ends)
    is_unused = (handles != 0) & ~np.isin(handles, launched)
    is_unused &= made_watched <= last_watched - _UNUSED_NS
    unused = made.where(is_unused)
    if not len(unused):
        return None
    return Finding(
        title=f"{len(unused)} CUDA graph{'s' * (len(unused) > 1)} of {process.name} instantiated and never launched",
        span_ns=(int(unused.starts[0]), last),
        lost_ns=unused.intervals.total_ns,
        causes=name_cause(
            "graphs nobody launches",
            1.0,
            f"{len(made)} instantiated, {len(made) - len(unused)} launched",
        ),
        process=process,
        op=unused.op,
        n_cases=len(unused),
        fix=(
            "capture only the shapes that are used",
            "destroy graphs that are not: they hold device memory",
        ),
        severity=Severity.LOW,
    )


@process_rule(
    "graph_recaptured",
    "A graph is captured as often as it is launched",
    Needs(_GRAPHS, max_missing=0.02),
)
def graph_recaptured(_evidence: Evidence, process: Process) -> Finding | None:
    """Captured about as often as launched: the graph is rebuilt instead of replayed."""
    captures = _of(process, GraphOp.END_CAPTURE)
    launches = process.calls.of(OpKind.GRAPH_LAUNCH)
    building = process.calls.of(OpKind.GRAPH)
    begins = _of(process, GraphOp.BEGIN_CAPTURE)
    n_pairs = min(len(begins), len(captures))
    capture_ns = int((captures.ends[:n_pairs] - begins.starts[:n_pairs]).sum()) if n_pairs else 0
    lost_ns = max(capture_ns, building.intervals.total_ns)
    is_often = len(captures) >= _MIN_CAPTURES and len(launches) < _MIN_REPLAYS * len(captures)
    if not is_often or lost_ns < max(_MIN_LOST_NS, _MIN_LOST_SHARE * process.active_length_ns):
        return None
    return Finding(
        title=f"CUDA graph captured {len(captures)} times for {len(launches)} launches: {process.name} rebuilds it",
        span_ns=building.span_ns,
        lost_ns=lost_ns,
        causes=name_cause(
            "recapture instead of replay",
            1.0,
            f"{format_duration(lost_ns)} in capture and instantiation",
        ),
        process=process,
        op=captures.op,
        n_cases=len(captures),
        fix=(
            "pad to a few fixed shapes and capture one graph for each",
            "update the executable graph (cudaGraphExecUpdate) instead of instantiating again",
        ),
    )


@process_rule(
    "graph_failed", "Graph capture ends with an error", Needs((OpKind.GRAPH,), is_proof=True)
)
def graph_failed(evidence: Evidence, process: Process) -> Finding | None:
    """Captures that ended with an error."""
    captures = _of(process, GraphOp.END_CAPTURE)
    codes = evidence.column("ret_code", captures)
    failed = captures.where(codes != 0)
    if not len(failed):
        return None
    numbers = ", ".join(str(code) for code in sorted(set(codes[codes != 0].tolist())))
    return Finding(
        title=f"CUDA graph capture failed {len(failed)} times in {process.name} (error {numbers})",
        span_ns=failed.span_ns,
        lost_ns=failed.intervals.total_ns,
        causes=name_cause(
            f"capture ended with error {numbers}",
            1.0,
            f"{len(failed)} of {len(captures)} captures",
        ),
        process=process,
        op=failed.op,
        n_cases=len(failed),
        fix=(
            "warm up before capturing (three runs on a side stream), so that libraries allocate outside of it",
            "keep synchronisation, allocation and host copies out of the captured region",
        ),
        severity=Severity.MEDIUM,
    )


@process_rule(
    "graph_contended",
    "Graph capture loses its CPU",
    Needs((OpKind.OFF_CPU,), is_time=True, applies=_captures_graphs),
)
def graph_contended(evidence: Evidence, process: Process) -> Finding | None:
    """Captures during which the capturing thread is kept from running."""
    tid, spans = _captures(process)
    if not len(spans):
        return None
    found = attribute(find_waits(evidence, process, tid), spans.starts, spans.ends)
    stolen = [(name, share) for name, share in found.shares if name.startswith(_STOLEN)]
    stolen_ns = round(sum(share for _, share in stolen) * found.total_ns)
    if stolen_ns < _MIN_LOST_NS or stolen_ns < NAMED_SHARE * found.total_ns:
        return None
    fact = (
        f"{len(spans)} captures take {format_duration(found.total_ns)}, of which the thread was kept from running for "
        f"{format_duration(stolen_ns)}"
    )
    causes = found.causes(without=(ON_CPU, SLEEPING, NO_REASON), facts=(fact,))
    if not causes[0].name.startswith(_STOLEN):
        return None
    return Finding(
        title=(
            f"CUDA graph capture of {process.name} loses its CPU: {format_duration(stolen_ns)} of "
            f"{format_duration(found.total_ns)} in capture"
        ),
        span_ns=(int(spans.starts[0]), int(spans.ends[-1])),
        lost_ns=found.total_ns,
        causes=causes,
        process=process,
        tid=tid,
        op=_of(process, GraphOp.BEGIN_CAPTURE).op,
        n_cases=len(spans),
        ruled_out=found.ruled_out(),
        fix=(
            "capture before serving starts, and all shapes at once",
            "give the capturing thread its own CPU (taskset, cpuset) while it captures",
        ),
    )


def _captures(process: Process) -> tuple[int, Intervals]:
    """The thread that captures most, and its stretches from begin to end of a capture."""
    begins, ends = _of(process, GraphOp.BEGIN_CAPTURE), _of(process, GraphOp.END_CAPTURE)
    if not len(begins) or not len(ends):
        return 0, NO_TIME
    tids, counts = np.unique(begins.tids, return_counts=True)
    tid = int(tids[counts.argmax()])
    starts, finishes = begins.starts[begins.tids == tid], np.sort(ends.ends[ends.tids == tid])
    at = np.searchsorted(finishes, starts)
    is_ended = at < len(finishes)
    return tid, Intervals.of(starts[is_ended], finishes[at[is_ended]])
