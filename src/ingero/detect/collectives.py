"""Who waited: operations matched across ranks by (communicator, sequence number), without clocks.

All ranks leave a collective together, so with d_r the time rank r spent inside, r arrived max d − d_r after the first
and lost d_r − min d waiting. Long inside means victim. Totals are sums and maxima of integers: the order in which
reports arrive cannot change them.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ingero.detect.columns import Columns
from ingero.detect.runs import index_of_last, index_of_start, run_starts, running_max
from ingero.model.arrays import IntArray, Records

ENTRY: Final = np.dtype([
    ("comm", "<i8"),
    ("seq", "<i8"),
    ("worker", "<i8"),
    ("inside_ns", "<i8"),
    ("episode", "<i8"),
    ("arrived_ns", "<i8"),
])
_EPISODE: Final = np.dtype([("worker", "<i8"), ("episode", "<i8"), ("wait_ns", "<i8")])
_REMEMBERED: Final = 256
"""Episodes of one worker for which late matches still find the wait already counted."""
_BINS_PER_OCTAVE: Final = 8
_N_BINS: Final = 40 * _BINS_PER_OCTAVE


class WaitLedger:
    """What each worker lost waiting, and how long each link's transfers took.

    Operations that a worker has in flight together (a batched send and receive) form one *episode*: it is blocked once,
    for the longest of them.

    Args:
        patience_ns: How long, on the clock of arrivals, a collective waits for members that do not report.

    Attributes:
        wait_ns: By worker, shape (n_workers,).
        n_matched: Operations matched with at least one other member.
        n_incomplete: Operations matched without all of their members.
        n_alone: Operations that no other member reported; they count as no wait.
    """

    def __init__(self, patience_ns: int) -> None:
        self._patience_ns = patience_ns
        self._workers = Columns(wait=0, leave=-1, episode=0)
        self._pending = np.zeros(0, ENTRY)
        self._episodes = np.zeros(0, _EPISODE)
        self._transfer_bins: dict[int, npt.NDArray[np.uint32]] = {}
        self.transfer_ns: dict[int, int] = {}
        self.n_matched = self.n_incomplete = self.n_alone = 0

    @property
    def wait_ns(self) -> IntArray:
        """By worker, shape (n_workers,)."""
        return self._workers["wait"]

    @property
    def n_pending(self) -> int:
        """Operations that wait for other members' reports."""
        return int(self._pending.size)

    def grow(self, n_workers: int) -> None:
        """Make room for workers that were registered."""
        self._workers.grow(n_workers)

    def add(self, ops: Records) -> None:
        """Take operations, sorted by worker and entry; those whose end was not seen are left out."""
        ops = ops[ops["inside_ns"] >= 0]
        if not ops.size:
            return
        worker, leave = ops["worker"], ops["entry_ns"] + ops["inside_ns"]
        starts = run_starts(worker)
        carried = self._workers["leave"][worker]
        latest = running_max(np.maximum(leave, carried), worker)
        before = np.where(starts, carried, np.concatenate([[-1], latest[:-1]]))
        # Recorded ends are rounded: a small overlap is no concurrency.
        is_new = ops["entry_ns"] + ops["inside_ns"] // 2 >= before
        count = np.cumsum(is_new)
        number = count - (count - is_new)[index_of_start(starts)]
        episode = number + self._workers["episode"][worker]
        last = index_of_last(starts)
        self._workers["leave"][worker[last]] = latest[last]
        self._workers["episode"][worker[last]] = episode[last]
        entries = np.zeros(ops.size, ENTRY)
        for name in ("comm", "seq", "worker", "inside_ns", "arrived_ns"):
            entries[name] = ops[name]
        entries["episode"] = episode
        self._pending = np.concatenate([self._pending, entries])

    def settle(self, now_ns: int, n_ranks: IntArray, *, final: bool) -> None:
        """Account for every collective that is complete, or that has waited long enough."""
        if not self._pending.size:
            return
        rows = self._pending[np.lexsort((self._pending["seq"], self._pending["comm"]))]
        starts = run_starts(rows["comm"], rows["seq"])
        first = np.flatnonzero(starts)
        which = np.cumsum(starts) - 1
        counts = np.diff(np.append(first, rows.size))
        is_complete = counts >= n_ranks[rows["comm"][first]]
        oldest = np.minimum.reduceat(rows["arrived_ns"], first)
        is_due = is_complete | final | (now_ns - oldest >= self._patience_ns)
        self._pending = rows[~is_due[which]]
        is_shared = counts > 1
        self.n_alone += int((is_due & ~is_shared & ~is_complete).sum())
        self.n_matched += int(counts[is_due & is_shared].sum())
        self.n_incomplete += int(counts[is_due & is_shared & ~is_complete].sum())
        least = np.minimum.reduceat(rows["inside_ns"], first)
        taken = (is_due & is_shared)[which]
        found = np.zeros(int(taken.sum()), _EPISODE)
        found["worker"], found["episode"] = rows["worker"][taken], rows["episode"][taken]
        found["wait_ns"] = (rows["inside_ns"] - least[which])[taken]
        self._count_waits(found)
        is_link = is_due & is_complete & (counts == 2)
        self._count_transfers(rows["comm"][first][is_link], least[is_link])

    def _count_waits(self, found: Records) -> None:
        """Add what these matches make an episode longer by."""
        table = np.concatenate([self._episodes, found])
        is_old = np.arange(table.size) < self._episodes.size
        order = np.lexsort((table["episode"], table["worker"]))
        table, is_old = table[order], is_old[order]
        first = np.flatnonzero(run_starts(table["worker"], table["episode"]))
        if not first.size:
            return
        longest = np.maximum.reduceat(table["wait_ns"], first)
        counted = np.maximum.reduceat(np.where(is_old, table["wait_ns"], 0), first)
        np.add.at(self._workers["wait"], table["worker"][first], longest - counted)
        kept = table[first]
        kept["wait_ns"] = longest
        newest = self._workers["episode"][kept["worker"]]
        self._episodes = kept[kept["episode"] > newest - _REMEMBERED]

    def _count_transfers(self, comms: IntArray, transfer_ns: IntArray) -> None:
        bins = np.clip(
            (np.log2(np.maximum(transfer_ns, 1)) * _BINS_PER_OCTAVE).astype(np.int64),
            0,
            _N_BINS - 1,
        )
        order = np.argsort(comms, kind="stable")
        bounds = np.flatnonzero(run_starts(comms[order]))
        for part in np.split(order, bounds[1:]) if order.size else []:
            comm = int(comms[part[0]])
            counts = self._transfer_bins.setdefault(comm, np.zeros(_N_BINS, np.uint32))
            counts += np.bincount(bins[part], minlength=_N_BINS).astype(np.uint32)
            self.transfer_ns[comm] = self.transfer_ns.get(comm, 0) + int(transfer_ns[part].sum())

    def typical_transfer(self, comm: int) -> tuple[float, int]:
        """Median transfer time of a link, to a ninth, and how many transfers; (NaN, 0) without any."""
        counts = self._transfer_bins.get(comm)
        if counts is None:
            return float("nan"), 0
        total = np.cumsum(counts)
        at = int(np.searchsorted(total, (int(total[-1]) + 1) // 2))
        return float(2.0 ** ((at + 0.5) / _BINS_PER_OCTAVE)), int(total[-1])
