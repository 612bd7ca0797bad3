"""Counts of what became of a node's collectives: a record for programs, a few words for people."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class CollectiveCounts:
    """Counts since the start.

    Attributes:
        taken: Operations that Fleet took.
        waiting: Operations that are kept until Fleet takes them.
        dropped: Operations dropped because Fleet took none for too long, or will not take them.
        unknown_communicator: Operations on communicators whose identity is not known; they are not sent to Fleet.
        without_end: Operations whose end nobody waited for; Fleet compares no times of them.
        plugin_told: Operations that the plug-in for NCCL timed by the device's clock.
        plugin_replaced: Rows of the probes that these replaced.
        plugin_lost: Operations that the plug-in could not record, or that were not read in time; the probes' row stays.
        plugin_refused: Its rows without sense, or of processes that are several ranks of one communicator.
        plugin_unplaced: Communicators beyond those that the plug-in keeps a place of: a hang on them is not seen.
        requests_taken: Requests that Fleet took.
        requests_failed: Requests that it did not take; what they held is sent again.
        push_faults: Rounds of the pushing thread that a fault of the agent ended.
        diagnoses_asked: Questions of Fleet why a rank is slow.
        diagnoses_sent: Answers that Fleet took.
        diagnoses_declined: Answers that say why it was not looked into.
        diagnoses_failed: Requests with an answer that it did not take; Fleet asks again.
        diagnoses_faulted: Questions at which a fault of the agent ended the look or the sending.
        taken_late: Operations that Fleet took from the spill, after it had been away.
        spill_batches: Batches that wait on disk.
        spill_bytes: What they take of it.
        spill_damaged: Batches on disk that are damaged and lie aside; what they held is not sent.
        spill_failed: Times the disk did not take, read or remove a batch, which is kept.
        spill_problem: The newest of these, in words.
    """

    taken: int = 0
    waiting: int = 0
    dropped: int = 0
    unknown_communicator: int = 0
    without_end: int = 0
    plugin_told: int = 0
    plugin_replaced: int = 0
    plugin_lost: int = 0
    plugin_refused: int = 0
    plugin_unplaced: int = 0
    requests_taken: int = 0
    requests_failed: int = 0
    push_faults: int = 0
    diagnoses_asked: int = 0
    diagnoses_sent: int = 0
    diagnoses_declined: int = 0
    diagnoses_failed: int = 0
    diagnoses_faulted: int = 0
    taken_late: int = 0
    spill_batches: int = 0
    spill_bytes: int = 0
    spill_damaged: int = 0
    spill_failed: int = 0
    spill_problem: str = ""

    @property
    def n_not_sent(self) -> int:
        """Operations that Fleet never receives."""
        return self.dropped + self.unknown_communicator

    def build_record(self) -> dict[str, int | str]:
        """Every count by its name."""
        return asdict(self)

    def describe_loss(self) -> str:
        """What to add to a line for people; empty while nothing is lost or waits on disk."""
        parts = [f"; {self.n_not_sent} collectives not sent"] if self.n_not_sent else []
        if self.plugin_unplaced:
            parts.append(f"; {self.plugin_unplaced} communicators on which no hang is seen")
        if self.push_faults:
            parts.append(f"; {self.push_faults} rounds of pushing failed")
        if self.spill_batches:
            parts.append(f"; {self.spill_batches} batches of collectives wait on disk")
        if self.spill_problem:
            parts.append(f"; spill: {self.spill_problem}")
        return "".join(parts)
