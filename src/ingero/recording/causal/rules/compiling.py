"""Work stops while new code is made: nothing is launched until a module has been loaded.

A pause is the time between two launches, copies or collectives of a process. It ends with new code where code is loaded
in it, or before as much time has passed again. It is *proven* where programs that the process or its children started
began and ended in it (a compiler, an assembler, a linker) and ran for a part that is enough to be named. Compilers that
live inside the process start none: there the code has to be loaded in the pause, the thread that loads it, or another
one that it waits for, has to have computed for half of it, and it has to be twice as long as the median of those that
did not end with new code. That alone is also what a program looks like that reads its input and then uses a kernel for
the first time, so it counts only where it recurs in a running job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.model.arrays import BoolArray, FloatArray
from ingero.model.events import DriverOp, HostOp
from ingero.model.incidents import Cause
from ingero.model.operations import OpKind, code_of
from ingero.recording.causal.attribution import NAMED_SHARE, OWN_THREAD, WORKER, find_waits
from ingero.recording.causal.evidence import EventRows, Evidence, Process, remembered
from ingero.recording.causal.finding import Finding, Needs, Unjudged, process_rule
from ingero.recording.causal.gaps import describe_gap
from ingero.recording.causal.intervals import NO_TIME, Intervals, Times
from ingero.units import NS_PER_MS, NS_PER_S, format_duration

_WORK: Final = (
    OpKind.LAUNCH,
    OpKind.GRAPH_LAUNCH,
    OpKind.COPY,
    OpKind.FILL,
    OpKind.COLLECTIVE,
)
_MIN_PAUSE_NS: Final = 10 * NS_PER_MS
_START_NS: Final = 60 * NS_PER_S
_MIN_PAUSES: Final = 3
_MIN_EQUAL: Final = 2.5  # they lose as much as this many equal ones: one long pause recurs not
_STANDS_OUT: Final = 2.0  # times the median of pauses without new code
KEEP_COMPILED: Final = (
    "keep compiled code between runs: TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR, "
    "JAX_COMPILATION_CACHE_DIR"
)
_FIX: Final = (
    "find what changes from step to step: TORCH_LOGS=recompiles (PyTorch), JAX_LOG_COMPILES=1 (JAX)",
    "pad or bucket the sizes that change, or declare them dynamic: torch.compile(dynamic=True), mark_dynamic",
    "pass changing numbers to Triton as ordinary arguments instead of constexpr; run each shape once before the loop",
    KEEP_COMPILED,
)


@dataclass(frozen=True, slots=True)
class Pauses:
    """Pauses that end with new code, in time order. All arrays have one element for each.

    Attributes:
        spans: From the end of the work before to the next.
        lost_ns: Time in none of the process's calls but loads, in which the thread that loads was not kept by something
            else; less what calls without a row may fill.
        hidden_ns: What calls without a row may fill.
        tools_ns: Time in which programs ran that began and ended in the pause.
        is_proven: Whether that is enough for a cause.
    """

    spans: Intervals
    lost_ns: Times
    hidden_ns: Times
    tools_ns: Times
    is_proven: BoolArray

    def __len__(self) -> int:
        return len(self.spans)

    def where(self, mask: BoolArray) -> Pauses:
        """Those that a mask chooses."""
        return Pauses(
            Intervals(self.spans.starts[mask], self.spans.ends[mask]),
            self.lost_ns[mask],
            self.hidden_ns[mask],
            self.tools_ns[mask],
            self.is_proven[mask],
        )

    def contain(self, rows: EventRows) -> BoolArray:
        """Which rows begin in one of them."""
        i = np.searchsorted(self.spans.starts, rows.starts, side="right") - 1
        inside: BoolArray = (i >= 0) & (rows.starts <= np.append(self.spans.ends, 0)[i])
        return inside


_NONE: Final = np.empty(0, np.int64)
_NO_PAUSES: Final = Pauses(NO_TIME, _NONE, _NONE, _NONE, np.empty(0, bool))


@remembered
def _find_pauses(evidence: Evidence, process: Process) -> Pauses:
    """Every pause of a process that new code ended and that is long enough, proven or not."""
    calls = process.calls
    work, loads = calls.of(*_WORK), calls.of(OpKind.MODULE)
    if not len(work) or not len(loads):
        return _NO_PAUSES
    busy = Intervals.of(work.starts, np.maximum(work.ends, work.starts + 1))
    every = busy.gaps(int(calls.starts[0]), int(busy.ends[-1]))
    is_watched = process.unwatched.covered_ns(every.starts, every.ends) == 0
    every = Intervals(every.starts[is_watched], every.ends[is_watched])
    lengths = every.ends - every.starts
    n_within, n_soon = (
        np.searchsorted(loads.starts, ends) - np.searchsorted(loads.starts, every.starts)
        for ends in (every.ends, every.ends + lengths)
    )
    others = calls.where(calls.kinds != OpKind.MODULE).intervals
    lost = lengths - others.covered_ns(every.starts, every.ends)
    ran = _tools_within(evidence, process, every)
    tools = ran.covered_ns(every.starts, every.ends)
    is_proven = (tools > 0) & (tools >= NAMED_SHARE * lost) & (n_soon > 0)
    bare = lost[(n_soon == 0) & (lost >= _MIN_PAUSE_NS)]
    usual = float(np.median(bare)) if len(bare) >= _MIN_PAUSES else 0.0
    last = loads.tids[np.searchsorted(loads.starts, every.ends) - 1].astype(np.int64)
    away, asleep = _away_ns(evidence, process, (every, last), others.union(ran))
    is_likely = (n_within > 0) & (lost - away >= lost / 2) & (lost >= _STANDS_OUT * usual)
    is_long = lost >= _MIN_PAUSE_NS
    lost = np.where(is_proven, lost - asleep, np.maximum(lost - usual, 0)).astype(np.int64)
    is_pause = is_long & (is_proven | is_likely)
    hidden = _hidden_ns(evidence, process, every, int(lost[is_pause].sum()))
    hidden = np.minimum(hidden, lost)
    return Pauses(every, lost - hidden, hidden, tools, is_proven).where(is_pause)


def _away_ns(
    evidence: Evidence, process: Process, pauses: tuple[Intervals, Times], taken: Intervals
) -> tuple[Times, Times]:
    """Time of each pause, outside of what is taken, in which the loading thread was off its CPU for another reason.

    The wait for another thread of its process counts as no other reason; nor does, in the second answer, the wait for a
    child. A thread whose switches have no row was away all the time by the first answer, and never by the second.
    """
    spans, tids = pauses
    away, asleep = np.array(spans.ends - spans.starts), np.zeros(len(spans), np.int64)
    for tid in np.unique(tids).tolist():
        waits = find_waits(evidence, process, tid)
        if not waits.is_off_cpu_known:
            continue
        mine = tids == tid
        starts, ends = spans.starts[mine], spans.ends[mine]
        off, threads, helpers = NO_TIME, NO_TIME, NO_TIME
        for reason, found in waits.by_reason.items():
            off = off.union(found)
            threads = threads.union(found) if reason == OWN_THREAD else threads
            helpers = helpers.union(found) if reason.startswith((OWN_THREAD, WORKER)) else helpers
        base = taken.covered_ns(starts, ends)
        gone, by_threads, by_helpers = (
            taken.union(one).covered_ns(starts, ends) - base for one in (off, threads, helpers)
        )
        away[mine], asleep[mine] = gone - by_threads, gone - by_helpers
    return away, asleep


def _tools_within(evidence: Evidence, process: Process, spans: Intervals) -> Intervals:
    """When programs ran that began and ended in the same pause."""
    begun, ended = _find_tools(evidence, process)
    at = np.searchsorted(spans.starts, begun, side="right") - 1
    is_inside = (at >= 0) & (ended <= np.append(spans.ends, 0)[at])
    return Intervals.of(begun[is_inside], ended[is_inside])


@remembered
def _find_tools(evidence: Evidence, process: Process) -> tuple[Times, Times]:
    """Begin and end of each program that a process, or a child of it, started and that ended."""
    life = evidence.rows.of(OpKind.LIFE)
    life = life.where(evidence.column("node", life) == process.node)
    family, running = {process.pid}, dict[int, int]()
    found: list[tuple[int, int]] = []
    columns = (life.ends, evidence.column("pid", life), evidence.column("arg1", life), life.codes)
    for at_ns, pid, child, code in zip(*(column.tolist() for column in columns), strict=True):
        if code == code_of(HostOp.FORK):
            running.pop(child, None)
            if pid in family:
                family.add(child)
            elif child != process.pid:
                family.discard(child)
        elif code == code_of(HostOp.EXEC) and pid in family and pid != process.pid:
            running.setdefault(pid, at_ns)
        elif code == code_of(HostOp.EXIT) and pid != process.pid:
            if pid in running:
                found.append((running.pop(pid), at_ns))
            family.discard(pid)
    times = np.array(found, np.int64).reshape(-1, 2)
    return times[:, 0], times[:, 1]


def _hidden_ns(evidence: Evidence, process: Process, spans: Intervals, paused_ns: int) -> Times:
    """How much of each pause calls without a row may fill: those that the first row after its begin stands for.

    Each is taken to last as long as one call of the process does outside of its pauses on the average, waits and all;
    or as long as the calls without a row were measured to last, where that is more.
    """
    work = process.calls.of(*_WORK)
    codes = np.unique(work.codes).tolist()
    gap = evidence.gap(process, codes)
    if not gap.unstored:
        return np.zeros(len(spans), np.int64)
    weights = np.maximum(evidence.column("weight", work), 1) - 1
    n_calls: FloatArray = np.full(len(spans), float(max(gap.unstored - int(weights.sum()), 0)))
    for code in codes:
        is_same = work.codes == code
        after = np.searchsorted(work.starts[is_same], spans.starts)
        n_calls += np.append(weights[is_same], 0)[after]
    outside_ns = max(process.active_length_ns - paused_ns, 0)
    usual = max(outside_ns / max(gap.seen, 1), gap.missing_ns / gap.unstored)
    hidden: Times = np.round(n_calls * usual).astype(np.int64)
    return hidden


def _start_ends_ns(evidence: Evidence, process: Process) -> int:
    """When the start of a process was over: a minute after its first call. One that was not seen to begin has none."""
    rows, events = process.rows, evidence.recording.events
    is_begun = np.isin(
        rows.codes, (code_of(HostOp.EXEC), code_of(DriverOp.PRIMARY_CTX_RETAIN))
    ).any()
    if not is_begun:
        is_fork = (events["node"] == process.node) & (events["arg1"] == process.pid)
        is_begun = (evidence.rows.codes[is_fork] == code_of(HostOp.FORK)).any()
    first = process.active_ns[0]
    return first + _START_NS if is_begun else first


def find_repeated(evidence: Evidence, process: Process) -> Pauses:
    """The pauses after a process's start, where they recur and cost enough; none where not."""
    every = _find_pauses(evidence, process)
    if len(every) < _MIN_PAUSES:
        return _NO_PAUSES
    later = every.where(every.spans.starts >= _start_ends_ns(evidence, process))
    total = int(later.lost_ns.sum()) + int(later.hidden_ns.sum())
    if len(later) < _MIN_PAUSES or total < process.worth_ns:
        return _NO_PAUSES
    shares = (later.lost_ns + later.hidden_ns) / max(total, 1)
    return later if 1 / (shares**2).sum() >= _MIN_EQUAL else _NO_PAUSES


