"""OTLP/JSON as typed structs: the three export requests and everything inside them.

Field names are the proto's snake_case, so that a walk written for a protobuf message also walks a struct; msgspec
renames them to the camelCase of the wire. Decoding is lax on purpose: 64-bit integers arrive as numbers or as
strings, and ``"NaN"`` and ``"Infinity"`` are strings. Unknown fields are skipped.

A oneof is a set of fields of which at most one is not None. Trace and span ids stay hexadecimal text, as on the wire.

Source: opentelemetry-proto 1.x; OTLP specification, "JSON Protobuf Encoding" (hexadecimal ids, integer enums).
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

Proto: TypeAlias = Any
"""A struct of this module or the upb message of the same name: both answer the same field names."""
Value: TypeAlias = "str | bool | int | float | bytes | list[Value] | dict[str, Value] | None"
"""An AnyValue as Python holds it."""

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
UInt64 = Annotated[int, msgspec.Meta(ge=0)]
"""fixed64 on the wire. msgspec has no bound above 2⁶³−1, so the decoder holds values to 2⁶⁴−1 itself."""
UInt32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Hex = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-fA-F]{2})*\Z")]


class Node(msgspec.Struct, rename="camel", omit_defaults=True, gc=False):
    """Root of the tree's types; ``gc=False`` is sound because a decoded tree holds no cycle."""


class ArrayValue(Node):
    """A list of values."""

    values: list[AnyValue] = []


class KeyValueList(Node):
    """A map of values, in order."""

    values: list[KeyValue] = []


class AnyValue(Node):
    """One of seven kinds of value, or none."""

    string_value: str | None = None
    bool_value: bool | None = None
    int_value: Int64 | None = None
    double_value: float | None = None
    array_value: ArrayValue | None = None
    kvlist_value: KeyValueList | None = None
    bytes_value: bytes | None = None


class KeyValue(Node):
    """An attribute."""

    key: str = ""
    value: AnyValue | None = None


class Resource(Node):
    """Who produced the data."""

    attributes: list[KeyValue] = []
    dropped_attributes_count: UInt32 = 0


class InstrumentationScope(Node):
    """Which instrumentation produced the data."""

    name: str = ""
    version: str = ""
    attributes: list[KeyValue] = []
    dropped_attributes_count: UInt32 = 0


class Exemplar(Node):
    """A sample that fell into a point."""

    filtered_attributes: list[KeyValue] = []
    time_unix_nano: UInt64 = 0
    as_double: float | None = None
    as_int: Int64 | None = None
    span_id: Hex = ""
    trace_id: Hex = ""


class NumberDataPoint(Node):
    """A point of a gauge or a sum."""

    attributes: list[KeyValue] = []
    start_time_unix_nano: UInt64 = 0
    time_unix_nano: UInt64 = 0
    as_double: float | None = None
    as_int: Int64 | None = None
    exemplars: list[Exemplar] = []
    flags: UInt32 = 0


class HistogramDataPoint(Node):
    """A point of a histogram with explicit bounds."""

    attributes: list[KeyValue] = []
    start_time_unix_nano: UInt64 = 0
    time_unix_nano: UInt64 = 0
    count: UInt64 = 0
    sum: float | None = None
    bucket_counts: list[UInt64] = []
    explicit_bounds: list[float] = []
    exemplars: list[Exemplar] = []
    flags: UInt32 = 0
    min: float | None = None
    max: float | None = None


class Buckets(Node):
    """One side of an exponential histogram."""

    offset: Int32 = 0
    bucket_counts: list[UInt64] = []


class ExponentialHistogramDataPoint(Node):
    """A point of an exponential histogram."""

    attributes: list[KeyValue] = []
    start_time_unix_nano: UInt64 = 0
    time_unix_nano: UInt64 = 0
    count: UInt64 = 0
    sum: float | None = None
    scale: Int32 = 0
    zero_count: UInt64 = 0
    positive: Buckets | None = None
    negative: Buckets | None = None
    flags: UInt32 = 0
    exemplars: list[Exemplar] = []
    min: float | None = None
    max: float | None = None
    zero_threshold: float = 0.0


class ValueAtQuantile(Node):
    """One quantile of a summary."""

    quantile: float = 0.0
    value: float = 0.0


