"""The outermost middleware of the MCP and API listener: id, drain, bearer, pace, audit, count. Pure ASGI.

Whatever happens behind it, a request has an answer with an id, a line in the audit log and its place in the counters.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Final

from ingero.echo.service.access import Access
from ingero.echo.service.config import EchoConfig
from ingero.echo.service.replies import ErrorReply, build_json
from ingero.echo.service.telemetry import (
    BAD_BEARERS,
    BEARER_REQUESTS,
    BEARER_SECONDS,
    LATENCY,
    REQUESTS,
)
from ingero.serving.audit import Answered, write_request
from ingero.serving.bearer import Principal
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
_HANDLERS: Final = (
    ("/api/v2/tools/", "tools"),
    ("/api/v2/sql", "sql"),
    ("/api/v2/", "api"),
    ("/api/v1", "gone"),
    ("/api/", "api"),
    ("/metrics", "metrics"),
    ("/report", "report"),
)
MCP_PATHS: Final = frozenset({"/", "/mcp"})
_CLIENT_GONE: Final = 499
_BAD_PER_SECOND: Final = 1.0
_BAD_BURST: Final = 20.0
_BAD_RETRY_S: Final = 5
DRAINING: Final = ErrorReply(503, "draining", "shutting down; ask again", 5)
NO_BEARER: Final = ErrorReply(401, "missing_bearer", "a bearer token is needed")
BAD_BEARER: Final = ErrorReply(401, "invalid_bearer", "invalid bearer token")
WRITER: Final = ErrorReply(403, "insufficient_scope", "this bearer may only write")
BUSY_BEARER: Final = ErrorReply(
    429, "in_flight_cap", "too many requests of this bearer are being answered", 1
)
NO_STREAM: Final = ErrorReply(
    405, "no_stream", "this bearer has its standing streams; requests are answered without one"
)
"""By MCP's specification, "Streamable HTTP", a client goes on after 405 without the stream."""
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


def is_event_stream(scope: Scope) -> bool:
    """Whether a request is for a stream of MCP that stands for what the server may want to say."""
    return scope["path"] in MCP_PATHS and scope["method"] == "GET"


class RequestAdmission:
    """Decides whether a request is answered: who sent it, and how much that bearer or address asks already.

    Args:
        access: Who is known.
        config: How much one may ask.
        clock: For the pace.
        meter: Where wrong tokens are counted.
    """

    def __init__(
        self,
        access: Access,
        config: EchoConfig,
        clock: Clock,
        meter: MeterRegistry,
    ) -> None:
        self._access = access
        self._config = config
        self._by_bearer = RateLimiter(config.rate_per_second, config.rate_burst, clock)
        self._by_address = RateLimiter(config.rate_per_second, config.rate_burst, clock)
        self._bad_by_address = RateLimiter(_BAD_PER_SECOND, _BAD_BURST, clock)
        bad = meter.counter(BAD_BEARERS)
        self._count_refused = bad.bound(outcome="refused")
        self._count_slowed = bad.bound(outcome="slowed")
        self.in_flight: Counter[str] = Counter()
        self._open_streams: Counter[str] = Counter()

    def admit(
        self, scope: Scope, headers: Mapping[bytes, bytes]
    ) -> tuple[Principal | None, ErrorReply | None]:
        """Who sent a request, and why it is refused; None each where it is unknown or let through."""
        given = headers.get(b"authorization")
        if given is None:
            if not self._access.is_open(scope["path"]):
                return None, NO_BEARER
            return None, _check_pace(self._by_address.take(self.find_address(scope, headers)))
        principal = self._access.authenticate(given.decode("latin-1"))
        if principal is None:
            return None, self._refuse_bad(self.find_address(scope, headers))
        if "read" not in principal.scopes:
            return principal, WRITER
        slow = _check_pace(self._by_bearer.take(principal.digest))
        if slow is None and self._find_held(scope)[principal.digest] >= self._config.max_in_flight:
            return principal, NO_STREAM if is_event_stream(scope) else BUSY_BEARER
        return principal, slow

    @contextmanager
    def hold(self, scope: Scope, principal: Principal | None) -> Iterator[None]:
        """Count a request as in flight, or as a stream that stands."""
        key, held = principal.digest if principal else "", self._find_held(scope)
        held[key] += 1
        try:
            yield
        finally:
            held[key] -= 1
            if not held[key]:
                del held[key]

    def _find_held(self, scope: Scope) -> Counter[str]:
        """What is counted by bearer: streams that stand are no requests that wait for an answer."""
        return self._open_streams if is_event_stream(scope) else self.in_flight

    def find_address(self, scope: Scope, headers: Mapping[bytes, bytes]) -> str:
        """Where a request is from."""
        if self._config.trust_proxy_headers:
            forwarded = headers.get(b"x-forwarded-for", b"").decode("latin-1")
            if forwarded:
                return forwarded.rpartition(",")[2].strip()
        client = scope.get("client")
        return client[0] if client else ""

    def _refuse_bad(self, address: str) -> ErrorReply:
        """Good tokens of the same address are not slowed: others behind one proxy must not be locked out."""
        if self._bad_by_address.take(address) > 0:
            self._count_slowed(1)
            return SLOWED
        self._count_refused(1)
        return BAD_BEARER


