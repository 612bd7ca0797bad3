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

from ingero.config import Endpoint
from ingero.serving.asgi import bind
from ingero.serving.connections import ConnectionCounters
from ingero.serving.otlp.grpc_calls import OtlpGrpcSettings
from ingero.serving.otlp.grpc_connection import GrpcConnection
from ingero.serving.otlp.grpc_shared import GrpcShared, ServiceMethod
from ingero.serving.otlp.handler import OtlpHandler
from ingero.units import NS_PER_S

_SWEEP_S: Final = 1.0
_BACKLOG: Final = 4096
_NO_METHODS: Final[Mapping[bytes, ServiceMethod]] = {}


class OtlpGrpcServer:
    """One listening gRPC port. Everything runs on the event loop.

    Args:
        endpoint: Where to listen.
        settings: Limits.
        handler: Who may send, and what becomes of it.
        tls: A server context, or None for plain text.
        methods: What else is served, by path.

    Attributes:
        bound: Where it listens, with the kernel's port; the configured endpoint before `start`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        settings: OtlpGrpcSettings,
        handler: OtlpHandler,
        tls: ssl.SSLContext | None = None,
        methods: Mapping[bytes, ServiceMethod] = _NO_METHODS,
    ) -> None:
        self.bound = endpoint
        self._shared = GrpcShared(settings, handler, methods)
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._sweeping: asyncio.TimerHandle | None = None

    @property
    def counters(self) -> ConnectionCounters:
        """Connections that were refused or ended for their slowness."""
        return self._shared.admission.counters

    async def start(self) -> None:
        """Bind and serve. Raises IngeroError when the address cannot be bound."""
        settings = self._shared.settings
        listening = await bind(self.bound, shares_port=settings.shares_port)
        loop = asyncio.get_running_loop()
        if self._tls is not None:
            self._tls.set_alpn_protocols(["h2"])
        self._server = await loop.create_server(
            lambda: GrpcConnection(self._shared, loop),
            sock=listening,
            ssl=self._tls,
            backlog=_BACKLOG,
            ssl_handshake_timeout=settings.connections.head_s if self._tls else None,
        )
        self.bound = Endpoint(self.bound.host, listening.getsockname()[1])
        self._sweep(loop)

    async def stop(self, drain_s: float) -> None:
        """Close the port; let calls in flight finish for ``drain_s``, then cut them."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        await self._shared.drain(drain_s)
        if self._sweeping is not None:
            self._sweeping.cancel()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """End what takes too long, and say so."""
        shared, settings = self._shared, self._shared.settings
        shared.check_time(loop.time())
        limits_ns = (
            settings.read_timeout_ns,
            settings.idle_ns,
            settings.age_ns,
            settings.age_grace_ns,
            settings.ping_after_ns,
            settings.ping_timeout_ns,
        )
        limits_s = [one / NS_PER_S for one in limits_ns if one is not None]
        limits_s += [settings.connections.head_s, settings.connections.stall_s]
        self._sweeping = loop.call_later(
            max(0.01, min(_SWEEP_S, *(s / 2 for s in limits_s))), self._sweep, loop
        )
