"""One request to Fleet over OTLP/gRPC, and what its metadata said."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import grpc

from ingero.agent.health.cache import ThresholdHeaders, parse_told
from ingero.agent.health.endpoint import FleetEndpoint
from ingero.agent.health.signals.hints import explain_code, explain_failure
from ingero.agent.health.transport import (
    USER_AGENT,
    PushReply,
    TransportSettings,
    parse_retry_after,
)
from ingero.errors import BadDataError, IngeroError
from ingero.otlp.codec.export import Export, encode_protobuf
from ingero.otlp.names import Signal
from ingero.units import NS_PER_MS, NS_PER_S
from ingero.wire.names import Header

_METHODS: Final = {
    Signal.METRICS: "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
    Signal.TRACES: "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    Signal.LOGS: "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
}
_CUT_OFF: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
_PUSHBACK: Final = "grpc-retry-pushback-ms"
_MAX_MESSAGE_BYTES: Final = 64 * 1024


class GrpcTransport:
    """OTLP/gRPC over one channel.

    Raises:
        IngeroError: A certificate file cannot be read.
    """

    def __init__(self, settings: TransportSettings) -> None:
        self._settings = settings
        options = [
            ("grpc.primary_user_agent", USER_AGENT),
            ("grpc.enable_retries", 0),
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ]
        target = settings.endpoint.target
        self._channel = (
            grpc.secure_channel(target, _credentials(settings), options)
            if settings.endpoint.is_secure
            else grpc.insecure_channel(target, options)
        )
        self._calls: dict[Signal, Any] = {
            signal: self._channel.unary_unary(
                method, request_serializer=encode_protobuf, response_deserializer=bytes
            )
            for signal, method in _METHODS.items()
        }

    def send(self, export: Export, wall_ns: int) -> PushReply:
        """Call once."""
        settings = self._settings
        try:
            metadata = [(key.lower(), value) for key, value in settings.auth_headers().items()]
        except BadDataError as error:
            return PushReply(is_taken=False, detail=error.message)
        # gRPC refuses a call whose metadata is not plain text; the body says the cluster anyway.
        if settings.cluster_id.isascii() and settings.cluster_id.isprintable():
            metadata.append((Header.CLUSTER_HINT.value, settings.cluster_id))
        try:
            _, call = self._calls[export.signal].with_call(
                export,
                timeout=settings.timeout_ns / NS_PER_S,
                metadata=metadata,
                compression=grpc.Compression.Gzip if settings.is_gzip else None,
            )
        except grpc.RpcError as error:
            return _read_refusal(error, wall_ns, settings.endpoint)
        told = _gather(call.initial_metadata()) | _gather(call.trailing_metadata())
        return PushReply(
            is_taken=True,
            detail="OK",
            told=_read_told(told),
        )

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


def _read_refusal(error: Any, wall_ns: int, endpoint: FleetEndpoint) -> PushReply:  # noqa: ANN401 - grpc.RpcError is also a Call
    told = _gather(error.initial_metadata()) | _gather(error.trailing_metadata())
    pause_ns = parse_retry_after(told.get("retry-after"), wall_ns)
    pushback = told.get(_PUSHBACK, "")
    if pushback.isascii() and pushback.isdigit():
        pause_ns = int(pushback[:12]) * NS_PER_MS
    is_cut_off = error.code() in _CUT_OFF and pause_ns is None
    detail = explain_code(error.code().name, error.details() or "")
    return PushReply(
        is_taken=False,
        detail=explain_failure(detail, endpoint) if is_cut_off else detail,
        told=_read_told(told),
        retry_after_ns=pause_ns,
        is_cut_off=is_cut_off,
        is_refused=not is_cut_off,
    )


def _read_told(metadata: dict[str, str]) -> ThresholdHeaders:
    return parse_told(
        metadata.get(Header.GRPC_THRESHOLD),
        metadata.get(Header.GRPC_QUORUM_MET),
        metadata.get(Header.GRPC_PANIC),
    )


def _gather(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def _credentials(settings: TransportSettings) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=_read(settings.ca_file),
        private_key=_read(settings.key_file),
        certificate_chain=_read(settings.cert_file),
    )


def _read(file: str | None) -> bytes | None:
    if not file:
        return None
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise IngeroError(f"{file}: {error.strerror or error}") from error
