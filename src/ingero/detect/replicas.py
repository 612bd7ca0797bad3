"""What the workers of one replica share: the data.

A microbatch passes through every stage of its pipeline, so a heavy one makes all of them work longer at once, on nodes
that share nothing else. A worker's slowdown is therefore compared with those of the other workers of its replica (those
that it exchanges activations with, directly or through others) on other nodes: what most of them show over the same
operations is not the worker's own.

Segments of different groups are aligned without clocks: the k-th exchange on a link is the same for both of its ends.

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
from ingero.detect.links import Links
from ingero.detect.medians import medians_of_others
from ingero.model.arrays import FloatArray, IntArray

_MIN_SEGMENTS: Final = 256
_MIN_USUAL_NS: Final = 1_000_000
"""Compute time of a worker of the replica below which its slowdown is not used."""


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
        if len(self.segment) >= 2 * _MIN_SEGMENTS:
            for column in (self.segment, self.own, self.usual):
                del column[:_MIN_SEGMENTS]
            for seqs, segments in self.links.values():
                stale = bisect_left(segments, self.segment[0])
                del seqs[:stale], segments[:stale]

    def note_exchange(self, comm: int, seq: int, segment: int) -> None:
        """Note an exchange; only a segment's first on each link is kept."""
        seqs, segments = self.links.setdefault(comm, ([], []))
        if not segments or segment > segments[-1]:
            seqs.append(seq)
            segments.append(segment)

    def since(self, segment: int) -> tuple[int, int]:
        """Own time and its peers' from the start of a segment until now."""
        at = min(max(bisect_right(self.segment, segment) - 1, 0), len(self.segment) - 1)
        return self.total_own - self.own[at], self.total_usual - self.usual[at]


class ReplicaTimes:
    """Compute times by worker and segment, for comparison within a replica."""

    def __init__(self) -> None:
        self._of: list[_History] = []

    def grow(self, n_workers: int) -> None:
        """Make room for workers that were registered."""
        while len(self._of) < n_workers:
            self._of.append(_History())

    def forget(self, worker: int) -> None:
        """Start a worker anew: its segments are numbered from the beginning among other peers."""
        self._of[worker] = _History()

    def note_links(self, members: Sequence[int], ops: PairedOps, links: Links) -> None:
        """Note the exchanges among a group's operations, compared or not.

        Args:
            members: The group's workers, by column.
            ops: In canonical order.
            links: Which views are links between two stages.
        """
        here = (ops.view >= 0) & links.is_between_stages[np.maximum(ops.view, 0)]
        at, column = np.nonzero(here)
        if not at.size:
            return
        rows = np.stack([column, ops.view[at, column], ops.segment[at]])
        _, first = np.unique(rows, axis=1, return_index=True)
        for row in np.sort(first).tolist():
            where = int(at[row]), int(column[row])
            comm = int(links.comms[ops.view[where]])
            segment = int(ops.segment[where[0]])
            self._of[members[where[1]]].note_exchange(comm, int(ops.seq[where]), segment)

    def add(self, members: Sequence[int], costs: FloatArray, segments: IntArray) -> None:
        """Add compared operations: costs of shape (T, m), NaN where missing, and their segments, shape (T,)."""
        usual = medians_of_others(costs)
        is_here = ~np.isnan(costs) & ~np.isnan(usual)
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
        """How much of a slowdown most others of the replica share.

        Args:
            worker: Whose slowdown.
            span: Its segments: the first, and the one at which it was over, None while it is open.
            links: Every worker's links: worker → communicator → the worker at the other end.
            among: The others that are asked.

        Returns:
            Natural log of own time over the peers' that at least half of those others reach (the lower median), at
            least 0; and how many could be compared.
        """
        begin = self._align(worker, span[0], links)
        end = {} if span[1] is None else self._align(worker, span[1], links)
        ratios = []
        for other in among:
            if other not in begin:
                continue
            own, usual = self._of[other].since(begin[other])
            if other in end:
                later_own, later_usual = self._of[other].since(end[other])
                own, usual = own - later_own, usual - later_usual
            if usual >= _MIN_USUAL_NS and own > 0:
                ratios.append(math.log(own / usual))
        if not ratios:
            return 0.0, 0
        return max(sorted(ratios)[(len(ratios) - 1) // 2], 0.0), len(ratios)

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
