"""One request to Fleet over OTLP/HTTP, and what the answer said.

A `PushTransport` sends once and reports; whether to try again is the lane's decision.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import httpx

from ingero import __version__
from ingero.agent.health.body import encode_agent_json
from ingero.agent.health.cache import Heard, ThresholdHeaders, parse_told
from ingero.agent.health.endpoint import FleetEndpoint
from ingero.agent.health.signals.hints import explain_failure, explain_status
from ingero.errors import BadDataError
from ingero.otlp.codec.export import Export, encode_protobuf
from ingero.otlp.names import ContentType
from ingero.units import NS_PER_S
from ingero.wire.names import Header

USER_AGENT: Final = f"ingero-agent/{__version__}"
MAX_ANSWER_BYTES: Final = 64 * 1024
_PAUSING: Final = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})


class PushReply(NamedTuple):
    """What became of one request.

    Attributes:
        is_taken: The data arrived and was accepted.
        detail: For people: the status or the failure.
        told: The threshold headers, also of a refusal.
        retry_after_ns: How long the receiver asked for silence; None when it did not.
        is_cut_off: No answer came at all, so one more try is worth it.
        is_refused: Somebody answered, and did not take it.
    """

    is_taken: bool
    detail: str
    told: ThresholdHeaders = ThresholdHeaders(Heard.MISS)
    retry_after_ns: int | None = None
    is_cut_off: bool = False
    is_refused: bool = False


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
        cluster_id: Hint for routing; empty sends none.
        timeout_ns: Longest wait for one answer.
        is_protobuf: Encoding of HTTP bodies; False is JSON.
        is_gzip: Compress bodies.
        headers: Sent with each request.
        token_file: Bearer token, read again for each request so that it can be renewed; None sends none.
        ca_file: Authorities to trust; None is the system's.
        cert_file: Client certificate chain; None shows none.
        key_file: Its key.
    """

    endpoint: FleetEndpoint
    timeout_ns: int
    cluster_id: str = ""
    is_protobuf: bool = False
    is_gzip: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    token_file: Path | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    def auth_headers(self) -> dict[str, str]:
        """The headers and the token as they are now.

        Raises:
            BadDataError: The token cannot be read or cannot stand in a header.
        """
        headers = dict(self.headers)
        if self.token_file is None:
            return headers
        try:
            token = self.token_file.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BadDataError(f"the bearer token cannot be read: {error}") from error
        if not token or not token.isprintable():
            raise BadDataError(f"{self.token_file} holds no bearer token")
        headers["Authorization"] = f"Bearer {token}"
        return headers


class HttpTransport:
    """OTLP/HTTP, JSON or protobuf, one kept-alive connection.

    Redirects are not followed: one may turn a POST into a GET and report success for data that nobody took.
    """

    def __init__(self, settings: TransportSettings) -> None:
        self._settings = settings
        self._client = build_client(settings)

    def send(self, export: Export, wall_ns: int) -> PushReply:
        """Post once."""
        settings = self._settings
        body = encode_protobuf(export) if settings.is_protobuf else encode_agent_json(export)
        kind = ContentType.PROTOBUF if settings.is_protobuf else ContentType.JSON
        try:
            headers = settings.auth_headers() | {"Content-Type": kind.value}
        except BadDataError as error:
            return PushReply(is_taken=False, detail=error.message)
        if settings.is_gzip:
            body = gzip.compress(body, compresslevel=1, mtime=0)
            headers["Content-Encoding"] = "gzip"
        url = settings.endpoint.signal_url(export.signal, settings.cluster_id)
        try:
            with self._client.stream("POST", url, content=body, headers=headers) as response:
                _skim(response)
        except httpx.HTTPError as error:
            detail = explain_failure(str(error) or type(error).__name__, settings.endpoint)
            return PushReply(is_taken=False, detail=detail, is_cut_off=True)
        return read_answer(response, wall_ns)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def build_client(settings: TransportSettings) -> httpx.Client:
    """An HTTP client with the settings' time limit and certificates.

    Raises:
        IngeroError: A certificate file cannot be used.
    """
    from ingero.config.tls import TlsClientConfig  # noqa: PLC0415 - pydantic and ssl only where TLS is
    from ingero.serving.tls import build_client_context  # noqa: PLC0415

    tls = TlsClientConfig(
        ca_file=settings.ca_file, cert_file=settings.cert_file, key_file=settings.key_file
    )
    return httpx.Client(
        timeout=settings.timeout_ns / NS_PER_S,
        verify=build_client_context(tls) if settings.endpoint.is_secure else True,
        follow_redirects=False,
        headers={"User-Agent": USER_AGENT},
        limits=httpx.Limits(max_connections=2, max_keepalive_connections=1, keepalive_expiry=30),
    )


def read_answer(response: httpx.Response, wall_ns: int) -> PushReply:
    """Read status and headers. ``Retry-After`` counts on 429 and 503 only."""
    headers = response.headers
    pause_ns = None
    if response.status_code in _PAUSING:
        pause_ns = parse_retry_after(headers.get("Retry-After"), wall_ns)
    return PushReply(
        is_taken=response.is_success,
        detail=explain_status(response.status_code, response.reason_phrase),
        told=parse_told(
            headers.get(Header.THRESHOLD),
            headers.get(Header.QUORUM_MET),
            headers.get(Header.PANIC),
        ),
        retry_after_ns=pause_ns,
        is_refused=not response.is_success,
    )


def parse_retry_after(text: str | None, wall_ns: int) -> int | None:
    """Whole seconds or an HTTP date as a delay from now; None when it is neither. A date that is past is no delay.

    Source: RFC 9110 §10.2.3.
    """
    stripped = (text or "").strip()
    if stripped.isascii() and stripped.isdigit():
        return int(stripped[:12]) * NS_PER_S
    try:
        moment = parsedate_to_datetime(stripped)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    now = datetime.fromtimestamp(wall_ns / NS_PER_S, UTC)
    return max(int((moment - now).total_seconds() * NS_PER_S), 0)


def _skim(response: httpx.Response) -> None:
    """Read a body so that the connection can be used again, unless it is absurdly long."""
    n_bytes = 0
    for chunk in response.iter_raw():
        n_bytes += len(chunk)
        if n_bytes > MAX_ANSWER_BYTES:
            return
