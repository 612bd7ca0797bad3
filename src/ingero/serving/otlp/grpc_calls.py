"""What the head of one gRPC call asks for, and its answer as header blocks. No sockets here.

Source: gRPC over HTTP/2 (grpc, doc/PROTOCOL-HTTP2.md); opentelemetry-proto collector services; OTLP specification 1.x,
"OTLP/gRPC" (RESOURCE_EXHAUSTED is retryable only with RetryInfo); google.rpc.Status in ``grpc-status-details-bin``.
Names of encodings as the Collector registers them (``config/configgrpc``): its ``snappy`` is the framed format.
"""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import quote

from ingero.otlp.names import GRPC_SERVICES, GRPC_STATUS_DETAILS, Signal
from ingero.serving.connections import ConnectionLimits
from ingero.serving.otlp.answers import (
    TAKEN,
    TAKEN_PROTOBUF,
    AnswerStatus,
    OtlpAnswer,
    encode_answer,
    encode_retry_status,
)
from ingero.serving.otlp.h2_headers import STATUS_200, Fields, write_block
from ingero.serving.otlp.handler import MAX_HINT_CHARS
from ingero.units import NS_PER_S
from ingero.wire.names import Header

GRPC_ENCODINGS: Final = frozenset({"gzip", "zstd", "snappy", "deflate"})
"""Encodings of messages; none is always taken too."""
UNIMPLEMENTED: Final = 12
EXPORT_PATHS: Final = {
    f"/{service}/Export".encode(): signal for signal, service in GRPC_SERVICES.items()
}
PREFIX_BYTES: Final = 5
"""A message's flag and length."""
_CLUSTER_HINT: Final = Header.CLUSTER_HINT.encode()
_PSEUDO: Final = frozenset({b":method", b":scheme", b":path", b":authority"})
_OF_A_CONNECTION: Final = frozenset({
    b"connection",
    b"keep-alive",
    b"proxy-connection",
    b"transfer-encoding",
    b"upgrade",
})
"""RFC 9113, section 8.2.2: a request that has one is malformed."""
_TIMEOUT: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNITS_S: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_UNSAFE: Final = re.compile(rb"[A-Z\x00-\x20\x7f-\xff]")
_MAX_MESSAGE_CHARS: Final = 1024


@dataclass(frozen=True, slots=True)
class OtlpGrpcSettings:
    """How one OTLP/gRPC listener treats connections and calls.

    Attributes:
        max_message_bytes: Largest request, as sent and uncompressed.
        max_in_flight: Calls at once, beyond which the handler counts as full.
        max_streams: Calls at once on one connection.
        max_buffered_bytes: Unfinished messages in memory over all connections; None where the handler reserves.
        read_timeout_ns: Longest time for one message to arrive.
        idle_ns: A connection without a call is closed after this; None is never.
        age_ns: A connection is closed after this, when its calls have ended; None is never.
        age_grace_ns: Time for calls to end then; None is without end.
        ping_after_ns: A client that is silent for this long is asked whether it is there.
        ping_timeout_ns: One that does not answer for this long is gone.
        connections: How many connections, how slow they may be, how large a header list.
        shares_port: Whether other processes of this user may listen on the same port.
    """

    max_message_bytes: int = 4 << 20
    max_in_flight: int = 1024
    max_streams: int = 128
    max_buffered_bytes: int | None = None
    read_timeout_ns: int = 30 * NS_PER_S
    idle_ns: int | None = None
    age_ns: int | None = None
    age_grace_ns: int | None = None
    ping_after_ns: int = 7200 * NS_PER_S
    ping_timeout_ns: int = 20 * NS_PER_S
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    shares_port: bool = False


@dataclass(frozen=True, slots=True)
class CallHead:
    """What a call's header block says.

    Attributes:
        path: As sent.
        signal: What is exported; None for another method.
        hint: The ``ingero.cluster.id`` metadata; empty when there is none.
        authorization: The ``authorization`` metadata; None when there is none.
        encoding: Of compressed messages; empty for none.
        timeout_s: By when the client wants its answer; None when it does not say.
        http_status: Why it is no gRPC call; 200 when it is.
        is_malformed: Whether it is no HTTP/2 request.
    """

    path: bytes = b""
    signal: Signal | None = None
    hint: str = ""
    authorization: str | None = None
    encoding: str = ""
    timeout_s: float | None = None
    http_status: int = 200
    is_malformed: bool = False


