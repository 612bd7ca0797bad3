"""OTLP/gRPC on grpcio's asyncio server: a stalled sender holds no thread, and a waiting commit holds none either.

Its rate is bound by grpcio's Python layer (about 3 000 requests/s a core); a collector that forwards here batches
thousands of rows in one.

Source: opentelemetry-proto collector services; google.rpc.Status in ``grpc-status-details-bin``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import grpc
import grpc.aio

from ingero.config import Endpoint
from ingero.echo.db.rows import Rows
from ingero.echo.ingest.intake import ForbiddenError, Intake
from ingero.echo.ingest.settings import Authenticate, IngestCounters, IngestSettings
from ingero.errors import BadDataError, IngeroError, RetryableError, StoreError
from ingero.serving.bodies import encode_retry_status, encode_taken
from ingero.units import NS_PER_S
from ingero.wire.names import ContentType, Header, Signal
from ingero.wire.otlp import decode_export

_SERVICES: Final = {
    "opentelemetry.proto.collector.metrics.v1.MetricsService": Signal.METRICS,
    "opentelemetry.proto.collector.logs.v1.LogsService": Signal.LOGS,
    "opentelemetry.proto.collector.trace.v1.TraceService": Signal.TRACES,
}
_LARGE_BYTES: Final = 32 << 10
_EXHAUSTED: Final = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]

_Context = grpc.aio.ServicerContext[bytes, bytes]
_Handler = Callable[[bytes, _Context], Awaitable[bytes]]


class OtlpGrpcServer:
    """The gRPC listener.

    Args:
        intake: Where exports go.
        authenticate: Who a request is from.
        settings: Limits.
        counters: Shared with the HTTP listener.
    """

    def __init__(
        self,
        intake: Intake,
        authenticate: Authenticate,
        settings: IngestSettings,
        counters: IngestCounters,
    ) -> None:
        self._intake = intake
        self._authenticate = authenticate
        self._settings = settings
        self._counters = counters
        self._server: grpc.aio.Server | None = None

    async def start(
        self, endpoint: Endpoint, credentials: grpc.ServerCredentials | None
    ) -> Endpoint:
        """Bind and serve; returns where, with the port that was chosen.

        Raises:
            IngeroError: The address cannot be bound.
        """
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self._settings.max_body_bytes),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 5000),
            ],
            maximum_concurrent_rpcs=self._settings.max_in_flight,
        )
        handlers = [
            grpc.method_handlers_generic_handler(
                service, {"Export": grpc.unary_unary_rpc_method_handler(self._handler(signal))}
            )
            for service, signal in _SERVICES.items()
        ]
        server.add_generic_rpc_handlers(handlers)
        address = str(endpoint) if endpoint.host else f"[::]:{endpoint.port}"
        try:
            if credentials is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise IngeroError(f"cannot listen on {endpoint} for OTLP/gRPC") from error
        if port == 0:
            raise IngeroError(f"cannot listen on {endpoint} for OTLP/gRPC")
        await server.start()
        self._server = server
        return Endpoint(endpoint.host, port)

    async def stop(self, drain_ns: int) -> None:
        """Refuse new calls, let those in flight finish."""
        if self._server is not None:
            await self._server.stop(drain_ns / NS_PER_S)

    def _handler(self, signal: Signal) -> _Handler:
        async def export(body: bytes, context: _Context) -> bytes:
            return await self._take(signal, body, context)

        return export

    async def _take(self, signal: Signal, body: bytes, context: _Context) -> bytes:
        if self._counters.draining:
            await _refuse(context, grpc.StatusCode.UNAVAILABLE, "shutting down; send again")
        metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
        given = metadata.get("authorization")
        principal = self._authenticate(given if isinstance(given, str) else None)
        if principal is None:
            self._counters.refused_auth += 1
            await _refuse(context, grpc.StatusCode.UNAUTHENTICATED, "missing or wrong bearer token")
            raise AssertionError  # abort raises
        hint = metadata.get(Header.CLUSTER_HINT.lower(), "")

        def build() -> tuple[Rows, int]:
            decoded = decode_export(body, signal, ContentType.PROTOBUF)
            return self._intake.build(decoded, principal, hint if isinstance(hint, str) else "")

        try:
            rows, n_refused = (
                await asyncio.to_thread(build) if len(body) > _LARGE_BYTES else build()
            )
            await self._intake.write(rows)
        except IngeroError as error:
            await self._refuse_error(context, error)
            raise AssertionError from error  # abort raises
        self._counters.taken += 1
        why = "collective batches that could not be read" if n_refused else ""
        return encode_taken(signal, n_refused, why, is_json=False)

    async def _refuse_error(self, context: _Context, error: IngeroError) -> None:
        counters = self._counters
        if isinstance(error, RetryableError):
            counters.refused_load += 1
            seconds = max(1, (error.retry_after_ns or NS_PER_S) // NS_PER_S)
            details = encode_retry_status(_EXHAUSTED, error.message, seconds)
            context.set_trailing_metadata((("grpc-status-details-bin", details),))
            await _refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
        if isinstance(error, ForbiddenError):
            counters.refused_acl += 1
            await _refuse(context, grpc.StatusCode.PERMISSION_DENIED, error.message)
        if isinstance(error, BadDataError):
            counters.refused_body += 1
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, error.message)
        counters.failed += 1
        is_store = isinstance(error, StoreError)
        status = grpc.StatusCode.UNAVAILABLE if is_store else grpc.StatusCode.INTERNAL
        await _refuse(context, status, "the store cannot write now")


async def _refuse(context: _Context, status: grpc.StatusCode, message: str) -> None:
    await context.abort(status, message)
