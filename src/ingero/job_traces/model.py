"""A recorded job, first as its rows, then as the collectives that each worker's agent would have reported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ingero.model.arrays import BoolArray, FloatArray, IntArray, Records
from ingero.model.collectives import CollectiveRun, Rank

STEP: Final = np.dtype([("step", "<i8"), ("begin_ns", "<i8"), ("end_ns", "<i8")])


@dataclass(frozen=True, slots=True)
class TraceRows:
    """Operations as recorded, one row each, in any order.

    Attributes:
        dp: Data-parallel rank, shape (n,).
        stage: Pipeline stage, shape (n,).
        step: The job's step number, shape (n,); numbers may be missing in between.
        optype: Index into ``optypes``, shape (n,).
        start_s: Seconds since the step began, shape (n,).
        duration_s: Seconds, shape (n,).
        optypes: Names of the kinds of operation.
    """

    dp: IntArray
    stage: IntArray
    step: IntArray
    optype: IntArray
    start_s: FloatArray
    duration_s: FloatArray
    optypes: tuple[str, ...]

    def where(self, mask: BoolArray) -> TraceRows:
        """The rows of a mask, shape (n,)."""
        return TraceRows(
            dp=self.dp[mask],
            stage=self.stage[mask],
            step=self.step[mask],
            optype=self.optype[mask],
            start_s=self.start_s[mask],
            duration_s=self.duration_s[mask],
            optypes=self.optypes,
        )

    def with_durations(self, duration_s: FloatArray) -> TraceRows:
        """The same rows lasting otherwise."""
        return replace(self, duration_s=duration_s)


@dataclass(frozen=True, slots=True)
class JobTrace:
    """What the agents of a recorded job report, in trace time.

    Attributes:
        name: For people.
        workers: One per (dp rank, stage), labelled ``dp`` and ``stage``.
        runs: For each worker, its whole history on each communicator.
        steps: Rows of STEP on the trace's own timeline, ascending: recorded steps follow each other without the gaps
            between them. Every worker's ``entry_ns`` is on this timeline.
        n_unknown_rows: Rows whose kind of operation is not known; left out.
    """

    name: str
    workers: tuple[Rank, ...]
    runs: tuple[tuple[CollectiveRun, ...], ...]
    steps: Records
    n_unknown_rows: int = 0

    def find_step(self, entry_ns: int) -> int | None:
        """The step during which a moment of the timeline lies, or None outside all of them."""
        at = int(np.searchsorted(self.steps["begin_ns"], entry_ns, side="right")) - 1
        if at < 0 or entry_ns > int(self.steps["end_ns"][-1]):
            return None
        return int(self.steps["step"][at])

    @property
    def n_ops(self) -> int:
        """Operations in all runs."""
        return sum(run.ops.size for runs in self.runs for run in runs)


@dataclass(frozen=True, slots=True)
class Push:
    """What one worker's agent sends at one moment.

    Attributes:
        at_ns: When, on the trace's timeline: the end of the interval that it covers.
        worker: Index into ``JobTrace.workers``.
        runs: Operations that ended in the interval.
        health_score: In [0, 1]: the median worker's compute time in the interval over this one's, at most 1; None
            when either computed nothing.
    """

    at_ns: int
    worker: int
    runs: tuple[CollectiveRun, ...]
    health_score: float | None


def _known_ns(runs: tuple[CollectiveRun, ...]) -> list[IntArray]:
    """When each operation of one worker can be reported: once everything entered up to the same moment has ended.

    Returns:
        Per run, nanoseconds on the trace's timeline, ascending, shape of its ops.
    """
    if not runs:
        return []
    ops = np.concatenate([run.ops for run in runs])
    order = np.argsort(ops["entry_ns"], kind="stable")
    known = np.empty(ops.size, np.int64)
    ended = ops["entry_ns"] + np.maximum(ops["inside_ns"], 0)
    entered = ops["entry_ns"][order]
    # Those entered at one moment, as a batched exchange is, are reported together.
    last = np.searchsorted(entered, entered, side="right") - 1
    known[order] = np.maximum.accumulate(ended[order])[last]
    sizes = np.cumsum([run.ops.size for run in runs])
    return [np.maximum.accumulate(part) for part in np.split(known, sizes[:-1])]


def iter_pushes(trace: JobTrace, interval_ns: int) -> Iterator[Push]:
    """Cut a trace into what its agents push, in the order of the timeline.

    An operation belongs to the interval in which it, and everything the worker entered before or with it, had *ended*:
    as a live agent learns of it, and so that a worker's operations reach Fleet in the order they were entered.
    """
    end_ns = int(trace.steps["end_ns"][-1])
    edges = np.arange(interval_ns, end_ns + 2 * interval_ns, interval_ns)
    cuts = [[np.searchsorted(known, edges) for known in _known_ns(runs)] for runs in trace.runs]
    for k, edge in enumerate(edges.tolist()):
        pushes: list[tuple[tuple[CollectiveRun, ...], int]] = []
        for runs, cut in zip(trace.runs, cuts, strict=True):
            taken, own_ns = [], 0
            for run, at in zip(runs, cut, strict=True):
                ops = run.ops[int(at[k - 1]) if k else 0 : int(at[k])]
                if ops.size:
                    taken.append(replace(run, ops=ops))
                    own_ns += int(np.maximum(ops["own_ns"], 0).sum())
            pushes.append((tuple(taken), own_ns))
        busy = [own_ns for _, own_ns in pushes if own_ns > 0]
        typical = float(np.median(busy)) if busy else 0.0
        for worker, (taken_runs, own_ns) in enumerate(pushes):
            score = min(1.0, typical / own_ns) if own_ns > 0 else None
            yield Push(edge, worker, taken_runs, score)
