"""Head-of-line blocking: connections that are in the middle of their tokens wait while one long prompt is processed.

A connection that is sent pieces again and again is a stream of tokens. A gap in it that a prompt's steps fill is a wait
behind that prompt, and not the connection's own: between two sends without a receive no new request came over it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.model.arrays import BoolArray, IntArray
from ingero.model.events import NetOp, Source
from ingero.model.incidents import RuledOut
from ingero.model.operations import CALLS, OpKind
from ingero.recording.causal.attribution import NAMED_SHARE
from ingero.recording.causal.evidence import Evidence, Process
from ingero.recording.causal.finding import Finding, Needs, name_cause, process_rule
from ingero.recording.causal.intervals import Intervals
from ingero.recording.causal.rules.inference import find_serving, may_be_serving
from ingero.units import NS_PER_MS, format_duration

_SEND: Final = int(Source.NET) << 8 | int(NetOp.SEND)
_MIN_GAPS: Final = 100
_MIN_HELD: Final = 10
_MIN_CONNECTIONS: Final = 2
_HELD_RATIO: Final = 4.0  # prompts that last as long as two tokens are what batching costs
_MIN_EXTRA_NS: Final = 5 * NS_PER_MS
_FILLED: Final = 0.50
_MIN_LOST_NS: Final = 20 * NS_PER_MS


@dataclass(frozen=True, slots=True)
class _Gaps:
    """Times between two sends over one connection with no receive between; all arrays have the same shape."""

    connections: IntArray
    starts: IntArray
    ends: IntArray

    @property
    def durations(self) -> IntArray:
        lengths: IntArray = self.ends - self.starts
        return lengths

    def where(self, mask: BoolArray) -> _Gaps:
        return _Gaps(self.connections[mask], self.starts[mask], self.ends[mask])


def _find_gaps(evidence: Evidence, process: Process) -> _Gaps:
    calls = process.rows.of(OpKind.NETWORK)
    moved = calls.where(evidence.column("arg1", calls) > 0)
    connections = evidence.column("arg0", moved)
    order = np.lexsort((moved.ends, connections))
    connections, ends = connections[order], moved.ends[order]
    is_send = moved.codes[order] == _SEND
    is_gap = (connections[1:] == connections[:-1]) & is_send[1:] & is_send[:-1]
    return _Gaps(connections[1:][is_gap], ends[:-1][is_gap], ends[1:][is_gap])


@process_rule(
    "head_of_line_blocking",
    "Tokens of running requests wait behind the prompt of another",
    Needs((*CALLS, OpKind.NETWORK), applies=may_be_serving),
)
def head_of_line_blocking(evidence: Evidence, process: Process) -> Finding | None:
    """At most one finding per process that serves."""
    gaps = _find_gaps(evidence, process)
    serving = find_serving(evidence, process) if len(gaps.starts) >= _MIN_GAPS else None
    if serving is None:
        return None
    is_prompt = ~serving.is_decode & ~serving.is_once
    prompts = Intervals.of(serving.starts[is_prompt], serving.ends[is_prompt])
    typical = float(np.median(gaps.durations))
    slow = gaps.where(gaps.durations > max(_HELD_RATIO * typical, typical + _MIN_EXTRA_NS))
    filled_ns = prompts.covered_ns(slow.starts, slow.ends)
    held = slow.where(filled_ns >= _FILLED * (slow.durations - typical))
    n_connections = len(np.unique(held.connections))
    if len(held.starts) < _MIN_HELD or n_connections < _MIN_CONNECTIONS:
        return None
    lost = Intervals.of(slow.starts, slow.ends)
    share = lost.within(prompts) / lost.total_ns
    if share < NAMED_SHARE or lost.total_ns < max(_MIN_LOST_NS, process.worth_ns):
        return None
    return _describe(process, held, (typical, share, lost.total_ns, n_connections), serving.tid)


def _describe(
    process: Process, held: _Gaps, found: tuple[float, float, int, int], tid: int
) -> Finding:
    typical, share, lost_ns, n_connections = found
    slow = format_duration(float(np.median(held.durations)))
    usual = format_duration(typical)
    return Finding(
        title=(
            f"Head-of-line blocking: {n_connections} connections of {process.name} wait {slow} instead of "
            f"{usual} for a token, "
            f"{len(held.starts)} times, behind a prompt"
        ),
        span_ns=(int(held.starts.min()), int(held.ends.max())),
        lost_ns=lost_ns,
        causes=name_cause(
            "prompts of other requests go first",
            share,
            f"{len(held.starts)} waits of {n_connections} connections, {slow} instead of {usual} (medians)",
            "each between two sends over one connection, with no request received over it and a prompt's steps inside",
            has_rest=True,
        ),
        process=process,
        tid=tid,
        n_cases=len(held.starts),
        ruled_out=(
            RuledOut("the connection's own next request", 0.0, "nothing was received between"),
        ),
        fix=(
            "chunk long prompts, so that tokens go between the chunks (enable_chunked_prefill, max_num_batched_tokens)",
            "serve prompts and tokens on different GPUs, or long prompts on their own instance",
        ),
    )
