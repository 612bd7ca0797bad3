"""The outermost wrapper of the MCP and API listener: id, drain, bearer, pace, audit, count. Pure ASGI.

Whatever happens behind it, a request has an answer with an id, a line in the audit log and its place in the counters.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ingero.echo.service.executor import ErrorReply
from ingero.echo.service.telemetry import (
    BAD_BEARERS,
    BEARER_REQUESTS,
    BEARER_SECONDS,
    LATENCY,
    REQUESTS,
)
from ingero.serving.audit import Answered, write_request
from ingero.serving.bearer import Bearers, Principal
from ingero.serving.limits import RateLimiter
from ingero.telemetry.clock import Clock
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_S

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PRINCIPAL: ContextVar[Principal] = ContextVar("PRINCIPAL")
"""Who the request that is being answered is from."""
GONE: ContextVar[asyncio.Event] = ContextVar("GONE")
"""Set when the client of the request that is being answered is gone."""

_LOG: Final = logging.getLogger("ingero.echo.api")
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_OPEN_PATHS: Final = frozenset({"/api/versions", "/api/v2/health"})
_HANDLERS: Final = (
    ("/api/v2/tools/", "tools"),
    ("/api/v2/sql", "sql"),
    ("/api/v2/", "api"),
    ("/api/v1", "gone"),
    ("/api/", "api"),
    ("/metrics", "metrics"),
)
MCP_PATHS: Final = frozenset({"/", "/mcp"})
N_DIGEST_CHARS: Final = 12
"""Characters of a token's digest that name it in metrics."""
_CLIENT_GONE: Final = 499
_BAD_PER_SECOND: Final = 1.0
_BAD_BURST: Final = 20.0
_BAD_RETRY_S: Final = 5
DRAINING: Final = ErrorReply(503, "draining", "shutting down; ask again", 5)
NO_BEARER: Final = ErrorReply(401, "missing_bearer", "a bearer token is needed")
BAD_BEARER: Final = ErrorReply(401, "invalid_bearer", "invalid bearer token")
BUSY_BEARER: Final = ErrorReply(
    429, "in_flight_cap", "too many requests of this bearer are being answered", 1
)
SLOWED: Final = ErrorReply(
    429, "too_many_bad_bearers", "too many wrong tokens from this address", _BAD_RETRY_S
)
CRASHED: Final = ErrorReply(
    500, "internal", "the answer could not be built; the log has the reason"
)
VERSION_GONE: Final = {
    "error": "version 1 of this API was removed",
    "code": "gone",
    "removed_version": "v1",
    "preferred": "v2",
    "docs": "docs/guides/echo.md",
}


@dataclass(frozen=True, slots=True)
class RequestLimitSettings:
    """How much one bearer may ask.

    Attributes:
        per_second: Requests a second.
        burst: Requests at once after a pause.
        max_in_flight: Requests being answered.
        trust_proxy: Take the address from X-Forwarded-For.
    """

    per_second: float = 30
    burst: float = 100
    max_in_flight: int = 16
    trust_proxy: bool = False


