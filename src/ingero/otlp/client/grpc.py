"""`GrpcSender`: OTLP over gRPC, on one channel at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from ingero.errors import IngeroError
from ingero.header_values import clean_headers
from ingero.otlp.client.reply import (
    MAX_ANSWER_BYTES,
    MAX_RETRY_AFTER_NS,
    SendReply,
    count_rejected,
    parse_retry_after,
)
from ingero.otlp.codec import Export, encode_protobuf
from ingero.otlp.names import GRPC_SERVICES, GRPC_STATUS_DETAILS, Signal
from ingero.units import NS_PER_MS, NS_PER_S

_CUT_OFF: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
_RETRYABLE: Final = frozenset({
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
})
_PUSHBACK: Final = "grpc-retry-pushback-ms"  # gRFC A6, "Pushback"
_RETRY_INFO: Final = b"google.rpc.RetryInfo"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcSenderSettings:
    """How to reach a receiver over gRPC.

    Attributes:
        target: ``host:port``.
        is_secure: TLS.
        timeout_ns: Longest wait for one answer; 0 is without end.
        is_gzip: Compress messages.
        headers: Asked for each call; raises BadDataError when they cannot be made. One that cannot be sent is such.
        ca_file: Authorities to trust; None is the system's.
        key_file: Key of the client certificate; None shows none.
        cert_file: Its chain.
        options: Channel arguments.
    """

    target: str
    is_secure: bool
    timeout_ns: int
    is_gzip: bool = False
    headers: Callable[[], Mapping[str, str]] = dict
    ca_file: str | None = None
    key_file: str | None = None
    cert_file: str | None = None
    options: tuple[tuple[str, Any], ...] = ()


class _Line:
    """A channel, and how many calls are under way on it. Raises IngeroError when a certificate file cannot be read."""

    def __init__(self, settings: GrpcSenderSettings) -> None:
        options = [
            ("grpc.enable_retries", 0),  # retries are the caller's
            ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
            *settings.options,
        ]
        if settings.is_secure:
            files = (settings.ca_file, settings.key_file, settings.cert_file)
            credentials = grpc.ssl_channel_credentials(*map(_read, files))
            self.channel = grpc.secure_channel(settings.target, credentials, options)
        else:
            self.channel = grpc.insecure_channel(settings.target, options)
        self.calls: dict[Signal, Any] = {
            signal: self.channel.unary_unary(
                f"/{service}/Export", request_serializer=None, response_deserializer=None
            )
            for signal, service in GRPC_SERVICES.items()
        }
        self.n_under_way = 0


class GrpcSender:
    """Calls ``Export``; any thread.

    Raises:
        IngeroError: A certificate file cannot be read.
    """

    def __init__(self, settings: GrpcSenderSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._lines = [_Line(settings)]  # the last takes new calls

    def send(self, export: Export, wall_ns: int) -> SendReply:
        """Call once; see `OtlpSender.send`."""
        settings = self._settings
        headers = clean_headers(settings.headers())
        metadata = [(name.lower(), value) for name, value in headers.items()]
        content = encode_protobuf(export)
        try:
            with self._take_line() as line:
                body, call = line.calls[export.signal].with_call(
                    content,
                    timeout=settings.timeout_ns / NS_PER_S or None,
                    metadata=metadata,
                    compression=grpc.Compression.Gzip if settings.is_gzip else None,
                )
        except grpc.RpcError as error:
            return _read_refusal(error, wall_ns)
        return SendReply(
            is_taken=True,
            code="OK",
            detail="",
            headers=_gather(call.initial_metadata()) | _gather(call.trailing_metadata()),
            n_rejected=count_rejected(body, export.signal, is_json=False),
        )

    def renew(self) -> None:
        """Read the certificate files again and connect anew; calls that are under way end where they began.

        Raises:
            IngeroError: One cannot be read; the old connection stays.
        """
        line = _Line(self._settings)
        with self._lock:
            self._lines.append(line)
            self._close_idle()

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for line in self._lines:
                line.channel.close()

    @contextmanager
    def _take_line(self) -> Iterator[_Line]:
        with self._lock:
            line = self._lines[-1]
            line.n_under_way += 1
        try:
            yield line
        finally:
            with self._lock:
                line.n_under_way -= 1
                self._close_idle()

    def _close_idle(self) -> None:
        """Close what was replaced and has no calls; the lock is held."""
        for line in self._lines[:-1]:
            if not line.n_under_way:
                line.channel.close()
                self._lines.remove(line)


def _read_refusal(error: Any, wall_ns: int) -> SendReply:  # noqa: ANN401 - grpc.RpcError is also a Call
    code: grpc.StatusCode = error.code()
    headers = _gather(error.initial_metadata()) | _gather(error.trailing_metadata())
    pause_ns = parse_retry_after(headers.get("retry-after"), wall_ns)
    pushback = headers.get(_PUSHBACK, "")
    if pushback.isascii() and pushback.isdigit():
        pause_ns = min(int(pushback[:12]) * NS_PER_MS, MAX_RETRY_AFTER_NS)
    details = dict(error.trailing_metadata() or ()).get(GRPC_STATUS_DETAILS, b"")
    is_exhausted = code is grpc.StatusCode.RESOURCE_EXHAUSTED
    return SendReply(
        is_taken=False,
        code=code.name,
        detail=error.details() or "",
        headers=headers,
        retry_after_ns=pause_ns,
        is_cut_off=code in _CUT_OFF and pause_ns is None,
        is_retryable=code in _RETRYABLE
        or (is_exhausted and isinstance(details, bytes) and _RETRY_INFO in details),
    )


def _gather(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def _read(file: str | None) -> bytes | None:
    if not file:
        return None
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise IngeroError(f"{file}: {error.strerror or error}") from error
