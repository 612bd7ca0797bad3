"""What one OTLP/HTTP request asks for, and the bytes of its answer. No sockets here.

Order of refusals: stopping (503), path (404), method (405), signal without a pipeline (404), too much at once (429),
credentials (401), content type and encoding (415), size (413). The threshold rides every answer whose sender is
known, errors included. There is no redirect: agents follow one into a GET.

Source: OTLP specification 1.x, "OTLP/HTTP"; RFC 9110.
"""

from __future__ import annotations

from functools import lru_cache
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qs, unquote, unquote_plus, urlsplit

from ingero.fleet.component import PushContext
from ingero.fleet.receivers.otlp.config import HttpConfig
from ingero.fleet.receivers.otlp.intake import (
    DRAINING,
    OVERLOADED,
    TAKEN,
    AnswerStatus,
    PushIntake,
    PushOutcome,
)
from ingero.fleet.receivers.otlp.telemetry import Reason
from ingero.otlp.names import ContentType, Signal
from ingero.serving.bodies import TAKEN_JSON, TAKEN_PROTOBUF, encode_status
from ingero.wire.names import CLUSTER_QUERY, Header

Refusal = tuple[PushOutcome, Reason]

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
    _CLUSTER_HINT,
})
"""Names of the headers that matter here, in lower case."""


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


class Router:
    """Which request gets how far. One per listening socket.

    Args:
        config: Paths and encodings.
        intake: Where bodies will go.
    """

    def __init__(self, config: HttpConfig, intake: PushIntake) -> None:
        self._intake = intake
        self._limit_bytes = config.max_request_body_size
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

    def open_request(
        self, method: bytes, target: bytes, headers: dict[bytes, bytes], *, is_full: bool
    ) -> Request:
        """Read a request's head and decide whether its body is wanted.

        Args:
            method: As sent.
            target: As sent.
            headers: Those in `WANTED`.
            is_full: No further request may be received now.
        """
        path, hint = parse_target(target)
        if not hint and _CLUSTER_HINT in headers:
            hint = headers[_CLUSTER_HINT][:_MAX_TARGET_BYTES].decode("utf-8", "replace")
        request = Request(PushContext(cluster_hint=hint), _find_content_type(headers))
        request.is_known = self._intake.is_open
        request.refusal = (
            self._route(request, method, path)
            or (is_full and (OVERLOADED, Reason.OVERLOADED))
            or self._authenticate(request, headers)
            or _check_content_type(request, headers)
            or self._check_encoding(request, headers)
            or self._check_length(headers)
            or None
        )
        return request

    def _route(self, request: Request, method: bytes, path: str) -> Refusal | None:
        if self._intake.draining:
            return DRAINING, Reason.DRAINING
        signal = self._routes.get(path)
        if signal is None:
            served = ", ".join(self._routes)
            message = f"nothing is served at {path!r:.200}; OTLP is at {served}"
            return PushOutcome(AnswerStatus.NOT_FOUND, message), Reason.PATH
        if method != b"POST":
            message = f"{method.decode('latin-1')} is not POST"
            return PushOutcome(AnswerStatus.METHOD, message), Reason.METHOD
        if not self._intake.accepts(signal):
            message = f"no pipeline takes {signal} from this receiver"
            return PushOutcome(AnswerStatus.NOT_FOUND, message), Reason.NO_PIPELINE
        request.signal = signal
        return None

    def _authenticate(self, request: Request, headers: dict[bytes, bytes]) -> Refusal | None:
        if request.is_known:
            return None
        given = headers.get(b"authorization")
        text = None if given is None else given.decode("latin-1")
        if self._intake.authenticate(text, request.push):
            request.is_known = True
            return None
        outcome = PushOutcome(AnswerStatus.UNAUTHENTICATED, "missing or wrong credentials")
        return outcome, Reason.UNAUTHENTICATED

    def _check_encoding(self, request: Request, headers: dict[bytes, bytes]) -> Refusal | None:
        encoding = headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()
        if encoding == "identity":
            encoding = ""
        if encoding in self._encodings:
            request.encoding = encoding
            return None
        accepted = ", ".join(sorted(one or "identity" for one in self._encodings))
        message = f"content encoding {encoding or 'identity'!r:.80}; accepted: {accepted}"
        return PushOutcome(AnswerStatus.UNSUPPORTED, message), Reason.CONTENT_ENCODING

    def _check_length(self, headers: dict[bytes, bytes]) -> Refusal | None:
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._limit_bytes:
            return self.too_large, Reason.TOO_LARGE
        return None

    @property
    def too_large(self) -> PushOutcome:
        """The answer to a body over the limit."""
        return PushOutcome(AnswerStatus.TOO_LARGE, f"the body is over {self._limit_bytes} bytes")


