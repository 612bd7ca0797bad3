"""Every rule, in a literal list. A rule costs a function, a line here, a firing recording and a healthy control."""

from __future__ import annotations

from typing import Final

from ingero.recording.causal.finding import Rule
from ingero.recording.causal.rules import (
    bound,
    collectives,
    compiling,
    contention,
    facts,
    first_use,
    graphs,
    hangs,
    inference,
    leaks,
    links,
    managed,
    memory,
    periodic,
    queueing,
    sharing,
    stalls,
    starvation,
    steps,
    unfinished,
)

RULES: Final[tuple[Rule, ...]] = (
    *facts.RULES,
    starvation.input_starvation,
    starvation.one_off_stall,
    *stalls.RULES,
    contention.cpu_contention,
    sharing.gpu_sharing,
    bound.copy_bound,
    bound.sync_bound,
    bound.launch_bound,
    compiling.repeated_compiling,
    first_use.lazy_load,
    memory.device_memory,
    memory.allocation_churn,
    leaks.memory_leak,
    leaks.pinned_memory_leak,
    managed.managed_memory,
    graphs.graph_contended,
    graphs.graph_failed,
    graphs.graph_recaptured,
    graphs.graph_unused,
    periodic.periodic_spike,
    inference.decode_outlier,
    inference.prefill_outlier,
    inference.kv_cache_pressure,
    queueing.head_of_line_blocking,
    collectives.late_rank,
    collectives.rank_skew,
    collectives.collective_disagreement,
    links.tcp_retransmits,
    links.slow_link,
    hangs.collective_hang,
    unfinished.call_in_flight,
    steps.step_time_changed,
)
"""In the order in which they look. Adding one: source, a line here, two recordings, a line in the guide."""
