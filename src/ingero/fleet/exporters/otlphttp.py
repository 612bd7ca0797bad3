"""``otlphttp``: OTLP over HTTP to another collector or store.

Sources: OTLP specification 1.x, "OTLP/HTTP Response" (retryable are 429, 502, 503 and 504; ``Retry-After``; partial
success is success); opentelemetry-collector ``exporter/otlphttpexporter`` (key names).
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final, Literal, Self
from urllib.parse import urlsplit

import zstandard
from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from pydantic import Field, model_validator

from ingero.errors import BadDataError, PermanentError, RetryableError
from ingero.fleet.component import Authenticator, ComponentId, Host, Stability
from ingero.fleet.consumer import Batch
from ingero.fleet.factory import ExporterFactory
from ingero.fleet.helpers.clients import ClientConfig, find_authenticator, open_http_client
from ingero.fleet.helpers.partial import REJECTED, count_rejected_json, count_rejected_message
from ingero.fleet.helpers.sending import SENDING_METRICS, QueueConfig, RetryConfig, Sender
from ingero.otlp.codec import Export, encode_json, encode_protobuf
from ingero.otlp.names import ContentType, Signal
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S
from ingero.wire.names import SIGNAL_PATHS

if TYPE_CHECKING:
    import httpx

_RETRYABLE: Final = frozenset({429, 502, 503, 504})
_RESPONSES: Final[Mapping[Signal, Callable[[bytes], Message]]] = {
    Signal.METRICS: ExportMetricsServiceResponse.FromString,
    Signal.LOGS: ExportLogsServiceResponse.FromString,
    Signal.TRACES: ExportTraceServiceResponse.FromString,
}
_COMPRESS: Final[Mapping[str, Callable[[bytes], bytes]]] = {
    "gzip": lambda body: gzip.compress(body, compresslevel=5, mtime=0),
    "zstd": zstandard.compress,
}


class OtlpHttpConfig(ClientConfig):
    """Where OTLP goes over HTTP."""

    endpoint: str | None = Field(None, description="Base URL; /v1/metrics and its like are added.")
    metrics_endpoint: str | None = Field(None, description="Whole URL for metrics instead.")
    logs_endpoint: str | None = Field(None, description="Whole URL for logs instead.")
    traces_endpoint: str | None = Field(None, description="Whole URL for traces instead.")
    encoding: Literal["proto", "json"] = Field("proto", description="Encoding of bodies.")
    sending_queue: QueueConfig = Field(QueueConfig(), description="Where batches wait.")
    retry_on_failure: RetryConfig = Field(
        RetryConfig(), description="What happens after a refusal."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        urls = [self.endpoint, self.metrics_endpoint, self.logs_endpoint, self.traces_endpoint]
        if not any(urls):
            raise ValueError("endpoint is required: the base URL, such as http://localhost:4318")
        for url in urls:
            if url is not None and urlsplit(url).scheme not in {"http", "https"}:
                raise ValueError(f"{url!r} is not an http or https URL")
        return self

    def url(self, signal: Signal) -> str | None:
        """Where a signal goes; None when there is nowhere."""
        own: str | None = getattr(self, f"{signal.value}_endpoint")
        if own is not None or self.endpoint is None:
            return own
        return self.endpoint.rstrip("/") + SIGNAL_PATHS[signal]


class OtlpHttpExporter:
    """Posts batches."""

    def __init__(self, component: ComponentId, config: OtlpHttpConfig) -> None:
        self._name = str(component)
        self._config = config
        self._sender = Sender(
            component, self._deliver, config.sending_queue, config.retry_on_failure
        )
        self._auth: Authenticator | None = None
        self._client: httpx.Client | None = None
        as_json = config.encoding == "json"
        self._encode: Callable[[Export], bytes] = encode_json if as_json else encode_protobuf
        self._headers = {"content-type": str(ContentType.JSON if as_json else ContentType.PROTOBUF)}
        if config.compression in _COMPRESS:
            self._headers["content-encoding"] = config.compression

    async def start(self, host: Host) -> None:
        """Open the client. Raises IngeroError for unusable TLS files or an unknown authenticator."""
        self._clock: Clock = host.clock
        self._auth = find_authenticator(host, self._config.auth)
        self._client = open_http_client(self._config, host)
        self._rejected = host.meter.counter(REJECTED).bound(exporter=self._name)
        self._sender.start(host)

    async def stop(self) -> None:
        """Send what waits, then close the client."""
        try:
            await self._sender.stop()
        finally:
            if self._client is not None:
                self._client.close()
                self._client = None

    def consume(self, batch: Batch) -> None:
        """Queue a batch; see `Sender.consume`."""
        self._sender.consume(batch)

    def find_refusal(self, batch: Batch) -> RetryableError | None:
        """Whether its queue is full; see `Sender.find_refusal`."""
        del batch
        return self._sender.find_refusal()

    def _deliver(self, batch: Batch) -> None:
        from httpx import HTTPError  # noqa: PLC0415 -- loaded by start; see open_http_client

        url = self._config.url(batch.signal)
        if url is None:
            raise PermanentError(f"exporters.{self._name} has no endpoint for {batch.signal}")
        body = self._body(batch)
        headers = self._headers | dict(self._auth.client_headers() if self._auth else {})
        client = self._client
        if client is None:
            raise RetryableError(f"exporters.{self._name} is stopped")
        try:
            answer = client.post(url, content=body, headers=headers)
        except HTTPError as error:
            raise RetryableError(f"{url}: {type(error).__name__} {error}") from error
        self._judge(batch.signal, answer)

    def _body(self, batch: Batch) -> bytes:
        try:
            body = self._encode(batch.export)
        except BadDataError as error:
            raise PermanentError(error.message) from error
        compress = _COMPRESS.get(self._config.compression)
        return body if compress is None else compress(body)

    def _judge(self, signal: Signal, answer: httpx.Response) -> None:
        status = answer.status_code
        if 200 <= status < 300:
            n_rejected = self._count_rejected(signal, answer)
            if n_rejected:
                self._rejected(n_rejected)
            return
        message = f"{answer.url}: {status} {answer.reason_phrase}"
        if status in _RETRYABLE:
            delay = parse_retry_after(answer.headers.get("retry-after", ""), self._clock.wall_ns())
            raise RetryableError(message, retry_after_ns=delay)
        raise PermanentError(message)

    @staticmethod
    def _count_rejected(signal: Signal, answer: httpx.Response) -> int:
        """Items a partial success refused; an answer that is no OTLP is a plain success."""
        if answer.headers.get("content-type", "").startswith(str(ContentType.JSON)):
            return count_rejected_json(answer.content)
        try:
            return count_rejected_message(_RESPONSES[signal](answer.content))
        except DecodeError:
            return 0


def parse_retry_after(text: str, wall_ns: int) -> int | None:
    """The delay of a ``Retry-After`` header in nanoseconds; None when there is none that can be read.

    Source: RFC 9110, section 10.2.3 (seconds, or a date).
    """
    if text.isascii() and text.isdigit():
        return int(text[:9]) * NS_PER_S
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0, round(when.timestamp() * NS_PER_S) - wall_ns)


FACTORY: Final = ExporterFactory(
    type="otlphttp",
    config=OtlpHttpConfig,
    says="OTLP over HTTP to another collector or store.",
    stability=Stability.BETA,
    metrics=(*SENDING_METRICS, REJECTED),
    create=OtlpHttpExporter,
    example={"endpoint": "http://localhost:4318"},
)
