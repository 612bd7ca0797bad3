"""What a scheduler must be able to do for pair tests."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from ingero.remediation.pair_tests import PairTestRecord


class PairJobState(Enum):
    """Where the job of a pair test is."""

    UNKNOWN = "unknown"
    """The scheduler has no such job."""
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    """It came to its end."""
    FAILED = "failed"
    """It was ended: cancelled, too long, its node failed."""


@dataclass(frozen=True, slots=True)
class PairJob:
    """What a scheduler says of the job of a pair test.

    Attributes:
        state: Where it is.
        job: Its id; empty for none.
        detail: Why it waits or failed, or what it printed.
    """

    state: PairJobState
    job: str = ""
    detail: str = ""


@runtime_checkable
class PairRunner(Protocol):
    """A scheduler that runs pair tests."""

    def find_peer(self, suspect: str, avoid: Collection[str]) -> tuple[str, str]:
        """A node that is like the suspect and in service, and a partition that has both; two empty ones for none.

        Raises:
            RetryableError: The scheduler does not answer.
        """
        ...

    def submit_test(self, record: PairTestRecord) -> str:
        """Have its job run; the job's id. Asked once for a record.

        Raises:
            RetryableError: It is not known whether the scheduler has it.
            PermanentError: It was refused.
        """
        ...

    def read_test(self, record: PairTestRecord) -> PairJob:
        """Where its job is; by the job's name, while its id is not known.

        Raises:
            RetryableError: The scheduler does not answer.
        """
        ...

    def cancel_test(self, record: PairTestRecord) -> None:
        """End whatever there is of it, also nothing.

        Raises:
            RetryableError: It is not known whether that was done.
        """
        ...
