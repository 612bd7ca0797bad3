"""Settings of the ``ingero`` processor: the documented keys, and the limits that keep hostile input bounded."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ingero.config import Duration, StrictModel
from ingero.units import NS_PER_MS, NS_PER_S, parse_duration

PushInterval = Annotated[Duration, Field(ge=NS_PER_S)]
RecomputeInterval = Annotated[Duration, Field(ge=10 * NS_PER_MS, le=60 * NS_PER_S)]


class ThresholdConfig(StrictModel):
    """How the bar is placed under the peers."""

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
    """When a threshold is worth telling."""

    statistical_min: int = Field(5, ge=1, description="Fewest active nodes for a threshold.")
    coverage_fraction: float = Field(
        0.80,
        ge=0.0,
        le=1.0,
        description="Share of max_expected_nodes that should report; below it coverage_low is 1. Informational.",
    )


class IngeroConfig(StrictModel):
    """The ``ingero`` processor."""

    threshold: ThresholdConfig = Field(
        ThresholdConfig(), description="How the bar is placed under the peers."
    )
    quorum: QuorumConfig = Field(QuorumConfig(), description="When a threshold is worth telling.")
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
        description="Cap on known nodes over all clusters, and what coverage is measured against.",
    )
    max_clusters: int = Field(
        1_000, ge=1, le=100_000, description="Cap on known clusters; more are refused and counted."
    )
    recompute_min_interval: RecomputeInterval = Field(
        parse_duration("200ms"), description="How old a threshold may be while pushes change it."
    )

    @property
    def ttl_ns(self) -> int:
        """How long a node is known without a push."""
        return self.push_interval * self.ttl_multiplier
