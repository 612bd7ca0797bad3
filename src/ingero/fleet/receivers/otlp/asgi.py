"""OTLP/HTTP as a bare ASGI callable: no framework, nothing allocated that the answer does not need.

Order of refusals: stopping (503), path (404), method (405), credentials (401), content type and encoding (415), size
(413), too much at once (429), slow body (408), body (400). The threshold rides every answer whose sender is known,
errors included. There is no redirect: agents follow one into a GET.

Source: OTLP specification 1.x, "OTLP/HTTP"; ASGI 3.0.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import lru_cache
from typing import Any, Final
from urllib.parse import parse_qs, unquote_plus

from ingero.errors import BadDataError
from ingero.fleet.component import PushContext
from ingero.fleet.receivers.otlp.config import HttpConfig
from ingero.fleet.receivers.otlp.intake import (
    DRAINING,
    OVERLOADED,
    TAKEN,
    Intake,
    Outcome,
    Verdict,
)
from ingero.fleet.receivers.otlp.telemetry import Reason, Tally
from ingero.serving.bodies import (
    TAKEN_JSON,
    TAKEN_PROTOBUF,
    TooLargeError,
    decompress,
    encode_status,
    encode_taken,
)
from ingero.units import NS_PER_S
from ingero.wire.names import CLUSTER_QUERY, ContentType, Header, Signal

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_RawHeaders = Iterable[tuple[bytes, bytes]]

_THRESHOLD: Final = Header.THRESHOLD.lower().encode()
_QUORUM_MET: Final = Header.QUORUM_MET.lower().encode()
_CLUSTER_HINT: Final = Header.CLUSTER_HINT.encode()
_CLUSTER_PREFIX: Final = f"{CLUSTER_QUERY}=".encode()
_PROTOBUF: Final = str(ContentType.PROTOBUF)
_JSON: Final = str(ContentType.JSON)
_CONTENT_TYPES: Final = {
    b"application/x-protobuf": _PROTOBUF,
    b"application/json": _JSON,
}
_TYPE_HEADERS: Final = {
    True: (b"content-type", b"application/json"),
    False: (b"content-type", b"application/x-protobuf"),
}
_TAKEN_LENGTHS: Final = {
    True: (b"content-length", str(len(TAKEN_JSON)).encode()),
    False: (b"content-length", str(len(TAKEN_PROTOBUF)).encode()),
}
_CLOSE: Final = (b"connection", b"close")
_MAX_DRAINED_BYTES: Final = 64 << 20
_MAX_QUERY_BYTES: Final = 1024
"""Longer hints are ignored: parsed ones are kept in a cache."""
_WANTED: Final = frozenset({
    b"content-type",
    b"content-encoding",
    b"content-length",
    b"authorization",
    _CLUSTER_HINT,
})


class _RefusedError(Exception):
    """Ends one request early; never leaves this module."""

    def __init__(self, outcome: Outcome, reason: Reason) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome
        self.reason = reason


@lru_cache(maxsize=4096)
def _parse_hint(query: bytes) -> str:
    """``cluster_id`` of a query string; agents send it alone and with ``+`` for a space."""
    if query.startswith(_CLUSTER_PREFIX) and b"&" not in query:
        return unquote_plus(query[len(_CLUSTER_PREFIX) :].decode("latin-1"), errors="replace")
    found = parse_qs(query.decode("latin-1"), errors="replace").get(CLUSTER_QUERY)
    return found[0] if found else ""


class OtlpHttpApp:
    """The application of one listening socket. Runs on the event loop only.

    Args:
        config: Paths and limits.
        intake: Where bodies go.
        tally: Counters.
    """

    def __init__(self, config: HttpConfig, intake: Intake, tally: Tally) -> None:
        self._intake = intake
        self._tally = tally
        self._limit_bytes = config.max_request_body_size
        self._buffer_bytes = config.max_buffered_size
        self._max_in_flight = config.max_in_flight
        self._read_timeout_s = config.read_timeout / NS_PER_S
        self._keeps_alive = config.keep_alives_enabled
        self._encodings = frozenset(config.compression_algorithms)
        self._routes = {
            prefix.rstrip("/") + path: signal
            for prefix in ("", *config.url_prefixes)
            for path, signal in (
                (config.metrics_url_path, Signal.METRICS),
                (config.logs_url_path, Signal.LOGS),
                (config.traces_url_path, Signal.TRACES),
            )
        }
        self._n_in_flight = 0
        self._n_buffered_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = {name: value for name, value in scope["headers"] if name in _WANTED}
        push = PushContext(cluster_hint=_find_hint(scope, headers))
        content_type = _find_content_type(headers)
        is_json = content_type != _PROTOBUF
        is_known = self._intake.is_open
        self._n_in_flight += 1
        try:
            signal = self._route(scope)
            self._authenticate(headers, push)
            is_known = True
            _check_content_type(content_type, headers)
            encoding = self._get_encoding(headers)
            body = await self._read(headers, receive)
            if encoding:
                body = self._decompress(body, encoding)
            outcome = self._intake.take(body, signal, content_type, push)
            answer = encode_taken(signal, outcome.n_rejected, outcome.message, is_json=is_json)
        except _RefusedError as refusal:
            outcome, answer = refusal.outcome, b""
            self._tally.refuse_request(refusal.reason)
        finally:
            self._n_in_flight -= 1
        threshold = self._intake.find_threshold(push) if is_known else None
        if outcome.verdict is not Verdict.TAKEN:
            answer = encode_status(outcome.verdict.grpc, outcome.message, is_json=is_json)
        await self._answer(send, outcome, answer, threshold, is_json=is_json)

    def _route(self, scope: Scope) -> Signal:
        if self._intake.draining:
            raise _RefusedError(DRAINING, Reason.DRAINING)
        signal = self._routes.get(scope["path"])
        if signal is None:
            message = (
                f"nothing is served at {scope['path']!r:.200}; OTLP is at {', '.join(self._routes)}"
            )
            raise _RefusedError(Outcome(Verdict.NOT_FOUND, message), Reason.PATH)
        if scope["method"] != "POST":
            message = f"{scope['method']} is not POST"
            raise _RefusedError(Outcome(Verdict.METHOD, message), Reason.METHOD)
        if not self._intake.accepts(signal):
            message = f"no pipeline takes {signal} from this receiver"
            raise _RefusedError(Outcome(Verdict.NOT_FOUND, message), Reason.NO_PIPELINE)
        if self._n_in_flight > self._max_in_flight:
            raise _RefusedError(OVERLOADED, Reason.OVERLOADED)
        return signal

    def _authenticate(self, headers: dict[bytes, bytes], push: PushContext) -> None:
        given = headers.get(b"authorization")
        if not self._intake.authenticate(None if given is None else given.decode("latin-1"), push):
            outcome = Outcome(Verdict.UNAUTHENTICATED, "missing or wrong credentials")
            raise _RefusedError(outcome, Reason.UNAUTHENTICATED)

    def _get_encoding(self, headers: dict[bytes, bytes]) -> str:
        encoding = headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()
        if encoding == "identity":
            encoding = ""
        if encoding not in self._encodings:
            accepted = ", ".join(sorted(one or "identity" for one in self._encodings))
            message = f"content encoding {encoding or 'identity'!r:.80}; accepted: {accepted}"
            raise _RefusedError(Outcome(Verdict.UNSUPPORTED, message), Reason.CONTENT_ENCODING)
        return encoding

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._limit_bytes:
            await self._drain(receive, 0)
            raise _RefusedError(self._too_large(), Reason.TOO_LARGE)
        first = await receive()
        _check_connected(first)
        body: bytes = first.get("body", b"")
        if first.get("more_body"):
            return await self._read_rest(body, receive)
        if len(body) > self._limit_bytes:
            raise _RefusedError(self._too_large(), Reason.TOO_LARGE)
        return body

    async def _read_rest(self, body: bytes, receive: Receive) -> bytes:
        """Gather a body that arrives in parts, within the time and the memory that there is for it."""
        parts = [body]
        n_bytes = len(body)
        self._n_buffered_bytes += n_bytes
        try:
            async with asyncio.timeout(self._read_timeout_s):
                is_more = True
                while is_more:
                    self._check_room(n_bytes)
                    message = await receive()
                    _check_connected(message)
                    part = message.get("body", b"")
                    parts.append(part)
                    n_bytes += len(part)
                    self._n_buffered_bytes += len(part)
                    if n_bytes > self._limit_bytes:
                        parts.clear()
                        await self._drain(receive, n_bytes)
                        raise _RefusedError(self._too_large(), Reason.TOO_LARGE)
                    is_more = message.get("more_body", False)
        except TimeoutError:
            message_text = f"the body did not arrive within {math.ceil(self._read_timeout_s)} s"
            raise _RefusedError(Outcome(Verdict.TIMEOUT, message_text), Reason.TIMEOUT) from None
        finally:
            self._n_buffered_bytes -= n_bytes
        return b"".join(parts)

    def _check_room(self, n_bytes: int) -> None:
        if n_bytes and self._n_buffered_bytes > self._buffer_bytes:
            raise _RefusedError(OVERLOADED, Reason.OVERLOADED)

    async def _drain(self, receive: Receive, n_bytes: int) -> None:
        """Let the sender finish, keeping nothing, so that it reads the answer instead of a broken pipe."""
        try:
            async with asyncio.timeout(self._read_timeout_s):
                while n_bytes < self._limit_bytes + _MAX_DRAINED_BYTES:
                    message = await receive()
                    n_bytes += len(message.get("body", b""))
                    if not message.get("more_body"):
                        return
        except TimeoutError:
            return

    def _too_large(self) -> Outcome:
        return Outcome(Verdict.TOO_LARGE, f"the body is over {self._limit_bytes} bytes")

    def _decompress(self, body: bytes, encoding: str) -> bytes:
        try:
            return decompress(body, encoding, self._limit_bytes)
        except TooLargeError as error:
            raise _RefusedError(
                Outcome(Verdict.TOO_LARGE, error.message), Reason.TOO_LARGE
            ) from error
        except BadDataError as error:
            raise _RefusedError(
                Outcome(Verdict.BAD_DATA, error.message), Reason.BAD_BODY
            ) from error

    async def _answer(
        self,
        send: Send,
        outcome: Outcome,
        body: bytes,
        threshold: tuple[str, str] | None,
        *,
        is_json: bool,
    ) -> None:
        headers = [_TYPE_HEADERS[is_json]]
        if outcome is TAKEN:
            headers.append(_TAKEN_LENGTHS[is_json])
        else:
            headers.append((b"content-length", str(len(body)).encode()))
            headers += _error_headers(outcome)
        if threshold is not None:
            headers.append((_THRESHOLD, threshold[0].encode()))
            headers.append((_QUORUM_MET, threshold[1].encode()))
        if not self._keeps_alive:
            headers.append(_CLOSE)
        status = outcome.verdict.http
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _find_hint(scope: Scope, headers: dict[bytes, bytes]) -> str:
    query = scope["query_string"]
    hint = _parse_hint(query) if query and len(query) <= _MAX_QUERY_BYTES else ""
    if hint or _CLUSTER_HINT not in headers:
        return hint
    return headers[_CLUSTER_HINT][:_MAX_QUERY_BYTES].decode("utf-8", "replace")


def _find_content_type(headers: dict[bytes, bytes]) -> str:
    """One of the two that are accepted, without parameters; empty for any other."""
    raw = headers.get(b"content-type", b"")
    known = _CONTENT_TYPES.get(raw)
    if known is None:
        known = _CONTENT_TYPES.get(raw.partition(b";")[0].strip().lower(), "")
    return known


def _check_content_type(content_type: str, headers: dict[bytes, bytes]) -> None:
    if not content_type:
        given = headers.get(b"content-type", b"").decode("latin-1")
        message = f"content type {given!r:.80}; accepted: {_PROTOBUF}, {_JSON}"
        raise _RefusedError(Outcome(Verdict.UNSUPPORTED, message), Reason.CONTENT_TYPE)


def _check_connected(message: MutableMapping[str, Any]) -> None:
    if message["type"] == "http.disconnect":
        outcome = Outcome(Verdict.BAD_DATA, "the sender left before its body was complete")
        raise _RefusedError(outcome, Reason.CUT_SHORT)


def _error_headers(outcome: Outcome) -> list[tuple[bytes, bytes]]:
    headers = []
    if outcome.retry_after_s:
        headers.append((b"retry-after", str(outcome.retry_after_s).encode()))
    if outcome.verdict is Verdict.METHOD:
        headers.append((b"allow", b"POST"))
    if outcome.verdict is Verdict.UNAUTHENTICATED:
        headers.append((b"www-authenticate", b"Bearer"))
    if outcome.verdict in {Verdict.TIMEOUT, Verdict.TOO_LARGE}:
        headers.append(_CLOSE)
    return headers
