"""OTLP/gRPC on an asyncio protocol of our own, with hpack (``docs/decisions/0105``).

What a general gRPC server would do and this does not: streams of messages from clients, compressed answers, HTTP/1.1
upgrades (RFC 9113 has none any more).

Bounds: number of connections, also of one peer; calls at once, on a connection and together; size of a header block and
of its list, of a message before and after decompression, of all unfinished messages together; time for a head and for a
message to arrive; time in which nothing of an answer is read; frames that cost work and bring no call; calls that are
reset. A client sends 64 KiB of a message, and the rest when the handler let it in and has room.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Final

from typing_extensions import override

from ingero.config import Endpoint
from ingero.serving.otlp.grpc_calls import OtlpGrpcSettings
from ingero.serving.otlp.grpc_connection import GrpcConnection
from ingero.serving.otlp.grpc_shared import GrpcShared, ServiceMethod
from ingero.serving.otlp.handler import OtlpHandler
from ingero.serving.otlp.listener import ListenerTimes, OtlpListener
from ingero.units import NS_PER_S

_NO_METHODS: Final[Mapping[bytes, ServiceMethod]] = {}


class OtlpGrpcServer(OtlpListener):
    """One listening gRPC port.

    Args:
        endpoint: Where to listen.
        settings: Limits.
        handler: Who may send, and what becomes of it.
        tls: A server context, or None for plain text.
        methods: What else is served, by path.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        settings: OtlpGrpcSettings,
        handler: OtlpHandler,
        tls: ssl.SSLContext | None = None,
        methods: Mapping[bytes, ServiceMethod] = _NO_METHODS,
    ) -> None:
        self._shared = GrpcShared(settings, handler, methods)
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        super().__init__(
            endpoint, self._shared, _find_times(settings), tls, shares_port=settings.shares_port
        )

    @override
    def _accept(self, loop: asyncio.AbstractEventLoop) -> GrpcConnection:
        return GrpcConnection(self._shared, loop)


def _find_times(settings: OtlpGrpcSettings) -> ListenerTimes:
    connections = settings.connections
    limits_ns = (
        settings.read_timeout_ns,
        settings.idle_ns,
        settings.age_ns,
        settings.age_grace_ns,
        settings.ping_after_ns,
        settings.ping_timeout_ns,
    )
    limits_s = [one / NS_PER_S for one in limits_ns if one is not None]
    return ListenerTimes(connections.head_s, (*limits_s, connections.head_s, connections.stall_s))
