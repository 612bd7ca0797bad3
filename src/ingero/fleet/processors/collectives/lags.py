"""How late each rank entered, against its peers: ``nccl.collective.peer_lag_ms``.

All ranks leave a collective together, so rank r with time d_r inside arrived max d − d_r behind the first; its lag
behind its peers is the median of the others' d less its own: positive is late, and late is the short call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ingero.model.arrays import FloatArray, IntArray
from ingero.model.collectives import ClockKind, CollectiveRun, Rank
from ingero.units import NS_PER_MS

_MAX_KEPT_OPS: Final = 1_000_000
_KEPT_PER_RANK: Final = 1024


@dataclass(frozen=True, slots=True)
class PeerLag:
    """One rank on one communicator.

    Attributes:
        rank: The worker.
        comm: Communicator id hash.
        comm_rank: Its rank there.
        lag_ms: Median over the operations compared; positive is late.
        n_ops: How many operations that every reporting rank had.
        n_ranks: How many ranks reported.
        is_approximate: Times are of the enqueue, or operations could not be matched by sequence.
    """

    rank: Rank
    comm: str
    comm_rank: int
    lag_ms: float
    n_ops: int
    n_ranks: int
    is_approximate: bool


@dataclass(slots=True)
class _Reported:
    rank: Rank
    clock: ClockKind
    seq: npt.NDArray[np.uint64]
    inside_ns: IntArray
    entered_ns: int

    def is_before(self, run: CollectiveRun) -> bool:
        """Whether a run counts anew, later than this: its job was started again under the same names."""
        first = int(run.ops["entry_ns"].argmin())
        is_later = int(run.ops["entry_ns"][first]) > self.entered_ns
        return is_later and int(run.ops["seq"][first]) <= int(self.seq.min())


def lags_of(inside_ns: FloatArray) -> FloatArray:
    """Lag behind the peers, shape (m, n) like the times inside of m ranks in n operations; same unit."""
    n_ranks = inside_ns.shape[0]
    ordered = np.sort(inside_ns, axis=0)
    place = np.argsort(np.argsort(inside_ns, axis=0, kind="stable"), axis=0, kind="stable")
    n_others = n_ranks - 1
    low, high = (n_others - 1) // 2, n_others // 2
    columns = np.arange(inside_ns.shape[1])

    def others(at: int) -> FloatArray:
        # Without its own entry, everything at or above its place moves down by one.
        return ordered[np.where(place <= at, at + 1, at), columns]

    result: FloatArray = (others(low) + others(high)) / 2.0 - inside_ns
    return result


def _sort_by_seq(one: _Reported) -> tuple[npt.NDArray[np.uint64], IntArray]:
    """Distinct operations in order, of those that came twice the first."""
    if (one.seq[1:] > one.seq[:-1]).all():
        return one.seq, one.inside_ns
    seq, first = np.unique(one.seq, return_index=True)
    return seq, one.inside_ns[first]


class LagTracker:
    """The newest operations of each rank on each communicator of one cluster, bounded."""

    def __init__(self) -> None:
        self._reported: dict[str, dict[int, _Reported]] = {}
        self._n_ranks = 0

    def add(self, runs: Iterable[CollectiveRun]) -> set[str]:
        """Remember the newest operations of each run; returns the communicators that changed."""
        changed = set()
        for run in runs:
            is_known = run.ops["inside_ns"] >= 0
            if not is_known.any():
                continue
            ranks = self._reported.setdefault(run.comm, {})
            before = ranks.get(run.comm_rank)
            if before is not None and before.is_before(run):
                self._n_ranks -= len(ranks)
                ranks.clear()
                before = None
            self._n_ranks += run.comm_rank not in ranks
            keep = max(16, min(_KEPT_PER_RANK, _MAX_KEPT_OPS // self._n_ranks))
            seq = run.ops["seq"][is_known].astype(np.uint64)
            inside = run.ops["inside_ns"][is_known].astype(np.int64)
            entered_ns = int(run.ops["entry_ns"].max())
            if before is not None:
                entered_ns = max(entered_ns, before.entered_ns)
                seq = np.concatenate((before.seq, seq))
                inside = np.concatenate((before.inside_ns, inside))
            ranks[run.comm_rank] = _Reported(
                run.rank, run.clock, seq[-keep:].copy(), inside[-keep:].copy(), entered_ns
            )
            changed.add(run.comm)
        return changed

    def lags(self, comm: str) -> list[PeerLag]:
        """The lag of each rank over the operations that all reporting ranks share; empty when there are none."""
        ranks = self._reported.get(comm, {})
        if len(ranks) < 2:
            return []
        reported = [ranks[at] for at in sorted(ranks)]
        columns = [_sort_by_seq(one) for one in reported]
        known, counts = np.unique(np.concatenate([seq for seq, _ in columns]), return_counts=True)
        shared = known[counts == len(reported)]
        if not shared.size:
            return []
        table = np.empty((len(reported), shared.size))
        for row, (seq, inside_ns) in enumerate(columns):
            table[row] = inside_ns[np.searchsorted(seq, shared)]
        lag_ms = np.median(lags_of(table), axis=1) / NS_PER_MS
        return [
            PeerLag(
                rank=one.rank,
                comm=comm,
                comm_rank=at,
                lag_ms=float(lag),
                n_ops=int(shared.size),
                n_ranks=len(reported),
                is_approximate=one.clock is ClockKind.ENQUEUE,
            )
            for at, one, lag in zip(sorted(ranks), reported, lag_ms, strict=True)
        ]


def gauge_lags(durations_ms: Mapping[object, float]) -> dict[object, float]:
    """Lag of each rank from one duration each, in ms; empty with fewer than two ranks."""
    if len(durations_ms) < 2:
        return {}
    values = np.array(list(durations_ms.values()), np.float64)
    return dict(zip(durations_ms, lags_of(values[:, None])[:, 0].tolist(), strict=True))
