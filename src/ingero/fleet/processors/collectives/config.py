"""Settings of the ``nccl`` processor."""

from __future__ import annotations

from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from ingero.config import Duration, StrictModel
from ingero.fleet.processors.collectives.rates import RatesConfig
from ingero.units import NS_PER_MS, parse_duration

JudgeInterval = Annotated[Duration, Field(ge=100 * NS_PER_MS)]
_LIVE: Final = frozenset({
    "rates",
    "cost_interval",
    "judge_interval",
    "max_clusters",
    "max_communicators",
    "max_communicator_ops",
    "max_pending_ops",
})
"""Settings that a reload changes without forgetting evidence."""


class NcclConfig(StrictModel):
    """The ``nccl`` processor."""

    alarm_slowdown: float = Field(
        0.10, gt=0.0, le=10.0, description="Slowdown that makes a culprit; 0.10 is 10 %."
    )
    notice_slowdown: float = Field(
        0.03, gt=0.0, le=10.0, description="Slowdown that makes a drag, which is never an alarm."
    )
    notice_spread: float = Field(
        0.0,
        ge=0.0,
        le=10.0,
        description="Raises notice_slowdown to this many standard deviations of what a worker's peers differ by"
        " persistently; 0 never does.",
    )
    alpha: float = Field(
        1e-6, gt=0.0, le=0.01, description="False alarms allowed per compared operation and worker."
    )
    alarms_per_worker_day: float | None = Field(
        None,
        gt=0.0,
        description="The same as a budget in time; wins over alpha, by how often the ranks have operated so far.",
    )
    judge_interval: JudgeInterval = Field(
        parse_duration("1s"), description="How often what arrived is judged."
    )
    reorder_window: Duration = Field(
        parse_duration("5s"),
        description="How long after its arrival an operation may be preceded by a later arrival.",
    )
    patience: Duration = Field(
        parse_duration("1m"), description="How long peers wait for a rank that does not report."
    )
    idle_timeout: Duration = Field(
        parse_duration("15m"),
        description="A cluster or communicator that is silent this long is forgotten, and a rank no longer named "
        "that reports nothing comparable for as long.",
    )
    gauge_window: Duration = Field(
        parse_duration("30s"), description="How old a per-event gauge may be to be compared."
    )
    cost_interval: Duration = Field(
        parse_duration("10s"),
        gt=0,
        description="How often what waiting has cost since the last time is reported, as log records.",
    )
    rates: RatesConfig = Field(
        RatesConfig(), description="Prices of a GPU-hour; what has none costs GPU-seconds only."
    )
    max_gauge_groups: int = Field(
        16_384, ge=1, description="Cap on operations of communicators that gauges are compared on."
    )
    max_clusters: int = Field(100, ge=1, description="Cap on clusters; more are refused.")
    max_workers: int = Field(20_000, ge=1, description="Cap on workers of one cluster.")
    max_communicators: int = Field(16_384, ge=1, description="Cap on communicators of one cluster.")
    max_pending_ops: int = Field(
        2_000_000, ge=1, description="Cap on operations of one cluster that wait to be judged."
    )
    max_communicator_ops: int = Field(
        1_000_000, ge=1, description="Cap on operations of one communicator in one judge interval."
    )

    def accepts(self, other: NcclConfig) -> bool:
        """Whether what was judged under these settings stands under the others: only prices, caps and timers differ."""
        fixed = set(NcclConfig.model_fields) - _LIVE
        return all(getattr(self, name) == getattr(other, name) for name in fixed)

    @model_validator(mode="after")
    def _check_tiers(self) -> Self:
        if self.notice_slowdown > self.alarm_slowdown:
            raise ValueError("notice_slowdown is above alarm_slowdown; the notice comes first")
        return self