class Request:
    """One request, from its head to its answer.

    Attributes:
        push: Who it may be from; processors fill in who it is.
        content_type: One of the two that are accepted, or empty.
        signal: What is pushed; meaningful when it was not refused.
        encoding: Content encoding; empty for none.
        is_known: Whether the sender may learn a threshold.
        refusal: Why it is refused, with the reason to count; None while it is not.
    """

    __slots__ = ("content_type", "encoding", "is_known", "push", "refusal", "signal")

    def __init__(self, push: PushContext, content_type: str) -> None:
        self.push = push
        self.content_type = content_type
        self.signal = Signal.METRICS
        self.encoding = ""
        self.is_known = False
        self.refusal: Refusal | None = None

    @property
    def is_json(self) -> bool:
        """Whether the answer is written in JSON: as the request, and for those that were neither."""
        return self.content_type != _PROTOBUF


def _find_content_type(headers: dict[bytes, bytes]) -> str:
    raw = headers.get(b"content-type", b"")
    known = _CONTENT_TYPES.get(raw)
    if known is None:
        known = _CONTENT_TYPES.get(raw.partition(b";")[0].strip().lower(), "")
    return known


def _check_content_type(request: Request, headers: dict[bytes, bytes]) -> Refusal | None:
    if request.content_type:
        return None
    given = headers.get(b"content-type", b"").decode("latin-1")
    message = f"content type {given!r:.80}; accepted: {_PROTOBUF}, {_JSON}"
    return PushOutcome(AnswerStatus.UNSUPPORTED, message), Reason.CONTENT_TYPE


_HEADS: Final = {
    verdict: f"HTTP/1.1 {verdict.http} {HTTPStatus(verdict.http).phrase}\r\n".encode()
    for verdict in AnswerStatus
}
_TYPE_LINES: Final = {
    True: b"content-type: application/json\r\n",
    False: b"content-type: application/x-protobuf\r\n",
}
_THRESHOLD_LINE: Final = f"{Header.THRESHOLD}: %s\r\n".encode()
_QUORUM_LINES: Final = {
    met: f"{Header.QUORUM_MET}: {met}\r\n".encode() for met in ("true", "false")
}
_PANIC_LINE: Final = f"{Header.PANIC}: true\r\n".encode()
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
    outcome: PushOutcome,
    body: bytes,
    threshold: tuple[str, str] | None,
    date_line: bytes,
    *,
    is_json: bool,
    closes: bool,
) -> bytes:
    """The whole answer as it goes on the wire.

    Args:
        outcome: How it went; errors get a google.rpc.Status as their body.
        body: Of an export that was taken in part; ignored otherwise.
        threshold: Values of the two headers, the first empty during panic; or None.
        date_line: The Date header with its line end.
        is_json: Which of the two encodings.
        closes: Whether the connection ends with this answer.
    """
    if outcome is TAKEN:
        head, body = _TAKEN[is_json]
        lines = [head, date_line]
    else:
        if outcome.verdict is not AnswerStatus.TAKEN:
            body = encode_status(outcome.verdict.grpc, outcome.message, is_json=is_json)
        length = f"content-length: {len(body)}\r\n".encode()
        lines = [_HEADS[outcome.verdict], _TYPE_LINES[is_json], length, date_line]
        lines += _error_lines(outcome)
    if threshold is not None:
        if threshold[0]:
            lines.append(_THRESHOLD_LINE % threshold[0].encode() + _QUORUM_LINES[threshold[1]])
        else:
            lines.append(_PANIC_LINE)
    if closes:
        lines.append(b"connection: close\r\n")
    lines += (b"\r\n", body)
    return b"".join(lines)


def _error_lines(outcome: PushOutcome) -> list[bytes]:
    lines = []
    if outcome.retry_after_s:
        lines.append(f"retry-after: {outcome.retry_after_s}\r\n".encode())
    if outcome.verdict is AnswerStatus.METHOD:
        lines.append(b"allow: POST\r\n")
    if outcome.verdict is AnswerStatus.UNAUTHENTICATED:
        lines.append(b"www-authenticate: Bearer\r\n")
    return lines
