"""How the writer works, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from ingero.echo.db.retention import Retention
from ingero.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class DatabaseWriterSettings:
    """How the writer groups, remembers and keeps.

    Attributes:
        group_ns: Longest wait for company.
        group_rows: Rows that end the wait at once.
        window_ns: How long a sender's retry is recognised.
        window_keys: Keys remembered at most.
        upkeep_ns: Time between two applications of retention.
        usage_ns: Time between two entries of what was stored.
        retention: What is kept.
        is_clock_trusted: Retention goes by the clock, however far it is ahead of what the database last saw.
        reopen_ns: Longest opening of the database after a failure; after it the process must be started again.
    """

    group_ns: int = 50_000_000
    group_rows: int = 50_000
    window_ns: int = 600 * NS_PER_S
    window_keys: int = 16_000_000
    upkeep_ns: int = 60 * NS_PER_S
    usage_ns: int = 300 * NS_PER_S
    retention: Retention = field(default_factory=lambda: Retention(None, None))
    is_clock_trusted: bool = False
    reopen_ns: int = 120 * NS_PER_S


@dataclass(slots=True)
class DatabaseWriterCounters:
    """What happened to rows; read by anyone, written by the writer.

    Attributes:
        written: Durable.
        duplicates: Dropped: stored already, with the same value.
        repeated: Dropped: log records of which one with the same ``log.record.uid`` is stored already.
        conflicts: Of those written: there is another row of their series and time with another value.
        refused_rows: The database does not take them, and the sender's answer said so.
        commits: Groups that were stored.
        failed_commits: Groups that were not stored whole.
        reopened: Times that the database was opened again after a failure.
        aged_out: Deleted for their age.
        sized_out: Deleted for the size.
    """

    written: int = 0
    duplicates: int = 0
    repeated: int = 0
    conflicts: int = 0
    refused_rows: int = 0
    commits: int = 0
    failed_commits: int = 0
    reopened: int = 0
    aged_out: int = 0
    sized_out: int = 0
