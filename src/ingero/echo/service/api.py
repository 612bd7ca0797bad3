"""The HTTP+JSON API, version 2, and MCP, on one listener behind the `RequestMiddleware`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router

from ingero import __version__
from ingero.echo.queries.analysis import RUN_ANALYSIS
from ingero.echo.queries.catalog import QUERIES
from ingero.echo.service.config import EchoConfig
from ingero.echo.service.executor import ClientGoneError, QueryExecutor
from ingero.echo.service.formats import choose_format, iter_sql
from ingero.echo.service.middleware import MCP_PATHS, Receive, Scope, Send
from ingero.echo.service.openapi import build_openapi
from ingero.echo.service.origins import build_rules
from ingero.echo.service.replies import (
    JSON,
    UNKNOWN_TOOL,
    ErrorReply,
    build_error_reply,
    build_json,
)
from ingero.echo.service.report_page import build_report_routes
from ingero.echo.service.streaming import (
    MAX_ROWS,
    RowsRequest,
    RowStreams,
    StreamedAnswer,
    TruncatedAnswerError,
)
from ingero.errors import BadDataError, IngeroError
from ingero.serving.bearer import Principal
from ingero.serving.mcp_http import McpOverHttp
from ingero.telemetry.exposition import encode_metrics
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_S

_LOG: Final = logging.getLogger("ingero.echo.api")
_NOT_FOUND: Final = ErrorReply(404, "not_found", "nothing is served here; see /api/v2/openapi.json")
_LIST_PATH: Final = "/api/v2/tools/list"
_METHOD: Final = ErrorReply(405, "method_not_allowed", "this path does not take that method")
_TOO_LARGE: Final = ErrorReply(413, "body_too_large", "the body is too large")
_SLOW_BODY: Final = ErrorReply(408, "body_timeout", "the body did not arrive in time")
_CLOSE: Final = {"connection": "close"}
_NOT_JSON: Final = ErrorReply(415, "unsupported_media_type", "send application/json")


_VERSIONS: Final = {
    "supported": ["v2"],
    "deprecated": [],
    "preferred": "v2",
    "binary": {"component": "echo", "version": ".".join(__version__.split(".")[:2])},
    "capabilities": {
        "tools_endpoint": True,
        "sql_endpoint": True,
        "anomaly_endpoint": True,
        "experimental_kprobes": False,
    },
    "removal_schedule": {},
}


class _ToolBody(msgspec.Struct, forbid_unknown_fields=True):
    args: msgspec.Raw
    # A number, since JSON Schema calls 2.0 an integer and msgspec does not.
    max_rows: Annotated[float, msgspec.Meta(ge=1, le=MAX_ROWS, multiple_of=1)] | None = None


class _ReplyError(Exception):
    def __init__(self, reply: ErrorReply, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(reply.message)
        self.reply = reply
        self.headers = headers


class Api:
    """Routes of the listener.

    Args:
        executor: Answers queries.
        streams: Answers them row by row.
        mcp: MCP, or None where only the API is wanted.
        meter: For ``/metrics``.
        config: Limits of bodies, and whom MCP answers.
        documents: Further JSON documents, by path.
    """

    def __init__(
        self,
        executor: QueryExecutor,
        streams: RowStreams,
        mcp: McpOverHttp | None,
        meter: MeterRegistry,
        config: EchoConfig,
        documents: Mapping[str, bytes] | None = None,
    ) -> None:
        self._executor = executor
        self._streams = streams
        self._mcp = mcp
        self._meter = meter
        self._config = config
        self._origins = build_rules(config.mcp_addr, config.allowed_hosts, config.allowed_origins)
        tools = {"tools": [_describe(query) for query in QUERIES]}
        self._router = Router(
            [
                Route("/api/versions", _fixed(_VERSIONS)),
                Route("/api/v2/health", self._health),
                Route("/api/v2/whoami", self._whoami),
                Route("/api/v2/tools/list", _fixed(tools)),
                Route("/api/v2/tools/{name}", self._call_tool, methods=["POST"]),
                Route("/api/v2/sql", self._sql, methods=["POST"]),
                Route("/api/v2/openapi.json", _fixed(build_openapi(QUERIES))),
                Route("/metrics", self._metrics),
                *build_report_routes(),
                *(Route(path, _encoded(body)) for path, body in (documents or {}).items()),
            ],
            redirect_slashes=False,
            default=_not_found,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one admitted request."""
        scope["app"] = self  # makes the router raise its 405 instead of answering in plain text
        try:
            if scope["path"] in MCP_PATHS and self._mcp is not None:
                await self._answer_mcp(self._mcp, scope, receive, send)
            else:
                await self._router(scope, receive, send)
        except _ReplyError as error:
            await error.reply.build_response(error.headers)(scope, receive, send)
        except HTTPException as error:
            reply = replace(_METHOD, status=error.status_code)
            await reply.build_response(error.headers)(scope, receive, send)
        except TruncatedAnswerError as error:
            _LOG.warning("%s: %s", scope["path"], error)
        except (ClientDisconnect, ClientGoneError):
            return
        except IngeroError as error:
            reply = build_error_reply(error)
            if reply.status >= 500:
                _LOG.warning("%s %s: %s", scope["method"], scope["path"], error.message)
            await reply.build_response()(scope, receive, send)

    async def _answer_mcp(
        self, mcp: McpOverHttp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        refusal = self._origins.check(dict(scope["headers"]))
        if refusal is not None:
            raise _ReplyError(refusal)
        if scope["method"] != "POST":
            await mcp.handle_request(scope, receive, send)
            return
        body = await self._read_body(Request(scope, receive))
        await mcp.handle_body(scope, body, receive, send)

    async def _health(self, request: Request) -> Response:
        body: dict[str, str] = {"status": "ok"}
        if request.scope.get("principal") is not None:
            body["version"] = f"v{__version__}"
        return build_json(body)

    async def _whoami(self, request: Request) -> Response:
        principal: Principal = request.scope["principal"]
        clusters = ["*"] if principal.clusters is None else sorted(principal.clusters)
        return build_json({
            "bearer_id": principal.digest,
            "cluster_ids": clusters,
            "capabilities": {"sql": True, "tools": True, "anomaly": True},
        })

    async def _metrics(self, request: Request) -> Response:
        principal: Principal = request.scope["principal"]
        only = None if principal.clusters is None else ("bearer", principal.label)
        accept = request.headers.get("accept", "")
        body, content_type = encode_metrics(self._meter, accept, only)
        return Response(body, headers={"content-type": content_type})

    async def _call_tool(self, request: Request) -> Response | StreamedAnswer:
        name = request.path_params["name"]
        if request.url.path == _LIST_PATH:
            raise _ReplyError(_METHOD, {"allow": "GET, HEAD"})
        body = await self._read(request)
        if all(query.name != name for query in QUERIES):
            raise _ReplyError(UNKNOWN_TOOL)
        try:
            given = msgspec.json.decode(body, type=_ToolBody)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadDataError(f'the body is not {{"args": {{…}}}}: {error}') from error
        except RecursionError:
            raise BadDataError('the body is not {"args": {…}}: it is nested too deeply') from None
        principal, arguments = request.scope["principal"], bytes(given.args)
        form = choose_format(request.headers.get("accept", ""))
        if form is not None and name != RUN_ANALYSIS.name:
            max_rows = None if given.max_rows is None else int(given.max_rows)
            rows = RowsRequest(principal, name, arguments, max_rows, form)
            return await self._streams.answer(rows, request.scope["gone"])
        encoded = await self._executor.ask(principal, name, arguments, request.scope["gone"])
        return _shape_sql(request, encoded, wrap=b'{"result":%b}')

    async def _sql(self, request: Request) -> Response:
        body = await self._read(request)
        encoded = await self._executor.ask(
            request.scope["principal"], RUN_ANALYSIS.name, body or b"{}", request.scope["gone"]
        )
        return _shape_sql(request, encoded, wrap=b"%b")

    async def _read(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
        if kind != JSON:
            raise _ReplyError(_NOT_JSON)
        return await self._read_body(request)

    async def _read_body(self, request: Request) -> bytes:
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._config.max_body:
            raise _ReplyError(_TOO_LARGE, _CLOSE)
        parts, n_bytes = [], 0
        try:
            async with asyncio.timeout(self._config.body_timeout / NS_PER_S):
                async for part in request.stream():
                    n_bytes += len(part)
                    if n_bytes > self._config.max_body:
                        raise _ReplyError(_TOO_LARGE, _CLOSE)
                    parts.append(part)
        except TimeoutError:
            raise _ReplyError(_SLOW_BODY, _CLOSE) from None
        return b"".join(parts)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    await _NOT_FOUND.build_response()(scope, receive, send)


def _fixed(body: object) -> Callable[[Request], Awaitable[Response]]:
    return _encoded(msgspec.json.encode(body))


def _encoded(body: bytes) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        del request
        return Response(body, media_type=JSON)

    return answer


def _describe(query: Any) -> dict[str, Any]:  # noqa: ANN401 - a Query of any types
    return {
        "name": query.name,
        "title": query.title,
        "description": query.description,
        "input_schema": query.input_schema(),
        "output_schema": query.output_schema(),
    }


def _shape_sql(request: Request, encoded: bytes, *, wrap: bytes) -> Response:
    """The answer to a tenant's statement in the form that ``Accept`` names; it was bounded where it ran."""
    form = choose_format(request.headers.get("accept", ""))
    if form is None:
        return Response(wrap % encoded, media_type=JSON)
    answer = msgspec.json.decode(encoded)
    parts = iter_sql(form, answer["columns"], answer["rows"])
    return Response(b"".join(parts), media_type=form.media_type)
