"""What became of one request: `SendReply`, and how it is read from statuses, headers and bodies.

Sources: OTLP specification 1.x, "OTLP/HTTP Response" and "OTLP/gRPC Response" (what is worth another try), "Partial
Success" (the request is not to be sent again); RFC 9110 section 10.2.3 (``Retry-After``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, Final, Protocol

import msgspec
from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from ingero.otlp.codec import Export
from ingero.otlp.names import Signal
from ingero.units import NS_PER_S

MAX_ANSWER_BYTES: Final = 64 * 1024
"""Longest answer that is read."""
MAX_RETRY_AFTER_NS: Final = 3600 * NS_PER_S
"""Longest pause that a receiver may ask for; one that asks for more is asked again after so long."""
_RESPONSES: Final[Mapping[Signal, tuple[Callable[[bytes], Message], str]]] = {
    Signal.METRICS: (ExportMetricsServiceResponse.FromString, "rejected_data_points"),
    Signal.LOGS: (ExportLogsServiceResponse.FromString, "rejected_log_records"),
    Signal.TRACES: (ExportTraceServiceResponse.FromString, "rejected_spans"),
}


@dataclass(frozen=True, slots=True)
class SendReply:
    """What became of one request.

    Attributes:
        is_taken: The data arrived and was accepted, at least in part.
        code: HTTP status or name of gRPC's code; empty for an HTTP request without an answer.
        detail: The status in words, or what went wrong.
        headers: Of the answer, or its metadata; names in lower case.
        retry_after_ns: How long the receiver asked for silence, at most `MAX_RETRY_AFTER_NS`; None when it did not.
        is_cut_off: No answer came at all.
        is_retryable: The protocol allows to send it again.
        n_rejected: Items that the receiver refused while it took the rest; they are lost.
        fault: Name of the library's error where there is no code.
    """

    is_taken: bool
    code: int | str
    detail: str
    headers: Mapping[str, str] = field(default_factory=dict)
    retry_after_ns: int | None = None
    is_cut_off: bool = False
    is_retryable: bool = False
    n_rejected: int = 0
    fault: str = ""

    @property
    def words(self) -> str:
        """Code and detail."""
        return f"{self.code or self.fault} {self.detail}".strip()


class OtlpSender(Protocol):
    """A way to send one export."""

    def send(self, export: Export, wall_ns: int) -> SendReply:
        """Send once and wait for the answer, at most the timeout. Does not raise for what the network does.

        Args:
            export: What to send.
            wall_ns: Now, for dates in ``Retry-After``.

        Raises:
            BadDataError: The export cannot be encoded, or a header cannot be made.
        """
        ...

    def close(self) -> None:
        """Release connections."""
        ...


def parse_retry_after(text: str | None, wall_ns: int) -> int | None:
    """Whole seconds or an HTTP date as a delay from now, at most `MAX_RETRY_AFTER_NS`; None when it is neither.

    A date that is past is no delay.
    """
    stripped = (text or "").strip()
    if stripped.isascii() and stripped.isdigit():
        return min(int(stripped[:12]) * NS_PER_S, MAX_RETRY_AFTER_NS)
    try:
        moment = parsedate_to_datetime(stripped)
    except (ValueError, OverflowError):  # the latter for numbers that no date has
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return min(max(0, round(moment.timestamp() * NS_PER_S) - wall_ns), MAX_RETRY_AFTER_NS)


class _Partial(msgspec.Struct, rename="camel"):
    rejected_data_points: int = 0
    rejected_log_records: int = 0
    rejected_spans: int = 0


class _JsonAnswer(msgspec.Struct, rename="camel"):
    partial_success: _Partial | None = None


_JSON: Final = msgspec.json.Decoder(_JsonAnswer, strict=False)


def count_rejected(body: bytes, signal: Signal, *, is_json: bool) -> int:
    """Items refused by a partial success; an answer that is no OTLP is a plain success."""
    decode, field_name = _RESPONSES[signal]
    try:
        answer: Any = _JSON.decode(body) if is_json and body else decode(b"" if is_json else body)
    except (msgspec.DecodeError, UnicodeDecodeError, DecodeError):
        return 0
    return int(getattr(answer.partial_success, field_name, 0))
