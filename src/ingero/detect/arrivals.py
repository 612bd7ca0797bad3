"""From runs as they arrive to each worker's operations in the order it entered them, and their totals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.detect.columns import Columns
from ingero.detect.peers import OP
from ingero.model.arrays import BoolArray, IntArray, Records
from ingero.model.collectives import ClockKind, CollectiveRun

_NEVER: Final = int(np.iinfo(np.int64).min)
_ALWAYS: Final = int(np.iinfo(np.int64).max)


@dataclass(slots=True)
class JudgeCounts:
    """What was read and what was lost, each with its reason."""

    ops: int = 0
    stale_ops: int = 0
    enqueue_ops: int = 0
    refused_workers: int = 0
    dropped_ops: int = 0
    late_members: int = 0


class SeenTimes(Columns):
    """When each worker reported first and last, on the clock of arrivals: ``first_ns`` and ``last_ns``.

    And since when it has reported, without a pause, nothing that could be compared, ``uncompared_ns``; and how many
    operations could be compared until then, ``n_compared``.

    Args:
        pause_ns: From which a worker that reports again begins anew.
    """

    def __init__(self, pause_ns: int) -> None:
        super().__init__(first_ns=_ALWAYS, last_ns=_NEVER, uncompared_ns=_ALWAYS, n_compared=0)
        self._pause_ns = pause_ns

    def note(self, worker: int, now_ns: int) -> None:
        """It reported; ``now_ns`` does not step back."""
        self.grow(worker + 1)
        if self["uncompared_ns"][worker] == _ALWAYS or self._was_silent(worker, now_ns):
            self["uncompared_ns"][worker] = now_ns
        self["first_ns"][worker] = min(int(self["first_ns"][worker]), now_ns)
        self["last_ns"][worker] = now_ns

    def note_compared(self, worker: int, n_ops: int) -> None:
        """So many of its operations have been compared in all."""
        if self["n_compared"][worker] != n_ops:
            self["n_compared"][worker], self["uncompared_ns"][worker] = n_ops, _ALWAYS

    def find_uncompared_ns(self, worker: int) -> int:
        """For how long it has reported, without a pause, nothing that could be compared."""
        return max(int(self["last_ns"][worker]) - int(self["uncompared_ns"][worker]), 0)

    def _was_silent(self, worker: int, now_ns: int) -> bool:
        return now_ns - int(self["last_ns"][worker]) >= self._pause_ns

    def find_silent(self, before_ns: int) -> IntArray:
        """Workers that did not report since then."""
        return np.flatnonzero(self["last_ns"] < before_ns)


class Arrivals:
    """Operations that arrived, held back while an earlier one of the same worker may still come.

    Args:
        reorder_ns: How long after its arrival an operation may still be preceded by one that arrives later.
        max_pending_ops: Operations beyond this are dropped and counted.
        counts: What is counted as read, stale and dropped.

    Attributes:
        n_pending: Operations that are held back.
        clocks: Of the workers.
    """

    def __init__(self, reorder_ns: int, max_pending_ops: int, counts: JudgeCounts) -> None:
        self._reorder_ns = reorder_ns
        self._max_pending_ops = max_pending_ops
        self._counts = counts
        self._parts: list[Records] = []
        self._workers = Columns(done_ns=_NEVER)
        self._views = Columns(done_seq=-1)
        self.clocks = WorkerClocks(reorder_ns)
        self.n_pending = 0

    def grow(self, n_workers: int, n_views: int) -> None:
        """Make room for workers and views that were registered."""
        self._workers.grow(n_workers)
        self._views.grow(n_views)

    def has_room(self, n_ops: int) -> bool:
        """Whether so many more operations fit; those that do not are counted as dropped."""
        fits = self.n_pending + n_ops <= self._max_pending_ops
        self._counts.dropped_ops += 0 if fits else n_ops
        return fits

    def add(
        self,
        run: CollectiveRun,
        entry_ns: IntArray,
        worker: int,
        view: tuple[int, int],
        now_ns: int,
    ) -> None:
        """Add a run's operations.

        Args:
            run: The operations.
            entry_ns: When they were entered, as `WorkerClocks.take` has it.
            worker: Index of the worker.
            view: Indices of the communicator and of the worker on it.
            now_ns: On the clock of arrivals.
        """
        rows = np.zeros(run.ops.size, OP)
        rows["worker"], (rows["comm"], rows["view"]) = worker, view
        for name in ("seq", "inside_ns", "own_ns", "n_bytes", "op", "limit_use"):
            rows[name] = run.ops[name]
        rows["entry_ns"] = entry_ns
        rows["is_enqueue"] = run.clock == ClockKind.ENQUEUE
        rows["arrived_ns"] = now_ns
        self._parts.append(rows)
        self.n_pending += rows.size
        self._counts.ops += rows.size

    def take_ready(self, n_ranks: IntArray, now_ns: int, *, final: bool) -> Records:
        """Operations whose predecessors had time to arrive, sorted by worker and entry, without repeats.

        Args:
            n_ranks: Members of each communicator.
            now_ns: On the clock of arrivals.
            final: Nothing more will come.
        """
        if not self._parts:
            return np.zeros(0, OP)
        rows = np.concatenate(self._parts)
        sizes = n_ranks[rows["comm"]]
        keys = [rows[name] for name in ("op", "entry_ns", "worker")]
        rows = rows[np.lexsort((rows["arrived_ns"], rows["seq"], sizes, *keys))]
        done_ns, done_seq = self._workers["done_ns"], self._views["done_seq"]
        is_stale = rows["seq"] <= done_seq[rows["view"]]
        is_stale |= rows["entry_ns"] <= done_ns[rows["worker"]]
        is_stale |= _is_repeat(rows)
        self._counts.stale_ops += int(is_stale.sum())
        rows = rows[~is_stale]
        frontier = np.full(self._workers.n, _NEVER)
        is_aged = (now_ns - rows["arrived_ns"] >= self._reorder_ns) | final
        np.maximum.at(frontier, rows["worker"][is_aged], rows["entry_ns"][is_aged])
        is_ready = rows["entry_ns"] <= frontier[rows["worker"]]
        ready: Records = rows[is_ready]
        kept = rows[~is_ready]
        self._parts, self.n_pending = ([kept] if kept.size else []), int(kept.size)
        np.maximum.at(done_ns, ready["worker"], ready["entry_ns"])
        np.maximum.at(done_seq, ready["view"], ready["seq"])
        return ready


class WorkerClocks:
    """What is added to the times of workers whose clock began anew, so that they go on.

    A node's clock begins anew when it boots, and is set back where its agent is started again after a step of the wall
    clock. It is so where a worker that reported nothing for a while comes with another communicator, on which all it
    did is earlier than what it did before; and where an operation with a later number was entered earlier.

    Args:
        reorder_ns: For how long a report may be overtaken by later ones.
    """

    def __init__(self, reorder_ns: int) -> None:
        self._reorder_ns = reorder_ns
        self._workers = Columns(offset_ns=0, newest_ns=_NEVER, arrived_ns=_NEVER, lag_ns=_ALWAYS)

    def take(
        self, worker: int, entry_ns: IntArray, now_ns: int, last_of_comm_ns: int | None
    ) -> IntArray:
        """The times of a run that arrived, shape (n,), as they go on from the worker's earlier ones.

        Args:
            worker: Whose clock it is.
            entry_ns: Of the run's operations, shape (n,).
            now_ns: On the clock of arrivals.
            last_of_comm_ns: As `Registry.find_last` returns it.
        """
        self._workers.grow(worker + 1)
        if not entry_ns.size:
            return entry_ns
        offsets, newest, arrived = (
            self._workers[name] for name in ("offset_ns", "newest_ns", "arrived_ns")
        )
        last_ns, before_ns = int(entry_ns.max()), int(newest[worker])
        at_ns, silent_ns = last_ns + int(offsets[worker]), now_ns - int(arrived[worker])
        if last_of_comm_ns is not None and at_ns <= before_ns:
            is_new, was_silent = last_of_comm_ns == _NEVER, silent_ns >= self._reorder_ns
            if was_silent if is_new else at_ns < last_of_comm_ns - self._reorder_ns:
                offsets[worker] = min(before_ns + silent_ns, _ALWAYS) - last_ns
        offset_ns = int(offsets[worker])
        taken = np.minimum(entry_ns, _ALWAYS - offset_ns) + offset_ns
        newest[worker], arrived[worker] = max(before_ns, int(taken.max())), now_ns
        return np.asarray(taken)

    def note_lag(self, worker: int, entry_ns: IntArray, sent_ns: int) -> None:
        """A worker's operations, with times as `take` returns them, were sent then, on the clock of arrivals."""
        if entry_ns.size:
            lags = self._workers["lag_ns"]
            lags[worker] = min(int(lags[worker]), max(sent_ns - int(entry_ns.max()), -_ALWAYS))

    def read_lag(self, worker: int) -> int:
        """By how much the clock of arrivals is ahead of a worker's, with the time that its quickest report took."""
        self._workers.grow(worker + 1)
        return int(self._workers["lag_ns"][worker])

    def read(self, worker: int, entry_ns: int) -> int:
        """A time as the worker's clock has it now; 0 where that had not begun."""
        self._workers.grow(worker + 1)
        return max(entry_ns - int(self._workers["offset_ns"][worker]), 0)


