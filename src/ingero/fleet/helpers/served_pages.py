"""Pages that a component serves on a socket of its own: a function makes each, this listens and sends."""

from __future__ import annotations

import json
import math
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ingero.config import Endpoint
from ingero.config.tls import TlsServerConfig
from ingero.fleet.component import Host
from ingero.serving.asgi import AsgiServer
from ingero.serving.scrape import send_bytes
from ingero.serving.tls import build_server_context

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, HTTPScope, Scope


@dataclass(frozen=True, slots=True)
class Page:
    """A response.

    Attributes:
        status: HTTP status.
        body: What is sent.
        content_type: Of the body.
        headers: Further ones.
    """

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[bytes, bytes], ...] = ()


Answer: TypeAlias = "Callable[[HTTPScope], Page]"


def build_json_page(status: int, body: object) -> Page:
    """JSON that nothing may cache; a float that is no number in JSON (NaN, infinities) becomes null."""
    allow = ((b"allow", b"GET, HEAD"),) if status == 405 else ()
    text = _write_json(body).encode()
    return Page(status, text, "application/json", ((b"cache-control", b"no-store"), *allow))


class ServedPages:
    """A component, or a part of one, that serves pages on one endpoint.

    Args:
        endpoint: Where to listen.
        build: Makes, at the start, the function that answers each request.
        tls: Its certificate, or a context that is made already; None for plain HTTP.
        what: Which of several sockets of the component this is.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        build: Callable[[Host], Answer],
        tls: TlsServerConfig | ssl.SSLContext | None = None,
        what: str = "",
    ) -> None:
        self._endpoint = endpoint
        self._build = build
        self._tls = tls
        self._what = what
        self._server: AsgiServer | None = None

    async def start(self, host: Host) -> None:
        """Listen. Raises IngeroError when the address or a TLS file cannot be used."""
        answer = self._build(host)

        async def app(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
            del receive
            assert scope["type"] == "http"
            page = answer(scope)
            await send_bytes(send, page.status, page.body, page.content_type, page.headers)

        tls = self._tls
        context = build_server_context(tls) if isinstance(tls, TlsServerConfig) else tls
        self._server = AsgiServer(app, self._endpoint, tls=context)
        await self._server.start()
        host.announce(self._server.bound, self._what)

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            await self._server.stop()


def _write_json(body: object) -> str:
    try:
        return json.dumps(body, separators=(",", ":"), default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_without_nan(body), separators=(",", ":"), default=str)


def _without_nan(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list | tuple) else value
