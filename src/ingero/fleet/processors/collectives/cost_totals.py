"""What waiting has cost so far, as cumulative sums for metrics pipelines: GPU-seconds, and money where a price is known.

A charge that is taken back makes no counter smaller: it is counted apart (`report.GPU_SECONDS_BACK`,
`report.COST_BACK`), and what something cost is the growth of the one less the growth of the other. The records
(`ingero.fleet.processors.collectives.costs`) say the same with victims.

Bounded: beyond `MAX_ACCOUNTS` of a cluster, growth goes to an account without a node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final, NamedTuple

from ingero.fleet.processors.collectives.costs import CostDelta
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

MAX_ACCOUNTS: Final = 10_000
_NS_PER_HOUR: Final = 3600 * NS_PER_S


class _Key(NamedTuple):
    """Labels of one sum: who is charged (empty for nobody), and the hardware that waited."""

    node_id: str
    rank: str
    provider: str
    gpu_model: str


class _Sums:
    """Growth and what was taken back of it."""

    def __init__(self) -> None:
        self.up: defaultdict[tuple[_Key, str], float] = defaultdict(float)
        self.down: defaultdict[tuple[_Key, str], float] = defaultdict(float)

    def add(self, key: _Key, currency: str, amount: float) -> None:
        (self.up if amount >= 0 else self.down)[key, currency] += abs(amount)
        self.down.setdefault((key, currency), 0.0)
        self.up.setdefault((key, currency), 0.0)


class CostTotals:
    """One cluster's sums since Fleet knows it. One thread."""

    def __init__(self, cluster_id: str, start_wall_ns: int) -> None:
        self._cluster_id = cluster_id
        self._start_wall_ns = start_wall_ns
        self._seconds = _Sums()
        self._money = _Sums()
        self._keys: set[_Key] = set()

    def add(self, charges: Iterable[CostDelta], rates: Rates) -> None:
        """Take what was told as records, at the prices of now."""
        for charge in charges:
            key = self._find_key(charge)
            self._seconds.add(key, "", charge.gpu_ns / NS_PER_S)
            rate = rates.find_rate(key.provider, key.gpu_model)
            if rate is not None:
                self._money.add(key, rates.currency, charge.gpu_ns * rate / _NS_PER_HOUR)

    def build(self, wall_ns: int) -> Export:
        """Every sum."""
        return build_series(
            {
                GPU_SECONDS: self._points(self._seconds.up, wall_ns),
                GPU_SECONDS_BACK: self._points(self._seconds.down, wall_ns),
                COST: self._points(self._money.up, wall_ns),
                COST_BACK: self._points(self._money.down, wall_ns),
            },
            self._cluster_id,
        )

    def _find_key(self, charge: CostDelta) -> _Key:
        account = charge.account
        rank = str(account.rank) if account.node_id and account.rank >= 0 else ""
        key = _Key(account.node_id, rank, *account.hardware)
        if key not in self._keys:
            if len(self._keys) >= MAX_ACCOUNTS:
                return _Key("", "", "", "")
            self._keys.add(key)
        return key

    def _points(
        self, sums: dict[tuple[_Key, str], float], wall_ns: int
    ) -> list[structs.NumberDataPoint]:
        found = []
        for (key, currency), value in sums.items():
            labels = {
                "cluster_id": self._cluster_id,
                "node_id": key.node_id,
                "rank": key.rank,
                "provider": key.provider,
                "gpu_model": key.gpu_model,
                "attributed": "charged" if key.node_id else "unattributed",
            }
            if currency:
                labels["currency"] = currency
            point = build_number(value, wall_ns, labels)
            point.start_time_unix_nano = self._start_wall_ns
            found.append(point)
        return found
