"""What the causal engine says: incidents, their causes with shares, and how much of the truth the data holds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How much of the process's time the problem took."""

    HIGH = "HIGH"
    MEDIUM = "MEDIUM"
    LOW = "LOW"


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason.

    Attributes:
        name: In plain words, with the name of who did it: ``preempted by logrotate``.
        share: Part of the lost time that overlaps it, 0 to 1. ``unexplained`` is a name too.
        evidence: What was measured, one fact per entry.
    """

    name: str
    share: float
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RuledOut:
    """A reason that was checked and did not explain the lost time."""

    name: str
    share: float
    why: str


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of what happened the incident's data holds.

    Attributes:
        state: ``exact`` (everything seen was stored), ``sampled`` (some of it was) or ``unknown`` (the recording keeps
            no counts).
        stored: Rows of the process that were there to look at.
        seen: Rows there were, at least, or about so many where `most` is given; None when unknown.
        lost: Rows lost against the recorder's will; None when unknown.
        most: Rows there were, at most, where a window cuts a minute: calls are counted by the minute. Else None.
    """

    state: str
    stored: int
    seen: int | None
    lost: int | None
    most: int | None = None


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """How many calls of one group of sources have a row.

    Attributes:
        name: The group.
        stored: Calls with a row.
        seen: Calls, at least, or about so many where `most` is given.
        most: Calls, at most, where a window cuts a minute; else None.
    """

    name: str
    stored: int
    seen: int
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Incident:
    """One problem, once.

    Attributes:
        id: Stable: the same recording, or a longer one of the same run, gives the same id.
        rule: Which rule found it.
        severity: From `window_share`, or fixed by the rule for facts such as an out-of-memory kill.
        title: One line.
        node: Node name; empty when the recording names none.
        pid: Process that suffered; 0 for the whole node.
        process: Its name.
        tid: Thread that suffered; 0 for the whole process.
        rank: Its place in the job; None when unknown.
        op: Operation that suffered; empty when it is no single one.
        start_ns: First moment, Unix time.
        end_ns: Last moment, Unix time.
        lost_ns: Time that the problem took.
        window_share: `lost_ns` as a part of the time the process was watched.
        watched_ns: From the process's first row to its last, less what nobody watched in between; 0 for the whole node.
        n_cases: How often it happened.
        causes: By share, greatest first.
        ruled_out: What was checked and is not the reason.
        fix: Next steps, most useful first.
        coverage: How much of the truth the data holds, of the operations that the incident speaks of.
        places: Where in the program the rows that show it were made, worst first; empty where no stack was recorded.
    """

    id: str
    rule: str
    severity: Severity
    title: str
    node: str
    pid: int
    process: str
    tid: int
    rank: int | None
    op: str
    start_ns: int
    end_ns: int
    lost_ns: int
    window_share: float
    watched_ns: int
    n_cases: int
    causes: tuple[Cause, ...]
    ruled_out: tuple[RuledOut, ...]
    fix: tuple[str, ...]
    coverage: Coverage
    places: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unknown:
    """What could not be decided, and why.

    Attributes:
        rules: Which rules say so.
        node: Node name; empty when the recording names none.
        pid: Process it is about; 0 for the whole node.
        process: Its name.
        rank: Its place in the job; None when unknown.
        missing: What the recording lacks: ``cudaLaunchKernel of pid 12: 300 of 5000 calls have a row``.
        how: How to record it.
        title: What the rows that are there suggest, when only its severity is open; else empty.
    """

    rules: tuple[str, ...]
    node: str
    pid: int
    process: str
    rank: int | None
    missing: str
    how: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything `explain` has to say about a recording.

    Attributes:
        incidents: Worst first; deterministic.
        start_ns: First event, Unix time.
        end_ns: Last end of an event.
        n_events: Events looked at.
        n_events_stored: Events in the file.
        n_processes: Processes with GPU calls or off-CPU spans that were judged.
        judged: Rules that had everything they need.
        unknown: What could not be decided.
        groups: GPU calls, collectives and host events, without page allocations.
        not_checked: Rules that this recording has no data for, with the reason.
    """

    incidents: tuple[Incident, ...]
    start_ns: int
    end_ns: int
    n_events: int
    n_events_stored: int
    n_processes: int
    judged: tuple[str, ...] = ()
    unknown: tuple[Unknown, ...] = ()
    groups: tuple[GroupCounts, ...] = ()
    not_checked: tuple[tuple[str, str], ...] = ()