class WorkerTotals(Columns):
    """Each worker's sums: ``own_ns``, ``n_ops``, ``n_enqueue``; and ``first_ns`` and ``last_ns``, −1 before any."""

    def __init__(self) -> None:
        super().__init__(own_ns=0, n_ops=0, n_enqueue=0, first_ns=-1, last_ns=-1)

    def add(self, ops: Records) -> None:
        """Add rows of OP sorted by worker and entry."""
        worker, first = ops["worker"], self["first_ns"]
        np.add.at(self["own_ns"], worker, np.maximum(ops["own_ns"], 0))
        np.add.at(self["n_ops"], worker, 1)
        np.add.at(self["n_enqueue"], worker, ops["is_enqueue"].astype(np.int64))
        begins = np.flatnonzero(np.diff(worker, prepend=-1))
        begins = begins[first[worker[begins]] < 0]
        first[worker[begins]] = ops["entry_ns"][begins]
        left_ns = ops["entry_ns"] + np.maximum(ops["inside_ns"], 0)
        np.maximum.at(self["last_ns"], worker, left_ns)

    def find_rate(self) -> float:
        """Operations a nanosecond of a worker, over the time from the first to the last of each; 0 before any."""
        span_ns = float((self["last_ns"] - self["first_ns"]).sum(dtype=np.float64))
        return float(self["n_ops"].sum()) / span_ns if span_ns > 0.0 else 0.0


def _is_repeat(rows: Records) -> BoolArray:
    """All but the first of rows with the same view and sequence number, in the given order."""
    order = np.lexsort((np.arange(rows.size), rows["seq"], rows["view"]))
    view, seq = rows["view"][order], rows["seq"][order]
    repeats = np.zeros(rows.size, bool)
    repeats[order[1:]] = (view[1:] == view[:-1]) & (seq[1:] == seq[:-1])
    return repeats