def find_once(evidence: Evidence, process: Process) -> Pauses:
    """The proven pauses of a process that are not among the repeated ones."""
    every = _find_pauses(evidence, process)
    proven = every.where(every.is_proven)
    return proven.where(
        ~np.isin(proven.spans.starts, find_repeated(evidence, process).spans.starts)
    )


def describe_tools(pauses: Pauses) -> str:
    """What ran in pauses, in words."""
    tools = format_duration(int(pauses.tools_ns.sum()))
    return f"programs that it or its children started ran, and ended, in them: {tools}"


@process_rule(
    "repeated_compiling",
    "A running job stops again and again until new code has been compiled and loaded",
    Needs((OpKind.MODULE,), is_proof=True),
)
def repeated_compiling(evidence: Evidence, process: Process) -> Finding | Unjudged | None:
    """The pauses for new code after a process's start, where they recur."""
    pauses = find_repeated(evidence, process)
    if not len(pauses):
        return None
    least_ns, hidden_ns = int(pauses.lost_ns.sum()), int(pauses.hidden_ns.sum())
    if least_ns < hidden_ns:
        return Unjudged(process, describe_gap(evidence, process, _codes_of_work(process)))
    loads = process.calls.of(OpKind.MODULE)
    loads = loads.where(pauses.contain(loads))
    span_ns = int(pauses.spans.starts[0]), int(pauses.spans.ends[-1])
    longest = format_duration(int(pauses.lost_ns.max()))
    return Finding(
        title=(
            f"Repeated compiling: {process.name} launched nothing for {format_duration(least_ns)} in "
            f"{len(pauses)} pauses until new code was loaded (longest {longest})"
        ),
        span_ns=span_ns,
        lost_ns=least_ns,
        causes=_causes(pauses, loads),
        process=process,
        tid=int(loads.tids[-1]),
        n_cases=len(pauses),
        fix=_FIX,
        range_ns=(least_ns, least_ns + hidden_ns),
        stacks=evidence.stacks_of(loads),
    )


