"""Settings of the ``ingero`` processor: the documented keys, and the limits that keep hostile input bounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from ingero.config import Duration, StrictModel
from ingero.units import NS_PER_MS, NS_PER_S, parse_duration

PushInterval = Annotated[Duration, Field(ge=NS_PER_S)]
RecomputeInterval = Annotated[Duration, Field(ge=10 * NS_PER_MS, le=60 * NS_PER_S)]


class ThresholdConfig(StrictModel):
    """How the threshold is placed under the peers."""

    k: float = Field(
        2.0, ge=1.0, le=4.0, description="Robust standard deviations below the median."
    )
    ema_alpha: float = Field(
        0.2, gt=0.0, le=1.0, description="Weight of a new raw threshold after one push_interval."
    )
    min_margin: float = Field(
        0.05,
        ge=0.0,
        le=0.5,
        description="Least distance below the median, so that equal scores never flag.",
    )


class QuorumConfig(StrictModel):
    """When there is a threshold."""

    statistical_min: int = Field(5, ge=1, description="Fewest active nodes for a threshold.")
    coverage_fraction: float = Field(
        0.80,
        ge=0.0,
        le=1.0,
        description="Share of the expected nodes that should report; below it coverage_low is 1. Informational.",
    )
    settle_time: Duration | None = Field(
        None,
        description="How long a cluster has had its quorum before its first threshold is answered, unless every node"
        " reported twice before; push_interval when left out, 0s answers that of the first nodes at once.",
    )


class IngeroConfig(StrictModel):
    """The ``ingero`` processor."""

    threshold: ThresholdConfig = Field(
        ThresholdConfig(), description="How the threshold is placed under the peers."
    )
    quorum: QuorumConfig = Field(QuorumConfig(), description="When there is a threshold.")
    push_interval: PushInterval = Field(
        parse_duration("10s"), description="Interval at which agents push; time scale of the EMA."
    )
    ttl_multiplier: int = Field(
        5, ge=2, description="A node expires after push_interval times this without a push."
    )
    max_expected_nodes: int = Field(
        10_000,
        ge=1,
        le=1_000_000,
        description="Cap on known nodes of one cluster, and what its coverage is measured against.",
    )
    expected_nodes: Mapping[str, Annotated[int, Field(ge=1)]] = Field(
        {},
        description="Cluster → nodes it should have: what its coverage is measured against instead.",
    )
    max_total_nodes: int | None = Field(
        None,
        ge=1,
        le=4_000_000,
        description="Cap on known nodes over all clusters; four times max_expected_nodes when left out.",
    )
    max_clusters: int = Field(
        1_000, ge=1, le=100_000, description="Cap on known clusters; more are refused and counted."
    )
    panic_answer: Literal["withhold", "floor"] = Field(
        "withhold",
        description="What agents are answered while more than half of a cluster is under its threshold: withhold sends"
        " none; floor sends the lowest that agents accept (0.10) with quorum false, which stops older agents at once.",
    )
    recompute_min_interval: RecomputeInterval = Field(
        parse_duration("200ms"), description="How old a threshold may be while pushes change it."
    )

    @property
    def total_cap(self) -> int:
        """Most nodes over all clusters."""
        return self.max_total_nodes or 4 * self.max_expected_nodes

    @property
    def settle_ns(self) -> int:
        """How long the first threshold waits."""
        settle = self.quorum.settle_time
        return self.push_interval if settle is None else settle

    @property
    def ttl_ns(self) -> int:
        """How long a node is known without a push."""
        return self.push_interval * self.ttl_multiplier
