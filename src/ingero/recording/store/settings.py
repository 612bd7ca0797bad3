"""How much a recording's writer may hold, and what became of what it was given."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WriterSettings:
    """How much the writer may hold.

    Attributes:
        queue_rows: Events waiting for the disk before further ones are dropped and counted.
        commit_batches: Batches in one transaction at most.
        linger_s: How long a batch waits for company: a transaction costs as much as hundreds of rows.
        max_bytes: Size of the file and its log above which the oldest rows are deleted; 0 for no limit.
        rollover_bytes: Size above which the file is set aside and a new one begun; 0 never does.
        rollover_keep: Files set aside that are kept.
    """

    queue_rows: int = 500_000
    commit_batches: int = 256
    linger_s: float = 0.2
    max_bytes: int = 0
    rollover_bytes: int = 0
    rollover_keep: int = 6


@dataclass(slots=True)
class WriterCounters:
    """What became of the rows given to the writer."""

    events_stored: int = 0
    events_lost: int = 0
    events_pruned: int = 0
    counts_lost: int = 0
    last_error: str = ""
