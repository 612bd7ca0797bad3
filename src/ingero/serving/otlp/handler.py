"""What a program does with OTLP requests: `OtlpHandler`, which the HTTP and gRPC servers call."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ingero.otlp.codec import Export, decode_export
from ingero.otlp.names import ContentType, Signal
from ingero.serving.otlp.answers import OtlpAnswer, RequestRefusal
from ingero.serving.otlp.encodings import decompress

MAX_HINT_CHARS = 1024
"""Longer cluster hints are cut."""


@dataclass(slots=True)
class OtlpRequest:
    """One request, as far as it is known before its body.

    Attributes:
        transport: ``http`` or ``grpc``.
        method: HTTP's, or ``Export``.
        path: Without the query; over gRPC the path of the same signal over HTTP. Empty where no head could be read.
        peer: Address of the sender, without its port.
        peer_names: What the sender's certificate says of it, where the listener asks for one.
        hint: ``?cluster_id=``, or the ``ingero.cluster.id`` header or metadata; empty when there is none.
        authorization: The ``Authorization`` value; None when there is none.
        forwarded_for: The ``X-Forwarded-For`` value; empty when there is none.
        signal: What is sent; meaningful when the path is one of OTLP's.
        content_type: One of `ContentType`'s two, or empty when it is neither.
        encoding: Content encoding; empty for none.
        n_declared_bytes: Length of the body as declared; None when it is not.
        context: What `OtlpHandler.open` made.
    """

    transport: str = "http"
    method: str = ""
    path: str = ""
    peer: str = ""
    peer_names: tuple[str, ...] = ()
    hint: str = ""
    authorization: str | None = None
    forwarded_for: str = ""
    signal: Signal = Signal.METRICS
    content_type: str = ""
    encoding: str = ""
    n_declared_bytes: int | None = None
    context: Any = None

    @property
    def is_json(self) -> bool:
        """Whether the answer is written in JSON: as the request, and for those that were neither."""
        return self.content_type != _PROTOBUF

    def decode(self, body: bytes, limit_bytes: int) -> Export:
        """Undo the content encoding and decode.

        Raises:
            TooLargeError: More than ``limit_bytes`` came out.
            BadDataError: It is no such request.
        """
        if self.encoding:
            body = decompress(body, self.encoding, limit_bytes)
        return decode_export(body, self.signal, self.content_type)


_PROTOBUF = str(ContentType.PROTOBUF)


class AnswerHeaders(NamedTuple):
    """Headers that a program adds to an answer.

    Attributes:
        lines: For HTTP, each with its line end.
        metadata: For gRPC: initial and trailing.
    """

    lines: bytes
    metadata: tuple[tuple[str, str], ...]


class OtlpHandler(Protocol):
    """Who may send, and what becomes of what was sent.

    Called on the event loop. Each request meets `open` first, and then either
    `take` or `refused` as the last.
    """

    def open(self, request: OtlpRequest) -> object:
        """Make what the handler itself keeps of a request, for ``request.context``."""
        ...

    def admit(self, request: OtlpRequest, *, is_full: bool) -> RequestRefusal | None:
        """Decide about a request for one of OTLP's paths before its body is read; None lets it in.

        Args:
            request: The request.
            is_full: As many requests as allowed are being received.
        """
        ...

    def reserve(self, request: OtlpRequest) -> Awaitable[RequestRefusal | None] | None:
        """Wait for room for the body of a request that was let in; None when there is no need to."""
        ...

    def take(self, request: OtlpRequest, body: bytes) -> OtlpAnswer | Awaitable[OtlpAnswer]:
        """Decode a whole body, as it was sent, and apply it; the answer says that it is applied."""
        ...

    def refused(self, request: OtlpRequest, refusal: RequestRefusal) -> None:
        """Count and log a request that ended without `take`, also one that was let in."""
        ...

    def find_headers(self, request: OtlpRequest) -> AnswerHeaders | None:
        """Headers of the answer; None for none."""
        ...
