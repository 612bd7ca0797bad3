"""One request to Fleet over OTLP, and the threshold headers of its answer.

A `PushTransport` sends once and reports; whether to try again its caller decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final, NamedTuple, Protocol
from urllib.parse import urlencode

from ingero import __version__
from ingero.agent.health.cache import HeaderOutcome, ThresholdHeaders, parse_threshold_headers
from ingero.agent.health.push_body import encode_agent_json
from ingero.errors import BadDataError
from ingero.header_values import read_bearer
from ingero.model.diagnosis import DiagnosisRequest
from ingero.otlp.client.endpoint import OtlpEndpoint
from ingero.otlp.client.http import HttpSender, HttpSenderSettings
from ingero.otlp.client.reply import OtlpSender, SendReply
from ingero.otlp.codec.export import Export, encode_protobuf
from ingero.otlp.names import ContentType
from ingero.wire.diagnosis import parse_request
from ingero.wire.names import CLUSTER_QUERY, Header

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


USER_AGENT: Final = f"ingero-agent/{__version__}"


class PushReply(NamedTuple):
    """What became of one request.

    Attributes:
        is_taken: The data arrived and was accepted.
        detail: For people: the status or the failure.
        headers: The threshold headers, also of a refusal.
        retry_after_ns: How long the receiver asked the agent to wait; None when it did not.
        is_cut_off: No answer came at all, so one more try is worth it.
        is_refused: Somebody answered, and did not take it.
        is_retryable: The protocol allows to send it again, as to a proxy whose Fleet is away.
        question: What the receiver wants to know of this node; None for nothing.
        n_rejected: Items that the receiver refused while it took the rest; they are lost.
    """

    is_taken: bool
    detail: str
    headers: ThresholdHeaders = ThresholdHeaders(HeaderOutcome.MISS)
    retry_after_ns: int | None = None
    is_cut_off: bool = False
    is_refused: bool = False
    is_retryable: bool = False
    question: DiagnosisRequest | None = None
    n_rejected: int = 0

    @property
    def is_settled(self) -> bool:
        """Taken, or refused permanently: to send it again, or to another Fleet, changes nothing."""
        is_away = self.is_cut_off or self.is_retryable or self.retry_after_ns is not None
        return self.is_taken or not is_away


class PushTransport(Protocol):
    """A way to send one export."""

    def send(self, export: Export, wall_ns: int) -> PushReply:
        """Send once and wait for the answer, at most the timeout. Does not raise for what the network does."""
        ...

    def close(self) -> None:
        """Release connections."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSettings:
    """How to reach a collector.

    Attributes:
        endpoint: Where.
        others: Further Fleets that act as one with it; a push goes to them while it is away.
        cluster_id: Hint for routing, in the query and as a header; empty sends none.
        timeout_ns: Longest wait for one answer.
        is_protobuf: Encoding of HTTP bodies; False is JSON.
        is_gzip: Compress bodies.
        headers: Sent with each request.
        token_file: Bearer token, read again for each request so that it can be renewed; None sends none.
        ca_file: Authorities to trust; None is the system's.
        cert_file: Client certificate chain; None shows none.
        key_file: Its key.
    """

    endpoint: OtlpEndpoint
    timeout_ns: int
    cluster_id: str = ""
    is_protobuf: bool = False
    is_gzip: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    token_file: Path | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    others: tuple[OtlpEndpoint, ...] = ()

    @property
    def query(self) -> str:
        """Names the cluster in a URL, as a hint for load balancers; empty when there is no cluster."""
        return f"?{urlencode({CLUSTER_QUERY: self.cluster_id})}" if self.cluster_id else ""

    def request_headers(self) -> dict[str, str]:
        """What each request carries: the cluster as a hint for load balancers, headers, the token as it is now.

        Raises:
            BadDataError: The token cannot be read or cannot stand in a header.
        """
        name = (
            self.cluster_id
        )  # one that cannot stand in a header is only in the query and in the body
        is_plain = name.isascii() and name.isprintable() and name == name.strip() != ""
        headers = {Header.CLUSTER_HINT.value: name} if is_plain else {}
        headers |= self.headers
        if self.token_file is None:
            return headers
        headers["Authorization"] = f"Bearer {read_bearer(self.token_file)}"
        return headers


