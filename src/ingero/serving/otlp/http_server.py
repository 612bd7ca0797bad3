"""OTLP/HTTP on httptools and an asyncio protocol of our own.

On uvicorn the server took half of a core that the decoding and the score map need (``docs/decisions/0015``). What a
general server would do and this does not: streaming answers, upgrades (ignored, as RFC 9110 section 7.8 allows),
HTTP/2.

Answers leave together, when everything that had arrived has been taken: a sender that is woken once for several of
them, rather than once each, takes a tenth of the core less.

Bounds: number of connections, also of one peer; size of a head, of a body, of all unfinished bodies together; number
of requests being received; time for a head and for a request to arrive; idle time; time in which nothing of an answer
is read. While an answer waits, for its sender to read or for the handler, nothing more is read from that connection.
"""

from __future__ import annotations

import asyncio
import ssl
from email.utils import formatdate
from typing import Final

from ingero.config import Endpoint
from ingero.serving.asgi import bind
from ingero.serving.connections import ConnectionCounters
from ingero.serving.otlp.handler import OtlpHandler
from ingero.serving.otlp.http_connection import HttpConnection
from ingero.serving.otlp.http_head import OtlpHttpSettings
from ingero.serving.otlp.http_shared import HttpShared
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

_SWEEP_S: Final = 1.0
_BACKLOG: Final = 4096


class OtlpHttpServer:
    """One listening HTTP port. Everything runs on the event loop.

    Args:
        endpoint: Where to listen.
        settings: Limits.
        handler: Who may send, and what becomes of it.
        clock: For the Date header.
        tls: A server context, or None for plain text.

    Attributes:
        bound: Where it listens, with the kernel's port; the configured endpoint before `start`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        settings: OtlpHttpSettings,
        handler: OtlpHandler,
        clock: Clock,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.bound = endpoint
        self._shared = HttpShared(settings, handler)
        self._clock = clock
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._sweeping: asyncio.TimerHandle | None = None

    @property
    def counters(self) -> ConnectionCounters:
        """Connections that were refused or ended for their slowness."""
        return self._shared.admission.counters

    async def start(self) -> None:
        """Bind and serve. Raises IngeroError when the address cannot be bound."""
        listening = await bind(self.bound, shares_port=self._shared.settings.shares_port)
        loop = asyncio.get_running_loop()
        settings = self._shared.settings
        handshake_s = min(settings.connections.head_s, settings.read_timeout_ns / NS_PER_S)
        self._server = await loop.create_server(
            lambda: HttpConnection(self._shared, loop),
            sock=listening,
            ssl=self._tls,
            backlog=_BACKLOG,
            ssl_handshake_timeout=handshake_s if self._tls else None,
        )
        self.bound = Endpoint(self.bound.host, listening.getsockname()[1])
        self._sweep(loop)

    async def stop(self, drain_s: float) -> None:
        """Close the port and idle connections; let requests in flight finish for ``drain_s``, then cut them."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        await self._shared.drain(drain_s)
        if self._sweeping is not None:
            self._sweeping.cancel()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Renew the date and end what takes too long; one timer for all connections costs less than one each."""
        shared, settings = self._shared, self._shared.settings
        date = formatdate(self._clock.wall_ns() / NS_PER_S, usegmt=True)
        shared.date_line = f"date: {date}\r\n".encode()
        shared.check_time(loop.time())
        limits_s = (
            settings.read_timeout_ns / NS_PER_S,
            settings.idle_timeout_ns / NS_PER_S,
            settings.connections.head_s,
            settings.connections.stall_s,
        )
        self._sweeping = loop.call_later(
            min(_SWEEP_S, *(s / 2 for s in limits_s)), self._sweep, loop
        )