class SummaryDataPoint(Node):
    """A point of a summary."""

    attributes: list[KeyValue] = []
    start_time_unix_nano: UInt64 = 0
    time_unix_nano: UInt64 = 0
    count: UInt64 = 0
    sum: float = 0.0
    quantile_values: list[ValueAtQuantile] = []
    flags: UInt32 = 0


class Gauge(Node):
    """Points that stand alone."""

    data_points: list[NumberDataPoint] = []


class Sum(Node):
    """Points that add up."""

    data_points: list[NumberDataPoint] = []
    aggregation_temporality: Int32 = 0
    is_monotonic: bool = False


class Histogram(Node):
    """Distributions with explicit bounds."""

    data_points: list[HistogramDataPoint] = []
    aggregation_temporality: Int32 = 0


class ExponentialHistogram(Node):
    """Distributions with exponential bounds."""

    data_points: list[ExponentialHistogramDataPoint] = []
    aggregation_temporality: Int32 = 0


class Summary(Node):
    """Quantiles computed by the sender."""

    data_points: list[SummaryDataPoint] = []


class Metric(Node):
    """A name and at most one kind of data."""

    name: str = ""
    description: str = ""
    unit: str = ""
    gauge: Gauge | None = None
    sum: Sum | None = None
    histogram: Histogram | None = None
    exponential_histogram: ExponentialHistogram | None = None
    summary: Summary | None = None
    metadata: list[KeyValue] = []


class ScopeMetrics(Node):
    """Metrics of one scope."""

    scope: InstrumentationScope | None = None
    metrics: list[Metric] = []
    schema_url: str = ""


class ResourceMetrics(Node):
    """Metrics of one resource."""

    resource: Resource | None = None
    scope_metrics: list[ScopeMetrics] = []
    schema_url: str = ""


class LogRecord(Node):
    """One log record."""

    time_unix_nano: UInt64 = 0
    observed_time_unix_nano: UInt64 = 0
    severity_number: Int32 = 0
    severity_text: str = ""
    body: AnyValue | None = None
    attributes: list[KeyValue] = []
    dropped_attributes_count: UInt32 = 0
    flags: UInt32 = 0
    trace_id: Hex = ""
    span_id: Hex = ""
    event_name: str = ""


class ScopeLogs(Node):
    """Log records of one scope."""

    scope: InstrumentationScope | None = None
    log_records: list[LogRecord] = []
    schema_url: str = ""


class ResourceLogs(Node):
    """Log records of one resource."""

    resource: Resource | None = None
    scope_logs: list[ScopeLogs] = []
    schema_url: str = ""


class SpanEvent(Node):
    """Something that happened during a span."""

    time_unix_nano: UInt64 = 0
    name: str = ""
    attributes: list[KeyValue] = []
    dropped_attributes_count: UInt32 = 0


class SpanLink(Node):
    """A pointer to another span."""

    trace_id: Hex = ""
    span_id: Hex = ""
    trace_state: str = ""
    attributes: list[KeyValue] = []
    dropped_attributes_count: UInt32 = 0
    flags: UInt32 = 0


class Status(Node):
    """How a span ended."""

    message: str = ""
    code: Int32 = 0


class Span(Node):
    """One span."""

    trace_id: Hex = ""
    span_id: Hex = ""
    trace_state: str = ""
    parent_span_id: Hex = ""
    flags: UInt32 = 0
    name: str = ""
    kind: Int32 = 0
    start_time_unix_nano: UInt64 = 0
    end_time_unix_nano: UInt64 = 0
    attributes: list[KeyValue] = []
    dropped_attributes_count: UInt32 = 0
    events: list[SpanEvent] = []
    dropped_events_count: UInt32 = 0
    links: list[SpanLink] = []
    dropped_links_count: UInt32 = 0
    status: Status | None = None


class ScopeSpans(Node):
    """Spans of one scope."""

    scope: InstrumentationScope | None = None
    spans: list[Span] = []
    schema_url: str = ""


class ResourceSpans(Node):
    """Spans of one resource."""

    resource: Resource | None = None
    scope_spans: list[ScopeSpans] = []
    schema_url: str = ""


class MetricsRequest(Node):
    """ExportMetricsServiceRequest."""

    resource_metrics: list[ResourceMetrics] = []


class LogsRequest(Node):
    """ExportLogsServiceRequest."""

    resource_logs: list[ResourceLogs] = []


class TracesRequest(Node):
    """ExportTraceServiceRequest."""

    resource_spans: list[ResourceSpans] = []


Request = MetricsRequest | LogsRequest | TracesRequest
