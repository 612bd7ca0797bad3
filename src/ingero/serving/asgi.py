"""One listening socket with an ASGI application behind it, started and stopped by code.

uvicorn's protocol on our own socket: signals, logging and the process stay with the service that owns it. Port 0 works,
and what was bound can be read.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import uvicorn

from ingero.config import Endpoint
from ingero.errors import IngeroError
from ingero.serving.connections import (
    BoundedProtocol,
    ConnectionAdmission,
    ConnectionCounters,
    ConnectionLimits,
)

if TYPE_CHECKING:
    from uvicorn._types import ASGIApplication

_BACKLOG = 4096
_CANCEL_S = 1.0
"""How long a request that was cancelled may take to end."""
_LOOK_S = 0.02
_KEEP_ALIVE_S = 90
"""How long an idle connection stays open; longer than any agent's push interval."""
_LOG = logging.getLogger("ingero.serving")


@dataclass(frozen=True, slots=True)
class AsgiSettings:
    """How a server treats its connections.

    Attributes:
        drain_s: How long `AsgiServer.stop` lets requests in flight finish before it cancels them.
        limits: How many connections, and how slow they may be.
    """

    drain_s: float = 10
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)


class AsgiServer:
    """Serves one ASGI 3 application on one endpoint.

    Args:
        app: The application; it sees ``http`` scopes only (no lifespan, no websockets).
        endpoint: Where to listen.
        tls: A server context, or None for plain HTTP. Loading a new certificate into it takes effect at once.
        settings: How to treat connections.
    """

    def __init__(
        self,
        app: ASGIApplication,
        endpoint: Endpoint,
        *,
        tls: ssl.SSLContext | None = None,
        settings: AsgiSettings | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._settings = settings or AsgiSettings()
        self._app: Any = app
        self._admission = ConnectionAdmission(self._settings.limits)
        self._is_stopping = False
        self._config = uvicorn.Config(
            self._run,
            http="httptools",
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            backlog=_BACKLOG,
        )
        self._config.load()
        self._tls = tls
        self._server: uvicorn.Server | None = None
        self._socket: socket.socket | None = None
        self._ticking: asyncio.Task[None] | None = None

    @property
    def bound(self) -> Endpoint:
        """Where it listens, with the port that the kernel chose; the configured endpoint before `start`."""
        if self._socket is None:
            return self._endpoint
        return Endpoint(self._endpoint.host, self._socket.getsockname()[1])

    @property
    def counters(self) -> ConnectionCounters:
        """Connections that were refused or ended for their slowness."""
        return self._admission.counters

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            IngeroError: The address cannot be bound; the message says which and why.
        """
        bound = await bind(self._endpoint)
        server = uvicorn.Server(self._config)
        server.lifespan = self._config.lifespan_class(self._config)
        listening = await asyncio.get_running_loop().create_server(
            lambda: BoundedProtocol(self._config, server.server_state, self._admission),
            sock=bound,
            ssl=self._tls,
            backlog=_BACKLOG,
            ssl_handshake_timeout=self._settings.limits.head_s if self._tls else None,
        )
        server.servers, server.started = [listening], True
        await server.on_tick(0)
        self._socket, self._server = bound, server
        self._ticking = asyncio.create_task(self._tick(server))

    async def stop(self, drain_s: float | None = None) -> None:
        """Close the socket, let requests in flight finish, cancel what is left after ``drain_s``.

        Args:
            drain_s: Instead of the settings'.
        """
        server, self._server = self._server, None
        if server is None or self._socket is None:
            return
        if self._ticking is not None:
            self._ticking.cancel()
        self._is_stopping = True
        for listening in server.servers:
            listening.close()
        self._socket.close()
        self._socket = None
        for connection in list(server.server_state.connections):
            connection.shutdown()
        within_s = self._settings.drain_s if drain_s is None else drain_s
        await self._end(server, asyncio.get_running_loop().time() + within_s)

    async def _end(self, server: uvicorn.Server, deadline_s: float) -> None:
        """Wait for answers and for what is still on its way to clients; end what is late."""
        loop, state = asyncio.get_running_loop(), server.server_state
        tasks = set(state.tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=max(0.0, deadline_s - loop.time()))
        late = [task for task in tasks if not task.done()]
        if late:
            _LOG.warning("%s: cancelled %d requests at the end of the drain", self.bound, len(late))
            for task in late:
                task.cancel()
            await asyncio.wait(late, timeout=_CANCEL_S)
        while state.connections and loop.time() < deadline_s:  # noqa: ASYNC110 - uvicorn has no event
            await asyncio.sleep(_LOOK_S)
        for connection in list(state.connections):
            connection.transport.abort()

    async def _run(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI's
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if not self._is_stopping:
                raise

    @staticmethod
    async def _tick(server: uvicorn.Server) -> None:
        while True:
            await asyncio.sleep(1)
            await server.on_tick(0)  # renews the Date header


async def bind(
    endpoint: Endpoint, *, shares_port: bool = False, listens: bool = True
) -> socket.socket:
    """A bound socket: IPv4 first where a name has both families, both where there is no host.

    Args:
        endpoint: Where.
        shares_port: Whether other sockets of this user that say so too may listen there.
        listens: Without, the port is only held: connections go to other sockets that listen there.

    Raises:
        IngeroError: With the address and the reason.
    """
    try:
        family, address = await _resolve(endpoint)
        # With the protocol named, asyncio sets TCP_NODELAY on what it accepts; without, each answer waits 40 ms.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise IngeroError(f"cannot listen on {endpoint}: {error.strerror or error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if not endpoint.host else 1)
        if shares_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
        if listens:
            bound.listen(_BACKLOG)
        bound.setblocking(False)  # noqa: FBT003 -- the socket API takes it by position
    except OSError as error:
        bound.close()
        raise IngeroError(
            f"cannot listen on {endpoint}: {error.strerror or error}", hint=_hint(error, endpoint)
        ) from error
    return bound


async def _resolve(endpoint: Endpoint) -> tuple[socket.AddressFamily, Any]:
    if not endpoint.host:
        if socket.has_dualstack_ipv6():
            return socket.AF_INET6, ("::", endpoint.port)
        return socket.AF_INET, ("0.0.0.0", endpoint.port)  # noqa: S104 -- an empty host asks for it
    found = await asyncio.get_running_loop().getaddrinfo(
        endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    found.sort(key=lambda one: one[0] is not socket.AF_INET)
    return found[0][0], found[0][4]


def _hint(error: OSError, endpoint: Endpoint) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"`ss -ltnp 'sport = :{endpoint.port}'` shows who has the port; choose another"
    if error.errno == errno.EACCES:
        return "ports below 1024 need CAP_NET_BIND_SERVICE; choose a higher one"
    if error.errno == errno.EADDRNOTAVAIL:
        return "no interface of this machine has that address"
    return ""
