"""What the Judge summed up, which verdicts are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ingero.detect.arrivals import WorkerClocks
from ingero.detect.collectives import WaitLedger
from ingero.detect.evidence import RankEvidence
from ingero.detect.groups import PeerGroup
from ingero.detect.ranks.settings import EDetectorSettings
from ingero.detect.registry import Registry
from ingero.model.collectives import Rank


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What the Judge summed up about a worker.

    Attributes:
        rank: The worker.
        group: Its peers; None when it has none yet.
        own_ns: Own time before all of its operations.
        wait_ns: What it lost waiting.
        n_ops: Operations it reported.
        n_enqueue: Those whose times are of the enqueue only.
        span_ns: From its first entry to its last leaving.
        last_ns: Its last leaving, on its clock.
        seen_ns: When it reported first and last, on the clock of arrivals.
        is_stale: For long it reported nothing that could be compared.
        links: Its two-member communicators: slot → communicator.
    """

    rank: Rank
    group: PeerGroup | None
    own_ns: int
    wait_ns: int
    n_ops: int
    n_enqueue: int
    span_ns: int
    last_ns: int = 0
    seen_ns: tuple[int, int] = (0, 0)
    is_stale: bool = False
    links: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that verdicts are made from; lists are by worker.

    Attributes:
        workers: What is known of each.
        registry: The workers and communicators.
        evidence: What was compared.
        ledger: Waits and transfers.
        settings: Of the detector.
        clocks: Of the workers.
        reorder_ns: By how much one may report later than another what they did in one time.
        patience_ns: How long peers wait for one that does not report.
        stage_links: Worker → communicator → the worker at the other end of that link between two stages.
    """

    workers: Sequence[WorkerFacts]
    registry: Registry
    evidence: RankEvidence
    ledger: WaitLedger
    settings: EDetectorSettings
    clocks: WorkerClocks
    reorder_ns: int = 0
    patience_ns: int = 0
    stage_links: Mapping[int, Mapping[int, int]] = field(default_factory=dict)

    def read_clock(self, worker: int, entry_ns: int) -> int:
        """A time of operations as the worker's own clock has it now."""
        return self.clocks.read(worker, entry_ns)

    def has_reported_often(self, worker: int) -> bool:
        """Whether a worker reported over time, so that its clock can be compared with that of arrivals."""
        first_ns, last_ns = self.workers[worker].seen_ns
        return first_ns < last_ns

    def is_silent(self, worker: int, until_ns: int) -> bool:
        """Whether a worker reported nothing in the last of its peers' patience, on the clock of arrivals."""
        return self.workers[worker].seen_ns[1] + self.patience_ns <= until_ns

    def met(self, one: tuple[int, int], other: tuple[int, int]) -> bool:
        """Whether what was seen first and last at these times, on the clock of arrivals, can have met."""
        return one[0] <= other[1] + self.reorder_ns and other[0] <= one[1] + self.reorder_ns
