"""OTLP/gRPC on grpcio's asyncio server.

A stalled sender holds no thread, and an answer that takes its time holds none either.

For handlers that wait. Export is served as a stream of one request, which is the same on the wire: a unary handler
gets the message after all of it was received, and this one asks for it only when the handler let it in and has room.
Until then gRPC's flow control holds the sender after 64 KiB.

Its rate is bound by grpcio's Python layer (about 3 000 requests/s a core); a collector that forwards here batches
thousands of rows in one.

Source: gRPC over HTTP/2 (unary and streaming calls have the same framing).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import grpc
import grpc.aio

from ingero.config import Endpoint
from ingero.otlp.names import Signal
from ingero.serving.otlp.answers import CUT_SHORT, AnswerStatus, OtlpAnswer, Reason, RequestRefusal
from ingero.serving.otlp.grpc_calls import (
    OtlpGrpcSettings,
    bind_port,
    build_handlers,
    open_call,
    write_answer,
)
from ingero.serving.otlp.handler import OtlpHandler, OtlpRequest
from ingero.units import NS_PER_S

_OPTIONS: Final = (
    ("grpc.max_concurrent_streams", 128),
    ("grpc.http2.bdp_probe", 0),  # or the window grows before anybody is known
    ("grpc.http2.lookahead_bytes", 64 << 10),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
)
_TIMEOUT: Final = RequestRefusal(
    OtlpAnswer(AnswerStatus.TIMEOUT, "the message did not arrive in time"), Reason.TIMEOUT
)

_Context = grpc.aio.ServicerContext[bytes, bytes]


class OtlpAsyncGrpcServer:
    """One listening gRPC port on the event loop.

    Args:
        settings: Limits.
        handler: Who may send, and what becomes of it.
        read_timeout_ns: Longest time for a message to arrive.
    """

    def __init__(
        self, settings: OtlpGrpcSettings, handler: OtlpHandler, read_timeout_ns: int
    ) -> None:
        self._settings = settings
        self._handler = handler
        self._read_timeout_s = read_timeout_ns / NS_PER_S
        self._server: grpc.aio.Server | None = None

    async def start(
        self, endpoint: Endpoint, credentials: grpc.ServerCredentials | None
    ) -> Endpoint:
        """Bind and serve; returns where, with the kernel's port.

        Raises:
            IngeroError: The address cannot be bound.
        """
        server = grpc.aio.server(
            options=[*self._settings.build_options(), *_OPTIONS],
            maximum_concurrent_rpcs=2 * self._settings.max_in_flight,
        )
        server.add_generic_rpc_handlers(build_handlers(self._build_handler))
        bound = bind_port(server, endpoint, credentials)
        await server.start()
        self._server = server
        return bound

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let those in flight finish for ``grace_s``, then cancel them."""
        if self._server is not None:
            await self._server.stop(grace_s)

    def _build_handler(self, signal: Signal) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def export(messages: AsyncIterator[bytes], context: _Context) -> bytes:
            request = open_call(signal, context, self._handler)
            answer = await self._answer(request, messages)
            return write_answer(context, signal, answer, self._handler.find_headers(request))

        return grpc.stream_unary_rpc_method_handler(export)

    async def _answer(self, request: OtlpRequest, messages: AsyncIterator[bytes]) -> OtlpAnswer:
        handler = self._handler
        received: bytes | RequestRefusal = (
            CUT_SHORT  # where a call is cancelled, or its message is too large for gRPC
        )
        try:
            received = await self._receive(request, messages)
        finally:
            if isinstance(received, RequestRefusal):
                handler.refused(request, received)
        if isinstance(received, RequestRefusal):
            return received.answer
        answer = handler.take(request, received)
        return answer if isinstance(answer, OtlpAnswer) else await answer

    async def _receive(
        self, request: OtlpRequest, messages: AsyncIterator[bytes]
    ) -> bytes | RequestRefusal:
        """The call's one message, or why it is not wanted."""
        refusal = self._handler.admit(request, is_full=False)
        if refusal is not None:
            await asyncio.sleep(refusal.delay_ns / NS_PER_S)
            return refusal
        room = self._handler.reserve(request)
        if room is not None and (refusal := await room) is not None:
            return refusal
        try:
            async with asyncio.timeout(self._read_timeout_s):
                return await anext(messages, b"")
        except TimeoutError:
            return _TIMEOUT