class _FleetTransport:
    """One way to a Fleet.

    Args:
        settings: Where Fleet is.
        sender: Sends.
        names: Headers of the threshold, of the quorum, of panic and of what Fleet asks.

    Attributes:
        settings: Where Fleet is.
    """

    def __init__(
        self,
        settings: TransportSettings,
        sender: OtlpSender,
        names: tuple[Header, Header, Header, Header],
    ) -> None:
        self.settings = settings
        self._sender = sender
        *self._names, self._question = [name.lower() for name in names]

    def send(self, export: Export, wall_ns: int) -> PushReply:
        """Send once and wait for the answer, at most the timeout. Does not raise for what the network does."""
        try:
            reply = self._sender.send(export, wall_ns)
        except BadDataError as error:
            return PushReply(is_taken=False, detail=error.message)
        detail = explain_refusal(reply)
        return PushReply(
            is_taken=reply.is_taken,
            detail=explain_failure(detail, self.settings.endpoint) if reply.is_cut_off else detail,
            headers=parse_threshold_headers(*map(reply.headers.get, self._names)),
            retry_after_ns=reply.retry_after_ns,
            is_cut_off=reply.is_cut_off,
            is_refused=not reply.is_taken and not reply.is_cut_off,
            is_retryable=reply.is_retryable,
            question=parse_request(reply.headers.get(self._question)),
            n_rejected=reply.n_rejected,
        )

    def close(self) -> None:
        """Release connections."""
        self._sender.close()


class HttpTransport(_FleetTransport):
    """OTLP/HTTP, JSON or protobuf, one kept-alive connection.

    Raises:
        IngeroError: A certificate file cannot be used.
    """

    def __init__(self, settings: TransportSettings) -> None:
        sender = open_http_sender(settings)
        names = (Header.THRESHOLD, Header.QUORUM_MET, Header.PANIC, Header.DIAGNOSE)
        super().__init__(settings, sender, names)


class GrpcTransport(_FleetTransport):
    """OTLP/gRPC over one channel.

    Raises:
        IngeroError: A certificate file cannot be read.
    """

    def __init__(self, settings: TransportSettings) -> None:
        from ingero.otlp.client.grpc import (  # noqa: PLC0415 - an extra
            GrpcSender,
            GrpcSenderSettings,
        )

        sender = GrpcSender(
            GrpcSenderSettings(
                target=settings.endpoint.target,
                is_secure=settings.endpoint.is_secure,
                timeout_ns=settings.timeout_ns,
                is_gzip=settings.is_gzip,
                headers=settings.request_headers,
                ca_file=settings.ca_file,
                key_file=settings.key_file,
                cert_file=settings.cert_file,
                options=(("grpc.primary_user_agent", USER_AGENT),),
            )
        )
        names = (
            Header.GRPC_THRESHOLD,
            Header.GRPC_QUORUM_MET,
            Header.GRPC_PANIC,
            Header.GRPC_DIAGNOSE,
        )
        super().__init__(settings, sender, names)


def open_http_sender(settings: TransportSettings) -> HttpSender:
    """A sender with the settings' time limit, certificates and encoding.

    Raises:
        IngeroError: A certificate file cannot be used.
    """
    from ingero.config.tls import TlsClientConfig  # noqa: PLC0415 - pydantic and ssl only where TLS is
    from ingero.serving.tls import build_client_context  # noqa: PLC0415

    endpoint, query = settings.endpoint, settings.query
    tls = TlsClientConfig(
        ca_file=settings.ca_file, cert_file=settings.cert_file, key_file=settings.key_file
    )
    return HttpSender(
        HttpSenderSettings(
            urls=lambda signal: endpoint.signal_url(signal) + query,
            encode=encode_protobuf if settings.is_protobuf else encode_agent_json,
            content_type=ContentType.PROTOBUF if settings.is_protobuf else ContentType.JSON,
            timeout_ns=settings.timeout_ns,
            encoding="gzip" if settings.is_gzip else "",
            headers=settings.request_headers,
            tls=build_client_context(tls) if endpoint.is_secure else None,
            user_agent=USER_AGENT,
            is_env_trusted=True,
            max_connections=2,
        )
    )
