"""What a failed push means, for people: the words of a library and a status beside what to do about them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from ingero.otlp.client.endpoint import OtlpEndpoint
from ingero.otlp.client.reply import SendReply

_REFUSALS: Final[dict[int | str, str]] = {
    HTTPStatus.UNAUTHORIZED: "wrong or missing token",
    HTTPStatus.FORBIDDEN: "the token may not do this",
    HTTPStatus.NOT_FOUND: "nothing takes OTLP at this address",
    HTTPStatus.METHOD_NOT_ALLOWED: "nothing takes OTLP at this address",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "the push is larger than the receiver takes",
    "UNAUTHENTICATED": "wrong or missing token",
    "PERMISSION_DENIED": "the token may not do this",
    "UNIMPLEMENTED": "nothing takes OTLP at this address",
}
_NO_TLS: Final = "the port speaks no TLS: write http:// before the address"
_WANTS_TLS: Final = "it may speak TLS only: write https:// before the address"
_UNTRUSTED: Final = "its certificate is not trusted: name its authority (--fleet-tls-ca)"
_IS_GRPC: Final = "this is a gRPC port: OTLP over HTTP is usually on 4318"
_IS_HTTP: Final = "this is an HTTP port: OTLP over gRPC is usually on 4317"
_HINTS: Final = (
    ("WRONG_VERSION_NUMBER", _NO_TLS),
    ("CERTIFICATE_VERIFY_FAILED", _UNTRUSTED),
    ("illegal request line", _IS_GRPC),  # h11 on the HTTP/2 frames of a gRPC server
    ("illegal status line", _IS_GRPC),
    ("Failed parsing HTTP/2", _IS_HTTP),  # gRPC core on the words of an HTTP/1 server
)
_CLOSED: Final = ("disconnected without sending a response", "Socket closed", "Connection reset")
"""What h11, gRPC core and the kernel say when a TLS server drops a plain connection."""


def explain_refusal(reply: SendReply) -> str:
    """What became of a request in words, with its status or code; the library's own words where no answer came."""
    if not reply.code:
        return reply.detail or reply.fault
    words = _REFUSALS.get(reply.code)
    return f"{words} ({reply.words})" if words else reply.words


def explain_failure(detail: str, endpoint: OtlpEndpoint) -> str:
    """Why no answer came, with what is probably wrong where the library's message shows it."""
    for words, hint in _HINTS:
        if words in detail:
            return f"{detail}; {hint}"
    if not endpoint.is_secure and any(words in detail for words in _CLOSED):
        return f"{detail}; {_WANTS_TLS}"
    return detail
