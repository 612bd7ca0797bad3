"""What waiting costs, as log records: the growth of each charge since the last report, so sums over time are right.

Specification: docs/specs/cost.md. The Judge says what each worker's waiting amounts to in all and whom it is charged
to; a `CostDeltas` keeps what was reported of that and finds the difference, which is negative for a charge that is
taken back. What the Judge forgets (it started over) is not taken back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from ingero.fleet.component import Hardware
from ingero.fleet.processors.collectives.conclusions import Conclusion
from ingero.fleet.processors.collectives.rates import Rates
from ingero.fleet.processors.collectives.verdicts import FindHardware
from ingero.model.collectives import Worker
from ingero.model.verdicts import Judgement
from ingero.otlp.codec import Export
from ingero.units import NS_PER_S
from ingero.wire.costs import CHARGED, UNATTRIBUTED, CostRecord, build_cost_records

MAX_VICTIMS: Final = 64
"""Victims of one culprit with a record of their own; the rest share one per kind of hardware."""
_MIN_CHANGE_NS: Final = 1_000_000
"""Smaller differences wait until they add up."""
_NS_PER_HOUR: Final = 3600 * NS_PER_S


class CostParties(NamedTuple):
    """What is counted apart.

    Attributes:
        node_id: Who is charged; empty for what no node is charged with.
        rank: Its global rank; negative when unknown.
        victim: Node that waited; empty for several of one hardware.
        hardware: Of the nodes that waited.
    """

    node_id: str
    rank: int
    victim: str
    hardware: Hardware


@dataclass(frozen=True, slots=True)
class CostDelta:
    """One record.

    Attributes:
        parties: Who, by whom; the hardware is that of the GPUs that waited.
        gpu_ns: Growth since the last report.
    """

    parties: CostParties
    gpu_ns: int


class CostDeltas:
    """What was reported of one cluster's costs. One thread.

    Attributes:
        mark_ns: The last cut of the cluster's log that was reported; 0 for none.
    """

    def __init__(self, mark_ns: int = 0) -> None:
        self.mark_ns = mark_ns
        self._reported: dict[CostParties, int] = {}
        self._generation = 0

    def find_deltas(
        self, conclusion: Conclusion, find_hardware: FindHardware
    ) -> tuple[list[CostDelta], dict[CostParties, int]]:
        """What grew since `settle`, and what to settle once it is reported."""
        is_same = conclusion.generation == self._generation
        reported = self._reported if is_same else {}
        cluster_id = conclusion.history.cluster_id
        now = _sum_up(conclusion.history, find_hardware)
        grown: dict[CostParties, int] = {}
        for parties in {**reported, **now}:
            change_ns = now.get(parties, 0) - reported.get(parties, 0)
            if abs(change_ns) >= _MIN_CHANGE_NS:
                grown[parties] = change_ns
        settled = {**reported, **{parties: now.get(parties, 0) for parties in grown}}
        charges = _gather(grown, lambda node_id: find_hardware(cluster_id, node_id))
        return charges, {parties: ns for parties, ns in settled.items() if ns}

    def settle(self, conclusion: Conclusion, settled: dict[CostParties, int]) -> None:
        """Keep what was reported."""
        self._reported, self._generation = settled, conclusion.generation


def _sum_up(judgement: Judgement, find_hardware: FindHardware) -> dict[CostParties, int]:
    """GPU-nanoseconds by parties since the Judge began; what is unattributed by hardware alone."""
    sums: dict[CostParties, int] = defaultdict(int)
    nowhere = Hardware("", "")
    for verdict in judgement.verdicts:
        waiting = verdict.rank
        rest_ns = verdict.wait_ns
        for culprit, wait_ns in verdict.charged_to.items():
            parties = CostParties(culprit.node_id, culprit.rank, waiting.node_id, nowhere)
            sums[parties] += wait_ns * waiting.n_gpus
            rest_ns -= wait_ns
        if rest_ns:
            hardware = find_hardware(judgement.cluster_id, waiting.node_id)
            sums[CostParties("", -1, "", hardware)] += rest_ns * waiting.n_gpus
    return sums


def _gather(
    grown: dict[CostParties, int], hardware_of: Callable[[str], Hardware]
) -> list[CostDelta]:
    """Charges to report: hardware filled in, small victims of one culprit put together."""
    by_culprit: dict[tuple[str, int], list[tuple[CostParties, int]]] = defaultdict(list)
    charges = []
    for parties, gpu_ns in grown.items():
        if parties.victim:
            by_culprit[parties.node_id, parties.rank].append((parties, gpu_ns))
        else:
            charges.append(CostDelta(parties, gpu_ns))
    for (node_id, rank), of_victims in by_culprit.items():
        of_victims.sort(key=lambda one: (-abs(one[1]), one[0].victim))
        for parties, gpu_ns in of_victims[:MAX_VICTIMS]:
            charges.append(
                CostDelta(parties._replace(hardware=hardware_of(parties.victim)), gpu_ns)
            )
        rest: dict[Hardware, int] = defaultdict(int)
        for parties, gpu_ns in of_victims[MAX_VICTIMS:]:
            rest[hardware_of(parties.victim)] += gpu_ns
        for hardware, gpu_ns in rest.items():
            charges.append(CostDelta(CostParties(node_id, rank, "", hardware), gpu_ns))
    return charges


def price_culprits(
    judgement: Judgement, rates: Rates, find_hardware: FindHardware
) -> dict[Worker, float]:
    """What each worker's victims lost by it since onset in money, as `Verdict.lost_gpu_ns` has it in time.

    Only those of victims with a known price; a worker of whose victims none has one is missing.
    """
    amounts: dict[Worker, float] = {}
    for verdict in judgement.verdicts:
        if not verdict.charged_to:
            continue
        waiting = verdict.rank
        rate = rates.find_rate(*find_hardware(judgement.cluster_id, waiting.node_id))
        if rate is None:
            continue
        for culprit, wait_ns in verdict.charged_to.items():
            amount = wait_ns * waiting.n_gpus * rate / _NS_PER_HOUR
            amounts[culprit.worker] = amounts.get(culprit.worker, 0.0) + amount
    return amounts


def build_costs(
    cluster_id: str, charges: Iterable[CostDelta], rates: Rates, wall_ns: int
) -> Export:
    """The charges of one cluster as records."""
    return build_cost_records(
        cluster_id, [_build_record(charge, rates) for charge in charges], wall_ns
    )


def _build_record(charge: CostDelta, rates: Rates) -> CostRecord:
    parties = charge.parties
    provider, gpu_model = parties.hardware
    seconds = charge.gpu_ns / NS_PER_S
    rate = rates.find_rate(provider, gpu_model)
    whom = f"charged to {parties.node_id}" if parties.node_id else "charged to nobody"
    return CostRecord(
        gpu_seconds=seconds,
        attributed=CHARGED if parties.node_id else UNATTRIBUTED,
        node_id=parties.node_id,
        rank=parties.rank if parties.node_id and parties.rank >= 0 else None,
        victim_node_id=parties.victim,
        provider=provider,
        gpu_model=gpu_model,
        amount=None if rate is None else charge.gpu_ns * rate / _NS_PER_HOUR,
        currency="" if rate is None else rates.currency,
        summary=f"{seconds:.3f} GPU-seconds of waiting {whom}",
    )