class RequestMiddleware:
    """Lets requests through to ``app`` and answers the others; writes down and counts all of them.

    Args:
        app: What is behind it.
        access: Who is known.
        config: How much one bearer may ask.
        clock: Time.
        meter: Where requests are counted.
    """

    def __init__(
        self,
        app: App,
        access: Access,
        config: EchoConfig,
        clock: Clock,
        meter: MeterRegistry,
    ) -> None:
        self._app = app
        self._clock = clock
        self._meter = meter
        self._access = access
        self.admission = RequestAdmission(access, config, clock, meter)
        self._streams: set[asyncio.Future[None]] = set()
        self._n_active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False

    async def drain(self, timeout_ns: int) -> None:
        """Answer 503 from now on, end MCP's open streams, return when nothing is in flight or the time is over."""
        self._is_draining = True
        for stream in list(self._streams):
            stream.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_ns / NS_PER_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        exchange = _Exchange(scope, send, self._clock.mono_ns(), self._access.challenge)
        watch = DisconnectWatch(receive)
        principal, refusal = None, DRAINING if self._is_draining else None
        try:
            if refusal is None:
                principal, refusal = self.admission.admit(scope, exchange.headers)
            if scope["path"].startswith("/api/v1/") or scope["path"] == "/api/v1":
                await build_json(VERSION_GONE, 410)(scope, receive, exchange.send)
            elif refusal is not None:
                await exchange.refuse(refusal)
            else:
                await self._pass_on(scope, watch, exchange, principal)
        except Exception:  # noqa: BLE001 - one request's defect must not be invisible, and not another's
            _LOG.exception("%s %s: %s", scope["method"], scope["path"][:256], CRASHED.message)
            if not exchange.is_started:
                await exchange.refuse(CRASHED)
        finally:
            watch.close()
            if not exchange.is_started and watch.gone.is_set():
                exchange.status = _CLIENT_GONE
            self._record(scope, exchange, principal)

    async def _pass_on(
        self,
        scope: Scope,
        watch: DisconnectWatch,
        exchange: _Exchange,
        principal: Principal | None,
    ) -> None:
        scope["principal"], scope["gone"] = principal, watch.gone
        token = PRINCIPAL.set(principal) if principal else None
        gone_token = GONE.set(watch.gone)
        answering = self._app(scope, watch.receive, exchange.send)
        try:
            with self.admission.hold(scope, principal):
                if is_event_stream(scope):
                    await self._keep_open(answering, exchange)
                else:
                    await self._work(answering)
        finally:
            GONE.reset(gone_token)
            if token is not None:
                PRINCIPAL.reset(token)

    async def _work(self, answering: Awaitable[None]) -> None:
        self._n_active += 1
        self._idle.clear()
        try:
            await answering
        finally:
            self._n_active -= 1
            if not self._n_active:
                self._idle.set()

    async def _keep_open(self, answering: Awaitable[None], exchange: _Exchange) -> None:
        """A stream for what the server may want to say: nothing is in flight on it, so no drain waits for it."""
        stream = asyncio.ensure_future(answering)
        self._streams.add(stream)
        try:
            await asyncio.shield(stream)
        except asyncio.CancelledError:
            if not stream.cancelled():
                stream.cancel()
                raise
            await exchange.end()
        finally:
            self._streams.discard(stream)

    def _record(self, scope: Scope, exchange: _Exchange, principal: Principal | None) -> None:
        took_ns = self._clock.mono_ns() - exchange.started_ns
        path, meter = scope["path"], self._meter
        handler = next((name for start, name in _HANDLERS if path.startswith(start)), "mcp")
        labels = {"handler": handler, "status_class": f"{exchange.status // 100}xx"}
        version = "v2" if path.startswith("/api/v2") else "none"
        meter.counter(REQUESTS).add(1, **labels, api_version=version)
        meter.histogram(LATENCY).record(took_ns / NS_PER_S, **labels, api_version=version)
        if principal is not None:
            bearer = principal.label
            meter.counter(BEARER_REQUESTS).add(1, bearer=bearer, **labels)
            seconds = meter.counter(BEARER_SECONDS)
            seconds.add(took_ns / NS_PER_S, bearer=bearer, handler=handler)
        answered = Answered(
            request_id=exchange.request_id.decode(),
            source_ip=self.admission.find_address(scope, exchange.headers),
            method=scope["method"],
            path=path,
            status=exchange.status,
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

    def __init__(
        self, scope: Scope, send: Send, started_ns: int, challenge: Callable[[str | None], str]
    ) -> None:
        self._scope = scope
        self._challenge = challenge
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
            await self.refuse(DRAINING)

    async def refuse(self, reply: ErrorReply) -> None:
        """Answer with an error body."""
        headers = {"connection": "close"} if reply is SLOWED else {}
        if reply is NO_STREAM:
            headers["allow"] = "POST"
        if reply.status == 401:
            headers["www-authenticate"] = self._challenge(
                self.headers.get(b"authorization", b"").decode("latin-1")
            )
        await reply.build_response(headers)(self._scope, _receive_nothing, self.send)


async def _receive_nothing() -> MutableMapping[str, Any]:
    raise AssertionError("an answer without a request's body reads none")


def _check_pace(wait_s: float) -> ErrorReply | None:
    if not wait_s:
        return None
    return ErrorReply(429, "rate_limited", "too many requests", max(1, math.ceil(wait_s)))
