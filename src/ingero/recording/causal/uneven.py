"""Why some of a rank's operations take it longer than the same ones do at other times: uneven work, of nobody's fault.

Each operation's own time is laid over what the kernel showed of the thread meanwhile, so that it falls into time on a
processor, ready without one, blocked, stopped and asleep, exactly. A step of training repeats the same operations in
the same order: operations that take longer than the median of those at their place are compared with the others there,
and what is beyond these is explained by what grew with it. A quota that did not change holds a process back that
computes more, and that is computing. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ingero.model.arrays import BoolArray, FloatArray, IntArray, Records
from ingero.model.counters import CodeLines
from ingero.model.diagnosis import CauseKind
from ingero.model.events import OffCpuReason
from ingero.recording.causal.conclusions import CausePart, ExcessCauses, conclude
from ingero.recording.causal.excess import describe_lines
from ingero.units import format_duration

MIN_OPS: Final = 20
"""Operations below which nothing is compared."""
MAX_PLACES: Final = 64
"""Longest step that is looked for, in operations."""
MIN_ROUNDS: Final = 8
"""Steps in which a place must have been seen."""
CLEARER: Final = 0.6
"""A longer step is taken where the scatter within its places is this part of a shorter one's, or less."""
MIN_UNEVEN: Final = 0.06
"""Part of all own time, below which operations are alike."""


@dataclass(frozen=True, slots=True)
class WatchedOps:
    """Operations of one thread in a time in which every switch of it was seen.

    Attributes:
        ops: Rows of ``entry_ns own_ns``, by entry, on the monotonic clock of ``spans``.
        spans: Rows of `OFF_SPAN`, by their start; they do not overlap.
        since_ns: When every switch began to be seen.
        throttled_ns: Time in it that a quota held the process back.
        n_processors: What that quota allows; None without one.
        n_lost: Switches that were not seen.
        device_share: The part of own time that it waited for its GPU in calls of CUDA; 0 where it makes none.
    """

    ops: Records
    spans: Records
    since_ns: int
    throttled_ns: int = 0
    n_processors: float | None = None
    n_lost: int = 0
    device_share: float = 0.0

    def find_held_for(self, computing_ns: float) -> float:
        """How long a quota holds a process back that computes for so long: that is its own doing, not the quota's."""
        if not self.n_processors:
            return 0.0
        return computing_ns * max(1 / self.n_processors - 1, 0.0)


def find_uneven_causes(watched: WatchedOps, lines: CodeLines | None = None) -> ExcessCauses:
    """Share out what operations took beyond their usual.

    Args:
        watched: What was seen.
        lines: Where in its program it was; None when nobody looked.
    """
    ops = watched.ops
    ops = ops[ops["entry_ns"] - ops["own_ns"] >= watched.since_ns]
    if len(ops) < MIN_OPS:
        return conclude([], 0, f"{len(ops)} operations were watched, which are too few")
    own_ns = ops["own_ns"].astype(float)
    places = _Places.of(own_ns)
    excess_ns = round(places.grown(own_ns))
    if excess_ns < MIN_UNEVEN * own_ns.sum():
        share = excess_ns / max(float(own_ns.sum()), 1.0)
        why = f"its operations were alike while it was watched: {share:.1%} uneven"
        return conclude([], excess_ns, why)
    took_ns = _lay_over(ops, watched.spans)
    grown = {what: max(places.grown(spent), 0.0) for what, spent in took_ns.items()}
    ready_ns = max(float(took_ns["ready"].sum()), 1.0)
    held_ns = grown["ready"] * min(watched.throttled_ns / ready_ns, 1.0)
    queued_ns = grown["ready"] - held_ns
    device_ns = watched.device_share * (grown["computing"] + grown["asleep"])
    for what in ("computing", "asleep"):  # most programs spin while they wait for a GPU, some sleep
        grown[what] *= 1 - watched.device_share
    by_itself_ns = min(held_ns, watched.find_held_for(grown["computing"]))
    n_late = int(places.is_late.sum())
    lost = (f"{watched.n_lost} switches were not seen",) if watched.n_lost else ()

    def each(spent_ns: float) -> str:
        return format_duration(round(spent_ns / n_late))

    beyond = (
        f"{n_late} of {len(ops)} operations took {each(excess_ns)} longer than usual, on average"
    )

    def part(kind: CauseKind, spent_ns: float, what: str, *further: str) -> CausePart:
        description = f"{beyond}: {each(spent_ns)} of it {what}"
        return CausePart(kind, spent_ns, (description, *further, *lost))

    running = [] if lines is None else describe_lines("running", lines.running, lines)
    waiting = [] if lines is None else describe_lines("waiting", lines.waiting, lines)
    computing = part(CauseKind.MORE_COMPUTING, grown["computing"], "on a processor", *running)
    if by_itself_ns > 0:
        description = f"held back for it by its quota {each(by_itself_ns)}"
        computing = replace(
            computing,
            extra_ns=computing.extra_ns + by_itself_ns,
            evidence=(computing.evidence[0], description, *computing.evidence[1:]),
        )
    parts = [
        computing,
        *(
            [part(CauseKind.GPU_COMPUTING, device_ns, "waiting for its GPU", *running)]
            if watched.device_share
            else []
        ),
        part(CauseKind.CPU_QUOTA, held_ns - by_itself_ns, "throttled"),
        part(CauseKind.CPU_CONTENTION, queued_ns, "ready to run and not running"),
        part(CauseKind.BLOCKED_IO, grown["blocked"], "blocked", *waiting),
        part(CauseKind.STOPPED, grown["stopped"], "stopped"),
    ]
    return conclude(parts, excess_ns, f"{beyond}: {each(grown['asleep'])} of it asleep", *waiting)


