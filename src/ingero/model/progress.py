"""How far a rank got on a communicator before it stopped: what the agents of a hung job report."""

from __future__ import annotations

from dataclasses import dataclass

from ingero.model.collectives import CollectiveOp, Rank


@dataclass(frozen=True, slots=True)
class Ending:
    """How and when a process ended.

    Attributes:
        at_ns: On the clock of the record that holds it.
        signal: The signal that ended it; 0 when it ended by itself.
        status: Its exit status; 0 with a signal.
    """

    at_ns: int
    signal: int = 0
    status: int = 0

    @property
    def has_failed(self) -> bool:
        """Whether it ended without success."""
        return self.signal != 0 or self.status != 0


@dataclass(frozen=True, slots=True)
class RankProgress:
    """One rank on one communicator, at the time of a push.

    Attributes:
        rank: The worker that reports.
        comm: Communicator id hash, 16 lower-case hex digits.
        comm_rank: Its rank there.
        n_ranks: Members.
        entered: Last sequence number it entered.
        left: Last one that it is known to have left; None when none is.
        op: What the last entered one was.
        still_ns: How long it has entered nothing.
        is_gone: Its process ended, and it will enter nothing more.
        ending: How it ended, with how long ago as its time; None where that is not known.
        is_stopped: Its process is stopped by a signal, a tracer or the freezer of its cgroup, and enters nothing
            until it is let go on.
    """

    rank: Rank
    comm: str
    comm_rank: int
    n_ranks: int
    entered: int
    left: int | None
    op: CollectiveOp
    still_ns: int
    is_gone: bool = False
    ending: Ending | None = None
    is_stopped: bool = False
