"""``otlp``: OTLP over gRPC to another collector or store.

Sources: OTLP specification 1.x, "OTLP/gRPC Response" (which codes are retryable; RESOURCE_EXHAUSTED only with a
RetryInfo); opentelemetry-collector ``exporter/otlpexporter`` (key names). grpcio cannot skip the check of a server's
certificate, so ``insecure_skip_verify`` is refused here; certificates are read at start.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, Self, cast

import grpc
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from pydantic import Field, model_validator

from ingero.config.tls import TlsClientConfig
from ingero.errors import BadDataError, IngeroError, PermanentError, RetryableError
from ingero.fleet.component import Authenticator, ComponentId, Host, Stability
from ingero.fleet.consumer import Batch
from ingero.fleet.factory import ExporterFactory
from ingero.fleet.helpers.clients import ClientConfig, find_authenticator, reveal
from ingero.fleet.helpers.partial import REJECTED, count_rejected_message
from ingero.fleet.helpers.sending import SENDING_METRICS, QueueConfig, RetryConfig, Sender
from ingero.otlp.codec import encode_protobuf
from ingero.otlp.names import Signal
from ingero.units import NS_PER_S

_METHODS: Final = {
    Signal.METRICS: (
        "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
        ExportMetricsServiceResponse.FromString,
    ),
    Signal.LOGS: (
        "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
        ExportLogsServiceResponse.FromString,
    ),
    Signal.TRACES: (
        "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
        ExportTraceServiceResponse.FromString,
    ),
}
_RETRYABLE: Final = frozenset({
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
})
_DETAILS: Final = "grpc-status-details-bin"
_RETRY_INFO: Final = b"google.rpc.RetryInfo"


class OtlpConfig(ClientConfig):
    """Where OTLP goes over gRPC."""

    endpoint: str = Field(
        min_length=1, description="host:port; http:// in front speaks without TLS."
    )
    sending_queue: QueueConfig = Field(QueueConfig(), description="Where batches wait.")
    retry_on_failure: RetryConfig = Field(
        RetryConfig(), description="What happens after a refusal."
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


class OtlpExporter:
    """Calls ``Export`` for each batch."""

    def __init__(self, component: ComponentId, config: OtlpConfig) -> None:
        self._name = str(component)
        self._config = config
        self._sender = Sender(
            component, self._deliver, config.sending_queue, config.retry_on_failure
        )
        self._auth: Authenticator | None = None
        self._channel: grpc.Channel | None = None
        self._calls: dict[Signal, Callable[..., object]] = {}

    async def start(self, host: Host) -> None:
        """Open the channel. Raises IngeroError for unusable TLS files or an unknown authenticator."""
        self._auth = find_authenticator(host, self._config.auth)
        self._channel = _open_channel(self._config)
        self._calls = {
            signal: self._channel.unary_unary(
                method, request_serializer=None, response_deserializer=decode
            )
            for signal, (method, decode) in _METHODS.items()
        }
        self._rejected = host.meter.counter(REJECTED).bound(exporter=self._name)
        self._sender.start(host)

    async def stop(self) -> None:
        """Send what waits, then close the channel."""
        try:
            await self._sender.stop()
        finally:
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    def consume(self, batch: Batch) -> None:
        """Queue a batch; see `Sender.consume`."""
        self._sender.consume(batch)

    def find_refusal(self, batch: Batch) -> RetryableError | None:
        """Whether its queue is full; see `Sender.find_refusal`."""
        del batch
        return self._sender.find_refusal()

    def _deliver(self, batch: Batch) -> None:
        try:
            body = encode_protobuf(batch.export)
        except BadDataError as error:
            raise PermanentError(error.message) from error
        headers = reveal(self._config.headers) | dict(
            self._auth.client_headers() if self._auth else {}
        )
        if self._channel is None:
            raise RetryableError(f"exporters.{self._name} is stopped")
        try:
            answer = self._calls[batch.signal](
                body,
                timeout=self._config.timeout / NS_PER_S,
                metadata=[(name.lower(), value) for name, value in headers.items()],
            )
        except grpc.RpcError as error:
            raise _translate(self._config.target, cast("grpc.Call", error)) from error
        n_rejected = count_rejected_message(answer)  # type: ignore[arg-type]
        if n_rejected:
            self._rejected(n_rejected)


def _translate(target: str, call: grpc.Call) -> RetryableError | PermanentError:
    code = call.code()
    message = f"{target}: {code.name} {call.details()}"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        trailers = dict(call.trailing_metadata() or ())
        details = trailers.get(_DETAILS, b"")
        is_temporary = isinstance(details, bytes) and _RETRY_INFO in details
        return RetryableError(message) if is_temporary else PermanentError(message)
    return RetryableError(message) if code in _RETRYABLE else PermanentError(message)


def _open_channel(config: OtlpConfig) -> grpc.Channel:
    gzip = grpc.Compression.Gzip if config.compression == "gzip" else grpc.Compression.NoCompression
    if config.is_insecure:
        return grpc.insecure_channel(config.target, compression=gzip)
    tls = config.tls or TlsClientConfig()
    override = tls.server_name_override
    options = [("grpc.ssl_target_name_override", override)] if override else []
    credentials = grpc.ssl_channel_credentials(
        _read(tls.ca_file), _read(tls.key_file), _read(tls.cert_file)
    )
    return grpc.secure_channel(config.target, credentials, options=options, compression=gzip)


def _read(name: str | None) -> bytes | None:
    try:
        return None if name is None else Path(name).read_bytes()
    except OSError as error:
        raise IngeroError(f"{name}: {error.strerror or error}") from error


FACTORY: Final = ExporterFactory(
    type="otlp",
    config=OtlpConfig,
    says="OTLP over gRPC to another collector or store.",
    stability=Stability.BETA,
    metrics=(*SENDING_METRICS, REJECTED),
    create=OtlpExporter,
    example={"endpoint": "localhost:4317"},
)
