"""Off the CPU inside calls that do not wait: all that a recording without reasons can prove.

Recordings of the older schema say when a thread was off its CPU, not why. Inside a wait that is normal. Inside a launch
it is not, so it is named for what it is, without a culprit.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ingero.model.events import OffCpuReason
from ingero.model.incidents import RuledOut
from ingero.model.operations import OpKind, find_codes
from ingero.recording.causal.attribution import NAMED_SHARE
from ingero.recording.causal.evidence import Evidence, Process
from ingero.recording.causal.finding import Contrast, Finding, Needs, name_cause, process_rule
from ingero.recording.causal.rules.first_use import one_time_calls
from ingero.recording.causal.slow import find_slow
from ingero.units import NS_PER_MS, format_duration

_LAUNCHES: Final = (OpKind.LAUNCH, OpKind.GRAPH_LAUNCH)
_MIN_CASES: Final = 10
_MIN_STOLEN_NS: Final = 10 * NS_PER_MS
_MIN_RESPONSE: Final = 2.0


def _has_no_reasons(evidence: Evidence, process: Process) -> bool:
    """Whether thread switches of it may have been recorded without a reason."""
    off = process.rows.of(OpKind.OFF_CPU)
    if not len(process.calls.of(*_LAUNCHES)):
        return False
    if evidence.gap(process, find_codes((OpKind.OFF_CPU,))).unstored:
        return True  # a switch without a row may have none
    return bool((evidence.column("reason", off) == OffCpuReason.UNKNOWN).any())


@process_rule(
    "cpu_contention",
    "Launches lose their CPU, in a recording that does not say to whom",
    Needs((*_LAUNCHES, OpKind.OFF_CPU), max_missing=0.20, applies=_has_no_reasons),
)
def cpu_contention(evidence: Evidence, process: Process) -> Finding | None:
    """At most one finding per process."""
    tid = process.busiest_tid
    off = process.thread(tid).of(OpKind.OFF_CPU)
    off = off.where(evidence.column("reason", off) == OffCpuReason.UNKNOWN)
    if len(off) < _MIN_CASES:
        return None
    spans = off.intervals
    once = one_time_calls(evidence, process)
    launches = process.calls.by(tid).of(*_LAUNCHES)
    launches = launches.where(~np.isin(launches.idx, once.idx))
    slow = launches.where(np.isin(launches.idx, find_slow(evidence, process).idx))
    covered = spans.covered_ns(slow.starts, slow.ends)
    lost_ns, stolen_ns, n_hit = (
        int(slow.durations.sum()),
        int(covered.sum()),
        int((covered > 0).sum()),
    )
    least_ns = max(_MIN_STOLEN_NS, NAMED_SHARE * lost_ns, process.worth_ns)
    if n_hit < _MIN_CASES or stolen_ns < least_ns:
        return None
    is_hit = spans.covered_ns(launches.starts, launches.ends) > 0
    response = Contrast.of(launches.durations, is_hit, n_least=0)
    if response is None or response.hit_ns < _MIN_RESPONSE * response.free_ns:
        return None
    return Finding(
        title=f"CPU contention: {process.name} loses its CPU inside {n_hit} launches, "
        f"{format_duration(stolen_ns)} in all",
        span_ns=slow.span_ns,
        lost_ns=lost_ns,
        causes=name_cause(
            "off the CPU inside launches, reason not recorded",
            stolen_ns / lost_ns,
            f"{n_hit} of {len(slow)} slow launches overlap an off-CPU span of their thread",
            f"a launch takes {response.format()} (medians)",
            has_rest=True,
        ),
        process=process,
        tid=tid,
        op=slow.op,
        n_cases=n_hit,
        ruled_out=(RuledOut("first use", 0.0, "first launches of a kernel are left out"),),
        fix=(
            "record again with this version: it says who took the CPU",
            "keep other work off the training threads' CPUs (taskset, cpuset)",
        ),
    )
