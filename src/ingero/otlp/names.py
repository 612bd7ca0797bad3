"""Names of the protocol itself. Source: OpenTelemetry protocol specification 1.x."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Signal(StrEnum):
    """The three OTLP signals; the value is the pipeline's type in a Collector configuration."""

    METRICS = "metrics"
    LOGS = "logs"
    TRACES = "traces"


class ContentType(StrEnum):
    """Bodies this project reads and writes."""

    PROTOBUF = "application/x-protobuf"  # OTLP/HTTP
    JSON = "application/json"
    NDJSON = "application/x-ndjson"


SIGNAL_PATHS: Final = {
    Signal.METRICS: "/v1/metrics",
    Signal.LOGS: "/v1/logs",
    Signal.TRACES: "/v1/traces",
}
"""Where OTLP/HTTP posts each signal. Source: OTLP specification, "OTLP/HTTP Request", default URL paths."""
GRPC_SERVICES: Final = {
    Signal.METRICS: "opentelemetry.proto.collector.metrics.v1.MetricsService",
    Signal.LOGS: "opentelemetry.proto.collector.logs.v1.LogsService",
    Signal.TRACES: "opentelemetry.proto.collector.trace.v1.TraceService",
}
"""The service of each signal; its only method is ``Export``. Source: opentelemetry-proto, collector services."""
GRPC_STATUS_DETAILS: Final = "grpc-status-details-bin"
"""Trailing metadata with a google.rpc.Status. Source: grpc.io, "Error handling", richer error model."""
