"""OTLP/HTTP on httptools and an asyncio protocol of our own.

A push is handled inside the callback that completed it: no task, no queue, no second copy of its body. On uvicorn the server took
half of a core that the decoding and the score map need (docs/decisions/0015). What a general server would do and this
does not: streaming answers, upgrades (ignored, as RFC 9110 section 7.8 allows), HTTP/2.

Answers leave together, when everything that had arrived has been taken: a sender that is woken once for several of them,
rather than once each, takes a tenth of the core less.

Bounds: size of a head, of a body, of all unfinished bodies together; number of requests being received; time for a
request to arrive; idle time. An answer is written whole; while a sender does not read, nothing more is read from it.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from email.utils import formatdate
from typing import Final, cast

import httptools
from typing_extensions import override

from ingero.config import Endpoint
from ingero.errors import BadDataError
from ingero.fleet.component import Host, PushContext
from ingero.fleet.receivers.otlp.config import HttpConfig
from ingero.fleet.receivers.otlp.http_request import WANTED, Request, Router, write_answer
from ingero.fleet.receivers.otlp.intake import (
    OVERLOADED,
    TAKEN,
    AnswerStatus,
    PushIntake,
    PushOutcome,
)
from ingero.fleet.receivers.otlp.telemetry import Reason, Tally
from ingero.serving.asgi import bind
from ingero.serving.bodies import TooLargeError, decompress, encode_taken
from ingero.units import NS_PER_S

MAX_HEAD_BYTES: Final = 64 << 10
_MAX_DRAINED_BYTES: Final = 64 << 20
"""How much of a body that was refused is still read, so that its sender reads the answer, not a broken pipe."""
_SWEEP_S: Final = 1.0
_LOG: Final = logging.getLogger(__name__)


class OtlpHttpServer:
    """One listening HTTP port. Everything runs on the event loop.

    Attributes:
        bound: Where it listens, with the kernel's port; the configured endpoint before `start`.
        router: Decides about heads.
        intake: Takes bodies.
        tally: Counters.
        limit_bytes: Largest body.
        n_in_flight: Requests whose head came and whose body is not complete.
        n_buffered_bytes: Parts of those bodies.
        is_stopping: Every answer ends its connection.
        date_line: The Date header, renewed each second.
        connections: All that are open.
    """

    def __init__(
        self,
        config: HttpConfig,
        intake: PushIntake,
        tally: Tally,
        host: Host,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.bound = config.endpoint
        self.router = Router(config, intake)
        self.intake = intake
        self.tally = tally
        self.limit_bytes = config.max_request_body_size
        self.n_in_flight = 0
        self.n_buffered_bytes = 0
        self.is_stopping = not config.keep_alives_enabled
        self.date_line = b""
        self.connections: set[_Connection] = set()
        self._unsent: list[_Connection] = []
        self._config = config
        self._clock = host.clock
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._read_timeout_s = config.read_timeout / NS_PER_S
        self._idle_timeout_s = config.idle_timeout / NS_PER_S
        self._all_gone = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether no further request may be received now."""
        return self.n_in_flight >= self._config.max_in_flight

    @property
    def has_room(self) -> bool:
        """Whether the unfinished bodies fit into memory."""
        return self.n_buffered_bytes <= self._config.max_buffered_size

    async def start(self) -> None:
        """Bind and serve. Raises IngeroError when the address cannot be bound."""
        listening = await bind(self._config.endpoint)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self, loop),
            sock=listening,
            ssl=self._tls,
            backlog=4096,
            ssl_handshake_timeout=self._read_timeout_s if self._tls else None,
        )
        self.bound = Endpoint(self._config.endpoint.host, listening.getsockname()[1])
        self._sweep(loop)

    async def stop(self, drain_s: float) -> None:
        """Close the port and idle connections; let requests in flight finish for ``drain_s``, then cut them."""
        server, self._server = self._server, None
        if server is None:
            return
        self.is_stopping = True
        server.close()
        for connection in list(self.connections):
            connection.close_if_idle()
        try:
            async with asyncio.timeout(drain_s):
                while self.connections:
                    self._all_gone.clear()
                    await self._all_gone.wait()
        except TimeoutError:
            for connection in list(self.connections):
                connection.abort()
        if self._sweeping is not None:
            self._sweeping.cancel()

    def send_soon(self, connection: _Connection) -> None:
        """Send what this connection has to say once everything that is readable now has been read."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_all)
        self._unsent.append(connection)

    def _send_all(self) -> None:
        unsent, self._unsent = self._unsent, []
        for connection in unsent:
            connection.send()

    def forget(self, connection: _Connection) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        if not self.connections:
            self._all_gone.set()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Renew the date and end what takes too long; one timer for all connections costs less than one each."""
        self.date_line = (
            f"date: {formatdate(self._clock.wall_ns() / NS_PER_S, usegmt=True)}\r\n".encode()
        )
        now_s = loop.time()
        for connection in list(self.connections):
            connection.check_time(now_s - self._read_timeout_s, now_s - self._idle_timeout_s)
        interval_s = min(_SWEEP_S, self._read_timeout_s / 2, self._idle_timeout_s / 2)
        self._sweeping = loop.call_later(interval_s, self._sweep, loop)


