"""The outermost wrapper of the MCP and API listener: id, drain, bearer, pace, audit, count. Pure ASGI."""

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

from ingero.echo.service.answers import Fault
from ingero.echo.service.telemetry import LATENCY, REQUESTS
from ingero.serving.bearer import Bearers, Principal
from ingero.serving.limits import RateLimiter
from ingero.telemetry.clock import Clock
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_MS, NS_PER_S

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PRINCIPAL: ContextVar[Principal] = ContextVar("PRINCIPAL")
"""Who the request that is being answered is from."""

_AUDIT: Final = logging.getLogger("ingero.echo.audit")
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
DRAINING: Final = Fault(503, "draining", "shutting down; ask again", 5)
NO_BEARER: Final = Fault(401, "missing_bearer", "a bearer token is needed")
BAD_BEARER: Final = Fault(401, "invalid_bearer", "invalid bearer token")
BUSY_BEARER: Final = Fault(
    429, "in_flight_cap", "too many requests of this bearer are being answered", 1
)
GONE: Final = {
    "error": "version 1 of this API was removed",
    "code": "gone",
    "removed_version": "v1",
    "preferred": "v2",
    "docs": "docs/guides/echo.md",
}


@dataclass(frozen=True, slots=True)
class GateSettings:
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


class Gate:
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
        settings: GateSettings,
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
        self._in_flight: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    async def drain(self, timeout_ns: int) -> None:
        """Answer 503 from now on, and return when nothing is in flight or the time is over."""
        self.draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_ns / NS_PER_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        visit = _Visit(scope, send, self._clock.mono_ns())
        principal, refusal = self._admit(scope, visit)
        if scope["path"].startswith("/api/v1/") or scope["path"] == "/api/v1":
            await visit.answer_json(410, GONE)
        elif refusal is not None:
            await visit.answer_fault(refusal)
        else:
            await self._pass_on(scope, receive, visit, principal)
        self._record(scope, visit, principal)

    def _admit(self, scope: Scope, visit: _Visit) -> tuple[Principal | None, Fault | None]:
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
            return None, BAD_BEARER
        slow = _paced(self._by_bearer.take(principal.digest))
        if slow is None and self._in_flight[principal.digest] >= self._settings.max_in_flight:
            return principal, BUSY_BEARER
        return principal, slow

    async def _pass_on(
        self, scope: Scope, receive: Receive, visit: _Visit, principal: Principal | None
    ) -> None:
        key = principal.digest if principal else ""
        scope["principal"] = principal
        token = PRINCIPAL.set(principal) if principal else None
        self._in_flight[key] += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, visit.send)
        finally:
            self._in_flight[key] -= 1
            if not self._in_flight[key]:
                del self._in_flight[key]
            if not self._in_flight:
                self._idle.set()
            if token is not None:
                PRINCIPAL.reset(token)

    def _find_address(self, scope: Scope, visit: _Visit) -> str:
        if self._settings.trust_proxy:
            forwarded = visit.headers.get(b"x-forwarded-for", b"").decode("latin-1")
            if forwarded:
                return forwarded.rpartition(",")[2].strip()
        client = scope.get("client")
        return client[0] if client else ""

    def _record(self, scope: Scope, visit: _Visit, principal: Principal | None) -> None:
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
        line = {
            "event": "request",
            "request_id": visit.request_id.decode(),
            "bearer_hash": principal.digest if principal else "",
            "bearer_key_name": principal.key_name if principal else "",
            "source_ip": self._find_address(scope, visit),
            "method": scope["method"],
            "path": path[:256],
            "status": visit.status,
            "latency_ms": round(took_ns / NS_PER_MS, 3),
        }
        _AUDIT.info("%s", msgspec.json.encode(line).decode())


class _Visit:
    """One request's answer on its way out."""

    __slots__ = ("_send", "headers", "request_id", "started_ns", "status")

    def __init__(self, scope: Scope, send: Send, started_ns: int) -> None:
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self.headers.get(b"x-request-id", b"")
        is_usable = _REQUEST_ID.fullmatch(given) is not None
        self.request_id = given if is_usable else uuid.uuid4().hex.encode()
        self.started_ns = started_ns
        self.status = 500
        self._send = send

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Pass on, with the request's id on the head."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [
                *message.get("headers", ()),
                (b"x-request-id", self.request_id),
                (b"x-content-type-options", b"nosniff"),
                (b"cache-control", b"no-store"),
            ]
        await self._send(message)

    async def answer_fault(self, fault: Fault) -> None:
        """Answer with an error body."""
        headers = []
        if fault.retry_after_s:
            headers.append((b"retry-after", str(fault.retry_after_s).encode()))
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


def _paced(wait_s: float) -> Fault | None:
    if not wait_s:
        return None
    return Fault(429, "rate_limited", "too many requests", max(1, math.ceil(wait_s)))
