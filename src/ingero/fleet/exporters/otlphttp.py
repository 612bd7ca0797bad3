"""``otlphttp``: OTLP over HTTP to another collector or store.

Source: opentelemetry-collector ``exporter/otlphttpexporter`` (key names).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from ingero.errors import BadDataError
from ingero.fleet.component import ComponentId, Host, Stability
from ingero.fleet.factory import ExporterFactory
from ingero.fleet.helpers.clients import open_client_context
from ingero.fleet.helpers.otlp_exporter import (
    MakeHeaders,
    OtlpClientConfig,
    QueuedOtlpExporter,
)
from ingero.fleet.helpers.sending_report import SENDING_METRICS
from ingero.otlp.codec import encode_json, encode_protobuf
from ingero.otlp.names import SIGNAL_PATHS, ContentType, Signal

if TYPE_CHECKING:
    from ingero.otlp.client.http import HttpSender

_GZIP_LEVEL: Final = 5


class OtlpHttpConfig(OtlpClientConfig):
    """Where OTLP goes over HTTP."""

    endpoint: str | None = Field(None, description="Base URL; /v1/metrics and its like are added.")
    metrics_endpoint: str | None = Field(None, description="Whole URL for metrics instead.")
    logs_endpoint: str | None = Field(None, description="Whole URL for logs instead.")
    traces_endpoint: str | None = Field(None, description="Whole URL for traces instead.")
    encoding: Literal["proto", "json"] = Field("proto", description="Encoding of bodies.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not any(self.urls):
            raise ValueError("endpoint is required: the base URL, such as http://localhost:4318")
        for url in self.urls:
            if urlsplit(url).scheme not in {"http", "https"}:
                raise ValueError(f"{url!r} is not an http or https URL")
        return self

    @property
    def urls(self) -> tuple[str, ...]:
        """Every address that is named."""
        named = (self.endpoint, self.metrics_endpoint, self.logs_endpoint, self.traces_endpoint)
        return tuple(url for url in named if url is not None)

    def url(self, signal: Signal) -> str | None:
        """Where a signal goes; None when there is nowhere."""
        own: str | None = getattr(self, f"{signal.value}_endpoint")
        if own is not None or self.endpoint is None:
            return own
        return self.endpoint.rstrip("/") + SIGNAL_PATHS[signal]


class OtlpHttpExporter(QueuedOtlpExporter):
    """Posts batches."""

    def __init__(self, component: ComponentId, config: OtlpHttpConfig) -> None:
        def find_url(signal: Signal) -> str:
            url = config.url(signal)
            if url is None:
                raise BadDataError(f"exporters.{component} has no endpoint for {signal}")
            return url

        def open_sender(host: Host, headers: MakeHeaders) -> HttpSender:
            from ingero.otlp.client.http import (  # noqa: PLC0415 -- 16 MiB that other collectors do not need
                HttpSender,
                HttpSenderSettings,
            )

            as_json = config.encoding == "json"
            return HttpSender(
                HttpSenderSettings(
                    urls=find_url,
                    encode=encode_json if as_json else encode_protobuf,
                    content_type=ContentType.JSON if as_json else ContentType.PROTOBUF,
                    timeout_ns=config.timeout,
                    encoding=config.compression,
                    gzip_level=_GZIP_LEVEL,
                    headers=headers,
                    tls=open_client_context(config, host, config.urls),
                )
            )

        super().__init__(component, config, config.waiting, open_sender, find_url)


FACTORY: Final = ExporterFactory(
    type="otlphttp",
    config=OtlpHttpConfig,
    description="OTLP over HTTP to another collector or store.",
    stability=Stability.BETA,
    metrics=SENDING_METRICS,
    create=OtlpHttpExporter,
    example={"endpoint": "http://localhost:4318"},
)
