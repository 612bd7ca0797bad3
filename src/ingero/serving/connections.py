"""uvicorn's HTTP/1.1 protocol with limits of its own: how many connections, how long a head, how slow a reader.

uvicorn bounds none of them: a client that sends half a head, or nothing, or never reads its answer, keeps its
descriptor for ever. A body's time is the application's to bound.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.server import ServerState

_REASONS: Final = {
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one connection and all of a listener's may take.

    Attributes:
        head_s: Longest time for a request's head to arrive, from its first byte or from the connection's start;
            longest TLS handshake.
        stall_s: Longest time in which a client takes nothing of an answer that waits for it.
        max_head_bytes: Largest head, to within one read of the socket.
        max_connections: Connections of one listener.
        max_per_peer: Connections from one address; 0 is no limit but the other, for listeners behind a proxy.
    """

    head_s: float = 10.0
    stall_s: float = 30.0
    max_head_bytes: int = 64 << 10
    max_connections: int = 1024
    max_per_peer: int = 0


@dataclass(slots=True)
class ConnectionCounters:
    """What was refused or closed since the start."""

    refused: int = 0
    slow_heads: int = 0
    large_heads: int = 0
    stalled: int = 0


class ConnectionAdmission:
    """The connections of one listener. One event loop owns it.

    Args:
        limits: How many connections there may be, and how slow.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.counters = ConnectionCounters()
        self._n_open = 0
        self._by_peer: Counter[str] = Counter()

    def enter(self, peer: str) -> bool:
        """Count a connection in; False where there is no room for it, and then it is not counted."""
        limits = self.limits
        is_full = self._n_open >= limits.max_connections
        if is_full or (limits.max_per_peer and self._by_peer[peer] >= limits.max_per_peer):
            self.counters.refused += 1
            return False
        self._n_open += 1
        self._by_peer[peer] += 1
        return True

    def leave(self, peer: str) -> None:
        """Count one that entered out."""
        self._n_open -= 1
        self._by_peer[peer] -= 1
        if not self._by_peer[peer]:
            del self._by_peer[peer]


class BoundedProtocol(HttpToolsProtocol):
    """One connection.

    Args:
        config: uvicorn's, loaded.
        state: uvicorn's, shared by the listener's connections.
        admission: Shared by the listener's connections.
    """

    def __init__(self, config: Config, state: ServerState, admission: ConnectionAdmission) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self._admission = admission
        self._limits = admission.limits
        self._peer: str | None = None  # None: it was not let in
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._has_begun = False
        self._n_head_bytes = 0

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Let it in, or answer 503 and close."""
        super().connection_made(transport)
        peer = self.client[0] if self.client else ""
        if not self._admission.enter(peer):
            self._refuse(503, "too many connections", "too_many_connections")
            return
        self._peer = peer
        self._await_head()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._drop_timers()
        if self._peer is not None:
            self._admission.leave(self._peer)
            self._peer = None
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._has_begun:
            self._n_head_bytes += len(data)
            if self._n_head_bytes > self._limits.max_head_bytes:
                self._admission.counters.large_heads += 1
                self._refuse(431, "the request's head is too large", "head_too_large")

    @override
    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._has_begun = True
        self._n_head_bytes = 0
        if self._head_timer is None:
            self._await_head()

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        """One field, without the white space behind its value, which the parser leaves (RFC 9110 §5.5)."""
        super().on_header(name, value.strip(b" \t"))

    @override
    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._has_begun = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    @override
    def pause_writing(self) -> None:
        """The client does not read: what waits for it fills the buffer."""
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self._limits.stall_s, self._end_stalled)

    @override
    def resume_writing(self) -> None:
        """The other side reads again."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        super().resume_writing()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.head_s, self._end_slow_head)

    def _end_slow_head(self) -> None:
        self._head_timer = None
        self._admission.counters.slow_heads += 1
        if self._has_begun:
            self._refuse(408, "the request's head did not arrive in time", "head_timeout")
        else:
            self.transport.close()

    def _end_stalled(self) -> None:
        self._stall_timer = None
        self._admission.counters.stalled += 1
        self.transport.abort()  # closing would wait for the buffer, which nobody empties

    def _refuse(self, status: int, message: str, code: str) -> None:
        self._drop_timers()
        if self.transport.is_closing():
            return
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:  # else an answer is on its way
            body = msgspec.json.encode({"error": message, "code": code})
            head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n"
            retry = b"retry-after: 5\r\n" if status == 503 else b""
            self.transport.write(
                head % (status, _REASONS[status], len(body)) + retry + b"\r\n" + body
            )
        self.transport.close()

    def _drop_timers(self) -> None:
        for timer in (self._head_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._stall_timer = None
