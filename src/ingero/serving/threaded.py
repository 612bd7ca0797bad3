"""A small HTTP server of the standard library, a thread per connection: for pages that few ask for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, TypeAlias

from typing_extensions import override

from ingero.config import Endpoint
from ingero.errors import IngeroError

CONNECTION_TIMEOUT_S: Final = 10.0
MAX_BODY_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """What is asked.

    Attributes:
        method: GET, HEAD or POST.
        path: With its query, as it was sent.
        headers: By their names in title case, such as Content-Type.
        body: Of a POST; at most `MAX_BODY_BYTES`.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """What is answered. The body of a HEAD is left out when it is sent.

    Attributes:
        status: Its status.
        body: Its body.
        headers: All but the body's length.
    """

    status: HTTPStatus
    body: bytes
    headers: Mapping[str, str]


Respond: TypeAlias = Callable[[HttpRequest], HttpResponse]
"""Called in a thread per connection."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "ingero"
    sys_version = ""
    timeout = CONNECTION_TIMEOUT_S
    wbufsize = -1
    respond: Respond

    def do_GET(self) -> None:
        """Answer."""
        self._answer(b"")

    def do_HEAD(self) -> None:
        """The same without the body."""
        self._answer(b"")

    def do_POST(self) -> None:
        """Answer, if the body is small."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            self._send(
                HttpResponse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, b"this body is too large\n", {})
            )
            return
        self._answer(self.rfile.read(int(length)))

    def _answer(self, body: bytes) -> None:
        headers = {name.title(): value for name, value in self.headers.items()}
        self._send(type(self).respond(HttpRequest(self.command, self.path, headers, body)))

    def _send(self, response: HttpResponse) -> None:
        self.send_response(response.status)
        for name, value in response.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(response.body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True


class _DualStackServer(_Server):
    address_family = socket.AF_INET6

    @override
    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


@contextmanager
def serve_threaded(endpoint: Endpoint, respond: Respond, option: str) -> Iterator[Endpoint]:
    """Serve until the end of the block.

    Args:
        endpoint: Where.
        respond: Answers requests.
        option: What chooses the address, for an error.

    Yields:
        Where it listens, with the real port.

    Raises:
        IngeroError: The address cannot be listened on.
    """
    is_v6 = ":" in endpoint.host or (not endpoint.host and socket.has_dualstack_ipv6())
    kind = _DualStackServer if is_v6 else _Server
    handler = type("_Responding", (_Handler,), {"respond": staticmethod(respond)})
    try:
        server = kind((endpoint.host, endpoint.port), handler)
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
