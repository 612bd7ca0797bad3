"""One-time costs: the first use of a kernel loads its module, the first calls of a process make its context.

Not contention, and not repeated: the same kernel is fast from its second launch on. Compiling belongs to it where
programs of a compiler were seen to run; what recurs in a running job is another rule's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.model.arrays import BoolArray
from ingero.model.incidents import Cause, RuledOut, Severity
from ingero.model.operations import OpKind, find_codes
from ingero.recording.causal.evidence import EventRows, Evidence, Process, remembered, split_by
from ingero.recording.causal.finding import Finding, Needs, Unjudged, process_rule
from ingero.recording.causal.gaps import describe_gap
from ingero.recording.causal.rules.compiling import (
    KEEP_COMPILED,
    describe_tools,
    find_once,
    find_repeated,
)
from ingero.units import NS_PER_MS, format_duration

_SLOW_RATIO: Final = 20.0
_MIN_LOST_NS: Final = 10 * NS_PER_MS
_MIN_EXPLAINED: Final = 0.60
_MIN_LATER: Final = 5
_MAX_PREFIX_SHARE: Final = 0.2
_MAX_MISSING: Final = 0.20
_BEGINNING: Final = (OpKind.ALLOC, OpKind.HOST_ALLOC, OpKind.COPY, OpKind.GRAPH_LAUNCH)
"""Kinds of which only the first calls of a process may be slow once."""
_FIX: Final = (
    "warm up before measuring or serving: run each shape once",
    "load modules at start instead of at first use: CUDA_MODULE_LOADING=EAGER",
    "keep the process alive between jobs, so the cost is paid once",
)


def first_use_mask(evidence: Evidence, launches: EventRows) -> BoolArray:
    """Which launches are the first of their function in their process."""
    functions = evidence.column("arg0", launches)
    _, first = np.unique(functions, return_index=True)
    is_first = np.zeros(len(launches), bool)
    is_first[first] = True
    known: BoolArray = is_first & (functions != 0)
    return known


def _is_thinned(evidence: Evidence, process: Process) -> bool:
    """Whether so many launches have no row that an earlier one of a function may be among them."""
    gap = evidence.gap(process, find_codes((OpKind.LAUNCH,)))
    return gap.share > _MAX_MISSING


def _has_slow_launches(process: Process) -> bool:
    launches = process.calls.of(OpKind.LAUNCH)
    return bool(launches.durations.sum() >= _MIN_LOST_NS)


def one_time_calls(evidence: Evidence, process: Process) -> EventRows:
    """Calls of a process that were slow once: first uses and a slow beginning. Other rules leave them out."""
    parts = [calls for calls, _ in _find_parts(evidence, process)]
    idx = (
        np.unique(np.concatenate([part.idx for part in parts])) if parts else np.empty(0, np.int64)
    )
    return process.calls.where(np.isin(process.calls.idx, idx))


@remembered
def _find_parts(evidence: Evidence, process: Process) -> list[tuple[EventRows, float]]:
    """Slow one-time calls with what the same call costs later, ns."""
    parts: list[tuple[EventRows, float]] = []
    for calls in split_by(process.calls, [process.calls.codes]):
        if calls.kinds[0] == OpKind.LAUNCH:
            found = _first_launches(evidence, calls, is_thinned=_is_thinned(evidence, process))
        elif calls.kinds[0] in _BEGINNING:
            found = _slow_beginning(calls)
        elif calls.kinds[0] == OpKind.MODULE:
            found = (calls.where(~find_repeated(evidence, process).contain(calls)), 0.0)
        else:
            continue
        if len(found[0]):
            parts.append(found)
    return parts


def _first_launches(
    evidence: Evidence, launches: EventRows, *, is_thinned: bool
) -> tuple[EventRows, float]:
    """Slow first launches, when being first explains most of the slow time.

    Where launches have no row, only the run of rows from the beginning in which every row stands for itself proves that
    nothing was launched before.
    """
    is_first = first_use_mask(evidence, launches)
    if is_thinned:
        is_first &= np.cumsum(np.maximum(evidence.column("weight", launches), 1) > 1) == 0
    durations = launches.durations
    later = durations[~is_first]
    typical = float(np.median(later)) if len(later) >= _MIN_LATER else float(np.median(durations))
    is_slow = durations > _SLOW_RATIO * max(typical, 1.0)
    slow_ns = durations[is_slow].sum()
    explained_ns = durations[is_slow & is_first].sum()
    if not slow_ns or explained_ns < _MIN_EXPLAINED * slow_ns:
        return launches.where(np.zeros(len(launches), bool)), typical
    return launches.where(is_slow & is_first), typical


def _slow_beginning(calls: EventRows) -> tuple[EventRows, float]:
    """The run of slow calls that an operation starts with, when all that follow are fast."""
    durations = calls.durations
    n_most = max(int(len(calls) * _MAX_PREFIX_SHARE), 0)
    typical = float(np.median(durations[n_most:])) if len(calls) > n_most else 0.0
    is_slow = durations > _SLOW_RATIO * max(typical, 1.0)
    n_prefix = int(np.argmin(is_slow)) if not is_slow.all() else 0
    is_once = (
        len(calls) - n_prefix >= _MIN_LATER and n_prefix <= n_most and not is_slow[n_prefix:].any()
    )
    return calls.where(np.arange(len(calls)) < (n_prefix if is_once else 0)), typical


def _name(rows: EventRows) -> str:
    if rows.kinds[0] == OpKind.LAUNCH:
        return "lazy module loading at first launch"
    if rows.kinds[0] == OpKind.MODULE:
        return "module loading"
    return f"first use: set-up inside the first {rows.op}"


def _facts(rows: EventRows, typical: float) -> tuple[str, ...]:
    slowest = int(rows.durations.max())
    ratio = (
        f", {slowest / typical:.0f} times a later one ({format_duration(typical)})"
        if typical
        else ""
    )
    return (f"{len(rows)} × {rows.op}, slowest {format_duration(slowest)}{ratio}",)


@dataclass(frozen=True, slots=True)
class _OneTime:
    """A cost that was paid once: calls of one operation, or compiling."""

    name: str
    lost_ns: int
    span_ns: tuple[int, int]
    n_cases: int
    facts: tuple[str, ...]


def _describe_part(rows: EventRows, typical: float) -> _OneTime:
    lost_ns = round(float((rows.durations - typical).sum()))
    return _OneTime(_name(rows), lost_ns, rows.span_ns, len(rows), _facts(rows, typical))


def _compiling(evidence: Evidence, process: Process) -> list[_OneTime]:
    """Pauses in which a compiler was seen to run, less the loads in them, which are parts of their own."""
    pauses = find_once(evidence, process)
    loads = process.calls.of(OpKind.MODULE)
    loads = loads.where(pauses.contain(loads))
    lost_ns = int(pauses.lost_ns.sum()) - int(loads.durations.sum())
    if lost_ns <= 0:
        return []
    n = len(pauses)
    what = "1 pause" if n == 1 else f"{n} pauses"
    span_ns = int(pauses.spans.starts[0]), int(pauses.spans.ends[-1])
    return [
        _OneTime(
            "compiling",
            lost_ns,
            span_ns,
            n,
            (f"{what} without a launch, until code was loaded", describe_tools(pauses)),
        )
    ]


def _title(
    process: Process, compiling: list[_OneTime], parts: list[tuple[EventRows, float]], lost_ns: int
) -> str:
    n_calls = sum(len(rows) for rows, _ in parts)
    calls = f"{n_calls} first call{'s' * (n_calls > 1)}"
    worst = max((int(rows.durations.max()) for rows, _ in parts), default=0)
    slowest = f"slowest {format_duration(worst)}"
    if not compiling:
        return (
            f"Cold start: {calls} of {process.name} took {format_duration(lost_ns)} once ({slowest}): "
            "lazy loading, not contention"
        )
    compiled = f"{process.name} compiled for {format_duration(compiling[0].lost_ns)} before its code could be loaded"
    rest = (
        f", and {calls} took {format_duration(lost_ns - compiling[0].lost_ns)} ({slowest})"
        if parts
        else ""
    )
    return f"Cold start: {compiled}{rest}, once"


@process_rule(
    "lazy_load",
    "First use of a kernel, or of the device, pays for loading once",
    Needs(
        (OpKind.LAUNCH, OpKind.MODULE, *_BEGINNING),
        max_missing=1.0,
    ),
)
def lazy_load(evidence: Evidence, process: Process) -> Finding | Unjudged | None:
    """One-time costs of a process; undecided where an earlier launch of a slow function may have no row."""
    parts = _find_parts(evidence, process)
    compiling = _compiling(evidence, process)
    found = [*compiling, *(_describe_part(*part) for part in parts)]
    lost_ns = sum(part.lost_ns for part in found)
    if lost_ns < _MIN_LOST_NS:
        is_open = _is_thinned(evidence, process) and _has_slow_launches(process)
        missing = describe_gap(evidence, process, find_codes((OpKind.LAUNCH,))) if is_open else ""
        return Unjudged(process, missing) if is_open else None
    causes = tuple(
        Cause(part.name, round(part.lost_ns / lost_ns, 4), part.facts)
        for part in sorted(found, key=lambda part: -part.lost_ns)
    )
    return Finding(
        title=_title(process, compiling, parts, lost_ns),
        span_ns=(min(p.span_ns[0] for p in found), max(p.span_ns[1] for p in found)),
        lost_ns=lost_ns,
        causes=causes,
        process=process,
        op=parts[0][0].op if len(found) == len(parts) == 1 else "",
        n_cases=sum(part.n_cases for part in found),
        ruled_out=(
            (RuledOut("contention", 0.0, "the same calls are fast from their second use on"),)
            if parts
            else ()
        ),
        fix=(*_FIX, KEEP_COMPILED) if compiling else _FIX,
        severity=Severity.LOW,
    )
