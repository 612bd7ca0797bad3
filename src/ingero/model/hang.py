"""Who waits for whom when a job stands still: what each rank last entered and left, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class StoppedGroup:
    """A communicator.

    Attributes:
        name: Its name, the same on every member.
        ranks: Global ranks in the communicator's own order.
        says: What the job calls it, such as ``TENSOR_MODEL_PARALLEL_GROUP``; may be empty.
    """

    name: str
    ranks: tuple[int, ...]
    says: str = ""


@dataclass(frozen=True, slots=True)
class PendingOp:
    """An operation that a rank entered and had not left.

    Attributes:
        group: Name of the communicator.
        seq: Sequence number on it. Collectives and point-to-point operations count apart.
        op: What it is, for a person.
        peer: For point-to-point: the other side's global rank; None for a collective.
        entered_wall_ns: When it was entered, on the rank's wall clock; None when unknown.
    """

    group: str
    seq: int
    op: str
    peer: int | None = None
    entered_wall_ns: int | None = None


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank at the moment it was looked at.

    Attributes:
        rank: Global rank.
        groups: Communicators it is a member of, by name.
        entered: Last collective sequence number it entered, by group; a group that is absent is unknown, not zero.
        left: Last collective sequence number it saw finished, by group; likewise.
        pending: Entered and not left, in the order it entered them.
    """

    rank: int
    groups: Mapping[str, StoppedGroup]
    entered: Mapping[str, int] = field(default_factory=dict)
    left: Mapping[str, int] = field(default_factory=dict)
    pending: tuple[PendingOp, ...] = ()


class HangCause(StrEnum):
    """Why a rank counts as a root of the hang."""

    ABSENT = "absent"
    """Its host never entered the operation that others wait in, and nothing it entered holds it back."""
    STUCK = "stuck"
    """It entered an operation that its peers have left, and never left it: its device, or what watches it, stopped."""
    SILENT = "silent"
    """It belongs to a group that waits, and no state of it could be read: the process is gone or cannot answer."""


@dataclass(frozen=True, slots=True)
class HangRoot:
    """A rank that others wait for and that waits for none.

    Attributes:
        rank: Global rank.
        cause: See `HangCause`.
        group: The communicator where it is missed.
        missing_seq: The operation there that it did not enter, or did not leave.
        last_left: The last operation there that it finished; None when unknown.
        blocks: Every rank that waits for it, directly or through others, ascending.
        node_id: Its node; empty when it is not known.
        job: Its job, where ranks of several have the same numbers; otherwise empty.
    """

    rank: int
    cause: HangCause
    group: StoppedGroup
    missing_seq: int
    last_left: int | None
    blocks: tuple[int, ...]
    node_id: str = ""
    job: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """One rank's reason to stand still.

    Attributes:
        rank: Who waits.
        op: In which operation.
        waits_for: Whom it waits for, ascending; empty when nothing read says whom.
    """

    rank: int
    op: PendingOp
    waits_for: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HangReport:
    """The answer.

    Attributes:
        roots: Ascending by rank. These never arrived.
        deadlocks: Sets of ranks that wait for each other in a circle with no root behind it.
        waits: Every rank that stands still, ascending by rank.
        ranks_read: Whose state was read.
        ranks_known: Every rank that some group names.
    """

    roots: tuple[HangRoot, ...]
    deadlocks: tuple[tuple[int, ...], ...]
    waits: tuple[Wait, ...]
    ranks_read: tuple[int, ...]
    ranks_known: tuple[int, ...]

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """The roots' ranks, each once."""
        return tuple(dict.fromkeys(root.rank for root in self.roots))
