"""What waiting has cost so far, as cumulative sums for metrics: GPU-seconds, and money where a price is known.

A charge that is taken back makes no counter smaller: it is counted apart (`report.GPU_SECONDS_BACK`,
`report.COST_BACK`), and what something cost is the growth of the one less the growth of the other. The records
(`ingero.fleet.processors.collectives.costs`) say the same with victims.

Bounded: beyond `MAX_PARTIES` of a cluster, growth goes to one without a node.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ingero.fleet.component import Hardware
from ingero.fleet.processors.collectives.costs import CostDelta, CostParties
from ingero.fleet.processors.collectives.rates import Rates
from ingero.fleet.processors.collectives.verdicts import (
    COST,
    COST_BACK,
    GPU_SECONDS,
    GPU_SECONDS_BACK,
    build_series,
)
from ingero.otlp.codec import Export, build_number, structs
from ingero.units import NS_PER_S

MAX_PARTIES: Final = 10_000
_NS_PER_HOUR: Final = 3600 * NS_PER_S


_OTHERS: Final = CostParties("", -1, "", Hardware("", ""))
"""The parties of what is beyond `MAX_PARTIES`."""
_Sums = dict[tuple[CostParties, str], float]


class CostTotals:
    """One cluster's sums since Fleet knows it. One thread."""

    def __init__(self, cluster_id: str, start_wall_ns: int) -> None:
        self._cluster_id = cluster_id
        self._start_wall_ns = start_wall_ns
        self._sums: dict[str, _Sums] = {
            name: {} for name in (GPU_SECONDS, GPU_SECONDS_BACK, COST, COST_BACK)
        }
        self._known: set[CostParties] = set()

    def add(self, deltas: Iterable[CostDelta], rates: Rates) -> None:
        """Add what was reported as records, at the prices of now."""
        for delta in deltas:
            parties = delta.parties._replace(victim="")
            if parties not in self._known and len(self._known) >= MAX_PARTIES:
                parties = _OTHERS
            self._known.add(parties)
            self._add(GPU_SECONDS, GPU_SECONDS_BACK, (parties, ""), delta.gpu_ns / NS_PER_S)
            rate = rates.find_rate(*parties.hardware)
            if rate is not None:
                amount = delta.gpu_ns * rate / _NS_PER_HOUR
                self._add(COST, COST_BACK, (parties, rates.currency), amount)

    def build(self, wall_ns: int) -> Export:
        """Every sum."""
        points = {name: self._build_points(sums, wall_ns) for name, sums in self._sums.items()}
        return build_series(points, self._cluster_id)

    def _add(self, name: str, name_back: str, key: tuple[CostParties, str], amount: float) -> None:
        """Add growth to the one sum, what was taken back to the other; both exist from then on."""
        for sums, more in (
            (self._sums[name], max(amount, 0.0)),
            (self._sums[name_back], max(-amount, 0.0)),
        ):
            sums[key] = sums.get(key, 0.0) + more

    def _build_points(self, sums: _Sums, wall_ns: int) -> list[structs.NumberDataPoint]:
        found = []
        for (parties, currency), value in sums.items():
            labels = {
                "cluster_id": self._cluster_id,
                "node_id": parties.node_id,
                "rank": str(parties.rank) if parties.node_id and parties.rank >= 0 else "",
                **parties.hardware._asdict(),
                "attributed": "charged" if parties.node_id else "unattributed",
            }
            if currency:
                labels["currency"] = currency
            point = build_number(value, wall_ns, labels)
            point.start_time_unix_nano = self._start_wall_ns
            found.append(point)
        return found
