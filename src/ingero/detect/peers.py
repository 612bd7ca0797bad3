"""Who does the same work: role peers from communicator membership, and which of their operations correspond.

Members of one data-parallel communicator hold the same stage and shape. So a worker's peers are the members of the
largest communicator on which it has reduced, scattered or gathered more than a few numbers, as long as the launcher's
labels, where present, say that their roles agree. Each operation on that communicator is an *anchor*; what a worker
does on communicators that its peers do not share is numbered from its last anchor.

Everything here depends on a worker's operations in the order it entered them, never on when they arrived.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ingero.detect.rows import Columns, count_within, index_of_start, run_starts, running_max
from ingero.model.collectives import CollectiveOp, Rank

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

GRADIENT_OPS: Final = (
    CollectiveOp.ALL_REDUCE,
    CollectiveOp.REDUCE_SCATTER,
    CollectiveOp.ALL_GATHER,
    CollectiveOp.REDUCE,
)
MIN_GRADIENT_BYTES: Final = 64 * 1024
"""Less than this is a norm, a flag or a loss, which whole jobs exchange whatever their roles."""
ROLE_LABELS: Final = ("pp", "stage", "tp", "ep", "cp")
"""Coordinates in which role peers agree."""
NO_COMM: Final = -1
BY_LABELS: Final = -2
"""In a column of communicators: peers are those with the same labels, for want of a shared communicator."""
BEFORE_FIRST: Final = -1
"""Segment of what came before a communicator's operation 0."""

OP: Final = np.dtype([
    ("worker", "<i8"),
    ("view", "<i8"),  # (worker, communicator)
    ("comm", "<i8"),
    ("seq", "<i8"),
    ("entry_ns", "<i8"),
    ("inside_ns", "<i8"),
    ("own_ns", "<i8"),
    ("n_bytes", "<i8"),
    ("op", "<i8"),
    ("is_enqueue", "?"),
    ("arrived_ns", "<i8"),
])
"""One operation of one worker as the Judge keeps it."""

KEY: Final = np.dtype([
    ("comm", "<i8"),  # that defines the peers, or BY_LABELS
    ("worker", "<i8"),
    ("segment", "<i8"),  # sequence number of the last anchor
    ("place", "<i8"),  # operations since the anchor, the anchor being 0
    (
        "slot",
        "<i8",
    ),  # which of the worker's communicators, comparable between peers; -1 for the anchor
    ("ordinal", "<i8"),  # of the operation on that communicator since the anchor
    ("entry_ns", "<i8"),
    ("seq", "<i8"),
    ("view", "<i8"),
    ("own_ns", "<i8"),  # -1: cannot be compared
])
"""An operation with the key under which its peers' operations correspond to it: (segment, slot, ordinal)."""


def role_of(rank: Rank) -> tuple[tuple[str, str], ...]:
    """The labels in which a worker's peers must agree with it; empty when the launcher exports none."""
    return tuple(pair for pair in rank.labels if pair[0] in ROLE_LABELS)


def op_of_slot(slots: IntArray) -> IntArray:
    """The kind of operation that a communicator's slot was named after, `CollectiveOp` values."""
    return (slots >> 16) & 0xFF