class RequestMiddleware:
    """Lets requests through to ``app`` and answers the others.

    Args:
        app: What is behind it.
        bearers: Who is known.
        settings: Pace.
        clock: Time.
        meter: Where requests are counted.
    """

    def __init__(
        self,
        app: App,
        bearers: Bearers,
        settings: RequestLimitSettings,
        clock: Clock,
        meter: MeterRegistry,
    ) -> None:
        self._app = app
        self._bearers = bearers
        self._settings = settings
        self._clock = clock
        self._requests = meter.counter(REQUESTS)
        self._latency = meter.histogram(LATENCY)
        self._by_bearer = RateLimiter(settings.per_second, settings.burst, clock)
        self._by_address = RateLimiter(settings.per_second, settings.burst, clock)
        self._bad_by_address = RateLimiter(_BAD_PER_SECOND, _BAD_BURST, clock)
        self._bearer_requests = meter.counter(BEARER_REQUESTS)
        self._bearer_seconds = meter.counter(BEARER_SECONDS)
        self._bad = meter.counter(BAD_BEARERS)
        self._in_flight: Counter[str] = Counter()
        self._standing: set[asyncio.Future[None]] = set()
        self._n_active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    async def drain(self, timeout_ns: int) -> None:
        """Answer 503 from now on, end MCP's standing streams, return when nothing is in flight or the time is over."""
        self.draining = True
        for stream in list(self._standing):
            stream.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_ns / NS_PER_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        visit = _Exchange(scope, send, self._clock.mono_ns())
        inbox = DisconnectWatch(receive)
        principal = None
        try:
            principal, refusal = self._admit(scope, visit)
            if scope["path"].startswith("/api/v1/") or scope["path"] == "/api/v1":
                await visit.answer_json(410, VERSION_GONE)
            elif refusal is not None:
                await visit.answer_fault(refusal)
            else:
                await self._pass_on(scope, inbox, visit, principal)
        except Exception:  # noqa: BLE001 - one request's defect must not be invisible, and not another's
            _LOG.exception("%s %s: %s", scope["method"], scope["path"][:256], CRASHED.message)
            if not visit.is_started:
                await visit.answer_fault(CRASHED)
        finally:
            inbox.close()
            if not visit.is_started and inbox.gone.is_set():
                visit.status = _CLIENT_GONE
            self._record(scope, visit, principal)

    def _admit(self, scope: Scope, visit: _Exchange) -> tuple[Principal | None, ErrorReply | None]:
        if self.draining:
            return None, DRAINING
        given = visit.headers.get(b"authorization")
        is_open = scope["path"] in _OPEN_PATHS
        if given is None:
            if not is_open:
                return None, NO_BEARER
            return None, _paced(self._by_address.take(self._find_address(scope, visit)))
        principal = self._bearers.authenticate(given.decode("latin-1"))
        if principal is None:
            return None, self._refuse_bad(self._find_address(scope, visit))
        slow = _paced(self._by_bearer.take(principal.digest))
        if slow is None and self._in_flight[principal.digest] >= self._settings.max_in_flight:
            return principal, BUSY_BEARER
        return principal, slow

    def _refuse_bad(self, address: str) -> ErrorReply:
        """Good tokens of the same address are not slowed: others behind one proxy must not be locked out."""
        is_slowed = self._bad_by_address.take(address) > 0
        self._bad.add(1, outcome="slowed" if is_slowed else "refused")
        return SLOWED if is_slowed else BAD_BEARER

    async def _pass_on(
        self, scope: Scope, inbox: DisconnectWatch, visit: _Exchange, principal: Principal | None
    ) -> None:
        key = principal.digest if principal else ""
        scope["principal"], scope["gone"] = principal, inbox.gone
        token = PRINCIPAL.set(principal) if principal else None
        gone_token = GONE.set(inbox.gone)
        self._in_flight[key] += 1
        try:
            if scope["path"] in MCP_PATHS and scope["method"] == "GET":
                await self._stand(scope, inbox, visit)
            else:
                await self._work(scope, inbox, visit)
        finally:
            self._in_flight[key] -= 1
            if not self._in_flight[key]:
                del self._in_flight[key]
            GONE.reset(gone_token)
            if token is not None:
                PRINCIPAL.reset(token)

    async def _work(self, scope: Scope, inbox: DisconnectWatch, visit: _Exchange) -> None:
        self._n_active += 1
        self._idle.clear()
        try:
            await self._app(scope, inbox.receive, visit.send)
        finally:
            self._n_active -= 1
            if not self._n_active:
                self._idle.set()

    async def _stand(self, scope: Scope, inbox: DisconnectWatch, visit: _Exchange) -> None:
        """A stream for what the server may want to say: nothing is in flight on it, so no drain waits for it."""
        stream = asyncio.ensure_future(self._app(scope, inbox.receive, visit.send))
        self._standing.add(stream)
        try:
            await asyncio.shield(stream)
        except asyncio.CancelledError:
            if not stream.cancelled():
                stream.cancel()
                raise
            await visit.end()
        finally:
            self._standing.discard(stream)

    def _find_address(self, scope: Scope, visit: _Exchange) -> str:
        if self._settings.trust_proxy:
            forwarded = visit.headers.get(b"x-forwarded-for", b"").decode("latin-1")
            if forwarded:
                return forwarded.rpartition(",")[2].strip()
        client = scope.get("client")
        return client[0] if client else ""

    def _record(self, scope: Scope, visit: _Exchange, principal: Principal | None) -> None:
        took_ns = self._clock.mono_ns() - visit.started_ns
        path = scope["path"]
        handler = next((name for start, name in _HANDLERS if path.startswith(start)), "mcp")
        labels = {
            "handler": handler,
            "status_class": f"{visit.status // 100}xx",
            "api_version": "v2" if path.startswith("/api/v2") else "none",
        }
        self._requests.add(1, **labels)
        self._latency.record(took_ns / NS_PER_S, **labels)
        if principal is not None:
            bearer = principal.digest[:N_DIGEST_CHARS]
            status_class = labels["status_class"]
            self._bearer_requests.add(1, bearer=bearer, handler=handler, status_class=status_class)
            self._bearer_seconds.add(took_ns / NS_PER_S, bearer=bearer, handler=handler)
        answered = Answered(
            request_id=visit.request_id.decode(),
            source_ip=self._find_address(scope, visit),
            method=scope["method"],
            path=path,
            status=visit.status,
            latency_ns=took_ns,
        )
        write_request(principal, answered)


