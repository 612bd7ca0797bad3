"""A recording over HTTP: the dashboard's page, its JSON API, and MCP, behind one check of host and bearer.

The page is static and says nothing; every answer needs the bearer, when there is one. Requests that name another host
are refused, so that no web page can reach a loopback server through a visitor's browser.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final

import anyio
import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router

from ingero.errors import BadDataError, IngeroError, StoreError
from ingero.model.recording import Recording
from ingero.recording.queries.api import ANSWERS, Answer, Asked, parse_asked
from ingero.recording.queries.recording_file import ExternalAccess, RecordingFile
from ingero.recording.queries.sql import MAX_ANSWER_BYTES, plain_rows
from ingero.recording.queries.transfer import MAX_ROWS as PART_ROWS
from ingero.recording.queries.transfer import encode_part
from ingero.recording.store.reader import read_unwritten
from ingero.recording.store.sql import MAX_ROWS, SqlLimits, SqlStop, run_sql
from ingero.serving.mcp_http import McpManager, McpOverHttp
from ingero.serving.oauth import AccessTokens
from ingero.serving.threads import run_on_thread
from ingero.telemetry.clock import Clock, SystemClock

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

_PAGE: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.css": ("app.css", "text/css; charset=utf-8"),
    **{
        f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
        for name in ("app", "parts", "overview", "timeline", "flame", "tables")
    },
}
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_JSON: Final = "application/json"
_MAX_BODY: Final = 256 * 1024
_MAX_MCP_BODY: Final = 4 * 1024 * 1024
_BODY_S: Final = 30.0  # for a whole body: the server bounds only the time of a head
_CLOSE: Final = {"Connection": "close"}  # what is left of a body is not read
_MAX_STATEMENTS: Final = 2  # at once: each may take the memory of a process


class SqlBody(msgspec.Struct, forbid_unknown_fields=True):
    """One statement over HTTP."""

    sql: str
    limit: Annotated[int, msgspec.Meta(ge=1)] = 1000


@dataclass(frozen=True, slots=True)
class NodeAccess:
    """Who may ask.

    Attributes:
        token: The bearer; empty for none, which only a loopback listener may have.
        hosts: Values of ``Host`` (without a port) that are answered.
        tokens: Access tokens that are taken next to the bearer; None for none.
    """

    token: str
    hosts: frozenset[str]
    tokens: AccessTokens | None = None

    def check(self, scope: Scope) -> Response | None:
        """The answer to a request that is not let through, or to one for what everybody may know."""
        headers = {
            name.decode().lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        if _host_name(headers.get("host", "")) not in self.hosts:
            return _fault(421, "this server does not answer for that host")
        if self.tokens is not None and scope["path"] == self.tokens.path:
            return Response(self.tokens.metadata, headers=dict(_HEADERS), media_type=_JSON)
        given = headers.get("authorization", "")
        if scope["path"] in _PAGE or self._is_admitted(given):
            return None
        answer = _fault(401, "send the bearer token")
        challenge = "Bearer" if self.tokens is None else self.tokens.challenge(given)
        answer.headers["WWW-Authenticate"] = challenge
        return answer

    def _is_admitted(self, authorization: str) -> bool:
        if not self.token and self.tokens is None:
            return True
        scheme, _, given = authorization.partition(" ")
        is_same = hmac.compare_digest(given.strip().encode(), self.token.encode())
        if self.token and is_same and scheme.lower() == "bearer":
            return True
        return self.tokens is not None and self.tokens.authenticate(authorization) is not None


class NodeApp:
    """The ASGI application of one recording.

    Args:
        path: The recording.
        access: Who may ask.
        mcp: MCP, or None where only the dashboard is wanted.
        clock: For ``/api/v1/time``.
        fleet_url: Where Fleet's live page is, for ``/api/v1/links``.
    """

    def __init__(
        self, path: Path, access: NodeAccess,
        mcp: McpOverHttp | None = None, clock: Clock | None = None, fleet_url: str = "",
    ) -> None:  # fmt: skip
        self._context = RecordingFile(path)
        self._access = access
        self._mcp = mcp
        self._clock = clock or SystemClock()
        self._links_json = {"fleet": fleet_url}
        self._one_at_a_time = anyio.CapacityLimiter(1)
        self._statements = anyio.CapacityLimiter(_MAX_STATEMENTS)
        self._router = Router([
            *(Route(f"/api/v1/{name}", self._answered(find)) for name, find in ANSWERS.items()),
            Route("/api/v1/part", self._part),
            Route("/api/v1/time", self._time),
            Route("/api/v1/links", self._links),
            Route("/api/v1/query", self._query, methods=["POST"]),
            *(Route(path, _page) for path in _PAGE),
        ])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request: host, then bearer, then what was asked."""
        answer = self._access.check(scope)
        if answer is not None:
            await answer(scope, receive, send)
        elif scope["path"] == "/mcp" and self._mcp is not None:
            await self._guarded(partial(_forward, self._mcp), scope, receive, send)
        else:
            await self._guarded(self._router, scope, receive, send)

    async def _guarded(self, answer: Asgi, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # makes the router raise instead of answering in plain text
        try:
            await answer(scope, receive, send)
        except ClientDisconnect:
            return
        except HTTPException as error:
            fault = _fault(error.status_code, str(error.detail))
            fault.headers.update(error.headers or {})
            await fault(scope, receive, send)
        except BadDataError as error:
            await _fault(400, error.message)(scope, receive, send)
        except StoreError as error:
            await _fault(503, error.message)(scope, receive, send)
        except IngeroError as error:
            await _fault(500, error.message)(scope, receive, send)

    def _answered(self, find: Answer) -> Callable[[Request], Awaitable[Response]]:
        """A route that answers on a thread, one at a time; an answer that the client has is not made again."""

        def build(asked: Asked) -> bytes:
            return msgspec.json.encode(find(asked))

        async def answer(request: Request) -> Response:
            asked = parse_asked(self._context, request.query_params)
            stamp = (*self._context.stamp(), str(request.url.path), str(request.url.query))
            tag = f'"{sha256(repr(stamp).encode()).hexdigest()[:32]}"'
            headers = {**_HEADERS, "ETag": tag}
            if request.headers.get("if-none-match") == tag:
                return Response(status_code=304, headers=headers)
            async with _while_asked(request.receive), self._one_at_a_time:
                body = await run_on_thread(None, partial(build, asked))
            return Response(body, headers=headers, media_type=_JSON)

        return answer

    async def _part(self, request: Request) -> Response:
        """Rows for another program (`ingero.recording.queries.transfer`)."""
        asked = parse_asked(self._context, request.query_params)
        wanted = replace(asked.wanted, last=min(asked.wanted.last or PART_ROWS, PART_ROWS))

        def build() -> bytes:
            return encode_part(self._context.load(wanted))

        async with _while_asked(request.receive), self._one_at_a_time:
            body = await run_on_thread(None, build)
        return Response(body, headers=dict(_HEADERS), media_type="application/msgpack")

    async def _time(self, request: Request) -> Response:
        del request
        return _json({"timestamp_ns": self._clock.wall_ns()})

    async def _links(self, request: Request) -> Response:
        del request
        return _json(self._links_json)

    async def _query(self, request: Request) -> Response:
        # A foreign page can send any other type to a loopback listener, without asking the browser's leave.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
            raise HTTPException(415, f"send {_JSON}", _CLOSE)
        body = await _read_body(request, _MAX_BODY)
        try:
            asked = msgspec.json.decode(body, type=SqlBody)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadDataError(f'send {{"sql": …, "limit": …}}: {error}') from error
        limits = SqlLimits(min(asked.limit, MAX_ROWS), max_bytes=MAX_ANSWER_BYTES)
        stop = SqlStop()
        work = partial(run_sql, self._context.path, asked.sql, limits, stop=stop)
        async with _while_asked(request.receive), self._statements:
            answer = await run_on_thread(None, work, stop.set)
        lost = await anyio.to_thread.run_sync(read_unwritten, self._context.path)
        missing = Recording(unwritten=lost).describe_missing()
        content = {
            "columns": answer.columns,
            "rows": plain_rows(answer),
            "truncated": answer.is_truncated,
        }
        return _json(content | ({"missing": missing} if missing else {}))


def build_mcp(path: Path, outside: ExternalAccess | None = None) -> McpOverHttp:
    """MCP for the recording's questions; the app in front of it guards host and bearer."""

    def load() -> Callable[[], McpManager]:
        from ingero.recording.queries.mcp import build_recording_manager  # noqa: PLC0415 - for the first request

        return partial(build_recording_manager, path, outside)

    return McpOverHttp(load)


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """A whole body.

    Raises:
        HTTPException: It is larger, or does not arrive in time.
        ClientDisconnect: It does not arrive.
    """
    body = bytearray()
    try:
        with anyio.fail_after(_BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise HTTPException(413, "the body is too large", _CLOSE)
    except TimeoutError:
        raise HTTPException(408, "the body did not arrive in time", _CLOSE) from None
    return bytes(body)


@asynccontextmanager
async def _while_asked(receive: Receive) -> AsyncIterator[None]:
    """Cancel what is inside when the client goes away; its body was read before.

    Raises:
        ClientDisconnect: It went.
    """
    with anyio.CancelScope() as scope:
        watching = asyncio.ensure_future(_cancel_at_end(receive, scope))
        try:
            yield
        finally:
            watching.cancel()
    if scope.cancelled_caught:
        raise ClientDisconnect


async def _cancel_at_end(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _forward(mcp: McpOverHttp, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["method"] != "POST":
        await mcp.handle_request(scope, receive, send)
        return
    body = await _read_body(Request(scope, receive), _MAX_MCP_BODY)
    async with _while_asked(receive):
        await mcp.handle_body(scope, body, receive, send)


def _host_name(host: str) -> str:
    """``Host`` without its port, lower-case."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()


def _json(content: Any, status: int = 200) -> Response:  # noqa: ANN401 - whatever msgspec encodes
    body = msgspec.json.encode(content)
    return Response(body, status, headers=dict(_HEADERS), media_type=_JSON)


def _fault(status: int, message: str) -> Response:
    return _json({"error": message}, status)


async def _page(request: Request) -> Response:
    name, media = _PAGE[request.url.path]
    body = files("ingero.recording.queries").joinpath("page", name).read_bytes()
    return Response(body, headers=dict(_HEADERS), media_type=media)
