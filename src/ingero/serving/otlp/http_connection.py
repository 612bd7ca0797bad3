"""One sender's connection over OTLP/HTTP: bytes into requests, answers back in their order.

`HttpConnection` is asyncio's protocol: what arrives, and by when. `_RequestParser` gathers heads and bodies.
`_AnswerQueue` answers in the order of the requests, also where an answer takes its time. Where the handler answers at
once, everything happens inside the callback that completed the request: no task, no queue, no second copy of its
body.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable
from functools import partial
from typing import Final, cast

import httptools
from typing_extensions import override

from ingero.serving.otlp.answers import OVERLOADED, AnswerStatus, OtlpAnswer, Reason, RequestRefusal
from ingero.serving.otlp.handler import OtlpRequest
from ingero.serving.otlp.http_head import WANTED, write_answer
from ingero.serving.otlp.http_shared import ArrivingRequest, HttpShared
from ingero.serving.tls import find_names
from ingero.units import NS_PER_S

_MAX_DRAINED_BYTES: Final = 64 << 20
"""How much of a body that was refused is still read, so that its sender reads the answer, not a broken pipe."""
_INTERNAL: Final = RequestRefusal(
    OtlpAnswer(AnswerStatus.PERMANENT, "internal error; see the log"), Reason.INTERNAL
)
_TIMEOUT: Final = RequestRefusal(
    OtlpAnswer(AnswerStatus.TIMEOUT, "the request did not arrive in time"), Reason.TIMEOUT
)
_TOO_MANY: Final = OtlpAnswer(AnswerStatus.UNAVAILABLE, "too many connections", 5)
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_LOG: Final = logging.getLogger(__name__)


class _RequestParser:
    """Makes requests of bytes; httptools calls the methods that begin with ``on_``.

    Attributes:
        incoming: The request whose body is arriving; None between bodies.
        n_head: Bytes of an unfinished head, to within one read of the socket.
    """

    __slots__ = ("_connection", "_headers", "_http", "_target", "incoming", "n_head")

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self._http = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self.incoming: ArrivingRequest | None = None
        self.n_head = 0

    def feed(self, data: bytes) -> None:
        """Parse what arrived. Raises httptools' errors."""
        try:
            self._http.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])

    def close(self) -> None:
        """Drop what refers to the connection; without the cycle nothing waits for the garbage collector."""
        del self._http, self._connection

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read a request that offers an upgrade as one that does not (RFC 9110, section 7.8); the parser would not."""
        method = self._http.get_method()
        if method == b"CONNECT":
            answer = OtlpAnswer(AnswerStatus.METHOD, "CONNECT is not POST")
            self._connection.fail(RequestRefusal(answer, Reason.METHOD))
            return
        lines = [b"%s: %s\r\n" % header for header in self._headers.items()]
        head = b"%s %s HTTP/1.1\r\n%s\r\n" % (method, self._target, b"".join(lines))
        self._http = httptools.HttpRequestParser(self)
        self.feed(head + rest)

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
        connection = self._connection
        if connection.is_done or self._http.should_upgrade():
            return
        self.n_head = 0
        shared, headers = connection.shared, self._headers
        router = shared.router
        request = router.read_head(
            self._http.get_method(), self._target, headers, connection.peer or ""
        )
        request.peer_names = connection.peer_names
        refusal = router.check_head(request, headers, is_full=shared.is_full)
        self.incoming = incoming = ArrivingRequest(request, refusal, expects=b"expect" in headers)
        shared.n_in_flight += 1
        waiting = None if refusal is not None else shared.handler.reserve(request)
        if waiting is not None:
            connection.wait_for_room(incoming, waiting)
        elif incoming.expects:
            connection.answer_expectation(incoming)

    def on_body(self, data: bytes) -> None:
        """A part of the body."""
        incoming = self.incoming
        if incoming is None:
            return
        shared = self._connection.shared
        incoming.n_body += len(data)
        limit = shared.settings.max_body_bytes
        if incoming.refusal is None:
            incoming.parts.append(data)
            if incoming.n_body > limit:
                incoming.parts.clear()
                incoming.refusal = shared.router.too_large
        elif incoming.n_body > limit + _MAX_DRAINED_BYTES:
            self._connection.refuse_now(incoming)

    def on_message_complete(self) -> None:
        """The body is there."""
        incoming = self.incoming
        if incoming is None:
            return
        shared = self._connection.shared
        incoming.closes = (
            shared.is_stopping
            or not self._http.should_keep_alive()
            or incoming.n_body > shared.settings.max_body_bytes
        )
        self._connection.finish(incoming)


class _AnswerQueue:
    """Answers the requests of one connection in their order.

    Attributes:
        pending: Requests that wait for the answer of an earlier one, or for room.
        is_busy: Whether an answer is being made.
    """

    __slots__ = ("_connection", "_shared", "is_busy", "pending")

    def __init__(self, connection: HttpConnection) -> None:
        self._connection: HttpConnection | None = connection
        self._shared = connection.shared
        self.pending: deque[ArrivingRequest] = deque()
        self.is_busy = False

    @property
    def is_empty(self) -> bool:
        """Whether every request so far has its answer."""
        return not self.is_busy and not self.pending

    def add(self, incoming: ArrivingRequest) -> None:
        """Answer a request whose body has arrived, or that is refused."""
        if self.is_busy or self.pending or incoming.waiting is not None:
            self.pending.append(incoming)
            self._set_reading()
        else:
            self._answer(incoming)

    def go_on(self) -> None:
        """Answer what no longer waits."""
        while self.pending and not self.is_busy and self.pending[0].waiting is None:
            self._answer(self.pending.popleft())
        self._set_reading()

    def drop(self) -> None:
        """The connection is gone: what was not begun is not applied."""
        self._connection = None
        while self.pending:
            self._shared.drop(self.pending.popleft())

    def _answer(self, incoming: ArrivingRequest) -> None:
        refusal = incoming.refusal
        if refusal is None:
            parts = incoming.parts
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            incoming.parts = []
            answer = self._shared.handler.take(incoming.request, body)
            if isinstance(answer, OtlpAnswer):
                self._write(incoming, answer)
            else:
                self._hold(incoming, answer)
        elif refusal.delay_ns:
            self._hold(incoming, _sleep(refusal))
        else:
            self._shared.handler.refused(incoming.request, refusal)
            self._write(incoming, refusal.answer)

    def _hold(self, incoming: ArrivingRequest, answer: Awaitable[OtlpAnswer]) -> None:
        """Wait for an answer; meanwhile nothing more is read."""
        self.is_busy = True
        task = asyncio.ensure_future(answer)
        self._shared.tasks.add(task)
        task.add_done_callback(partial(self._on_answer, incoming))
        self._set_reading()

    def _on_answer(self, incoming: ArrivingRequest, task: asyncio.Future[OtlpAnswer]) -> None:
        self._shared.tasks.discard(task)
        self.is_busy = False
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            _LOG.error("a request could not be handled", exc_info=fault)
        if task.cancelled() or fault is not None:
            incoming.refusal = _INTERNAL
        if incoming.refusal is not None:
            self._shared.handler.refused(incoming.request, incoming.refusal)
        self._write(incoming, incoming.refusal.answer if incoming.refusal else task.result())
        self.go_on()

    def _write(self, incoming: ArrivingRequest, answer: OtlpAnswer) -> None:
        if self._connection is None:
            return
        more = self._shared.handler.find_headers(incoming.request)
        lines = b"" if more is None else more.lines
        request, closes = incoming.request, incoming.closes
        date_line = self._shared.date_line
        self._connection.send_line(write_answer(answer, request, lines, date_line, closes=closes))
        if closes:
            self._connection.is_done = True

    def _set_reading(self) -> None:
        if self._connection is not None:
            self._connection.set_reading()


async def _sleep(refusal: RequestRefusal) -> OtlpAnswer:
    await asyncio.sleep(refusal.delay_ns / NS_PER_S)
    return refusal.answer


class HttpConnection(asyncio.Protocol):
    """One connection.

    Args:
        shared: What the listener's connections share.
        loop: The running loop.

    Attributes:
        shared: Likewise.
        peer: Address of the sender; None where it was not let in.
        peer_names: Who its certificate is of.
        is_done: Nothing more is taken from it; it ends when everything is answered.
    """

    __slots__ = (
        "_answers",
        "_is_fresh",
        "_loop",
        "_parser",
        "_since_s",
        "_stalled_s",
        "_transport",
        "_unsent",
        "is_done",
        "peer",
        "peer_names",
        "shared",
    )

    def __init__(self, shared: HttpShared, loop: asyncio.AbstractEventLoop) -> None:
        self.shared = shared
        self.peer: str | None = None
        self.peer_names: tuple[str, ...] = ()
        self.is_done = False
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = _RequestParser(self)
        self._answers = _AnswerQueue(self)
        self._is_fresh = True
        self._since_s = loop.time()
        self._stalled_s: float | None = None
        self._unsent: list[bytes] = []

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.shared.open.add(self)
        name = transport.get_extra_info("peername")
        peer = str(name[0]) if name else ""
        if self.shared.admission.enter(peer):
            self.peer = peer
            self.peer_names = find_names(transport.get_extra_info("peercert"))
            return
        self.is_done = True
        self.send_line(
            write_answer(_TOO_MANY, OtlpRequest(), b"", self.shared.date_line, closes=True)
        )

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        incoming = self._parser.incoming
        if incoming is not None:
            self.shared.end_body(incoming)
            self.shared.drop(incoming)
        self._transport = None
        self._answers.drop()
        self._parser.close()
        self._unsent.clear()
        if self.peer is not None:
            self.shared.admission.leave(self.peer)
        self.shared.forget(self)

    @override
    def eof_received(self) -> None:
        self.send()

    @override
    def data_received(self, data: bytes) -> None:
        if self.is_done:
            return
        parser = self._parser
        if parser.incoming is None:
            if not parser.n_head:
                self._since_s = self._loop.time()
            parser.n_head += len(data)
        try:
            parser.feed(data)
        except httptools.HttpParserCallbackError as error:
            _LOG.error("a request could not be handled", exc_info=error.__context__ or error)
            self.fail(_INTERNAL)
            return
        except httptools.HttpParserError as error:
            answer = OtlpAnswer(AnswerStatus.BAD_DATA, f"not HTTP/1.1: {error}")
            self.fail(RequestRefusal(answer, Reason.BAD_REQUEST))
            return
        if parser.incoming is not None:
            if not self.shared.count_buffered(parser.incoming):
                parser.incoming.refusal = OVERLOADED
                self.refuse_now(parser.incoming)
        elif parser.n_head > self.shared.settings.connections.max_head_bytes:
            self.shared.admission.counters.large_heads += 1
            limit = self.shared.settings.connections.max_head_bytes
            answer = OtlpAnswer(AnswerStatus.HEAD_TOO_LARGE, f"the head is over {limit} bytes")
            self.fail(RequestRefusal(answer, Reason.TOO_LARGE))

    @override
    def pause_writing(self) -> None:
        self._stalled_s = self._loop.time()
        self.set_reading()

    @override
    def resume_writing(self) -> None:
        self._stalled_s = None
        self.set_reading()

    def set_reading(self) -> None:
        """Read on, unless answers are not read or not made yet, or there is no room for a body."""
        transport, incoming = self._transport, self._parser.incoming
        if transport is None or transport.is_closing():
            return
        is_waiting = incoming is not None and incoming.waiting is not None
        if self._stalled_s is not None or is_waiting or not self._answers.is_empty:
            transport.pause_reading()
        elif not self.is_done:
            transport.resume_reading()

    def check_time(self, now_s: float) -> None:
        """End a request that has been arriving for too long, or a connection that does not send or read."""
        settings, counters = self.shared.settings, self.shared.admission.counters
        limits, incoming = settings.connections, self._parser.incoming
        passed_s = now_s - self._since_s
        read_s = settings.read_timeout_ns / NS_PER_S
        idle_s = settings.idle_timeout_ns / NS_PER_S
        if self._stalled_s is not None:
            if now_s - self._stalled_s > limits.stall_s:
                counters.stalled += 1
                self.abort()
        elif incoming is not None:
            if incoming.waiting is None and passed_s > read_s:
                self.fail(_TIMEOUT)
        elif self._parser.n_head:
            if passed_s > min(limits.head_s, read_s):
                counters.slow_heads += 1
                self.fail(_TIMEOUT)
        elif self._answers.is_empty and passed_s > (
            min(limits.head_s, idle_s) if self._is_fresh else idle_s
        ):
            counters.slow_heads += self._is_fresh
            self._close()

    def close_if_idle(self) -> None:
        """Close unless a request is arriving or being answered."""
        if self._parser.incoming is None and not self._parser.n_head and self._answers.is_empty:
            self._close()

    def wait_for_room(
        self, incoming: ArrivingRequest, room: Awaitable[RequestRefusal | None]
    ) -> None:
        """Read no more of a body until the handler has room for it."""
        incoming.waiting = asyncio.ensure_future(room)
        incoming.waiting.add_done_callback(partial(self._on_room, incoming))
        self.set_reading()

    def _on_room(
        self, incoming: ArrivingRequest, room: asyncio.Future[RequestRefusal | None]
    ) -> None:
        incoming.waiting = None
        if room.cancelled() or self._transport is None:
            return
        fault = room.exception()
        if fault is not None:
            _LOG.error("a request could not be handled", exc_info=fault)
        incoming.refusal = incoming.refusal or (room.result() if fault is None else _INTERNAL)
        self._since_s = self._loop.time()
        if self._parser.incoming is incoming:
            if incoming.refusal is not None:
                self.refuse_now(incoming)
            elif incoming.expects:
                self.answer_expectation(incoming)
        self._answers.go_on()

    def answer_expectation(self, incoming: ArrivingRequest) -> None:
        """Tell a sender that asks first whether to send its body."""
        if incoming.refusal is None:
            self.send_line(_CONTINUE)
        else:
            self.refuse_now(incoming)

    def finish(self, incoming: ArrivingRequest) -> None:
        """Answer a request whose body has arrived."""
        self._parser.incoming = None
        self._is_fresh = False
        self._since_s = self._loop.time()
        self.shared.end_body(incoming)
        self._answers.add(incoming)

    def refuse_now(self, incoming: ArrivingRequest) -> None:
        """Answer a refused request before its body has arrived, and end the connection."""
        self.is_done = incoming.closes = True
        self.finish(incoming)

    def fail(self, refusal: RequestRefusal) -> None:
        """Refuse whatever is arriving, also what is no request, and end the connection."""
        incoming = self._parser.incoming
        if incoming is None:
            request = OtlpRequest(peer=self.peer or "")
            request.context = self.shared.handler.open(request)
            incoming = ArrivingRequest(request)
            self.shared.n_in_flight += 1
        incoming.refusal = refusal
        self.refuse_now(incoming)

    def send_line(self, line: bytes) -> None:
        """Send soon, with what else is to be sent."""
        if not self._unsent:
            self.shared.send_soon(self)
        self._unsent.append(line)

    def send(self) -> None:
        """Send what is unsent, and close after a last answer."""
        unsent, transport = self._unsent, self._transport
        if not unsent or transport is None:
            return
        transport.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))
        unsent.clear()
        if self.is_done and self._answers.is_empty:
            transport.close()
        elif self.shared.is_stopping:
            self.close_if_idle()

    def abort(self) -> None:
        """Cut the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _close(self) -> None:
        self.send()
        if self._transport is not None:
            self._transport.close()
