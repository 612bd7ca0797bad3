"""Names of the protocol itself. Source: OpenTelemetry protocol specification 1.x."""

from __future__ import annotations

from enum import StrEnum


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
