"""OTLP export requests: decode, read, build, merge, encode.

`Export` is one request in the encoding it came in; `iter_points` and `iter_log_rows` give rows to exporters;
`build_metrics` and its neighbours make requests. Nothing here opens a socket or reads a clock.
"""

from ingero.otlp.codec.build import (
    build_attributes,
    build_gauge,
    build_logs,
    build_metrics,
    build_number,
    build_sum,
    build_traces,
    build_value,
    merge_exports,
    split_export,
)
from ingero.otlp.codec.export import (
    Export,
    decode_export,
    decode_protobuf,
    encode_json,
    encode_protobuf,
)
from ingero.otlp.codec.points import (
    LogEntry,
    LogEntryReader,
    LogRow,
    Point,
    PointDistribution,
    PointKind,
    Temporality,
    iter_log_entries,
    iter_log_rows,
    iter_points,
    read_log_entries,
)

__all__ = [
    "Export",
    "LogEntry",
    "LogEntryReader",
    "LogRow",
    "Point",
    "PointDistribution",
    "PointKind",
    "Temporality",
    "build_attributes",
    "build_gauge",
    "build_logs",
    "build_metrics",
    "build_number",
    "build_sum",
    "build_traces",
    "build_value",
    "decode_export",
    "decode_protobuf",
    "encode_json",
    "encode_protobuf",
    "iter_log_entries",
    "iter_log_rows",
    "iter_points",
    "merge_exports",
    "read_log_entries",
    "split_export",
]