def _codes_of_work(process: Process) -> list[int]:
    codes: list[int] = np.unique(process.calls.of(*_WORK).codes).tolist()
    return codes


def _causes(pauses: Pauses, loads: EventRows) -> tuple[Cause, ...]:
    """Compiling where programs ran, preparing where only the process itself was busy; greatest first."""
    total = max(int(pauses.lost_ns.sum()), 1)
    loaded = (
        f"{len(loads)} loads of code, {format_duration(int(loads.durations.sum()))} inside them"
    )
    proven, likely = pauses.where(pauses.is_proven), pauses.where(~pauses.is_proven)
    found = []
    if len(proven):
        facts = (
            f"{len(proven)} pauses, {format_duration(int(proven.lost_ns.sum()))}",
            describe_tools(proven),
        )
        found.append(("compiling new code", proven, facts))
    if len(likely):
        facts = (
            f"{len(likely)} pauses, {format_duration(int(likely.lost_ns.sum()))}",
            "no program was started for it: the compiler is part of the process, or the code came from a cache",
        )
        found.append(("preparing new code in the process", likely, facts))
    found.sort(key=lambda one: -int(one[1].lost_ns.sum()))
    return tuple(
        Cause(
            name, round(int(part.lost_ns.sum()) / total, 4), (*facts, *([loaded] if i == 0 else []))
        )
        for i, (name, part, facts) in enumerate(found)
    )
