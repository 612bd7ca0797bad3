"""What the head of one OTLP/HTTP request asks for, and the bytes of its answer. No sockets here.

Order of refusals: path (404), method (405), what the handler says, content type and encoding (415), size (413). There
is no redirect: agents follow one into a GET.

Source: OTLP specification 1.x, "OTLP/HTTP"; RFC 9110.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qs, unquote, unquote_plus, urlsplit

from ingero.otlp.names import SIGNAL_PATHS, ContentType, Signal
from ingero.serving.connections import ConnectionLimits
from ingero.serving.otlp.answers import (
    TAKEN,
    TAKEN_JSON,
    TAKEN_PROTOBUF,
    AnswerStatus,
    OtlpAnswer,
    Reason,
    RequestRefusal,
    encode_answer,
)
from ingero.serving.otlp.encodings import ENCODINGS
from ingero.serving.otlp.handler import MAX_HINT_CHARS, OtlpHandler, OtlpRequest
from ingero.units import NS_PER_S
from ingero.wire.names import CLUSTER_QUERY, Header

_PROTOBUF: Final = str(ContentType.PROTOBUF)
_JSON: Final = str(ContentType.JSON)
_CONTENT_TYPES: Final = {_PROTOBUF.encode(): _PROTOBUF, _JSON.encode(): _JSON}
_CLUSTER_HINT: Final = Header.CLUSTER_HINT.encode()
_CLUSTER_PREFIX: Final = f"{CLUSTER_QUERY}="
_MAX_TARGET_BYTES: Final = 1024
"""Longer request targets are read without their query: read ones are kept in a cache."""

WANTED: Final = frozenset({
    b"content-type",
    b"content-encoding",
    b"content-length",
    b"authorization",
    b"expect",
    b"transfer-encoding",
    b"x-forwarded-for",
    _CLUSTER_HINT,
})
"""Names of the headers that matter here, in lower case."""


@dataclass(frozen=True, slots=True)
class OtlpHttpSettings:
    """How one OTLP/HTTP listener treats requests.

    Attributes:
        routes: Signal by path.
        encodings: Content encodings that are accepted; the empty one is an uncompressed body.
        max_body_bytes: Largest body.
        max_in_flight: Requests whose bodies are being received at once, beyond which the handler counts as full.
        max_buffered_bytes: Unfinished bodies in memory over all connections; None where the handler reserves.
        read_timeout_ns: Longest time for one request to arrive.
        idle_timeout_ns: A connection without a request is closed after this.
        is_kept_alive: Several requests on one connection.
        connections: How many connections, how slow their heads and their readers may be.
        shares_port: Whether other processes of this user may listen on the same port.
    """

    routes: Mapping[str, Signal] = field(
        default_factory=lambda: {path: signal for signal, path in SIGNAL_PATHS.items()}
    )
    encodings: frozenset[str] = ENCODINGS | {""}
    max_body_bytes: int = 20 << 20
    max_in_flight: int = 1024
    max_buffered_bytes: int | None = None
    read_timeout_ns: int = 30 * NS_PER_S
    idle_timeout_ns: int = 90 * NS_PER_S
    is_kept_alive: bool = True
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    shares_port: bool = False


@lru_cache(maxsize=4096)
def _parse_known(target: bytes) -> tuple[str, str]:
    text = target.decode("latin-1")
    if not text.startswith("/"):  # absolute form, as through a proxy
        parts = urlsplit(text)
        text = f"{parts.path}?{parts.query}"
    path, _, query = text.partition("?")
    query = query.partition("#")[0]
    if query.startswith(_CLUSTER_PREFIX) and "&" not in query:
        return unquote(path), unquote_plus(query[len(_CLUSTER_PREFIX) :], errors="replace")
    found = parse_qs(query, errors="replace").get(CLUSTER_QUERY)
    return unquote(path), found[0] if found else ""


def parse_target(target: bytes) -> tuple[str, str]:
    """Path and ``cluster_id`` of a request target; the id is empty when there is none."""
    if len(target) > _MAX_TARGET_BYTES:
        target = target.partition(b"?")[0][:_MAX_TARGET_BYTES]
    try:
        return _parse_known(target)
    except ValueError:  # an absolute form with a bad host
        return "", ""


class HttpRouter:
    """Which request gets how far. One per listening socket.

    Args:
        settings: Paths, encodings, size.
        handler: Decides about senders.
    """

    def __init__(self, settings: OtlpHttpSettings, handler: OtlpHandler) -> None:
        self._settings = settings
        self._handler = handler
        message = f"the body is over {settings.max_body_bytes} bytes"
        self.too_large = _refuse(AnswerStatus.TOO_LARGE, message, Reason.TOO_LARGE)

    def read_head(
        self, method: bytes, target: bytes, headers: Mapping[bytes, bytes], peer: str
    ) -> OtlpRequest:
        """Read a request's head.

        Args:
            method: As sent.
            target: As sent.
            headers: Those in `WANTED`.
            peer: Address of the sender.
        """
        path, hint = parse_target(target)
        get = headers.get
        if not hint and _CLUSTER_HINT in headers:
            hint = headers[_CLUSTER_HINT][:MAX_HINT_CHARS].decode("utf-8", "replace")
        authorization = get(b"authorization")
        declared = get(b"content-length")
        request = OtlpRequest(
            method="POST" if method == b"POST" else method.decode("latin-1"),
            path=path,
            peer=peer,
            hint=hint,
            authorization=None if authorization is None else authorization.decode("latin-1"),
            forwarded_for=get(b"x-forwarded-for", b"").decode("latin-1"),
            content_type=_find_content_type(headers),
            encoding=get(b"content-encoding", b"").decode("latin-1").strip().lower(),
            n_declared_bytes=int(declared) if declared is not None and declared.isdigit() else None,
        )
        request.context = self._handler.open(request)
        return request

    def check_head(
        self, request: OtlpRequest, headers: Mapping[bytes, bytes], *, is_full: bool
    ) -> RequestRefusal | None:
        """Decide whether the body of a request is wanted.

        Args:
            request: What `read_head` made.
            headers: Those in `WANTED`.
            is_full: As many requests as allowed are being received.
        """
        return (
            self._route(request)
            or self._handler.admit(request, is_full=is_full)
            or _check_content_type(request, headers)
            or self._check_encoding(request)
            or self._check_length(request)
        )

    def _route(self, request: OtlpRequest) -> RequestRefusal | None:
        routes = self._settings.routes
        signal = routes.get(request.path)
        if signal is None:
            message = f"nothing is served at {request.path!r:.200}; OTLP is at {', '.join(routes)}"
            return _refuse(AnswerStatus.NOT_FOUND, message, Reason.PATH)
        if request.method != "POST":
            return _refuse(AnswerStatus.METHOD, f"{request.method} is not POST", Reason.METHOD)
        request.signal = signal
        return None

    def _check_encoding(self, request: OtlpRequest) -> RequestRefusal | None:
        if request.encoding == "identity":
            request.encoding = ""
        accepted = self._settings.encodings
        if request.encoding in accepted:
            return None
        names = ", ".join(sorted(one or "identity" for one in accepted))
        message = f"content encoding {request.encoding or 'identity'!r:.80}; accepted: {names}"
        return _refuse(AnswerStatus.UNSUPPORTED, message, Reason.CONTENT_ENCODING)

    def _check_length(self, request: OtlpRequest) -> RequestRefusal | None:
        is_too_large = (request.n_declared_bytes or 0) > self._settings.max_body_bytes
        return self.too_large if is_too_large else None


def _refuse(status: AnswerStatus, message: str, reason: Reason) -> RequestRefusal:
    return RequestRefusal(OtlpAnswer(status, message), reason)


def _find_content_type(headers: Mapping[bytes, bytes]) -> str:
    raw = headers.get(b"content-type", b"")
    known = _CONTENT_TYPES.get(raw)
    if known is None:
        known = _CONTENT_TYPES.get(raw.partition(b";")[0].strip().lower(), "")
    return known


def _check_content_type(
    request: OtlpRequest, headers: Mapping[bytes, bytes]
) -> RequestRefusal | None:
    if request.content_type:
        return None
    given = headers.get(b"content-type", b"").decode("latin-1")
    message = f"content type {given!r:.80}; accepted: {_PROTOBUF}, {_JSON}"
    return _refuse(AnswerStatus.UNSUPPORTED, message, Reason.CONTENT_TYPE)


_PHRASES: Final = {499: "Client Closed Request"}  # not in RFC 9110
_HEADS: Final = {
    status: f"HTTP/1.1 {status.http} {_PHRASES.get(status.http) or HTTPStatus(status.http).phrase}\r\n".encode()
    for status in AnswerStatus
}
_TYPE_LINES: Final = {
    True: b"content-type: application/json\r\n",
    False: b"content-type: application/x-protobuf\r\n",
}
_TAKEN: Final = {
    is_json: (
        _HEADS[AnswerStatus.TAKEN]
        + _TYPE_LINES[is_json]
        + f"content-length: {len(body)}\r\n".encode(),
        body,
    )
    for is_json, body in ((True, TAKEN_JSON), (False, TAKEN_PROTOBUF))
}


def write_answer(
    answer: OtlpAnswer, request: OtlpRequest, more: bytes, date_line: bytes, *, closes: bool
) -> bytes:
    """The whole answer as it goes on the wire.

    Args:
        answer: How it went; errors get a google.rpc.Status as their body.
        request: What it answers; a HEAD request's answer has no body.
        more: Further header lines, each with its line end.
        date_line: The Date header with its line end.
        closes: Whether the connection ends with this answer.
    """
    is_json = request.is_json
    end = b"connection: close\r\n\r\n" if closes else b"\r\n"
    if answer is TAKEN:
        head, body = _TAKEN[is_json]
        return b"".join((head, date_line, more, end, body))
    body = encode_answer(answer, request.signal, is_json=is_json)
    length = f"content-length: {len(body)}\r\n".encode()
    if request.method == "HEAD":
        body = b""
    return b"".join((
        _HEADS[answer.status],
        _TYPE_LINES[is_json],
        length,
        date_line,
        *_error_lines(answer),
        more,
        end,
        body,
    ))


def _error_lines(answer: OtlpAnswer) -> list[bytes]:
    lines = []
    if answer.retry_after_s:
        lines.append(f"retry-after: {answer.retry_after_s}\r\n".encode())
    if answer.status is AnswerStatus.METHOD:
        lines.append(b"allow: POST\r\n")
    if answer.status is AnswerStatus.UNAUTHENTICATED:
        lines.append(b"www-authenticate: Bearer\r\n")
    return lines
