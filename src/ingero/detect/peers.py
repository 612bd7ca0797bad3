"""Who does the same work: role peers from communicator membership, and which of their operations correspond.

Members of one data-parallel communicator hold the same stage and shape. So a worker's peers are the members of the
largest communicator on which it has reduced, scattered or gathered more than a few numbers, as long as the launcher's
labels, where present, say that their roles agree. Of those that are equally large it is the one on which it scatters
or reduces, before one on which it only gathers: where reports begin in the middle of a job, each worker may see another
one first. A communicator that a worker has not used for many of its segments is given up: after a restart, or when a
spare takes a node's place, all work on new ones. Each operation on that communicator is an *anchor*; what a worker does
on communicators that its peers do not share is numbered from its last anchor.

Everything here depends on a worker's operations in the order it entered them, never on when they arrived.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ingero.detect.columns import Columns
from ingero.detect.runs import count_within, index_of_last, index_of_start, run_starts, running_max
from ingero.model.arrays import BoolArray, IntArray, Records
from ingero.model.collectives import CollectiveOp, Rank

_MAX_HELD: Final = 4096
"""Operations of one worker without any gradient communicator after which its labels define its peers."""
_PREFERENCES: Final = {
    CollectiveOp.ALL_GATHER: 1,
    CollectiveOp.REDUCE: 2,
    CollectiveOp.ALL_REDUCE: 3,
    CollectiveOp.REDUCE_SCATTER: 4,
}
"""Among communicators of one size: the greatest of what a worker does there."""
_PER_MEMBER: Final = 8
MIN_GRADIENT_BYTES: Final = 64 * 1024
"""Less than this is a norm, a flag or a loss, which whole jobs exchange whatever their roles."""
ROLE_LABELS: Final = ("pp", "stage", "tp", "ep", "cp")
"""Coordinates in which role peers agree."""
NO_COMM: Final = -1
BY_LABELS: Final = -2
"""In a column of communicators: peers are those with the same labels, for want of a shared communicator."""
_GIVE_UP_AFTER: Final = 8
"""Longest segments so far without an anchor, and ``_GIVE_UP_OPS`` more, after which another communicator is chosen."""
_GIVE_UP_OPS: Final = 256
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
    ("limit_use", "<i8"),
    ("arrived_ns", "<i8"),
])
"""One operation of one worker as the Judge keeps it."""

KEY: Final = np.dtype([
    ("comm", "<i8"),  # that defines the peers, or BY_LABELS
    ("worker", "<i8"),
    ("segment", "<i8"),  # sequence number of the last anchor
    ("place", "<i8"),  # operations since the anchor, the anchor being 0
    # Which of the worker's communicators, comparable between peers; -1 for the anchor.
    ("slot", "<i8"),
    ("ordinal", "<i8"),  # of the operation on that communicator since the anchor
    ("entry_ns", "<i8"),
    ("seq", "<i8"),
    ("view", "<i8"),
    ("own_ns", "<i8"),  # -1: cannot be compared
    ("limit_use", "<i8"),
])
"""An operation with the key under which its peers' operations correspond to it: (segment, slot, ordinal)."""


def role_of(rank: Rank) -> tuple[tuple[str, str], ...]:
    """The labels in which a worker's peers must agree with it; empty when the launcher exports none."""
    return tuple(pair for pair in rank.labels if pair[0] in ROLE_LABELS)


def op_of_slot(slots: IntArray) -> IntArray:
    """The kind of operation that a communicator's slot was named after, `CollectiveOp` values."""
    return (slots >> 16) & 0xFF


def _weigh(ops: Records, n_ranks: IntArray) -> IntArray:
    """By how much each operation speaks for its communicator as the one that defines peers; 0 where it is none."""
    size, preferred = n_ranks[ops["comm"]], np.zeros(ops.size, np.int64)
    for op, preference in _PREFERENCES.items():
        preferred[ops["op"] == op] = preference
    is_gradient = (ops["n_bytes"] < 0) | (ops["n_bytes"] >= MIN_GRADIENT_BYTES)
    is_one = is_gradient & (preferred > 0) & (size >= 2)
    return np.where(is_one, size * _PER_MEMBER + preferred, 0)