@dataclass(frozen=True, slots=True)
class _Places:
    """Operations against the usual ones at their place of a step: those of the half that took less.

    Attributes:
        n: Operations of a step.
        is_late: Those that took longer than the median of their place, shape (n,).
    """

    n: int
    is_late: BoolArray

    @classmethod
    def of(cls, own_ns: FloatArray) -> _Places:
        """The places of operations with these own times, in order."""
        n_places = find_places(own_ns)
        return cls(n_places, own_ns > _find_medians(own_ns, n_places))

    def grown(self, spent_ns: FloatArray) -> float:
        """What the late ones spent beyond the mean of the others at their place, in all. Parts of a time add up."""
        beyond_ns = 0.0
        for place in range(self.n):
            spent, is_late = spent_ns[place :: self.n], self.is_late[place :: self.n]
            if is_late.any():
                beyond_ns += float((spent[is_late] - spent[~is_late].mean()).sum())
        return beyond_ns


def find_places(own_ns: FloatArray) -> int:
    """Operations of a step: after so many the same ones come again; 1 where no order is seen.

    The shortest period with which hardly less remains unexplained than with any other: the mean absolute deviation of
    own times from the median of their place, with the degrees of freedom that places cost. Squares would follow the few
    operations that are long, wherever they fall.

    Args:
        own_ns: Own time before each operation, in order, shape (n,).
    """
    n_most = min(MAX_PLACES, len(own_ns) // MIN_ROUNDS)
    best, least = 1, _scatter(own_ns, 1)
    for n_places in range(2, n_most + 1):
        scatter = _scatter(own_ns, n_places)
        if scatter < CLEARER * least:
            best, least = n_places, scatter
    return best


def _scatter(values: FloatArray, n_places: int) -> float:
    """Mean absolute deviation within places."""
    away = np.abs(values - _find_medians(values, n_places))
    return float(away.sum() / max(len(values) - n_places, 1))


def _find_medians(values: FloatArray, n_places: int) -> FloatArray:
    """The median at each value's place, shape of ``values``."""
    medians = np.empty(len(values))
    for place in range(n_places):
        medians[place::n_places] = np.median(values[place::n_places])
    return medians


def _lay_over(ops: Records, spans: Records) -> dict[str, FloatArray]:
    """Where each operation's own time went, nanoseconds."""
    begin, end = ops["entry_ns"] - ops["own_ns"], ops["entry_ns"]
    woken = spans["start_ns"] + spans["off_ns"] - spans["wait_ns"]
    until = spans["start_ns"] + spans["off_ns"]
    is_ready = np.isin(spans["reason"], (OffCpuReason.PREEMPTED, OffCpuReason.THROTTLED))
    away = {
        "blocked": spans["reason"] == OffCpuReason.BLOCKED_IO,
        "stopped": spans["reason"] == OffCpuReason.STOPPED,
    }
    away["asleep"] = ~(is_ready | away["blocked"] | away["stopped"])
    found = {
        what: _overlap(spans["start_ns"][which], woken[which], begin, end)
        for what, which in away.items()
    }
    found["ready"] = _overlap(woken, until, begin, end)
    found["computing"] = np.maximum(ops["own_ns"] - sum(found.values()), 0.0)
    return found


def _overlap(start: IntArray, stop: IntArray, begin: IntArray, end: IntArray) -> FloatArray:
    """How much of each stretch ``begin`` to ``end`` is covered by those from ``start`` to ``stop``, in order."""
    if not len(start):
        return np.zeros(len(begin))
    first = start[0]
    edges = np.stack((start - first, stop - first), axis=1).ravel().astype(float)
    covered = np.repeat(np.concatenate(([0], np.cumsum(stop - start))), 2)[1:-1].astype(float)
    upto: FloatArray = np.interp(end - first, edges, covered)
    return np.asarray(upto - np.interp(begin - first, edges, covered), float)
