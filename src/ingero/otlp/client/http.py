"""`HttpSender`: OTLP over HTTP, JSON or protobuf, on kept-alive connections."""

from __future__ import annotations

import gzip
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import httpx

from ingero.header_values import clean_headers
from ingero.otlp.client.reply import (
    MAX_ANSWER_BYTES,
    SendReply,
    count_rejected,
    parse_retry_after,
)
from ingero.otlp.codec import Export
from ingero.otlp.names import ContentType, Signal
from ingero.units import NS_PER_S
from ingero.web_authorities import WebAuthorities

_RETRYABLE: Final = frozenset({429, 502, 503, 504})


def _compress(body: bytes, encoding: str, gzip_level: int) -> bytes:
    if encoding == "gzip":
        return gzip.compress(body, compresslevel=gzip_level, mtime=0)
    if encoding == "zstd":
        import zstandard  # noqa: PLC0415 - of Fleet's dependencies, not of the agent's

        return zstandard.compress(body)
    return body


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSenderSettings:
    """How to reach a receiver over HTTP.

    Attributes:
        urls: Where each signal is posted.
        encode: Makes the body.
        content_type: Its type.
        encoding: ``gzip``, ``zstd``, or anything else for none.
        gzip_level: 1 costs a GPU node least; 5 makes bodies a tenth smaller.
        timeout_ns: Longest wait for one answer; 0 is without end.
        headers: Asked for each request; raises BadDataError when they cannot be made. One that cannot be sent is such.
        tls: For https; None trusts the system's authorities.
        user_agent: Who sends.
        is_env_trusted: Take proxies from the environment.
        max_connections: At once.
    """

    urls: Callable[[Signal], str]
    encode: Callable[[Export], bytes]
    content_type: ContentType
    timeout_ns: int
    encoding: str = ""
    gzip_level: int = 1
    headers: Callable[[], Mapping[str, str]] = dict
    tls: ssl.SSLContext | None = None
    user_agent: str = ""
    is_env_trusted: bool = False
    max_connections: int | None = None


class HttpSender:
    """Posts exports; any thread.

    Redirects are not followed: one may turn a POST into a GET and report success for data that nobody took.
    """

    def __init__(self, settings: HttpSenderSettings) -> None:
        self._settings = settings
        user_agent = {"User-Agent": settings.user_agent} if settings.user_agent else {}
        self.client = httpx.Client(
            timeout=settings.timeout_ns / NS_PER_S or None,
            verify=WebAuthorities(is_env_trusted=settings.is_env_trusted)
            if settings.tls is None
            else settings.tls,
            follow_redirects=False,
            headers={"Accept-Encoding": "identity", **user_agent},  # answers are read as they come
            limits=httpx.Limits(
                max_connections=settings.max_connections,
                max_keepalive_connections=None if settings.max_connections is None else 1,
                keepalive_expiry=30,
            ),
            trust_env=settings.is_env_trusted,
        )

    def send(self, export: Export, wall_ns: int) -> SendReply:
        """Post once; see `OtlpSender.send`."""
        settings = self._settings
        body = _compress(settings.encode(export), settings.encoding, settings.gzip_level)
        headers = {**clean_headers(settings.headers()), "Content-Type": settings.content_type.value}
        if settings.encoding in {"gzip", "zstd"}:
            headers["Content-Encoding"] = settings.encoding
        url = settings.urls(export.signal)
        try:
            with self.client.stream("POST", url, content=body, headers=headers) as response:
                answer = read_short(response, MAX_ANSWER_BYTES)
        except httpx.HTTPError as error:
            fault = type(error).__name__
            # h11 quotes a header that it does not write, which may be a secret.
            detail = "" if isinstance(error, httpx.LocalProtocolError) else str(error)
            return SendReply(
                is_taken=False,
                code="",
                detail=detail,
                is_cut_off=True,
                is_retryable=True,
                fault=fault,
            )
        return _read_reply(response, answer or b"", export.signal, wall_ns)

    def close(self) -> None:
        """Close the connections."""
        self.client.close()


def _read_reply(response: httpx.Response, body: bytes, signal: Signal, wall_ns: int) -> SendReply:
    status, headers = response.status_code, response.headers
    is_json = headers.get("content-type", "").startswith(str(ContentType.JSON))
    is_retryable = status in _RETRYABLE
    return SendReply(
        is_taken=response.is_success,
        code=status,
        detail=response.reason_phrase,
        headers=headers,
        retry_after_ns=parse_retry_after(headers.get("retry-after"), wall_ns)
        if is_retryable
        else None,
        is_retryable=is_retryable,
        n_rejected=count_rejected(body, signal, is_json=is_json) if response.is_success else 0,
    )


def read_short(response: httpx.Response, max_bytes: int) -> bytes | None:
    """The body as it came, so that the connection can be used again; None when it is too long."""
    body = b""
    for chunk in response.iter_raw():
        body += chunk
        if len(body) > max_bytes:
            return None
    return body
