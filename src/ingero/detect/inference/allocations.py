"""How long device memory is held: allocations matched with their release.

Which of a server's allocations hold its KV cache is not in the calls. An engine that takes its cache once holds one
old, large allocation; one that takes blocks as requests come shows how long requests keep them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ingero.model.arrays import IntArray, Records
from ingero.model.events import DriverOp, EventFlag, Events
from ingero.model.operations import OpKind, code_of, find_kinds
from ingero.units import NS_PER_MS

HELD: Final = np.dtype([
    ("start_ns", "<i8"),  # Unix time of the allocation's return
    ("pid", "<i4"),
    ("handle", "<i8"),  # pointer; or handle of memory without an address
    ("bytes", "<i8"),
    ("is_created", "?"),  # memory without an address, whose handles are another kind of number
    ("is_free", "?"),
])
_CREATED: Final = list(map(code_of, (DriverOp.MEM_CREATE, DriverOp.MEM_RELEASE)))


@dataclass(slots=True)
class AllocationAges:
    """Device memory that traced processes hold.

    Args:
        max_per_pid: Allocations that are followed of one process; the oldest stay.

    Attributes:
        n_untracked: Allocations that were not followed because a process held too many.
        held: Rows of HELD that were not released.
    """

    max_per_pid: int
    n_untracked: int = 0
    held: Records = field(default_factory=lambda: np.zeros(0, HELD))
    _released: Records = field(default_factory=lambda: np.zeros(0, HELD))
    _released_ns: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))

    def take(self, events: Events) -> IntArray:
        """Take rows of EVENT, in any order and of any kind.

        Returns:
            Ages in nanoseconds, shape (n,), of the allocations that were released.
        """
        rows = np.concatenate([self.held, _build(events)])
        self._released, self._released_ns = rows[:0], np.zeros(0, np.int64)
        if not len(rows):
            return self._released_ns
        keys = ("is_free", "start_ns", "handle", "is_created", "pid")
        rows = rows[np.lexsort([rows[name] for name in keys])]
        is_same = np.ones(len(rows) - 1, bool)
        for name in ("pid", "is_created", "handle"):
            is_same &= rows[name][1:] == rows[name][:-1]
        is_released = np.zeros(len(rows), bool)
        is_released[:-1] = is_same & ~rows["is_free"][:-1] & rows["is_free"][1:]
        # A second allocation at one place without a release between them: the release was not seen.
        is_replaced = np.zeros(len(rows), bool)
        is_replaced[:-1] = is_same & ~rows["is_free"][:-1] & ~rows["is_free"][1:]
        released = np.flatnonzero(is_released)
        self._released, self._released_ns = rows[released], rows["start_ns"][released + 1]
        ages: IntArray = self._released_ns - self._released["start_ns"]
        self.held = self._bound(rows[~rows["is_free"] & ~is_released & ~is_replaced])
        return ages

    def _bound(self, held: Records) -> Records:
        held = held[np.lexsort((held["start_ns"], held["pid"]))]
        begins = np.searchsorted(held["pid"], held["pid"])
        is_kept = np.arange(len(held)) - begins < self.max_per_pid
        self.n_untracked += int((~is_kept).sum())
        kept: Records = held[is_kept]
        return kept

    def forget(self, pids: set[int]) -> None:
        """Forget processes that ended: their memory is released."""
        self.held = self.held[~np.isin(self.held["pid"], list(pids))]

    def find_oldest_ms(self, pid: int, at_ns: int, top_n: int) -> tuple[int, ...]:
        """Ages of the oldest allocations that a process held at a moment of the newest events, oldest first."""
        was_held = self._released[self._released_ns > at_ns]
        rows = np.concatenate([self.held, was_held])
        starts = np.sort(rows["start_ns"][(rows["pid"] == pid) & (rows["start_ns"] <= at_ns)])
        return tuple(((at_ns - starts[:top_n]) // NS_PER_MS).tolist())


def _build(events: Events) -> Records:
    """Rows of HELD from calls that succeeded; a managed or pooled allocation is one like any other."""
    kinds = find_kinds(events["source"], events["op"])
    codes = events["source"].astype(np.int64) << 8 | events["op"]
    is_it = np.isin(kinds, (OpKind.ALLOC, OpKind.FREE))
    is_it &= (events["ret_code"] == 0) & (
        (events["flags"] & (EventFlag.NESTED | EventFlag.IN_FLIGHT)) == 0
    )
    events, kinds, codes = events[is_it], kinds[is_it], codes[is_it]
    is_free = kinds == OpKind.FREE
    rows = np.zeros(len(events), HELD)
    rows["pid"] = events["pid"]
    rows["start_ns"] = events["start_ns"] + np.where(is_free, 0, events["duration_ns"])
    rows["handle"] = np.where(is_free, events["arg0"], events["arg1"])
    rows["bytes"] = np.where(is_free, events["arg1"], events["arg0"])
    rows["is_created"] = np.isin(codes, _CREATED)
    rows["is_free"] = is_free
    known: Records = rows[rows["handle"] != 0]
    return known
