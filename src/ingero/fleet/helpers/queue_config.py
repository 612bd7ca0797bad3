"""Settings of sending queues and of retries, named and preset as those of the Collector's ``exporterhelper``."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from ingero.config import Duration, StrictModel
from ingero.fleet.component import NamesExtension
from ingero.units import parse_duration


class QueueConfig(StrictModel):
    """Where batches wait for their destination."""

    enabled: bool = Field(
        default=True,
        description="Without a queue a batch is sent while its pusher waits, and nothing else moves meanwhile.",
    )
    num_consumers: int = Field(10, ge=1, le=256, description="Batches under way at once.")
    queue_size: int = Field(
        1000,
        ge=1,
        description="Batches that may wait. One more is refused, and its pusher keeps it; where other "
        "exporters took it, it is lost to "
        "this one, counted and logged.",
    )
    storage: Annotated[str | None, NamesExtension()] = Field(
        None,
        description="Id of a file_storage extension, where batches wait instead of in memory: what was "
        "acknowledged outlives a killed process, and a stopped one leaves it to the next.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.storage is not None and not self.enabled:
            raise ValueError("storage needs a queue: set enabled to true")
        return self


class RetryConfig(StrictModel):
    """What happens to a batch that its destination did not take for now."""

    enabled: bool = Field(
        default=True, description="Without retries such a batch is lost and counted."
    )
    initial_interval: Duration = Field(
        parse_duration("5s"), description="Wait before the first retry."
    )
    randomization_factor: float = Field(
        0.5, ge=0, le=1, description="Share by which each wait varies either way."
    )
    multiplier: float = Field(
        1.5, ge=1, description="Growth of the wait from one retry to the next."
    )
    max_interval: Duration = Field(parse_duration("30s"), description="Longest wait.")
    max_elapsed_time: Duration = Field(
        parse_duration("5m"),
        description="Time after which a batch is given up and counted; 0s never gives up.",
    )
