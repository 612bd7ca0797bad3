"""A process that answers requests token by token: prefill and decode steps against their baselines, and its cache.

A step runs from the first call after a wait to the end of the next one. A process serves when most steps bring a few
bytes back (the token), and a minority is longer and of another shape (the prompt).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.model.arrays import BoolArray, IntArray
from ingero.model.events import CopyKind
from ingero.model.incidents import RuledOut
from ingero.model.operations import BLOCKING_COPIES, CALLS, OpKind, find_codes
from ingero.recording.causal.attribution import NO_REASON, ON_CPU, SLEEPING, attribute, find_waits
from ingero.recording.causal.evidence import EventRows, Evidence, Process, remembered
from ingero.recording.causal.finding import Finding, Needs, name_cause, process_rule
from ingero.recording.causal.rules.first_use import one_time_calls
from ingero.units import NS_PER_MS, format_duration, format_size

_BLOCKING: Final = list(BLOCKING_COPIES)
_TOKEN_BYTES: Final = 64 * 1024
_BLOCK_BYTES: Final = 1 << 20
_MIN_STEPS: Final = 100
_MIN_TOKEN_SHARE: Final = 0.60
_MAX_PREFILL_SHARE: Final = 0.40
_PREFILL_RATIO: Final = 2.0
_MIN_CLASS: Final = 20
_OUTLIER_RATIO: Final = 3.0
_MIN_EXTRA_NS: Final = NS_PER_MS
_MIN_OUTLIERS: Final = 5
_MIN_LOST_NS: Final = 20 * NS_PER_MS
_MIN_SWAPS: Final = 10
_SAME_BYTES: Final = 2.0
_ENGINES: Final = ("vllm", "sglang", "tgi", "text-generation", "triton", "llama-server", "ollama")
"""Names, in lower case, that processes of inference engines have."""


def is_serving(evidence: Evidence, process: Process) -> bool:
    """Whether a process is an inference engine, by its name or by its steps."""
    is_named = any(name in process.name.lower() for name in _ENGINES)
    return is_named or find_serving(evidence, process) is not None


@remembered
def may_be_serving(evidence: Evidence, process: Process) -> bool:
    """Whether a process may be an inference engine: by its name, or because it brings a few bytes back again and again.

    Unlike `find_serving` it needs no row for every call; where copies have none, one of their rows is enough.
    """
    if is_serving(evidence, process):
        return True
    copies = process.calls.of(OpKind.COPY)
    n_bytes = evidence.column("arg0", copies)
    is_back = evidence.column("arg1", copies) == CopyKind.DEVICE_TO_HOST
    n_tokens = int((is_back & (n_bytes > 0) & (n_bytes <= _TOKEN_BYTES)).sum())
    gap = evidence.gap(process, find_codes((OpKind.COPY,)))
    if gap.unstored:
        return n_tokens > 0 and gap.seen >= _MIN_STEPS
    return n_tokens >= max(_MIN_STEPS, _MIN_TOKEN_SHARE * len(process.calls.of(OpKind.SYNC)))


NEEDS: Final = Needs(CALLS, applies=may_be_serving)
"""A row of every call: a step whose end has none would count as one long step with the next."""


@dataclass(frozen=True, slots=True)
class Serving:
    """Steps of the thread that serves, in time order; all arrays have the same shape.

    Attributes:
        tid: The thread.
        starts: First call of each step.
        ends: End of the wait that closes it.
        is_decode: The majority shape; the others are prefill.
        is_once: Steps with first uses, which are no measure.
    """

    tid: int
    starts: IntArray
    ends: IntArray
    is_decode: BoolArray
    is_once: BoolArray


@remembered
def find_serving(evidence: Evidence, process: Process) -> Serving | None:
    """The steps of a process that serves; None when it does not, or when calls have no row."""
    if evidence.gap(process, NEEDS.codes).unstored:
        return None  # a step whose end has no row would count as one long step with the next
    tid = process.busiest_tid
    calls = process.calls.by(tid)
    is_wait = (calls.kinds == OpKind.SYNC) | np.isin(calls.codes, _BLOCKING)
    closes = np.flatnonzero(is_wait)
    if len(closes) < _MIN_STEPS:
        return None
    opens = np.concatenate(([0], closes[:-1] + 1))
    starts, ends = calls.starts[opens], calls.ends[closes]
    step_of = np.searchsorted(closes, np.arange(len(calls)))
    inside = step_of < len(closes)

    def total(values: IntArray) -> IntArray:
        sums: IntArray = np.bincount(step_of[inside], values[inside], len(closes)).astype(np.int64)
        return sums

    is_launch = np.isin(calls.kinds, (OpKind.LAUNCH, OpKind.GRAPH_LAUNCH))
    n_launches = total(is_launch.astype(np.int64))
    back = total(_bytes(evidence, calls, CopyKind.DEVICE_TO_HOST))
    is_token = (back > 0) & (back <= _TOKEN_BYTES) & (n_launches > 0)
    if is_token.sum() < _MIN_TOKEN_SHARE * len(closes):
        return None
    shapes = np.stack([
        np.round(np.log2(n_launches + 1)).astype(np.int64),
        np.round(np.log2(total(_bytes(evidence, calls, CopyKind.HOST_TO_DEVICE)) + 1)).astype(
            np.int64
        ),
    ])
    is_decode = _majority(shapes)
    if not _is_two_phased(ends - starts, is_decode):
        return None
    once = np.isin(calls.idx, one_time_calls(evidence, process).idx)
    return Serving(tid, starts, ends, is_decode, total(once.astype(np.int64)) > 0)


def _bytes(evidence: Evidence, calls: EventRows, direction: CopyKind) -> IntArray:
    is_it = (calls.kinds == OpKind.COPY) & (evidence.column("arg1", calls) == direction)
    return np.where(is_it, evidence.column("arg0", calls), 0)


def _majority(shapes: IntArray) -> BoolArray:
    """Which steps have the most frequent shape; `shapes` has the shape (features, steps)."""
    _, which, counts = np.unique(shapes, axis=1, return_inverse=True, return_counts=True)
    is_it: BoolArray = which.reshape(-1) == counts.argmax()
    return is_it


def _is_two_phased(durations: IntArray, is_decode: BoolArray) -> bool:
    """Whether a minority of steps is of another shape and longer: prompts beside tokens."""
    n_prefill = int((~is_decode).sum())
    if not 0 < n_prefill <= _MAX_PREFILL_SHARE * len(durations):
        return False
    return bool(
        np.median(durations[~is_decode]) >= _PREFILL_RATIO * np.median(durations[is_decode])
    )


@process_rule("decode_outlier", "Decode steps take far longer than the process's own", NEEDS)
def decode_outlier(evidence: Evidence, process: Process) -> Finding | None:
    """Decode steps far over the process's own."""
    return _judge_outliers(evidence, process, is_decode=True)


