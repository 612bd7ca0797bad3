"""What a failed push means, for people: the words of a library and a status beside what to do about them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from ingero.agent.health.endpoint import FleetEndpoint

_REFUSALS: Final[dict[int, str]] = {
    HTTPStatus.UNAUTHORIZED: "wrong or missing token",
    HTTPStatus.FORBIDDEN: "the token may not do this",
    HTTPStatus.NOT_FOUND: "nothing takes OTLP at this address",
    HTTPStatus.METHOD_NOT_ALLOWED: "nothing takes OTLP at this address",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "the push is larger than the receiver takes",
}
_GRPC_REFUSALS: Final = {
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


def explain_status(status: int, reason: str) -> str:
    """A refusal over HTTP in words, with its status."""
    said = f"{status} {reason}".strip()
    words = _REFUSALS.get(status)
    return f"{words} ({said})" if words else said


def explain_code(code: str, details: str) -> str:
    """A refusal over gRPC in words, with its code."""
    words = _GRPC_REFUSALS.get(code)
    said = f"{code} {details}".strip()
    return f"{words} ({said})" if words else said


def explain_failure(detail: str, endpoint: FleetEndpoint) -> str:
    """Why no answer came, with what is probably wrong where the library's words tell."""
    for words, hint in _HINTS:
        if words in detail:
            return f"{detail}; {hint}"
    if not endpoint.is_secure and any(words in detail for words in _CLOSED):
        return f"{detail}; {_WANTS_TLS}"
    return detail
