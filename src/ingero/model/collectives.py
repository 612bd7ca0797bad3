"""Collective operations as ranks report them: columns, not objects per operation.

Terms are NCCL's: a *communicator* is a group of ranks, an operation on it has a *sequence number* that every member
counts alike. A rank's *own time* is what it spent between leaving its previous operation and entering this one; the
time *inside* is waiting for others plus transfer. Long inside means victim, long own means culprit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np

from ingero.model.arrays import Records


class CollectiveOp(IntEnum):
    """What the operation was. Values are on the wire: append only."""

    UNKNOWN = 0
    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    BROADCAST = 4
    REDUCE = 5
    SEND = 6
    RECV = 7
    BARRIER = 8
    ALL_TO_ALL = 9


class ClockKind(IntEnum):
    """Which event the end of an operation was read from. Values are on the wire: append only.

    Host probes see when an asynchronous operation was *enqueued*; that alone never supports a culprit verdict.
    """

    ENQUEUE = 0
    SYNC = 1
    DEVICE = 2


UNKNOWN_NS: Final = -1
"""In a column of durations: not measured. Absent is not zero."""

MAX_SEQ: Final = (1 << 62) - 1
"""Largest sequence number that is taken from outside; room to count on from it in 64 bits with a sign."""

COLLECTIVE_OP: Final = np.dtype([
    # Sequence number on the communicator, counted by every member alike; at most MAX_SEQ.
    ("seq", "<u8"),
    # When the rank entered, on its own clock; ordered within a rank, not across ranks.
    ("entry_ns", "<i8"),
    ("inside_ns", "<i8"),  # from entry to leaving; UNKNOWN_NS when the end was not seen
    # Since the rank left its previous operation on any communicator; UNKNOWN_NS for the first.
    ("own_ns", "<i8"),
    ("n_bytes", "<i8"),  # element count × type size; UNKNOWN_NS when unknown
    ("op", "u1"),  # CollectiveOp
    # Processor time in use under its CPU limit at that time, in thousandths of the limit; 0 where it has none.
    ("limit_use", "<u2"),
])
FULL_LIMIT: Final = 1000
"""``limit_use`` of a limit that is used up."""


class Worker(NamedTuple):
    """A process of a job, within a cluster. Fields as in `Rank`."""

    node_id: str
    job: str
    rank: int


@dataclass(frozen=True, slots=True)
class Rank:
    """Who reports: one process of a job.

    Attributes:
        cluster_id: The cluster, as its agents name it.
        node_id: The reporting agent's node.
        rank: Global rank in the job, or -1 when the launcher did not say.
        n_gpus: GPUs that wait when this rank waits (a tensor-parallel group reported as one worker has several).
        labels: Launcher's coordinates as sorted pairs, such as ``(("dp", "0"), ("pp", "3"))``; may be empty.
        job: Distinguishes jobs on one node whose ranks have the same numbers; empty where there is one.
        resource: Where the process runs, as sorted pairs of `ingero.wire.process_resource.ResourceKey` and text. Says
            nothing of who it is: a rank that is started again in another pod is the same one.
    """

    cluster_id: str
    node_id: str
    rank: int
    n_gpus: int = 1
    labels: tuple[tuple[str, str], ...] = ()
    job: str = ""
    resource: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    @property
    def worker(self) -> Worker:
        """Its key within its cluster."""
        return Worker(self.node_id, self.job, self.rank)


@dataclass(frozen=True, slots=True)
class CollectiveRun:
    """Consecutive operations of one rank on one communicator, as one push carries them.

    Attributes:
        rank: Who reports.
        comm: Communicator id hash, 16 lower-case hex digits.
        comm_rank: The reporter's rank within the communicator.
        n_ranks: Members of the communicator.
        clock: What the end of each operation was read from.
        ops: Rows of COLLECTIVE_OP, shape (n,), in the order the rank entered them. Not to be changed.
    """

    rank: Rank
    comm: str
    comm_rank: int
    n_ranks: int
    clock: ClockKind
    ops: Records