class Pairing:
    """Numbers each worker's operations so that peers' numbers correspond.

    Attributes:
        n_unpaired: Operations that came before anything they could be numbered from.
    """

    def __init__(self) -> None:
        self._workers = Columns(
            best=0,
            comm=NO_COMM,
            segment=BEFORE_FIRST,
            place=0,
            longest=0,
            run=0,
            life=0,
        )
        self._views = Columns(slot=-1)
        self._numberings = Columns(slot=-1, run=-1, count=0)
        self._numbering_of: dict[tuple[int, int], int] = {}
        self._slots_of: dict[tuple[int, int, int], int] = {}
        self._held = np.zeros(0, OP)
        self.n_unpaired = 0

    def segments(self) -> IntArray:
        """The segment that each worker is in, shape (n_workers,)."""
        return self._workers["segment"]

    def slots(self) -> IntArray:
        """The slot of each view, −1 before its first operation was numbered, shape (n_views,)."""
        return self._views["slot"]

    def grow(self, n_workers: int, n_views: int) -> None:
        """Make room for workers and views that were registered."""
        self._workers.grow(n_workers)
        self._views.grow(n_views)

    def number(self, ops: Records, n_ranks: IntArray, *, final: bool) -> Records:
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
        comm, first, life = self._choose_comms(ops, n_ranks)
        keep, comm = self._hold_back(ops, comm, first, final=final)
        ops = ops[keep]
        if not ops.size:
            return np.zeros(0, KEY)
        return self._number(ops, comm[keep], self._find_numberings(ops, life[keep]), n_ranks)

    def _choose_comms(self, ops: Records, n_ranks: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """The peer-defining communicator in force at each operation, the row where the worker first had one, and lives.

        A worker's life ends when it gives its communicator up or finds a better one; shape (n_ops,), counted from 0.
        """
        worker = ops["worker"]
        size = _weigh(ops, n_ranks)
        life = np.zeros(ops.size, np.int64)
        while True:
            comm, best, before = self._choose_largest(ops, size, life)
            longest, is_given_up = self._find_given_up(ops, comm, size)
            if not is_given_up.any():
                break
            who, row = np.unique(worker[is_given_up], return_index=True)
            begins = np.full(self._workers.n, ops.size)
            begins[who] = np.flatnonzero(is_given_up)[row]
            life += np.arange(ops.size) >= begins[worker]
        last = index_of_last(run_starts(worker))
        self._workers["best"][worker[last]] = best[last]
        self._workers["longest"][worker[last]] = longest[last]
        is_switch = size > before
        is_first = is_switch & (before == 0) & (life == 0)
        first = np.full(self._workers.n, -1, np.int64)
        first[worker[is_first]] = np.flatnonzero(is_first)
        starts = run_starts(worker)
        earlier = np.where(starts, self._workers["comm"][worker], np.roll(comm, 1))
        finds_better = is_switch & (before > 0) & (comm != earlier)
        found = np.cumsum(finds_better)
        life += found - (found - finds_better)[index_of_start(starts)]
        life += self._workers["life"][worker]
        self._workers["life"][worker[last]] = life[last]
        return comm, first, life

    def _choose_largest(
        self, ops: Records, size: IntArray, life: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """The best communicator since each was given up, its weight, and the weight in force before each operation."""
        worker = ops["worker"]
        carried = np.where(life == 0, self._workers["best"][worker], 0)
        starts = run_starts(worker, life)
        best = running_max(np.maximum(size, carried), np.cumsum(starts) - 1)
        before = np.where(starts, carried, np.concatenate([[0], best[:-1]]))
        is_switch = size > before
        chosen = index_of_start(starts | is_switch)
        old = self._workers["comm"][worker]
        comm = np.where(is_switch[chosen], ops["comm"][chosen], old)
        return comm, best, before

    def _find_given_up(
        self, ops: Records, comm: IntArray, size: IntArray
    ) -> tuple[IntArray, BoolArray]:
        """A worker's longest segment so far, and where it reduces elsewhere so long after its last anchor."""
        worker, state = ops["worker"], self._workers
        starts, is_anchor = run_starts(worker), ops["comm"] == comm
        begin = index_of_start(starts | is_anchor)
        carried = state["place"][worker]
        place = np.arange(ops.size) - begin + np.where(is_anchor[begin], 0, carried)
        before = np.where(starts, carried, np.concatenate([[0], place[:-1] + 1]))
        earlier = np.concatenate([[NO_COMM], comm[:-1]])
        earlier = np.where(starts, state["comm"][worker], earlier)
        is_whole = is_anchor & (comm == earlier)  # from anchor to anchor of one communicator
        length = np.where(is_whole, before, 0)
        length = np.maximum(length, state["longest"][worker])
        longest = running_max(length, worker)
        is_late = place > _GIVE_UP_AFTER * longest + _GIVE_UP_OPS
        return longest, is_late & (size > 0) & ~is_anchor & (comm >= 0)

    def _hold_back(
        self, ops: Records, comm: IntArray, first: IntArray, *, final: bool
    ) -> tuple[BoolArray, IntArray]:
        """Which operations to number now, and on what.

        Before the first gradient communicator they wait or are dropped.
        """
        worker = ops["worker"]
        row = first[worker]
        is_early = (comm == NO_COMM) & (row >= 0)
        is_countable = is_early & (ops["seq"][np.maximum(row, 0)] == 0)
        comm = np.where(is_countable, ops["comm"][np.maximum(row, 0)], comm)
        is_lost = is_early & ~is_countable
        self.n_unpaired += int(is_lost.sum())
        is_waiting = (comm == NO_COMM) & ~is_lost
        n_held = np.bincount(worker[is_waiting], minlength=self._workers.n)
        gives_up = is_waiting & ((n_held > _MAX_HELD)[worker] | final)
        comm = np.where(gives_up, BY_LABELS, comm)
        self._workers["comm"][worker[gives_up]] = BY_LABELS
        self._held = ops[is_waiting & ~gives_up]
        keep = ~is_lost & ~(is_waiting & ~gives_up)
        return keep, comm

    def _find_numberings(self, ops: Records, life: IntArray) -> IntArray:
        """A view within one life of its worker: communicators are numbered anew when peers are chosen anew."""
        pairs, numbering = np.unique(
            ops["view"] << 16 | np.minimum(life, 0xFFFF), return_inverse=True
        )
        numberings = []
        for pair in pairs.tolist():
            key = pair >> 16, pair & 0xFFFF
            found = self._numbering_of.get(key)
            if found is None:
                found = self._numbering_of[key] = len(self._numbering_of)
                self._numberings.grow(found + 1)
            numberings.append(found)
        return np.asarray(np.array(numberings, np.int64)[numbering])

    def _number(
        self, ops: Records, comm: IntArray, numberings: IntArray, n_ranks: IntArray
    ) -> Records:
        worker, state = ops["worker"], self._workers
        starts = run_starts(worker)
        is_anchor = ops["comm"] == comm
        # Runs are counted from 1 within this batch; run 0 continues what earlier batches began.
        cumulative = np.cumsum(is_anchor)
        run = cumulative - (cumulative - is_anchor)[index_of_start(starts)]
        begin = index_of_start(starts | is_anchor)
        is_continued = run == 0
        segment = np.where(is_continued, state["segment"][worker], ops["seq"][begin])
        place = np.arange(ops.size) - begin
        place += np.where(is_continued, state["place"][worker], 0)
        absolute = state["run"][worker] + run
        self._name_slots(ops, numberings, n_ranks)
        ordinal = count_within(numberings, absolute)
        was_here = self._numberings["run"][numberings] == absolute
        ordinal += np.where(was_here, self._numberings["count"][numberings], 0)
        last = index_of_last(starts)
        state["segment"][worker[last]] = segment[last]
        state["place"][worker[last]] = place[last] + 1
        state["run"][worker[last]] = absolute[last]
        state["comm"][worker[last]] = comm[last]
        self._numberings["run"][numberings] = absolute  # the last row of a numbering wins
        self._numberings["count"][numberings] = ordinal + 1
        slots = self._numberings["slot"][numberings]
        self._views["slot"][ops["view"]] = slots
        keys = np.zeros(ops.size, KEY)
        for name in ("worker", "entry_ns", "seq", "view", "limit_use"):
            keys[name] = ops[name]
        keys["comm"], keys["segment"], keys["place"] = comm, segment, place
        keys["slot"] = np.where(is_anchor, -1, slots)
        keys["ordinal"] = np.where(is_anchor, 0, ordinal)
        keys["own_ns"] = np.where(ops["is_enqueue"] | (ops["own_ns"] < 0), -1, ops["own_ns"])
        return keys

    def _name_slots(self, ops: Records, numberings: IntArray, n_ranks: IntArray) -> None:
        """Number the communicators that a worker used for the first time in its life.

        A slot is (members, kind of the first operation, how many such communicators the worker had before).
        """
        slots = self._numberings["slot"]
        fresh = np.flatnonzero(slots[numberings] < 0)
        life_of = {one: life for (_, life), one in self._numbering_of.items()} if fresh.size else {}
        for row in fresh.tolist():
            numbering = int(numberings[row])
            if slots[numbering] >= 0:
                continue
            kind = int(n_ranks[ops["comm"][row]]) << 8 | int(ops["op"][row])
            key = int(ops["worker"][row]), life_of[numbering], kind
            nth = self._slots_of.get(key, 0)
            self._slots_of[key] = nth + 1
            slots[numbering] = kind << 16 | min(nth, 0xFFFF)
