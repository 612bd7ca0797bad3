"""A collector that records what it is sent and answers what a test tells it to, over real HTTP on loopback."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typing_extensions import override

from ingero.otlp.codec.export import Export, decode_export
from ingero.otlp.names import Signal


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request as it came.

    Attributes:
        method: ``POST`` or ``GET``.
        path: With its query.
        headers: Names in lower case.
        body: Uncompressed.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def signal(self) -> Signal | None:
        """What the path says that the body holds."""
        return next((one for one in Signal if f"/v1/{one}" in self.path), None)

    @property
    def export(self) -> Export:
        """The body, decoded.

        Raises:
            ValueError: The path is none of OTLP's.
        """
        if self.signal is None:
            raise ValueError(f"{self.path} is no OTLP path")
        return decode_export(self.body, self.signal, self.headers["content-type"])


@dataclass(slots=True)
class RecordingCollector:
    """What it answers, and what it was sent.

    Attributes:
        port: Where it listens, on 127.0.0.1; stays the same over `pause`.
        status: Status of every answer.
        headers: Headers of every answer.
        body: Body of every answer.
        requests: What came, in order.
    """

    port: int = 0
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b"{}"
    requests: list[RecordedRequest] = field(default_factory=list)
    arrived: threading.Condition = field(default_factory=threading.Condition)
    _server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def logs(self) -> list[Export]:
        """Every logs export so far, in order."""
        return [r.export for r in list(self.requests) if r.signal is Signal.LOGS]

    def set_threshold(self, threshold: str | None, quorum: str = "true") -> None:
        """Answer with this threshold from now on; None answers without one."""
        self.headers = (
            {}
            if threshold is None
            else {"X-Ingero-Threshold": threshold, "X-Ingero-Quorum-Met": quorum}
        )

    def set_panic(self) -> None:
        """Answer from now on that the threshold is withheld."""
        self.headers = {"X-Ingero-Panic": "true"}

    def start(self) -> None:
        """Listen."""
        self._server = _Server(("127.0.0.1", self.port), self)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections until `start`; the open ones end with their next request."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def wait_for(self, n_requests: int, timeout_s: float = 30.0) -> list[RecordedRequest]:
        """Wait until so many requests came; the timeout only ends a broken test."""
        with self.arrived:
            if not self.arrived.wait_for(lambda: len(self.requests) >= n_requests, timeout_s):
                raise TimeoutError(f"{len(self.requests)} of {n_requests} requests came")
            return list(self.requests)


class _Server(ThreadingHTTPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: tuple[str, int], collector: RecordingCollector) -> None:
        self.collector = collector
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one segment per answer: two would wait for a delayed acknowledgement
    disable_nagle_algorithm = True
    server: _Server

    def _answer(self) -> None:
        collector = self.server.collector
        if collector._server is not self.server:
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        headers = {name.lower(): value for name, value in self.headers.items()}
        with collector.arrived:
            collector.requests.append(RecordedRequest(self.command, self.path, headers, body))
            collector.arrived.notify_all()
        self.send_response(collector.status)
        for name, value in collector.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(collector.body)))
        self.end_headers()
        self.wfile.write(collector.body)

    def do_POST(self) -> None:
        """Record and answer."""
        self._answer()

    def do_GET(self) -> None:
        """Record and answer."""
        self._answer()

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Tests read `RecordingCollector.requests`."""


@contextmanager
def open_collector() -> Iterator[RecordingCollector]:
    """A collector that listens until the end of the block."""
    collector = RecordingCollector()
    collector.start()
    try:
        yield collector
    finally:
        collector.stop()
