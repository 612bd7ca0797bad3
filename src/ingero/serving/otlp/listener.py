"""A listening port: what both OTLP protocols do with the socket, with the timer and at the end."""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from typing import Final, NamedTuple

from ingero.config import Endpoint
from ingero.serving.asgi import bind
from ingero.serving.connections import ConnectionCounters
from ingero.serving.otlp.open_connections import OpenConnections

_SWEEP_S: Final = 1.0
_MIN_SWEEP_S: Final = 0.01
_BACKLOG: Final = 4096


class ListenerTimes(NamedTuple):
    """How long things may take.

    Attributes:
        handshake_s: A TLS handshake.
        limits_s: Everything else that a connection may do; half of the shortest is how often all are looked at.
    """

    handshake_s: float
    limits_s: tuple[float, ...]


class OtlpListener(ABC):
    """One listening port. Everything runs on the event loop.

    Args:
        endpoint: Where to listen.
        connections: Those that are open.
        times: How long things may take.
        tls: A server context, or None for plain text.
        shares_port: Whether other processes may listen there too.

    Attributes:
        bound: Where it listens, with the kernel's port; the configured endpoint before `start`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        connections: OpenConnections,
        times: ListenerTimes,
        tls: ssl.SSLContext | None,
        *,
        shares_port: bool,
    ) -> None:
        self.bound = endpoint
        self._connections = connections
        self._times = times
        self._tls = tls
        self._shares_port = shares_port
        self._server: asyncio.Server | None = None
        self._sweeping: asyncio.TimerHandle | None = None

    @property
    def counters(self) -> ConnectionCounters:
        """Connections that were refused or ended for their slowness."""
        return self._connections.admission.counters

    async def start(self) -> None:
        """Bind and serve. Raises IngeroError when the address cannot be bound."""
        listening = await bind(self.bound, shares_port=self._shares_port)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: self._accept(loop),
            sock=listening,
            ssl=self._tls,
            backlog=_BACKLOG,
            ssl_handshake_timeout=self._times.handshake_s if self._tls else None,
        )
        self.bound = Endpoint(self.bound.host, listening.getsockname()[1])
        self._sweep(loop)

    async def stop(self, drain_s: float) -> None:
        """Close the port and idle connections; let what is in flight finish for ``drain_s``, then cut it."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        await self._connections.drain(drain_s)
        if self._sweeping is not None:
            self._sweeping.cancel()

    @abstractmethod
    def _accept(self, loop: asyncio.AbstractEventLoop) -> asyncio.BaseProtocol:
        """The protocol of a connection that came."""

    def _note_time(self) -> None:  # noqa: B027 -- not every protocol tells the time
        """Called at least each second."""

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """End what takes too long; one timer for all connections costs less than one each."""
        self._note_time()
        self._connections.check_time(loop.time())
        shortest_s = min(self._times.limits_s, default=2 * _SWEEP_S)
        pause_s = max(_MIN_SWEEP_S, min(_SWEEP_S, shortest_s / 2))
        self._sweeping = loop.call_later(pause_s, self._sweep, loop)
