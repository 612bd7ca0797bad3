"""``otlp``: OTLP over gRPC to another collector or store.

Source: opentelemetry-collector ``exporter/otlpexporter`` (key names). grpcio cannot skip the check of a server's
certificate, so ``insecure_skip_verify`` is refused here; certificates are read at start.
"""

from __future__ import annotations

from typing import Final, Self

from pydantic import Field, model_validator

from ingero.config.tls import TlsClientConfig
from ingero.fleet.component import ComponentId, Host, Stability
from ingero.fleet.factory import ExporterFactory
from ingero.fleet.helpers.otlp_exporter import (
    MakeHeaders,
    OtlpClientConfig,
    QueuedOtlpExporter,
)
from ingero.fleet.helpers.sending_report import SENDING_METRICS
from ingero.otlp.client.grpc import GrpcSender, GrpcSenderSettings


class OtlpConfig(OtlpClientConfig):
    """Where OTLP goes over gRPC."""

    endpoint: str = Field(
        min_length=1, description="host:port; http:// in front speaks without TLS."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tls is not None and self.tls.insecure_skip_verify:
            raise ValueError("tls.insecure_skip_verify cannot be had over gRPC; give ca_file")
        if self.compression == "zstd":
            raise ValueError("compression zstd cannot be had over gRPC; write gzip or none")
        return self

    @property
    def target(self) -> str:
        """What gRPC calls."""
        return self.endpoint.removeprefix("http://").removeprefix("https://").rstrip("/")

    @property
    def is_insecure(self) -> bool:
        """True when there is no TLS."""
        return self.endpoint.startswith("http://") or (self.tls is not None and self.tls.insecure)


class OtlpExporter(QueuedOtlpExporter):
    """Calls ``Export`` for each batch."""

    def __init__(self, component: ComponentId, config: OtlpConfig) -> None:
        def open_sender(_host: Host, headers: MakeHeaders) -> GrpcSender:
            return GrpcSender(_build_settings(config, headers))

        super().__init__(
            component, config, config.waiting, open_sender, lambda _signal: config.target
        )


def _build_settings(config: OtlpConfig, headers: MakeHeaders) -> GrpcSenderSettings:
    tls = config.tls or TlsClientConfig()
    name = tls.server_name_override
    return GrpcSenderSettings(
        target=config.target,
        is_secure=not config.is_insecure,
        timeout_ns=config.timeout,
        is_gzip=config.compression == "gzip",
        headers=headers,
        ca_file=tls.ca_file,
        key_file=tls.key_file,
        cert_file=tls.cert_file,
        options=(("grpc.ssl_target_name_override", name),) if name else (),
    )


FACTORY: Final = ExporterFactory(
    type="otlp",
    config=OtlpConfig,
    description="OTLP over gRPC to another collector or store.",
    stability=Stability.BETA,
    metrics=SENDING_METRICS,
    create=OtlpExporter,
    example={"endpoint": "localhost:4317"},
)