class _Connection(asyncio.Protocol):
    """One sender's connection: parses, gathers a body, answers."""

    __slots__ = (
        "_headers",
        "_is_done",
        "_loop",
        "_n_accounted",
        "_n_body",
        "_n_head",
        "_parser",
        "_parts",
        "_request",
        "_server",
        "_since_s",
        "_target",
        "_transport",
        "_unsent",
    )

    def __init__(self, server: OtlpHttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._since_s = loop.time()
        self._is_done = False
        self._n_head = 0
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._request: Request | None = None
        self._parts: list[bytes] = []
        self._n_body = 0
        self._n_accounted = 0
        self._unsent: list[bytes] = []

    # asyncio

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._server.connections.add(self)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self._request is not None:
            if self._request.refusal is None:
                self._server.tally.refuse_request(Reason.CUT_SHORT)
            self._end_request()
        self._transport = None
        del self._parser  # it refers to this; without the cycle nothing waits for the collector
        self._unsent.clear()
        self._server.forget(self)

    @override
    def eof_received(self) -> None:
        self.send()

    @override
    def data_received(self, data: bytes) -> None:
        if self._is_done:
            return
        if self._request is None:
            if not self._n_head:
                self._since_s = self._loop.time()
            self._n_head += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserCallbackError as error:
            _LOG.error("a push could not be handled", exc_info=error.__context__ or error)
            self._fail(AnswerStatus.PERMANENT, "internal error; see Fleet's log", Reason.INTERNAL)
            return
        except httptools.HttpParserError as error:
            self._fail(AnswerStatus.BAD_DATA, f"not HTTP/1.1: {error}", Reason.BAD_REQUEST)
            return
        if self._request is not None:
            self._account()
        elif self._n_head > MAX_HEAD_BYTES:
            message = f"the head is over {MAX_HEAD_BYTES} bytes"
            self._fail(AnswerStatus.HEAD_TOO_LARGE, message, Reason.TOO_LARGE)

    @override
    def pause_writing(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    @override
    def resume_writing(self) -> None:
        if self._transport is not None and not self._is_done:
            self._transport.resume_reading()

    # httptools

    def on_message_begin(self) -> None:
        """A head begins."""
        self._target = b""
        self._headers = {}

    def on_url(self, url: bytes) -> None:
        """A part of the target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A whole header."""
        name = name.lower()
        if name in WANTED:
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        """The head is there: decide about the body."""
        if self._is_done or self._parser.should_upgrade():
            return
        server = self._server
        self._n_head = 0
        method = self._parser.get_method()
        self._request = request = server.router.open_request(
            method, self._target, self._headers, is_full=server.is_full
        )
        server.n_in_flight += 1
        if b"expect" in self._headers and self._transport is not None:
            if request.refusal is None:
                self._say(b"HTTP/1.1 100 Continue\r\n\r\n")
            else:
                self._answer_refusal(request, closes=True)

    def on_body(self, data: bytes) -> None:
        """A part of the body."""
        request = self._request
        if request is None:
            return
        self._n_body += len(data)
        if request.refusal is None:
            self._parts.append(data)
            if self._n_body > self._server.limit_bytes:
                self._parts.clear()
                request.refusal = (self._server.router.too_large, Reason.TOO_LARGE)
        elif self._n_body > self._server.limit_bytes + _MAX_DRAINED_BYTES:
            self._answer_refusal(request, closes=True)

    def on_message_complete(self) -> None:
        """The body is there: take it and answer."""
        request = self._request
        if request is None:
            return
        closes = self._server.is_stopping or not self._parser.should_keep_alive()
        if request.refusal is not None:
            closes = closes or self._n_body > self._server.limit_bytes
            self._answer_refusal(request, closes=closes)
            return
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._end_request()
        self._since_s = self._loop.time()
        server = self._server
        try:
            if request.encoding:
                body = decompress(body, request.encoding, server.limit_bytes)
        except TooLargeError as error:
            request.refusal = (PushOutcome(AnswerStatus.TOO_LARGE, error.message), Reason.TOO_LARGE)
        except BadDataError as error:
            request.refusal = (PushOutcome(AnswerStatus.BAD_DATA, error.message), Reason.BAD_BODY)
        if request.refusal is not None:
            self._answer_refusal(request, closes=closes)
            return
        outcome = server.intake.take(body, request.signal, request.content_type, request.push)
        self._write(request, outcome, closes=closes)

    # The server

    def check_time(self, begun_before_s: float, idle_before_s: float) -> None:
        """End a request that has been arriving for too long, or a connection that has been idle for too long."""
        if self._request is not None or self._n_head:
            if self._since_s < begun_before_s:
                self._fail(
                    AnswerStatus.TIMEOUT, "the request did not arrive in time", Reason.TIMEOUT
                )
        elif self._since_s < idle_before_s:
            self._close()

    def close_if_idle(self) -> None:
        """Close unless a request is arriving."""
        if self._request is None and not self._n_head:
            self._close()

    def send(self) -> None:
        """Send what is unsent, and close after a last answer."""
        unsent, transport = self._unsent, self._transport
        if not unsent or transport is None:
            return
        transport.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))
        unsent.clear()
        if self._is_done:
            transport.close()

    def abort(self) -> None:
        """Cut the connection."""
        if self._transport is not None:
            self._transport.abort()

    # Inside

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read a request that offers an upgrade as one that does not: the parser would take its body for the other protocol."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._fail(AnswerStatus.METHOD, "CONNECT is not POST", Reason.METHOD)
            return
        lines = [b"%s: %s\r\n" % header for header in self._headers.items()]
        head = b"%s %s HTTP/1.1\r\n%s\r\n" % (method, self._target, b"".join(lines))
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(head + rest)

    def _account(self) -> None:
        """Count what an unfinished body holds, and refuse it when all of them together are too much."""
        request, server = self._request, self._server
        if request is None or request.refusal is not None:
            self._n_accounted, given = 0, self._n_accounted
            server.n_buffered_bytes -= given
            return
        server.n_buffered_bytes += self._n_body - self._n_accounted
        self._n_accounted = self._n_body
        if not server.has_room and self._n_body:
            request.refusal = (OVERLOADED, Reason.OVERLOADED)
            self._answer_refusal(request, closes=True)

    def _end_request(self) -> None:
        self._server.n_in_flight -= 1
        self._server.n_buffered_bytes -= self._n_accounted
        self._request = None
        self._headers = {}
        self._parts = []
        self._n_body = self._n_accounted = 0

    def _fail(self, verdict: AnswerStatus, message: str, reason: Reason) -> None:
        """Refuse whatever is arriving and end the connection."""
        request = self._request or Request(PushContext(), "")
        request.refusal = (PushOutcome(verdict, message), reason)
        self._answer_refusal(request, closes=True)

    def _answer_refusal(self, request: Request, *, closes: bool) -> None:
        assert request.refusal is not None
        outcome, reason = request.refusal
        if self._request is not None:
            self._end_request()
        self._since_s = self._loop.time()
        self._server.tally.refuse_request(reason)
        if reason is Reason.UNAUTHENTICATED and self._transport is not None:
            peer = self._transport.get_extra_info("peername")
            self._server.intake.tell_refused(peer[0] if peer else "", request.push)
        self._write(request, outcome, closes=closes)

    def _write(self, request: Request, outcome: PushOutcome, *, closes: bool) -> None:
        server = self._server
        if self._transport is None:
            return
        is_json = request.is_json
        body = b""
        if outcome.verdict is AnswerStatus.TAKEN and outcome is not TAKEN:
            body = encode_taken(
                request.signal, outcome.n_rejected, outcome.message, is_json=is_json
            )
        threshold = server.intake.find_threshold(request.push) if request.is_known else None
        answer = write_answer(
            outcome, body, threshold, server.date_line, is_json=is_json, closes=closes
        )
        if outcome.verdict is AnswerStatus.METHOD and self._parser.get_method() == b"HEAD":
            answer = answer[: answer.index(b"\r\n\r\n") + 4]
        self._is_done = self._is_done or closes
        self._say(answer)

    def _say(self, line: bytes) -> None:
        if not self._unsent:
            self._server.send_soon(self)
        self._unsent.append(line)

    def _close(self) -> None:
        self.send()
        if self._transport is not None:
            self._transport.close()