@process_rule("prefill_outlier", "Prefill steps take far longer than the process's own", NEEDS)
def prefill_outlier(evidence: Evidence, process: Process) -> Finding | None:
    """Prefill steps far over the process's own."""
    return _judge_outliers(evidence, process, is_decode=False)


def _judge_outliers(evidence: Evidence, process: Process, *, is_decode: bool) -> Finding | None:
    serving = find_serving(evidence, process)
    if serving is None:
        return None
    is_class = (serving.is_decode == is_decode) & ~serving.is_once
    starts, ends = serving.starts[is_class], serving.ends[is_class]
    durations = ends - starts
    if len(durations) < _MIN_CLASS:
        return None
    typical = float(np.median(durations))
    is_out = durations > max(_OUTLIER_RATIO * typical, typical + _MIN_EXTRA_NS)
    lost_ns = round(float((durations[is_out] - typical).sum()))
    if is_out.sum() < _MIN_OUTLIERS or lost_ns < max(_MIN_LOST_NS, process.worth_ns):
        return None
    found = attribute(find_waits(evidence, process, serving.tid), starts[is_out], ends[is_out])
    phase = "decode" if is_decode else "prefill"
    slow = format_duration(float(np.median(durations[is_out])))
    facts = (
        (
            f"{int(is_out.sum())} of {len(durations)} {phase} steps, {slow} instead of {format_duration(typical)} "
            f"(medians)"
        ),
        f"p95 of the others: {format_duration(float(np.percentile(durations[~is_out], 95)))}",
    )
    return Finding(
        title=f"Slow {phase}: {int(is_out.sum())} steps of {process.name} take {slow} instead of "
        f"{format_duration(typical)}",
        span_ns=(int(starts[is_out][0]), int(ends[is_out][-1])),
        lost_ns=lost_ns,
        causes=found.causes(without=(ON_CPU, SLEEPING, NO_REASON), facts=facts),
        process=process,
        tid=serving.tid,
        n_cases=int(is_out.sum()),
        ruled_out=found.ruled_out(),
        fix=(
            "look at what else runs at these moments: the timeline (`ingero export --format perfetto`) shows it",
            "a step that is long for its phase carries more than usual: cap the tokens of a batch, chunk long prompts",
        ),
    )


@process_rule(
    "kv_cache_pressure", "Blocks are swapped out to the host and back while serving", NEEDS
)
def kv_cache_pressure(evidence: Evidence, process: Process) -> Finding | None:
    """Blocks copied out to the host and back while requests are served."""
    if find_serving(evidence, process) is None:
        return None
    copies = process.calls.of(OpKind.COPY)
    copies = copies.where(evidence.column("arg0", copies) >= _BLOCK_BYTES)
    directions = evidence.column("arg1", copies)
    out = copies.where(directions == CopyKind.DEVICE_TO_HOST)
    back = copies.where(directions == CopyKind.HOST_TO_DEVICE)
    back = back.where(back.starts >= (out.starts[0] if len(out) else 0))
    n_out, n_back = (int(evidence.column("arg0", rows).sum()) for rows in (out, back))
    is_pair = 0 < n_out <= _SAME_BYTES * n_back and n_back <= _SAME_BYTES * n_out
    lost_ns = out.intervals.union(back.intervals).total_ns
    if min(len(out), len(back)) < _MIN_SWAPS or not is_pair:
        return None
    if lost_ns < max(_MIN_LOST_NS, process.worth_ns):
        return None
    return Finding(
        title=(
            f"KV-cache pressure: {process.name} copies {format_size(n_out)} out to the host and "
            f"{format_size(n_back)} back "
            "between its steps"
        ),
        span_ns=(int(out.starts[0]), int(max(out.ends.max(), back.ends.max()))),
        lost_ns=lost_ns,
        causes=name_cause(
            "requests preempted: their cache is swapped out and back",
            1.0,
            f"{len(out)} copies out, {len(back)} back, {format_duration(lost_ns)} in them",
            "of 1 MiB and more each; tokens and prompts are smaller",
        ),
        process=process,
        n_cases=len(out),
        ruled_out=(RuledOut("input and output", 0.0, "as much goes out as comes back"),),
        fix=(
            "give the cache more memory (gpu_memory_utilization), or serve fewer requests at once (max_num_seqs)",
            "a shorter context limit or a quantised cache (fp8) holds more requests in the same memory",
        ),
    )
