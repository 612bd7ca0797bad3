"""Answers to OTLP requests: status, body, and the reason that is counted for a refusal."""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Final, NamedTuple

import msgspec
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from ingero.otlp.names import Signal

RETRY_AFTER_S: Final = 2
"""Default delay to ask for. Agents add it to their interval; above 20 s together they lose their mode for a tick."""


class AnswerStatus(Enum):
    """How a request went: HTTP status and google.rpc.Code."""

    TAKEN = (200, 0)
    BAD_DATA = (400, 3)  # INVALID_ARGUMENT
    UNAUTHENTICATED = (401, 16)
    FORBIDDEN = (403, 7)  # PERMISSION_DENIED
    NOT_FOUND = (404, 12)  # UNIMPLEMENTED
    METHOD = (405, 12)
    TIMEOUT = (408, 4)  # DEADLINE_EXCEEDED
    TOO_LARGE = (413, 8)  # RESOURCE_EXHAUSTED; OTLP retries it only with RetryInfo
    UNSUPPORTED = (415, 3)
    UNKNOWN_ENCODING = (
        415,
        12,
    )  # over gRPC: its own codes for a message that cannot be decompressed
    OVERLOADED = (429, 8)
    HEAD_TOO_LARGE = (431, 3)
    CLIENT_GONE = (499, 1)  # CANCELLED; nginx's number, for the audit log only
    PERMANENT = (500, 13)  # INTERNAL: the Collector's answer to a permanent consumer error
    UNAVAILABLE = (503, 14)
    STORAGE_FULL = (
        507,
        8,
    )  # RESOURCE_EXHAUSTED without RetryInfo, which OTLP does not retry; nor does it retry 507

    @property
    def http(self) -> int:
        """HTTP status."""
        return self.value[0]

    @property
    def grpc(self) -> int:
        """google.rpc.Code."""
        return self.value[1]


class OtlpAnswer(NamedTuple):
    """The answer to one request, before it is written.

    Attributes:
        status: How it went.
        message: For a person; of a request that was taken, why a part of it was not, or a warning.
        retry_after_s: Whole seconds to wait, or 0.
        n_rejected: Items of a taken request that were refused.
    """

    status: AnswerStatus
    message: str = ""
    retry_after_s: int = 0
    n_rejected: int = 0


class Reason(StrEnum):
    """Why a request was refused; value of the label ``reason``."""

    DRAINING = "draining"
    PATH = "path"
    METHOD = "method"
    NO_PIPELINE = "no_pipeline"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN_CLUSTER = "forbidden_cluster"
    READ_ONLY = "read_only"
    CONTENT_TYPE = "content_type"
    CONTENT_ENCODING = "content_encoding"
    TOO_LARGE = "too_large"
    OVERLOADED = "overloaded"
    TIMEOUT = "timeout"
    CUT_SHORT = "cut_short"
    BAD_REQUEST = "bad_request"
    FLOOD = "flood"
    BAD_BODY = "bad_body"
    INTERNAL = "internal"


class RequestRefusal(NamedTuple):
    """A request that gets no further.

    Attributes:
        answer: What its sender reads.
        reason: What is counted.
        delay_ns: How long the answer is held back.
    """

    answer: OtlpAnswer
    reason: Reason
    delay_ns: int = 0


TAKEN: Final = OtlpAnswer(AnswerStatus.TAKEN)
DRAINING: Final = RequestRefusal(
    OtlpAnswer(AnswerStatus.UNAVAILABLE, "shutting down; push again", RETRY_AFTER_S),
    Reason.DRAINING,
)
OVERLOADED: Final = RequestRefusal(
    OtlpAnswer(AnswerStatus.OVERLOADED, "too many pushes at once; push again", RETRY_AFTER_S),
    Reason.OVERLOADED,
)
CUT_SHORT: Final = RequestRefusal(
    OtlpAnswer(AnswerStatus.CLIENT_GONE, "the sender went away"), Reason.CUT_SHORT
)

_RESPONSES: Final = {
    Signal.METRICS: (ExportMetricsServiceResponse, "rejected_data_points", "rejectedDataPoints"),
    Signal.LOGS: (ExportLogsServiceResponse, "rejected_log_records", "rejectedLogRecords"),
    Signal.TRACES: (ExportTraceServiceResponse, "rejected_spans", "rejectedSpans"),
}
TAKEN_JSON: Final = b'{"partialSuccess":{}}'
TAKEN_PROTOBUF: Final = b""


def encode_answer(answer: OtlpAnswer, signal: Signal, *, is_json: bool) -> bytes:
    """The body of an answer over HTTP, or the message of one over gRPC that was taken.

    Source: OTLP specification 1.x, "Partial Success" (a warning has no rejected items and a message) and "Failures"
    (the body is a google.rpc.Status).
    """
    message = answer.message
    if answer.status is not AnswerStatus.TAKEN:
        code = answer.status.grpc
        if is_json:
            return msgspec.json.encode({"code": code, "message": message})
        return _serialize(status_pb2.Status(code=code, message=message))
    if not answer.n_rejected and not message:
        return TAKEN_JSON if is_json else TAKEN_PROTOBUF
    response_type, field, camel = _RESPONSES[signal]
    if is_json:
        partial = {camel: str(answer.n_rejected), "errorMessage": message}
        return msgspec.json.encode({"partialSuccess": partial})
    response = response_type()
    setattr(response.partial_success, field, answer.n_rejected)
    response.partial_success.error_message = message
    return _serialize(response)


def encode_retry_status(answer: OtlpAnswer) -> bytes:
    """A google.rpc.Status with RetryInfo, for gRPC's ``grpc-status-details-bin``."""
    status = status_pb2.Status(code=answer.status.grpc, message=answer.message)
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.seconds = answer.retry_after_s
    status.details.add().Pack(retry)
    return _serialize(status)


def _serialize(message: object) -> bytes:
    encoded: bytes = message.SerializeToString()  # type: ignore[attr-defined]
    return encoded
