"""OTLP/HTTP: one bare ASGI callable; answers after the rows are on disk.

Source: OTLP specification 1.x, "OTLP/HTTP"; ASGI 3.0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs

from ingero.echo.ingest.reception import EXHAUSTED, INVALID, Reception, RefusedError, Visit
from ingero.otlp.codec import Export, decode_export
from ingero.otlp.names import ContentType, Signal
from ingero.serving.bodies import ENCODINGS, decompress, encode_status, encode_taken
from ingero.units import NS_PER_S
from ingero.wire.names import CLUSTER_QUERY, SIGNAL_PATHS, Header

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = dict[bytes, bytes]

_ROUTES: Final = {str(path): signal for signal, path in SIGNAL_PATHS.items()}
_CLIENT_GONE: Final = 499


@dataclass(frozen=True, slots=True)
class HttpReply:
    """What goes back.

    Attributes:
        status: HTTP status.
        body: Encoded.
        retry_after_s: For the header; 0 sends none.
    """

    status: int
    body: bytes
    retry_after_s: int = 0


class OtlpHttpApp:
    """The application of the OTLP/HTTP listener.

    Args:
        reception: Shared with the gRPC listener.
    """

    def __init__(self, reception: Reception) -> None:
        self._reception = reception

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers: Headers = dict(scope["headers"])
        is_json = headers.get(b"content-type", b"").startswith(b"application/json")
        visit = self._reception.visit(
            "http", scope["method"], scope["path"], self._find_address(scope, headers)
        )
        try:
            answer = await self._take(scope, headers, receive, visit)
        except RefusedError as refused:
            visit.status, visit.why = refused.status, refused.message
            body = encode_status(refused.code, refused.message, is_json=is_json)
            answer = HttpReply(refused.status, body, refused.retry_after_s)
        finally:
            self._reception.record(visit)
        await _send(send, answer, is_json=is_json)

    async def _take(
        self,
        scope: MutableMapping[str, Any],
        headers: Headers,
        receive: Receive,
        visit: Visit,
    ) -> HttpReply:
        signal = _route(scope)
        given = headers.get(b"authorization")
        authorization = None if given is None else given.decode("latin-1")
        async with self._reception.enter(visit, authorization):
            content_type = _get_content_type(headers)
            encoding = self._get_encoding(headers)
            body = await self._read(headers, receive, visit)
            limit = self._reception.settings.max_body_bytes

            def decode() -> Export:
                plain = decompress(body, encoding, limit) if encoding else body
                return decode_export(plain, signal, content_type)

            taken = await self._reception.take(
                visit, decode, _find_hint(scope, headers), is_compressed=bool(encoding)
            )
        is_json = content_type == ContentType.JSON
        return HttpReply(200, encode_taken(signal, taken.n_refused, taken.why, is_json=is_json))

    async def _read(self, headers: Headers, receive: Receive, visit: Visit) -> bytes:
        settings = self._reception.settings
        limit = settings.max_body_bytes
        given = headers.get(b"content-length", b"0")
        declared = int(given) if given.isdigit() else 0
        if declared > limit:
            raise self._refuse_body(413, f"the body is over {limit} bytes")
        parts, n_bytes, is_more = [], 0, True
        try:
            async with asyncio.timeout(settings.read_timeout_ns / NS_PER_S):
                await self._reception.reserve(visit, declared)
                while is_more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise self._refuse_body(_CLIENT_GONE, "the sender went away")
                    parts.append(message.get("body", b""))
                    n_bytes += len(parts[-1])
                    is_more = message.get("more_body", False)
                    if n_bytes > limit:
                        raise self._refuse_body(413, f"the body is over {limit} bytes")
                    if n_bytes > visit.n_bytes:
                        await self._reception.reserve(visit, n_bytes - visit.n_bytes)
        except TimeoutError:
            if visit.n_bytes < max(declared, n_bytes):
                self._reception.counters.refused_load += 1
                raise RefusedError(
                    429, EXHAUSTED, "too many bytes are being read at once", 1
                ) from None
            raise self._refuse_body(408, "the body did not arrive in time") from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _find_address(self, scope: MutableMapping[str, Any], headers: Headers) -> str:
        if self._reception.settings.trust_proxy:
            forwarded = headers.get(b"x-forwarded-for", b"").decode("latin-1")
            if forwarded:
                return forwarded.rpartition(",")[2].strip()
        client = scope.get("client")
        return str(client[0]) if client else ""

    def _get_encoding(self, headers: Headers) -> str:
        """The Content-Encoding; empty where the body is as it is."""
        encoding = headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()
        if encoding in {"", "identity"}:
            return ""
        if encoding not in ENCODINGS:
            raise self._refuse_body(415, f"content encoding {encoding[:40]!r}")
        return encoding

    def _refuse_body(self, status: int, message: str) -> RefusedError:
        self._reception.counters.refused_body += 1
        return RefusedError(status, INVALID, message)


def _route(scope: MutableMapping[str, Any]) -> Signal:
    signal = _ROUTES.get(scope["path"])
    if signal is None:
        raise RefusedError(404, INVALID, f"OTLP is at {', '.join(_ROUTES)}")
    if scope["method"] != "POST":
        raise RefusedError(405, INVALID, "POST only")
    return signal


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
        raise RefusedError(415, INVALID, message)
    return kind


async def _send(send: Send, answer: HttpReply, *, is_json: bool) -> None:
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
