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

from typing_extensions import override

from ingero.config import Endpoint
from ingero.serving.otlp.handler import OtlpHandler
from ingero.serving.otlp.http_connection import HttpConnection
from ingero.serving.otlp.http_head import OtlpHttpSettings
from ingero.serving.otlp.http_shared import HttpShared
from ingero.serving.otlp.listener import ListenerTimes, OtlpListener
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S


class OtlpHttpServer(OtlpListener):
    """One listening HTTP port.

    Args:
        endpoint: Where to listen.
        settings: Limits.
        handler: Who may send, and what becomes of it.
        clock: For the Date header.
        tls: A server context, or None for plain text.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        settings: OtlpHttpSettings,
        handler: OtlpHandler,
        clock: Clock,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._shared = HttpShared(settings, handler)
        self._clock = clock
        super().__init__(
            endpoint, self._shared, _find_times(settings), tls, shares_port=settings.shares_port
        )

    @override
    def _accept(self, loop: asyncio.AbstractEventLoop) -> HttpConnection:
        return HttpConnection(self._shared, loop)

    @override
    def _note_time(self) -> None:
        date = formatdate(self._clock.wall_ns() / NS_PER_S, usegmt=True)
        self._shared.date_line = f"date: {date}\r\n".encode()


def _find_times(settings: OtlpHttpSettings) -> ListenerTimes:
    connections = settings.connections
    read_s = settings.read_timeout_ns / NS_PER_S
    idle_s = settings.idle_timeout_ns / NS_PER_S
    limits_s = (read_s, idle_s, connections.head_s, connections.stall_s)
    return ListenerTimes(min(connections.head_s, read_s), limits_s)
