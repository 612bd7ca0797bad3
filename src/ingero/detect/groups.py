"""Peer groups: operations that correspond, in one canonical order, once every member that should have one has it.

The order in which pairs reach the e-detector is (segment, place, slot, ordinal), a property of the operations
alone. A pair is complete when each member of the group reported it or has left its segment; pairs are taken up to the
first that is not. A member that keeps the others waiting for longer than ``patience_ns`` of arrival time is
absent from then on, until it reports again: its peers wait for it once, not for each operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ingero.detect.runs import run_starts
from ingero.model.arrays import BoolArray, IntArray, Records

FOREVER: Final = np.iinfo(np.int64).max


@dataclass(slots=True, eq=False)
class PeerGroup:
    """Workers that do the same work.

    Attributes:
        comm: Communicator index that defines it, or BY_LABELS.
        members: Worker indices, in the order of their columns.
        is_open: Membership is known, so pairing has begun.
        late: Workers that came to it since, until they become members.
        late_ns: Arrival of the first of them.
        n_widened: How often late ones became members.
        depth: How many groups some member was in before this one: its evidence comes after theirs.
        first_ns: First arrival, on the clock of arrivals.
        last_ns: Last arrival, likewise.
        since_ns: First arrival, while not open; else when it began to wait for a member, or None.
        gone: Members that nobody waits for: they moved to another group, or are absent.
        pending: Rows of KEY.
        n_pending: Operations that wait.
    """

    comm: int
    members: list[int] = field(default_factory=list)
    is_open: bool = False
    late: list[int] = field(default_factory=list)
    late_ns: int = 0
    n_widened: int = 0
    depth: int = 0
    first_ns: int = 0
    last_ns: int = 0
    since_ns: int | None = None
    gone: set[int] = field(default_factory=set)
    pending: list[Records] = field(default_factory=list)
    n_pending: int = 0

    @property
    def seen_ns(self) -> tuple[int, int]:
        """First and last arrival, on the clock of arrivals."""
        return self.first_ns, self.last_ns


@dataclass(frozen=True, slots=True)
class PairedOps:
    """Pairs that are complete, in canonical order.

    Attributes:
        own_ns: Shape (T, m): own time before the operation; −1 where it is missing or cannot be compared.
        entry_ns: Shape (T, m); −1 where missing.
        seq: Shape (T, m).
        view: Shape (T, m); −1 where missing.
        limit_use: Shape (T, m): as in `COLLECTIVE_OP`; −1 where missing.
        segment: Shape (T,).
    """

    own_ns: IntArray
    entry_ns: IntArray
    seq: IntArray
    view: IntArray
    limit_use: IntArray
    segment: IntArray

    def where(self, mask: BoolArray) -> PairedOps:
        """The operations of a mask, shape (T,)."""
        return PairedOps(
            self.own_ns[mask],
            self.entry_ns[mask],
            self.seq[mask],
            self.view[mask],
            self.limit_use[mask],
            self.segment[mask],
        )


def take_complete(
    group: PeerGroup, segments: IntArray, now_ns: int, patience_ns: int, *, final: bool
) -> PairedOps | None:
    """Remove and return the pairs of an open group that are complete; None when there are none.

    Args:
        group: Changed in place.
        segments: Segment that each worker has reached, by worker index.
        now_ns: On the clock of arrivals.
        patience_ns: How long a member may keep the others waiting.
        final: Nothing more will come.
    """
    if not group.n_pending:
        group.since_ns = None
        return None
    rows = np.concatenate(group.pending)
    column = {worker: at for at, worker in enumerate(group.members)}
    columns = np.array([column.get(int(w), -1) for w in rows["worker"].tolist()], np.int64)
    rows, columns = rows[columns >= 0], columns[columns >= 0]
    reached = segments[np.array(group.members, np.int64)].copy()
    reached[[column[worker] for worker in group.gone if worker in column]] = FOREVER
    order, key_of, has = _order_keys(rows, columns, len(group.members))
    first = np.flatnonzero(np.diff(key_of, prepend=-1))
    segment = rows["segment"][order][first]
    is_complete = (has | (reached[None, :] > segment[:, None])).all(axis=1) | final
    n_keys = int(is_complete.size if is_complete.all() else is_complete.argmin())
    if n_keys < is_complete.size:
        group.since_ns = now_ns if n_keys or group.since_ns is None else group.since_ns
        if now_ns - group.since_ns >= patience_ns:
            missing = ~has[n_keys] & (reached <= segment[n_keys])
            group.gone.update(group.members[at] for at in np.flatnonzero(missing).tolist())
    else:
        group.since_ns = None
    is_taken = key_of < n_keys
    kept = rows[order[~is_taken]]
    group.pending, group.n_pending = ([kept] if kept.size else []), int(kept.size)
    if not n_keys:
        return None
    return _spread(rows[order[is_taken]], columns[order[is_taken]], key_of[is_taken], has[:n_keys])


def _order_keys(
    rows: Records, columns: IntArray, n_members: int
) -> tuple[IntArray, IntArray, BoolArray]:
    """Canonical order of the rows, the key that each row belongs to, and which members have each key."""
    by_key = np.lexsort((rows["ordinal"], rows["slot"], rows["segment"]))
    names = [rows[name][by_key] for name in ("segment", "slot", "ordinal")]
    starts = run_starts(*names)
    first = np.flatnonzero(starts)
    run = np.cumsum(starts) - 1
    place = np.minimum.reduceat(rows["place"][by_key], first)
    rank = np.empty(first.size, np.int64)
    canonical = np.lexsort((names[2][first], names[1][first], place, names[0][first]))
    rank[canonical] = np.arange(first.size)
    key_of = rank[run]
    order = np.argsort(key_of, kind="stable")
    has = np.zeros((first.size, n_members), bool)
    has[key_of, columns[by_key]] = True
    return by_key[order], key_of[order], has


def _spread(rows: Records, columns: IntArray, key_of: IntArray, has: BoolArray) -> PairedOps:
    def table(name: str) -> IntArray:
        values = np.full(has.shape, -1, np.int64)
        values[key_of, columns] = rows[name]
        return values

    segment = np.empty(has.shape[0], np.int64)
    segment[key_of] = rows["segment"]
    return PairedOps(
        table("own_ns"), table("entry_ns"), table("seq"), table("view"), table("limit_use"), segment
    )


def iter_by_group(keys: Records) -> Iterator[tuple[int, int, Records]]:
    """Each worker's consecutive rows of KEY on one communicator: worker, communicator, rows."""
    bounds = np.flatnonzero(run_starts(keys["worker"], keys["comm"]))
    for part in np.split(keys, bounds[1:]) if keys.size else []:
        yield int(part["worker"][0]), int(part["comm"][0]), part
