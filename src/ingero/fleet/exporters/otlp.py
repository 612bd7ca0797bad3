"""``otlp``: OTLP over gRPC to another collector or store.

Source: opentelemetry-collector ``exporter/otlpexporter`` (key names). grpcio cannot skip the check of a server's
certificate, nor choose among TLS 1.2 and 1.3, nor add authorities to the default ones: what asks for that is refused.
Where certificates change, a new channel takes over.
"""

from __future__ import annotations

import logging
from typing import Final, Self

from pydantic import Field, model_validator

from ingero.config.tls import TlsClientConfig
from ingero.errors import IngeroError
from ingero.fleet.component import ComponentId, Host, Stability
from ingero.fleet.factory import ExporterFactory
from ingero.fleet.helpers.otlp_exporter import (
    MakeHeaders,
    OtlpClientConfig,
    QueuedOtlpExporter,
)
from ingero.fleet.helpers.sending_report import SENDING_METRICS
from ingero.otlp.client.grpc import GrpcSender, GrpcSenderSettings
from ingero.serving.tls import build_client_context, stamp_files

_log: Final = logging.getLogger("ingero.fleet.exporter")


class OtlpConfig(OtlpClientConfig):
    """Where OTLP goes over gRPC."""

    endpoint: str = Field(
        min_length=1, description="host:port; http:// in front speaks without TLS."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tls is not None:
            _check_tls(self.tls)
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
        def open_sender(host: Host, headers: MakeHeaders) -> GrpcSender:
            return _open_sender(config, host, headers)

        super().__init__(
            component, config, config.waiting, open_sender, lambda _signal: config.target
        )


def _check_tls(tls: TlsClientConfig) -> None:
    """Refuse what grpcio cannot do; raises ValueError."""
    if tls.insecure_skip_verify:
        raise ValueError("tls.insecure_skip_verify cannot be had over gRPC; give ca_file")
    if tls.min_version == "1.3":
        raise ValueError("tls.min_version 1.3 cannot be had over gRPC, which takes 1.2 too")
    if tls.max_version == "1.2":
        raise ValueError("tls.max_version 1.2 cannot be had over gRPC, which takes 1.3 too")
    if tls.include_system_ca_certs_pool and tls.ca_file:
        raise ValueError(
            "tls.include_system_ca_certs_pool cannot be had over gRPC beside ca_file;"
            " give ca_file all authorities"
        )


def _open_sender(config: OtlpConfig, host: Host, headers: MakeHeaders) -> GrpcSender:
    """Connect; where a certificate file changes, connect anew. Raises IngeroError for a file that cannot be read."""
    tls = config.tls or TlsClientConfig()
    names = [name for name in (tls.ca_file, tls.cert_file, tls.key_file) if name is not None]
    if config.is_insecure or not names or not tls.reload_interval:
        return GrpcSender(_build_settings(config, headers))
    stamps = stamp_files(names)
    sender = GrpcSender(_build_settings(config, headers))

    def renew() -> None:
        nonlocal stamps
        try:
            found = stamp_files(names)
            if found != stamps:
                build_client_context(tls)  # gRPC would find a bad pair only while it connects
                sender.renew()
                stamps = found
        except IngeroError as error:
            _log.warning("certificate not renewed, the old one stays: %s", error.message)

    host.every(tls.reload_interval, renew)
    return sender


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
