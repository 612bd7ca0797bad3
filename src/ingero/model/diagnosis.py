"""Why a worker that was named is slow, or stands: what is asked of its agent, and what comes back."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ingero.model.collectives import Rank
from ingero.model.counters import WorkRates
from ingero.model.incidents import RuledOut


class CauseKind(StrEnum):
    """The closed list of causes, each by what the kernel counts."""

    CPU_QUOTA = "cpu-quota"
    """Its cgroup has less processor time than before, or needs more, and is throttled."""
    CPU_CONTENTION = "cpu-contention"
    """It is ready to run and others have the processor, or use up the quota that it shares with them."""
    CPU_STEAL = "cpu-steal"
    """The hypervisor of its virtual machine has given its processor to others."""
    STOPPED = "stopped"
    """A signal, a tracer or the freezer of its cgroup stops it."""
    BLOCKED_IO = "blocked-io"
    """It waits for a disk or for a file on one."""
    PAGE_FAULTS = "page-faults"
    """Memory is read back from a disk."""
    MEMORY_RECLAIM = "memory-reclaim"
    """It has to make room itself before it gets memory."""
    MORE_COMPUTING = "more-computing"
    """It uses more processor time for the same number of operations."""
    GPU_COMPUTING = "gpu-computing"
    """Its host waits longer for its GPU, in calls of CUDA, and not for peers: the GPU has more to do, or is slower."""
    ASLEEP = "asleep"
    """It waits for what is no disk: a lock, a socket, another process. Of a worker that others wait for only."""
    NETWORK_DELAY = "network-delay"
    """Its packets take longer to a host and back than others, or meet queues. Of a link only, as the next three."""
    NETWORK_LOSS = "network-loss"
    """They are lost and sent again."""
    WINDOW_LIMITED = "window-limited"
    """The other end's window, or its own send buffer, is full more often than towards others; or the other end has no
    buffer ready."""
    SLOW_PORT = "slow-port"
    """The port of an RDMA device went down, or is slower than others of its board."""
    UNEXPLAINED = "unexplained"
    """None of the above takes enough of the time."""


class Subject(StrEnum):
    """What is asked of a worker's agent."""

    SLOW = ""
    """Why it is slower than its peers."""
    HANG = "hang"
    """What it does while others wait for it and it enters no operation."""
    WORK = "work"
    """What an operation takes it: another one, of which the episode is, is compared with it."""
    LINK = "link"
    """Why what it sends takes longer than on its peers' links."""
    UNEVEN = "uneven"
    """Why some of its operations take it longer than the same ones at other times: it is slow in turns with peers."""


@dataclass(frozen=True, slots=True)
class DiagnosisRequest:
    """What Fleet asks the agent of a worker's node.

    Attributes:
        id: The verdict's episode, 16 lower-case hexadecimal digits.
        rank: Global rank of the worker.
        job: Its job, where ranks of several have the same numbers; otherwise empty.
        excess_share: The part of its own time since onset above its median peer's, 0 to 1; 0 for other subjects.
        since_ns: When it became slow, by the worker's own wall clock; 0 for other subjects.
        about: What is asked.
        peers: Ranks of the same node and job that do the same and are not slow: its agent knows their work itself.
        peers_work: What an operation takes its peers on other nodes, the median; None where that is not known.
        is_work_asked: Whether it may become known soon, because these are asked.
    """

    id: str
    rank: int
    job: str
    excess_share: float
    since_ns: int
    about: Subject = Subject.SLOW
    peers: tuple[int, ...] = ()
    peers_work: WorkRates | None = None
    is_work_asked: bool = False


@dataclass(frozen=True, slots=True)
class PeerWork:
    """The answer to a question about a worker's work.

    Attributes:
        id: That of the question.
        rank: The worker.
        rates: What an operation takes it.
    """

    id: str
    rank: Rank
    rates: WorkRates


@dataclass(frozen=True, slots=True)
class DiagnosedCause:
    """One reason.

    Attributes:
        kind: A value of `CauseKind`; another sender may have more.
        name: In plain words, with the name of who did it.
        share: Part of the excess that it explains, 0 to 1.
        evidence: What was measured, one fact per entry.
    """

    kind: str
    name: str
    share: float
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The answer to a `DiagnosisRequest`.

    Attributes:
        id: That of the request.
        rank: The worker, with its cluster and node.
        causes: By share, greatest first; ``unexplained`` is one of them where nothing takes most of the time.
        excess_ns: Own time above the peers' that was to be explained; of uneven work that above its own usual, of a
            hang what was looked at, of a link the time for which data on the way that lost most were not acknowledged,
            or for which its port was busy.
        window_ns: Time that was looked at, since onset; of uneven work while every switch was seen, of a hang in
            looks, of a link between two readings.
        n_ops: Operations in that time.
        ruled_out: What was checked and takes no part that counts.
        todo: Next steps, most useful first.
        declined: Why the agent did not look; empty when it did.
    """

    id: str
    rank: Rank
    causes: tuple[DiagnosedCause, ...] = ()
    excess_ns: int = 0
    window_ns: int = 0
    n_ops: int = 0
    ruled_out: tuple[RuledOut, ...] = ()
    todo: tuple[str, ...] = ()
    declined: str = ""

    @property
    def cause(self) -> str:
        """The kind of the first cause; empty where the agent did not look."""
        return self.causes[0].kind if self.causes else ""


_SEEN_CHARS: Final = 160


def describe_diagnosis(diagnosis: Diagnosis) -> str:
    """One line for a person. What is unexplained comes with what was seen: the lines at which the program waited."""
    if diagnosis.declined:
        return f"not looked at: {diagnosis.declined}"
    return ", ".join(
        f"{cause.name} ({'; '.join((f'{cause.share:.0%}', *_find_seen(cause)))})"
        for cause in diagnosis.causes
    )


def _find_seen(cause: DiagnosedCause) -> tuple[str, ...]:
    if cause.kind != CauseKind.UNEXPLAINED or not cause.evidence:
        return ()
    return (textwrap.shorten("; ".join(cause.evidence), _SEEN_CHARS, placeholder=" …"),)
