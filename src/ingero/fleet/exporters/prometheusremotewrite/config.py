"""Settings of the ``prometheusremotewrite`` exporter.

Sources of names: opentelemetry-collector-contrib ``exporter/prometheusremotewriteexporter``; ``send_exemplars`` and
``send_native_histograms`` are those of Prometheus' own ``remote_write``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from ingero.config import StrictModel
from ingero.fleet.helpers.clients import ConnectionConfig
from ingero.fleet.helpers.prometheus_labels import ResourceConversionConfig, ResourceLabelsConfig
from ingero.fleet.helpers.queue_config import QueueConfig, RetryConfig


class TargetInfoConfig(StrictModel):
    """A series that describes each sender."""

    enabled: bool = Field(
        default=True, description="Write target_info with a sender's resource attributes."
    )


class RemoteWriteConfig(ConnectionConfig):
    """Where samples go, and under which names."""

    absent_keys: ClassVar[Mapping[str, str]] = {
        "wal": "name a file_storage in remote_write_queue.storage instead",
        "compression": "the protocol has snappy only",
        "protobuf_message": "only Remote-Write 1.0 is spoken",
    }

    endpoint: str = Field(description="Whole URL, such as http://prometheus:9090/api/v1/write.")
    namespace: str = Field("", description="Put before each metric's name.")
    external_labels: dict[str, str] = Field(
        default_factory=dict, description="Labels of every series."
    )
    add_metric_suffixes: bool = Field(
        default=True, description="Append unit and type to names, as Prometheus wants them."
    )
    resource_constant_labels: ResourceLabelsConfig = Field(
        ResourceLabelsConfig(), description="Which resource attributes become labels."
    )
    resource_to_telemetry_conversion: ResourceConversionConfig = Field(
        ResourceConversionConfig(), description="The Collector's switch for all of them."
    )
    drop_attributes: tuple[str, ...] = Field(
        ("ingero.event.id", "score", "threshold"),
        description="Point attributes that never become labels, because each push brings a new value.",
    )
    target_info: TargetInfoConfig = Field(
        TargetInfoConfig(), description="A series that describes each sender."
    )
    send_exemplars: bool = Field(
        default=True,
        description="Write exemplars too; a receiver that keeps none passes them over.",
    )
    send_native_histograms: bool = Field(
        default=False,
        description="Write exponential histograms as native ones. A Prometheus that has them off refuses the whole "
        "batch; without this they are counted as rejected.",
    )
    remote_write_queue: QueueConfig = Field(
        QueueConfig(num_consumers=1), description="Where batches wait, as elsewhere sending_queue."
    )
    retry_on_failure: RetryConfig = Field(
        RetryConfig(), description="What happens after a refusal."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if urlsplit(self.endpoint).scheme not in {"http", "https"}:
            raise ValueError(f"{self.endpoint!r} is not an http or https URL")
        return self