class Pairing:
    """Numbers each worker's operations so that peers' numbers correspond.

    Args:
        max_held: Operations of one worker without any gradient communicator after which its labels define its peers.

    Attributes:
        n_unpaired: Operations that came before anything they could be numbered from.
    """

    def __init__(self, max_held: int = 4096) -> None:
        self._max_held = max_held
        self._workers = Columns(
            best=("<i8", 0),
            comm=("<i8", NO_COMM),
            segment=("<i8", BEFORE_FIRST),
            place=("<i8", 0),
            run=("<i8", 0),
        )
        self._views = Columns(slot=("<i8", -1), run=("<i8", -1), count=("<i8", 0))
        self._slots_of: dict[tuple[int, int], int] = {}
        self._held = np.zeros(0, OP)
        self.n_unpaired = 0

    def segments(self) -> IntArray:
        """The segment that each worker is in, shape (n_workers,)."""
        return np.asarray(self._workers["segment"], np.int64)

    def slots(self) -> IntArray:
        """The slot of each view, −1 before its first operation was numbered, shape (n_views,)."""
        return np.asarray(self._views["slot"], np.int64)

    def grow(self, n_workers: int, n_views: int) -> None:
        """Make room for workers and views that were registered."""
        while self._workers.n < n_workers:
            self._workers.add()
        while self._views.n < n_views:
            self._views.add()

    def number(
        self, ops: npt.NDArray[np.void], n_ranks: IntArray, *, final: bool
    ) -> npt.NDArray[np.void]:
        """Give operations their keys.

        Args:
            ops: Rows of OP sorted by worker and entry, later than all that were numbered before.
            n_ranks: Members of each operation's communicator by communicator index.
            final: No more will come, so what is held is numbered now.

        Returns:
            Rows of KEY in the order of ``ops``, without those that are held back or unpaired.
        """
        if self._held.size:
            ops = np.concatenate([self._held, ops])
            ops = ops[np.argsort(ops["worker"], kind="stable")]
        if not ops.size:
            return np.zeros(0, KEY)
        comm, first = self._choose_comms(ops, n_ranks)
        ops, comm = self._hold_back(ops, comm, first, final=final)
        if not ops.size:
            return np.zeros(0, KEY)
        return self._number(ops, comm, n_ranks)

    def _choose_comms(
        self, ops: npt.NDArray[np.void], n_ranks: IntArray
    ) -> tuple[IntArray, IntArray]:
        """The peer-defining communicator in force at each operation, and the row where the worker first had one."""
        worker = ops["worker"]
        size = np.where(
            np.isin(ops["op"], GRADIENT_OPS)
            & ((ops["n_bytes"] < 0) | (ops["n_bytes"] >= MIN_GRADIENT_BYTES))
            & (n_ranks[ops["comm"]] >= 2),
            n_ranks[ops["comm"]],
            0,
        )
        carried = np.asarray(self._workers["best"], np.int64)[worker]
        starts = run_starts(worker)
        best = running_max(np.maximum(size, carried), worker)
        before = np.where(starts, carried, np.concatenate([[0], best[:-1]]))
        is_switch = size > before
        chosen = index_of_start(starts | is_switch)
        has_switch = is_switch[chosen]
        old = np.asarray(self._workers["comm"], np.int64)[worker]
        comm = np.where(has_switch, ops["comm"][chosen], old)
        last = np.flatnonzero(np.append(starts[1:], True))
        np.asarray(self._workers["best"])[worker[last]] = best[last]
        is_first = is_switch & (before == 0)
        first = np.full(self._workers.n, -1, np.int64)
        first[worker[is_first]] = np.flatnonzero(is_first)
        return comm, first

    def _hold_back(
        self, ops: npt.NDArray[np.void], comm: IntArray, first: IntArray, *, final: bool
    ) -> tuple[npt.NDArray[np.void], IntArray]:
        """Decide on operations before the first gradient communicator: number, hold or drop them."""
        worker = ops["worker"]
        row = first[worker]
        is_early = (comm == NO_COMM) & (row >= 0)
        is_countable = is_early & (ops["seq"][np.maximum(row, 0)] == 0)
        comm = np.where(is_countable, ops["comm"][np.maximum(row, 0)], comm)
        is_lost = is_early & ~is_countable
        self.n_unpaired += int(is_lost.sum())
        is_waiting = (comm == NO_COMM) & ~is_lost
        n_held = np.bincount(worker[is_waiting], minlength=self._workers.n)
        gives_up = is_waiting & ((n_held > self._max_held)[worker] | final)
        comm = np.where(gives_up, BY_LABELS, comm)
        np.asarray(self._workers["comm"])[worker[gives_up]] = BY_LABELS
        self._held = ops[is_waiting & ~gives_up]
        keep = ~is_lost & ~(is_waiting & ~gives_up)
        return ops[keep], comm[keep]

    def _number(
        self, ops: npt.NDArray[np.void], comm: IntArray, n_ranks: IntArray
    ) -> npt.NDArray[np.void]:
        worker, state = ops["worker"], self._workers
        starts = run_starts(worker)
        is_anchor = ops["comm"] == comm
        # Runs are counted from 1 within this batch; run 0 continues what earlier batches began.
        cumulative = np.cumsum(is_anchor)
        run = cumulative - (cumulative - is_anchor)[index_of_start(starts)]
        begin = index_of_start(starts | is_anchor)
        is_continued = run == 0
        segment = np.where(is_continued, np.asarray(state["segment"])[worker], ops["seq"][begin])
        place = np.arange(ops.size) - begin
        place += np.where(is_continued, np.asarray(state["place"])[worker], 0)
        absolute = np.asarray(state["run"])[worker] + run
        self._name_slots(ops, n_ranks)
        ordinal = count_within(ops["view"], absolute)
        was_here = np.asarray(self._views["run"])[ops["view"]] == absolute
        ordinal += np.where(was_here, np.asarray(self._views["count"])[ops["view"]], 0)
        last = np.flatnonzero(np.append(starts[1:], True))
        np.asarray(state["segment"])[worker[last]] = segment[last]
        np.asarray(state["place"])[worker[last]] = place[last] + 1
        np.asarray(state["run"])[worker[last]] = absolute[last]
        np.asarray(state["comm"])[worker[last]] = comm[last]
        np.asarray(self._views["run"])[ops["view"]] = absolute  # the last row of a view wins
        np.asarray(self._views["count"])[ops["view"]] = ordinal + 1
        keys = np.zeros(ops.size, KEY)
        for name in ("worker", "entry_ns", "seq", "view"):
            keys[name] = ops[name]
        keys["comm"], keys["segment"], keys["place"] = comm, segment, place
        keys["slot"] = np.where(is_anchor, -1, np.asarray(self._views["slot"])[ops["view"]])
        keys["ordinal"] = np.where(is_anchor, 0, ordinal)
        keys["own_ns"] = np.where(ops["is_enqueue"] | (ops["own_ns"] < 0), -1, ops["own_ns"])
        return keys

    def _name_slots(self, ops: npt.NDArray[np.void], n_ranks: IntArray) -> None:
        """Number the communicators that a worker used for the first time.

        A slot is (members, kind of the first operation, how many such communicators the worker had before).
        """
        slots = np.asarray(self._views["slot"])
        fresh = np.flatnonzero(slots[ops["view"]] < 0)
        for row in fresh.tolist():
            view = int(ops["view"][row])
            if slots[view] >= 0:
                continue
            kind = int(n_ranks[ops["comm"][row]]) << 8 | int(ops["op"][row])
            nth = self._slots_of.get((int(ops["worker"][row]), kind), 0)
            self._slots_of[int(ops["worker"][row]), kind] = nth + 1
            slots[view] = kind << 16 | min(nth, 0xFFFF)
