"""Settings of the ``prometheus`` exporter: the Collector's keys, and two caps of ours.

Source of names and defaults: opentelemetry-collector-contrib, ``exporter/prometheusexporter/README.md``. Two defaults
differ: the ``ingero.*`` resource attributes become labels, since without a node's name nothing says whose series they
are; and scope names never become labels, since one series that two scopes report is one series.
"""

from __future__ import annotations

from pydantic import Field

from ingero.config import Duration, Endpoint, StrictModel
from ingero.config.tls import TlsServerConfig
from ingero.fleet.helpers.prometheus_labels import ResourceConversionConfig, ResourceLabelsConfig
from ingero.units import parse_duration


class PrometheusConfig(StrictModel):
    """The ``prometheus`` exporter."""

    endpoint: Endpoint = Field(description="host:port to serve /metrics on.")
    tls: TlsServerConfig | None = Field(None, description="Serve HTTPS.")
    namespace: str = Field("", description="Put before each metric's name.")
    const_labels: dict[str, str] = Field({}, description="Labels of every series.")
    send_timestamps: bool = Field(default=False, description="Show each sample's own time.")
    metric_expiration: Duration = Field(
        parse_duration("5m"), description="How long a series is shown without a new point."
    )
    enable_open_metrics: bool = Field(
        default=False, description="Answer in OpenMetrics text to a scraper that asks for it."
    )
    add_metric_suffixes: bool = Field(
        default=True, description="Append unit and type to names, as Prometheus wants them."
    )
    resource_constant_labels: ResourceLabelsConfig = Field(
        ResourceLabelsConfig(), description="Which resource attributes become labels."
    )
    resource_to_telemetry_conversion: ResourceConversionConfig = Field(
        ResourceConversionConfig(), description="The Collector's older switch for all of them."
    )
    drop_attributes: tuple[str, ...] = Field(
        ("ingero.event.id", "score", "threshold"),
        description="Point attributes that never become labels, because each push brings a new value.",
    )
    label_limit: int = Field(
        64,
        ge=1,
        description="Labels of a point, and of its sender, at most; more are refused and counted.",
    )
    label_name_length_limit: int = Field(
        256,
        ge=1,
        description="Longest name of a label or metric; longer ones are refused and counted.",
    )
    label_value_length_limit: int = Field(
        1024, ge=1, description="Longest value of a label; longer ones are refused and counted."
    )
    exclusive_attributes: tuple[str, ...] = Field(
        ("ingero.node.state", "ingero.detection_mode"),
        description="Point attributes of which a sender has one value at a time: the series with its value before goes"
        " from /metrics with its next push.",
    )
    max_series: int = Field(
        500_000,
        ge=1,
        description="Cap on series; more are refused and counted. About 110 bytes each.",
    )
