"""Three pages for a scraper: ``/metrics``, ``/healthz``, ``/readyz``. Read-only, small, from the standard library."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Protocol

from typing_extensions import override

from ingero.config import Endpoint
from ingero.errors import IngeroError

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
TEXT_TYPE: Final = "text/plain; charset=utf-8"
CONNECTION_TIMEOUT_S: Final = 10.0


class Scraped(Protocol):
    """What the pages show. Asked in other threads."""

    def render(self) -> str:
        """The metrics, text format 0.0.4."""
        ...

    def readiness(self, window_ns: int, /) -> tuple[bool, str]:
        """Whether it can be relied on, and why."""
        ...


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], state: Scraped, window_ns: int) -> None:
        self.state = state
        self.window_ns = window_ns
        super().__init__(address, _Handler)


class _DualStackServer(_Server):
    address_family = socket.AF_INET6

    @override
    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "ingero"
    sys_version = ""
    timeout = CONNECTION_TIMEOUT_S
    wbufsize = -1
    server: _Server

    def do_GET(self) -> None:
        """Answer one of the pages."""
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        """The same without its body."""
        self._answer(has_body=False)

    def _answer(self, *, has_body: bool) -> None:
        status, kind, text = self._page(self.path.partition("?")[0])
        body = text.encode("utf-8", "surrogateescape")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def _page(self, path: str) -> tuple[HTTPStatus, str, str]:
        if path == "/metrics":
            return HTTPStatus.OK, METRICS_TYPE, self.server.state.render()
        if path == "/healthz":
            return HTTPStatus.OK, TEXT_TYPE, "ok\n"
        if path == "/readyz":
            is_ready, text = self.server.state.readiness(self.server.window_ns)
            status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
            return status, TEXT_TYPE, f"{text}\n"
        return HTTPStatus.NOT_FOUND, TEXT_TYPE, "pages: /metrics /healthz /readyz\n"

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged."""


@contextmanager
def serve_sink(
    endpoint: Endpoint, state: Scraped, window_ns: int = 0, option: str = "--listen"
) -> Iterator[Endpoint]:
    """Serve until the end of the block.

    Yields:
        Where it listens, with the real port.

    Raises:
        IngeroError: The address cannot be listened on.
    """
    is_v6 = ":" in endpoint.host or (not endpoint.host and socket.has_dualstack_ipv6())
    kind = _DualStackServer if is_v6 else _Server
    try:
        server = kind((endpoint.host, endpoint.port), state, window_ns)
    except OSError as error:
        raise IngeroError(
            f"cannot listen on {endpoint}: {error.strerror or error}",
            hint=f"choose another address with {option}",
        ) from error
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield Endpoint(endpoint.host, server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