class DisconnectWatch:
    """A request's body on its way in, and then whether its client is still there.

    Args:
        receive: The server's.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_whole = False
        self._watching: asyncio.Task[None] | None = None
        self.gone = asyncio.Event()

    async def receive(self) -> MutableMapping[str, Any]:
        """The next message, as ASGI has it; several may wait for the disconnect."""
        if self._is_whole:
            await self.gone.wait()
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._is_whole = True
            self.gone.set()
        elif not message.get("more_body", False):
            self._is_whole = True
            self._watching = asyncio.ensure_future(self._watch())
        return message

    def close(self) -> None:
        """The request is answered."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone.set()


class _Exchange:
    """One request's answer on its way out."""

    __slots__ = (
        "_is_whole",
        "_send",
        "headers",
        "is_started",
        "request_id",
        "started_ns",
        "status",
    )

    def __init__(self, scope: Scope, send: Send, started_ns: int) -> None:
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self.headers.get(b"x-request-id", b"")
        is_usable = _REQUEST_ID.fullmatch(given) is not None
        self.request_id = given if is_usable else uuid.uuid4().hex.encode()
        self.started_ns = started_ns
        self.status = 500
        self.is_started = False
        self._is_whole = False
        self._send = send

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Pass on, with the request's id on the head."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.is_started = True
            message["headers"] = [
                *message.get("headers", ()),
                (b"x-request-id", self.request_id),
                (b"x-content-type-options", b"nosniff"),
                (b"cache-control", b"no-store"),
            ]
        elif not message.get("more_body", False):
            self._is_whole = True
        await self._send(message)

    async def end(self) -> None:
        """Nothing follows on an answer that was begun."""
        if self.is_started and not self._is_whole:
            await self.send({"type": "http.response.body", "body": b""})
        elif not self.is_started:
            await self.answer_fault(DRAINING)

    async def answer_fault(self, fault: ErrorReply) -> None:
        """Answer with an error body."""
        headers = []
        if fault.retry_after_s:
            headers.append((b"retry-after", str(fault.retry_after_s).encode()))
        if fault is SLOWED:
            headers.append((b"connection", b"close"))
        if fault.status == 401:
            headers.append((b"www-authenticate", b'Bearer error="invalid_token"'))
        await self.answer_json(fault.status, {"error": fault.message, "code": fault.code}, headers)

    async def answer_json(
        self, status: int, body: object, headers: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        """Answer with JSON."""
        encoded = msgspec.json.encode(body)
        head = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(encoded)).encode()),
            *(headers or ()),
        ]
        await self.send({"type": "http.response.start", "status": status, "headers": head})
        await self.send({"type": "http.response.body", "body": encoded})


def _paced(wait_s: float) -> ErrorReply | None:
    if not wait_s:
        return None
    return ErrorReply(429, "rate_limited", "too many requests", max(1, math.ceil(wait_s)))
