"""Collectives of the part: how long each rank was inside, and who came last.

The last rank to arrive spends the least time inside, because the others wait for it there. That holds for calls that
block; where calls only enqueue, the times say nothing and `is_blocking` is false.

The exact counts of a recording do not tell communicators apart, so these numbers are of rows, and say which share of
the calls has one. Where some have none, only operations with a row of every rank say who came last.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
import numpy as np

from ingero.model.arrays import IntArray, Records
from ingero.model.events import EventFlag, op_name
from ingero.model.operations import OpKind
from ingero.model.untrusted import clean
from ingero.recording.causal.evidence import Evidence
from ingero.recording.causal.exact import share_of_rows
from ingero.units import NS_PER_MS

_BLOCKS: Final = NS_PER_MS  # a call shorter than this (median) is taken for one that only enqueues
_RANK_SHIFT: Final = 32
_MIN_RANKS: Final = 2  # ranks that can be compared


class RankTimes(msgspec.Struct, frozen=True):
    """One rank in one kind of operation."""

    rank: int
    node: str
    process: str
    pid: int
    count: Annotated[int, msgspec.Meta(description="calls on this communicator with a row")]
    row_share: Annotated[
        float | None,
        msgspec.Meta(
            description="part of the process's calls of this operation, on every communicator, that has a row; "
            "null: nobody counted the others"
        ),
    ]
    p50_us: float
    p99_us: float
    max_us: float
    came_last: Annotated[
        int, msgspec.Meta(description="operations in which it was inside for the least time")
    ]


class CollectiveAnswer(msgspec.Struct, frozen=True):
    """One operation on one communicator, over the ranks that the recording has."""

    comm: str
    op: str
    ranks_of: Annotated[int, msgspec.Meta(description="ranks of the communicator; 0 unknown")]
    operations: int
    compared: Annotated[
        int,
        msgspec.Meta(
            description="operations that say who came last: of at least two recorded ranks, and of all where "
            "rows are missing"
        ),
    ]
    row_share: Annotated[
        float | None,
        msgspec.Meta(description="least share of a rank's calls with a row; null: not counted"),
    ]
    bytes: Annotated[int, msgspec.Meta(description="of one call, median")]
    is_blocking: bool
    wait_p50_us: Annotated[
        float | None, msgspec.Meta(description="longest minus shortest time inside, median")
    ]
    ranks: list[RankTimes]


class CollectivesAnswer(msgspec.Struct, frozen=True):
    """Every operation, most time inside first."""

    collectives: list[CollectiveAnswer]


def list_collectives(evidence: Evidence) -> CollectivesAnswer:
    """Compare the ranks of every communicator."""
    flags = evidence.recording.events["flags"][evidence.rows.idx]
    # What a collective calls inside is the same one again.
    is_one = (flags & (EventFlag.IN_FLIGHT | EventFlag.NESTED)) == 0
    idx = evidence.rows.idx[(evidence.rows.kinds == OpKind.COLLECTIVE) & is_one]
    events = evidence.recording.events[idx]
    if not len(events):
        return CollectivesAnswer([])
    keys = np.stack((events["arg1"], events["op"].astype(np.int64)), axis=1)
    _, group = np.unique(keys, axis=0, return_inverse=True)
    group = group.reshape(-1)
    found = [
        (int(events["duration_ns"][group == i].sum()), _summarise(evidence, events[group == i]))
        for i in range(int(group.max()) + 1)
    ]
    found.sort(key=lambda pair: (-pair[0], pair[1].comm, pair[1].op))
    return CollectivesAnswer([answer for _, answer in found])


def _summarise(evidence: Evidence, events: Records) -> CollectiveAnswer:
    first = events[0]
    ranks = events["arg3"] >> _RANK_SHIFT
    is_blocking = bool(np.median(events["duration_ns"]) >= _BLOCKS)
    members = np.unique(ranks).tolist()
    shares = {rank: _row_share(evidence, events[ranks == rank]) for rank in members}
    is_whole = all(share == 1 for share in shares.values())
    n_ranks = int(first["arg3"]) & 0xFFFF_FFFF
    n_least = _MIN_RANKS if is_whole else max(n_ranks, len(members), _MIN_RANKS)
    last, wait_ns = _compare(events["arg2"], events["duration_ns"], n_least)
    known = [share for share in shares.values() if share is not None]
    return CollectiveAnswer(
        comm=f"{int(first['arg1']) & 0xFFFF_FFFF_FFFF_FFFF:#x}",
        op=op_name(int(first["source"]), int(first["op"])),
        ranks_of=n_ranks,
        operations=len(np.unique(events["arg2"])),
        compared=len(wait_ns),
        row_share=min(known) if len(known) == len(shares) else None,
        bytes=int(np.median(events["arg0"])),
        is_blocking=is_blocking,
        wait_p50_us=round(float(np.median(wait_ns)) / 1e3, 1)
        if len(wait_ns) and is_blocking
        else None,
        ranks=[
            _rank_times(
                evidence, events[ranks == rank], int((ranks[last] == rank).sum()), shares[rank]
            )
            for rank in members
        ],
    )


def _row_share(evidence: Evidence, events: Records) -> float | None:
    """Which part of one rank's calls of an operation has a row, over the processes that were this rank."""
    code = int(events["source"][0]) << 8 | int(events["op"][0])
    places = set(zip(events["node"].tolist(), events["pid"].tolist(), strict=True))
    known = (evidence.statistics.get((node, pid, code)) for node, pid in places)
    share = share_of_rows(one for one in known if one is not None)
    return share if share is None else round(share, 4)


def _compare(seqs: IntArray, durations: IntArray, n_least: int) -> tuple[IntArray, IntArray]:
    """Per operation with so many rows: the row that was inside shortest, and by how much the longest was longer."""
    order = np.lexsort((durations, seqs))
    starts = np.flatnonzero(np.diff(seqs[order], prepend=seqs[order][0] - 1))
    ends = np.append(starts[1:], len(order)) - 1
    is_shared = ends - starts + 1 >= n_least
    shortest, longest = order[starts[is_shared]], order[ends[is_shared]]
    return shortest, durations[longest] - durations[shortest]


def _rank_times(
    evidence: Evidence, events: Records, came_last: int, row_share: float | None
) -> RankTimes:
    node, pid = int(events["node"][0]), int(events["pid"][0])
    p50, p99 = np.percentile(events["duration_ns"], (50, 99), method="inverted_cdf") / 1e3
    return RankTimes(
        rank=int(events["arg3"][0]) >> _RANK_SHIFT,
        node=clean(evidence.recording.nodes[node]),
        process=clean(evidence.process_name(node, pid)),
        pid=pid,
        count=len(events),
        row_share=row_share,
        p50_us=round(float(p50), 1),
        p99_us=round(float(p99), 1),
        max_us=round(int(events["duration_ns"].max()) / 1e3, 1),
        came_last=came_last,
    )
