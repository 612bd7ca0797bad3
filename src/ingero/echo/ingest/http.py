"""OTLP/HTTP: one bare ASGI callable; answers after the rows are on disk.

Source: OTLP specification 1.x, "OTLP/HTTP"; ASGI 3.0.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs

from ingero.echo.db.rows import Rows
from ingero.echo.ingest.intake import ForbiddenError, Intake
from ingero.echo.ingest.settings import Authenticate, IngestCounters, IngestSettings
from ingero.errors import BadDataError, RetryableError, StoreError
from ingero.serving.bearer import Principal
from ingero.serving.bodies import TooLargeError, decompress, encode_status, encode_taken
from ingero.units import NS_PER_S
from ingero.wire.names import CLUSTER_QUERY, SIGNAL_PATHS, ContentType, Header, Signal
from ingero.wire.otlp import decode_export

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = dict[bytes, bytes]

_ROUTES: Final = {str(path): signal for signal, path in SIGNAL_PATHS.items()}
_ENCODINGS: Final = frozenset({"gzip", "zstd", "zlib", "deflate"})
_LARGE_BYTES: Final = 32 << 10
"""Bodies above this are decoded on a thread, so that one sender's large batch does not stop the others."""

# google.rpc.Code
_INVALID, _PERMISSION, _EXHAUSTED, _INTERNAL, _UNAVAILABLE, _UNAUTHENTICATED = 3, 7, 8, 13, 14, 16


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes back.

    Attributes:
        status: HTTP status.
        body: Encoded.
        retry_after_s: For the header; 0 sends none.
    """

    status: int
    body: bytes
    retry_after_s: int = 0


class _RefusedError(Exception):
    def __init__(self, status: int, code: int, message: str, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


class OtlpHttpApp:
    """The application of the OTLP/HTTP listener.

    Args:
        intake: Where exports go.
        authenticate: Who a request is from.
        settings: Limits.
        counters: Shared with the gRPC listener.
    """

    def __init__(
        self,
        intake: Intake,
        authenticate: Authenticate,
        settings: IngestSettings,
        counters: IngestCounters,
    ) -> None:
        self._intake = intake
        self._authenticate = authenticate
        self._settings = settings
        self._counters = counters
        self._n_in_flight = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers: Headers = dict(scope["headers"])
        is_json = headers.get(b"content-type", b"").startswith(b"application/json")
        self._n_in_flight += 1
        try:
            answer = await self._take(scope, headers, receive, is_json=is_json)
        except _RefusedError as refused:
            body = encode_status(refused.code, refused.message, is_json=is_json)
            answer = Answer(refused.status, body, refused.retry_after_s)
        finally:
            self._n_in_flight -= 1
        await _send(send, answer, is_json=is_json)

    async def _take(
        self,
        scope: MutableMapping[str, Any],
        headers: Headers,
        receive: Receive,
        *,
        is_json: bool,
    ) -> Answer:
        signal = self._route(scope)
        principal = self._recognise(headers)
        content_type = _get_content_type(headers)
        body = await self._read(headers, receive)
        hint = _find_hint(scope, headers)
        arguments = (body, headers, signal, content_type, principal, hint)
        if len(body) > _LARGE_BYTES:
            rows, n_refused = await asyncio.to_thread(self._build, *arguments)
        else:
            rows, n_refused = self._build(*arguments)
        try:
            await self._intake.write(rows)
        except RetryableError as error:
            self._counters.refused_load += 1
            seconds = _seconds(error.retry_after_ns)
            raise _RefusedError(429, _EXHAUSTED, error.message, seconds) from error
        except StoreError as error:
            self._counters.failed += 1
            raise _RefusedError(503, _UNAVAILABLE, "the store cannot write now", 5) from error
        self._counters.taken += 1
        why = "collective batches that could not be read" if n_refused else ""
        return Answer(200, encode_taken(signal, n_refused, why, is_json=is_json))

    def _route(self, scope: MutableMapping[str, Any]) -> Signal:
        if self._counters.draining:
            raise _RefusedError(503, _UNAVAILABLE, "shutting down; send again", 5)
        signal = _ROUTES.get(scope["path"])
        if signal is None:
            raise _RefusedError(404, _INVALID, f"OTLP is at {', '.join(_ROUTES)}")
        if scope["method"] != "POST":
            raise _RefusedError(405, _INVALID, "POST only")
        if self._n_in_flight > self._settings.max_in_flight:
            self._counters.refused_load += 1
            raise _RefusedError(429, _EXHAUSTED, "too many requests at once", 1)
        return signal

    def _recognise(self, headers: Headers) -> Principal:
        given = headers.get(b"authorization")
        principal = self._authenticate(None if given is None else given.decode("latin-1"))
        if principal is None:
            self._counters.refused_auth += 1
            raise _RefusedError(401, _UNAUTHENTICATED, "missing or wrong bearer token")
        return principal

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        limit = self._settings.max_body_bytes
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            raise self._refuse_body(413, f"the body is over {limit} bytes")
        parts, n_bytes, is_more = [], 0, True
        try:
            async with asyncio.timeout(self._settings.read_timeout_ns / NS_PER_S):
                while is_more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise self._refuse_body(400, "the sender went away")
                    parts.append(message.get("body", b""))
                    n_bytes += len(parts[-1])
                    is_more = message.get("more_body", False)
                    if n_bytes > limit:
                        raise self._refuse_body(413, f"the body is over {limit} bytes")
        except TimeoutError:
            raise self._refuse_body(408, "the body did not arrive in time") from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _build(
        self,
        body: bytes,
        headers: Headers,
        signal: Signal,
        content_type: str,
        principal: Principal,
        hint: str,
    ) -> tuple[Rows, int]:
        encoding = headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()
        try:
            if encoding and encoding != "identity":
                if encoding not in _ENCODINGS:
                    raise self._refuse_body(415, f"content encoding {encoding[:40]!r}")
                body = decompress(body, encoding, self._settings.max_body_bytes)
            return self._intake.build(decode_export(body, signal, content_type), principal, hint)
        except TooLargeError as error:
            raise self._refuse_body(413, error.message) from error
        except BadDataError as error:
            raise self._refuse_body(400, error.message) from error
        except ForbiddenError as error:
            self._counters.refused_acl += 1
            raise _RefusedError(403, _PERMISSION, error.message) from error

    def _refuse_body(self, status: int, message: str) -> _RefusedError:
        self._counters.refused_body += 1
        return _RefusedError(status, _INVALID, message)


def _find_hint(scope: MutableMapping[str, Any], headers: Headers) -> str:
    query = scope["query_string"]
    if query:
        found = parse_qs(query.decode("latin-1")).get(CLUSTER_QUERY)
        if found:
            return str(found[0])
    given: bytes = headers.get(Header.CLUSTER_HINT.encode(), b"")
    return given.decode("utf-8", "replace")


def _get_content_type(headers: Headers) -> str:
    given: bytes = headers.get(b"content-type", b"")
    kind = given.partition(b";")[0].strip().lower().decode("latin-1")
    if kind not in {ContentType.PROTOBUF, ContentType.JSON}:
        message = (
            f"content type {kind[:80]!r}; OTLP is {ContentType.PROTOBUF} or {ContentType.JSON}"
        )
        raise _RefusedError(415, _INVALID, message)
    return kind


def _seconds(duration_ns: int | None) -> int:
    return max(1, math.ceil((duration_ns or NS_PER_S) / NS_PER_S))


async def _send(send: Send, answer: Answer, *, is_json: bool) -> None:
    kind = ContentType.JSON if is_json else ContentType.PROTOBUF
    headers = [
        (b"content-type", kind.encode()),
        (b"content-length", str(len(answer.body)).encode()),
    ]
    if answer.retry_after_s:
        headers.append((b"retry-after", str(answer.retry_after_s).encode()))
    if answer.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if answer.status == 405:
        headers.append((b"allow", b"POST"))
    if answer.status in {408, 413}:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