def read_head(fields: Fields) -> CallHead:
    """Read a header block; of one that is twice, the last."""
    if _is_malformed(fields):
        return CallHead(is_malformed=True)
    get = dict(fields).get
    path = get(b":path", b"")
    authorization = get(b"authorization")
    encoding = get(b"grpc-encoding", b"").decode("latin-1")
    http_status = 200
    if get(b":method") != b"POST":
        http_status = 405
    elif not get(b"content-type", b"").startswith(b"application/grpc"):
        http_status = 415
    return CallHead(
        path,
        EXPORT_PATHS.get(path),
        get(_CLUSTER_HINT, b"")[:MAX_HINT_CHARS].decode("utf-8", "replace"),
        None if authorization is None else authorization.decode("latin-1"),
        "" if encoding == "identity" else encoding,
        _read_timeout(get(b"grpc-timeout")),
        http_status,
    )


def _is_malformed(fields: Fields) -> bool:
    """RFC 9113, sections 8.2.1, 8.2.2 and 8.3.1."""
    seen: set[bytes] = set()
    has_regular = False
    for name, value in fields:
        if name.startswith(b":"):
            if has_regular or name in seen or name not in _PSEUDO:
                return True
            seen.add(name)
        else:
            has_regular = True
            if name in _OF_A_CONNECTION or (name == b"te" and value != b"trailers"):
                return True
        if not name or _UNSAFE.search(name):
            return True
        if b"\n" in value or b"\r" in value or b"\0" in value:
            return True
    return not seen >= {b":method", b":scheme", b":path"}


def _read_timeout(text: bytes | None) -> float | None:
    match = _TIMEOUT.fullmatch(text or b"")
    return None if match is None else int(match[1]) * _UNITS_S[match[2]]


class CallAnswer(NamedTuple):
    """An answer as it goes on the wire.

    Attributes:
        head: The first header block; None where the trailers stand alone.
        message: With its prefix.
        trailers: The last header block.
    """

    head: bytes | None
    message: bytes
    trailers: bytes


_CONTENT_TYPE: Final = (b"content-type", b"application/grpc")
_ACCEPTED: Final = (
    b"grpc-accept-encoding",
    ",".join(["identity", *sorted(GRPC_ENCODINGS)]).encode(),
)
HEAD: Final = STATUS_200 + write_block([_CONTENT_TYPE, _ACCEPTED])
"""The first header block of an answer without metadata."""
Metadata = tuple[tuple[str, str], ...]


def write_message(message: bytes) -> bytes:
    """A message with its prefix."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def write_status(code: int, message: str = "", metadata: Metadata = ()) -> bytes:
    """The last header block of an answer."""
    fields = [(b"grpc-status", b"%d" % code)]
    if message:
        quoted = quote(message[:_MAX_MESSAGE_CHARS], safe=_PRINTABLE, errors="replace")
        fields.append((b"grpc-message", quoted.encode("ascii")))
    return write_block([*fields, *_encode(metadata)])


_PRINTABLE: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


def _encode(metadata: Metadata) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in metadata]


@lru_cache(maxsize=256)
def _write_taken(metadata: Metadata) -> CallAnswer:
    return CallAnswer(
        _write_head(metadata), write_message(TAKEN_PROTOBUF), write_status(0, "", metadata)
    )


def _write_head(metadata: Metadata) -> bytes:
    return HEAD + write_block(_encode(metadata))


def write_answer(answer: OtlpAnswer, signal: Signal, metadata: Metadata = ()) -> CallAnswer:
    """The answer to an export; an error without metadata is trailers alone.

    Args:
        answer: How it went.
        signal: What was sent.
        metadata: In both blocks.
    """
    if answer is TAKEN:
        return _write_taken(metadata)
    if answer.status is AnswerStatus.TAKEN:
        message = write_message(encode_answer(answer, signal, is_json=False))
        return CallAnswer(_write_head(metadata), message, write_status(0, "", metadata))
    trailers = write_status(answer.status.grpc, answer.message, metadata)
    if answer.retry_after_s:
        details = b64encode(encode_retry_status(answer)).rstrip(b"=")
        trailers += write_block([(GRPC_STATUS_DETAILS.encode(), details)])
    if metadata:
        return CallAnswer(_write_head(metadata), b"", trailers)
    return CallAnswer(None, b"", HEAD + trailers)


def write_refusal(code: int, message: str) -> CallAnswer:
    """The answer to a call that is no export."""
    return CallAnswer(None, b"", HEAD + write_status(code, message))


def write_http_status(status: int) -> bytes:
    """The header block of an answer to what is no gRPC call."""
    # A literal without indexing whose name is that of entry 8 of the static table.
    return b"\x08\x03" + str(status).encode()
