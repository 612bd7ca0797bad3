"""OTLP/gRPC on grpcio's asyncio server: a stalled sender holds no thread, and a waiting commit holds none either.

Export is served as a stream of one request, which is the same on the wire: a unary handler gets the message after all of
it was received, and this one asks for it only when it knows who sends it and there is room. Until then gRPC's flow
control holds the sender after 64 KiB.

Its rate is bound by grpcio's Python layer (about 3 000 requests/s a core); a collector that forwards here batches
thousands of rows in one.

Source: opentelemetry-proto collector services; google.rpc.Status in ``grpc-status-details-bin``; gRPC over HTTP/2
(unary and streaming calls have the same framing).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, NoReturn

import grpc
import grpc.aio

from ingero.config import Endpoint
from ingero.echo.ingest.reception import EXHAUSTED, INVALID, Reception, RefusedError, Visit
from ingero.errors import IngeroError
from ingero.otlp.codec import Export, decode_export
from ingero.otlp.names import ContentType, Signal
from ingero.serving.bodies import encode_retry_status, encode_taken
from ingero.units import NS_PER_S
from ingero.wire.names import Header

_SERVICES: Final = {
    "opentelemetry.proto.collector.metrics.v1.MetricsService": Signal.METRICS,
    "opentelemetry.proto.collector.logs.v1.LogsService": Signal.LOGS,
    "opentelemetry.proto.collector.trace.v1.TraceService": Signal.TRACES,
}
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_STREAMS_PER_CONNECTION: Final = 128
_WINDOW_BYTES: Final = 64 << 10
_HANDSHAKE_MS: Final = 10_000

_Context = grpc.aio.ServicerContext[bytes, bytes]
_Handler = Callable[[AsyncIterator[bytes], _Context], Awaitable[bytes]]


class EchoGrpcServer:
    """The gRPC listener.

    Args:
        reception: Shared with the HTTP listener.
    """

    def __init__(self, reception: Reception) -> None:
        self._reception = reception
        self._server: grpc.aio.Server | None = None

    async def start(
        self, endpoint: Endpoint, credentials: grpc.ServerCredentials | None
    ) -> Endpoint:
        """Bind and serve; returns where, with the port that was chosen.

        Raises:
            IngeroError: The address cannot be bound.
        """
        settings = self._reception.settings
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", settings.max_body_bytes),
                ("grpc.so_reuseport", 0),
                ("grpc.max_concurrent_streams", _STREAMS_PER_CONNECTION),
                ("grpc.http2.bdp_probe", 0),  # or the window grows before anybody is known
                ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
                ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 5000),
            ],
            maximum_concurrent_rpcs=2 * settings.max_in_flight,
        )
        handlers = [
            grpc.method_handlers_generic_handler(
                service, {"Export": grpc.stream_unary_rpc_method_handler(self._handler(signal))}
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
        async def export(messages: AsyncIterator[bytes], context: _Context) -> bytes:
            return await self._answer(signal, messages, context)

        return export

    async def _answer(
        self, signal: Signal, messages: AsyncIterator[bytes], context: _Context
    ) -> bytes:
        visit = self._reception.visit(
            "grpc", "Export", f"/v1/{signal.value}", _find_address(context.peer())
        )
        try:
            return await self._take(signal, messages, context, visit)
        except RefusedError as error:
            visit.status, visit.why = error.status, error.message
            refused = error
        finally:
            self._reception.record(visit)
        return await _refuse(context, refused)

    async def _take(
        self, signal: Signal, messages: AsyncIterator[bytes], context: _Context, visit: Visit
    ) -> bytes:
        metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
        given = metadata.get("authorization")
        hint = metadata.get(Header.CLUSTER_HINT.lower(), "")
        async with self._reception.enter(visit, given if isinstance(given, str) else None):
            body = await self._read(messages, visit)

            def decode() -> Export:
                return decode_export(body, signal, ContentType.PROTOBUF)

            taken = await self._reception.take(visit, decode, hint if isinstance(hint, str) else "")
        return encode_taken(signal, taken.n_refused, taken.why, is_json=False)

    async def _read(self, messages: AsyncIterator[bytes], visit: Visit) -> bytes:
        """The request's one message; its size is known when it is there, so the largest is reserved until then."""
        settings = self._reception.settings
        try:
            async with asyncio.timeout(settings.read_timeout_ns / NS_PER_S):
                await self._reception.reserve(visit, settings.max_body_bytes)
                body = await anext(messages, b"")
        except TimeoutError:
            if not visit.n_bytes:
                self._reception.counters.refused_load += 1
                raise RefusedError(
                    429, EXHAUSTED, "too many bytes are being read at once", 1
                ) from None
            self._reception.counters.refused_body += 1
            raise RefusedError(408, INVALID, "the message did not arrive in time") from None
        await self._reception.shrink(visit, len(body))
        return body


def _find_address(peer: str) -> str:
    """The address of ``ipv4:10.0.0.1:4242`` and ``ipv6:[::1]:4242`` (as ``%5B::1%5D``)."""
    address = peer.partition(":")[2].rpartition(":")[0]
    return address.replace("%5B", "").replace("%5D", "").strip("[]") or peer


async def _refuse(context: _Context, refused: RefusedError) -> NoReturn:
    if refused.code == EXHAUSTED and refused.retry_after_s:
        details = encode_retry_status(EXHAUSTED, refused.message, refused.retry_after_s)
        context.set_trailing_metadata((("grpc-status-details-bin", details),))
    await context.abort(_CODES[refused.code], refused.message)
