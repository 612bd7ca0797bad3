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
        description: What the job calls it, such as ``TENSOR_MODEL_PARALLEL_GROUP``; may be empty.
        is_whole: Whether ``ranks`` are all members. False where they were gathered from the ranks that used it.
    """

    name: str
    ranks: tuple[int, ...]
    description: str = ""
    is_whole: bool = True


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
class RecordedOp:
    """A collective that a rank entered, as far as every member has to enter the same.

    Attributes:
        kind: What it is, without the backend: ``all_reduce``.
        elements: Elements that go in; None where members may give different numbers.
        dtype: Their type; empty where there is none.
        is_finished: Whether the rank left it, with its result or with an error.
        entered_wall_ns: When it was entered, on the rank's wall clock; None when unknown.
        timeout_ns: After how long the rank gives up; None when unknown.
    """

    kind: str
    elements: int | None
    dtype: str
    is_finished: bool
    entered_wall_ns: int | None = None
    timeout_ns: int | None = None


class Whereabouts(StrEnum):
    """Where a rank's stack says that it is."""

    INSIDE = "inside"
    """In a call of the communication library: it waits for another rank."""
    OUTSIDE = "outside"
    """In code of its own: it waits for no rank."""


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank at the moment it was looked at.

    Attributes:
        rank: Global rank.
        groups: Communicators it is a member of, by name.
        entered: Last collective sequence number it entered, by group; a group that is absent is unknown, not zero.
        left: Last collective sequence number it saw finished, by group; likewise.
        pending: Entered and not left, in the order it entered them.
        recorded: Collectives by group and sequence number, as far back as the recorder remembers.
        whereabouts: What its stack says; None without one.
        sees_p2p: Whether waits in point-to-point operations are recorded; what records none hides such waits.
        read_wall_ns: When it was looked at, on its wall clock; None when unknown.
        is_stopped: Whether its process is stopped by a signal, a tracer or the freezer of its cgroup: it then waits
            for no rank.
    """

    rank: int
    groups: Mapping[str, StoppedGroup]
    entered: Mapping[str, int] = field(default_factory=dict)
    left: Mapping[str, int] = field(default_factory=dict)
    pending: tuple[PendingOp, ...] = ()
    recorded: Mapping[str, Mapping[int, RecordedOp]] = field(default_factory=dict)
    whereabouts: Whereabouts | None = None
    sees_p2p: bool = True
    read_wall_ns: int | None = None
    is_stopped: bool = False


class HangCause(StrEnum):
    """Why a rank counts as a root of the hang."""

    ABSENT = "absent"
    """Its host never entered the operation that others wait in, and nothing it entered holds it back."""
    STUCK = "stuck"
    """It entered an operation that its peers have left, and never left it: its device, or what watches it, stopped."""
    SILENT = "silent"
    """It belongs to a group that waits, and no state of it could be read: the process is gone or cannot answer."""
    STOPPED = "stopped"
    """Its process is stopped by a signal, a tracer or the freezer of its cgroup."""
    ENDED = "ended"
    """Its process ended without success, before all others of the job that did."""
    MISMATCHED = "mismatched"
    """It entered another operation, or another size, than most members of the group entered in its place."""


class HangVerdict(StrEnum):
    """How far the report decides who is at fault."""

    NAMED = "named"
    """The roots hold the others."""
    NOBODY = "nobody"
    """No rank hangs."""
    UNKNOWN = "unknown"
    """Ranks wait, and what was read does not say for whom, or says it of several of whom some only wait."""


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
    """What is known of a hang.

    Attributes:
        roots: Ascending by rank. These never arrived.
        deadlocks: Sets of ranks that wait for each other in a circle with no root behind it.
        waits: Every rank that stands still, ascending by rank.
        ranks_read: Whose state was read.
        ranks_known: Every rank that some group names.
        suspects: Ranks one or more of which hold the others, where it is not known which; none of the roots.
        hidden_waits: Ranks that wait in something that is not recorded, by their stacks.
        note: Why the answer is not more than it is, as a sentence; empty when there is nothing to say.
    """

    roots: tuple[HangRoot, ...]
    deadlocks: tuple[tuple[int, ...], ...]
    waits: tuple[Wait, ...]
    ranks_read: tuple[int, ...]
    ranks_known: tuple[int, ...]
    suspects: tuple[int, ...] = ()
    hidden_waits: tuple[int, ...] = ()
    note: str = ""

    @property
    def verdict(self) -> HangVerdict:
        """Whether somebody is named, nobody hangs, or it is not known."""
        if self.roots:
            return HangVerdict.NAMED
        is_open = self.waits or self.suspects or self.hidden_waits or self.note
        return HangVerdict.UNKNOWN if is_open else HangVerdict.NOBODY

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """The roots' ranks, each once."""
        return tuple(dict.fromkeys(root.rank for root in self.roots))
