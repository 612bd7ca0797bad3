"""What the workers of one replica share: the data.

A microbatch passes through every stage of its pipeline, so a heavy one makes all of them work longer at once, on nodes
that share nothing else. Whether a worker's slowdown is its own is therefore asked of its *siblings*, those that it
exchanges activations with, directly or through others, and that sit on other nodes: what most of them show over
the same operations is not the worker's.

Segments of different groups are aligned without clocks: the k-th exchange on a link is the same one for both of its ends.

Memory: the newest segments of each worker; an older onset is compared from the oldest of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ingero.detect.groups import PairedOps
from ingero.detect.rows import leave_one_out_median
from ingero.model.arrays import FloatArray, IntArray

_KEPT: Final = 256
_MIN_USUAL_NS: Final = 1_000_000
"""Own time of a sibling below which it says nothing."""


@dataclass(slots=True)
class _History:
    """One worker's sums at the start of each of its newest segments; the lists are of one length and ascend.

    Attributes:
        segment: Segment numbers.
        own: Own time before each.
        usual: What its peers took for the same operations, before each.
        total_own: Up to now.
        total_usual: Up to now.
        links: Communicator → first sequence number in a segment, and that segment, both ascending.
    """

    segment: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    usual: list[int] = field(default_factory=list)
    total_own: int = 0
    total_usual: int = 0
    links: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)

    def open_segment(self, number: int) -> None:
        """Begin a segment unless it is the one that is open."""
        if self.segment and number <= self.segment[-1]:
            return
        self.segment.append(number)
        self.own.append(self.total_own)
        self.usual.append(self.total_usual)
        if len(self.segment) >= 2 * _KEPT:
            for column in (self.segment, self.own, self.usual):
                del column[:_KEPT]
            for seqs, segments in self.links.values():
                stale = bisect_left(segments, self.segment[0])
                del seqs[:stale], segments[:stale]

    def meet(self, comm: int, seq: int, segment: int) -> None:
        """Note an exchange; only a segment's first on each link is kept."""
        seqs, segments = self.links.setdefault(comm, ([], []))
        if not segments or segment > segments[-1]:
            seqs.append(seq)
            segments.append(segment)

    def since(self, segment: int) -> tuple[int, int]:
        """Own time and its peers' from the start of a segment until now."""
        at = min(max(bisect_right(self.segment, segment) - 1, 0), len(self.segment) - 1)
        return self.total_own - self.own[at], self.total_usual - self.usual[at]


class Siblings:
    """Sums by worker and segment.

    Attributes:
        n_workers: How many are known.
    """

    def __init__(self) -> None:
        self._of: list[_History] = []

    @property
    def n_workers(self) -> int:
        """How many workers are known."""
        return len(self._of)

    def grow(self, n_workers: int) -> None:
        """Make room for workers that were registered."""
        while len(self._of) < n_workers:
            self._of.append(_History())

    def forget(self, worker: int) -> None:
        """Start a worker anew: its segments are numbered from the beginning among other peers."""
        self._of[worker] = _History()

    def note_links(
        self, members: Sequence[int], ops: PairedOps, comm_of_view: IntArray, is_link: IntArray
    ) -> None:
        """Take the exchanges among a group's operations, compared or not.

        Args:
            members: The group's workers, by column.
            ops: In canonical order.
            comm_of_view: Communicator of each view.
            is_link: Whether it is a link between two stages, by view.
        """
        here = (ops.view >= 0) & (is_link[np.maximum(ops.view, 0)] > 0)
        at, column = np.nonzero(here)
        if not at.size:
            return
        rows = np.stack([column, ops.view[at, column], ops.segment[at]])
        _, first = np.unique(rows, axis=1, return_index=True)
        for row in np.sort(first).tolist():
            where = int(at[row]), int(column[row])
            comm = int(comm_of_view[ops.view[where]])
            segment = int(ops.segment[where[0]])
            self._of[members[where[1]]].meet(comm, int(ops.seq[where]), segment)

    def add(self, members: Sequence[int], costs: FloatArray, segments: IntArray) -> None:
        """Take compared operations: costs of shape (T, m), NaN where missing, and their segments, shape (T,)."""
        is_here = ~np.isnan(costs)
        order = np.argsort(np.where(is_here, costs, np.inf), axis=1, kind="stable")
        ordered = np.take_along_axis(np.where(is_here, costs, np.inf), order, axis=1)
        place = np.empty_like(order)
        np.put_along_axis(place, order, np.arange(costs.shape[1])[None, :], axis=1)
        n_here = is_here.sum(axis=1, keepdims=True)
        usual = leave_one_out_median(ordered, n_here, place, is_here)
        is_here &= ~np.isnan(usual)
        own_ns = np.where(is_here, costs, 0.0).astype(np.int64)
        usual_ns = np.round(np.where(is_here, usual, 0.0)).astype(np.int64)
        starts = np.flatnonzero(np.diff(segments, prepend=segments[0] - 1))
        own_sums = np.add.reduceat(own_ns, starts, axis=0)
        usual_sums = np.add.reduceat(usual_ns, starts, axis=0)
        for column, worker in enumerate(members):
            history = self._of[worker]
            for at, start in enumerate(starts.tolist()):
                history.open_segment(int(segments[start]))
                history.total_own += int(own_sums[at, column])
                history.total_usual += int(usual_sums[at, column])

    def shared(
        self,
        worker: int,
        span: tuple[int, int | None],
        links: Mapping[int, Mapping[int, int]],
        among: Iterable[int],
    ) -> tuple[float, int]:
        """How much of a slowdown most siblings share.

        Args:
            worker: Whose slowdown.
            span: Its segments: the first, and the one at which it was over, None while it lasts.
            links: Every worker's links: worker → communicator → the worker at the other end.
            among: Siblings that may speak.

        Returns:
            Natural log of own time over the peers' that at least half of those siblings reach (the lower median), at
            least 0; and how many spoke.
        """
        begin = self._align(worker, span[0], links)
        end = {} if span[1] is None else self._align(worker, span[1], links)
        said = []
        for sibling in among:
            if sibling not in begin:
                continue
            own, usual = self._of[sibling].since(begin[sibling])
            if sibling in end:
                later_own, later_usual = self._of[sibling].since(end[sibling])
                own, usual = own - later_own, usual - later_usual
            if usual >= _MIN_USUAL_NS and own > 0:
                said.append(math.log(own / usual))
        if not said:
            return 0.0, 0
        return max(sorted(said)[(len(said) - 1) // 2], 0.0), len(said)

    def _align(
        self, worker: int, segment: int, links: Mapping[int, Mapping[int, int]]
    ) -> dict[int, int]:
        """The segment of every worker of the replica in which it was when this worker was in that segment."""
        found, todo = {worker: segment}, [worker]
        while todo:
            here = todo.pop(0)
            for comm, other in sorted(links.get(here, {}).items()):
                mine, theirs = self._of[here].links.get(comm), self._of[other].links.get(comm)
                if other in found or not mine or not theirs or not mine[0] or not theirs[0]:
                    continue
                at = min(bisect_left(mine[1], found[here]), len(mine[0]) - 1)
                their_at = max(bisect_right(theirs[0], mine[0][at]) - 1, 0)
                found[other] = theirs[1][their_at]
                todo.append(other)
        return found
