"""`Export`: one OTLP export request, in the encoding it came in until somebody needs the other.

A protobuf body stays a upb message and a JSON body stays a struct tree; both answer the same field names, so the
walks in this package serve both. Converting is explicit, cached and off the hot path.

Sources: OTLP specification 1.x (OTLP/HTTP request bodies; JSON Protobuf Encoding).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import msgspec
from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from ingero.errors import BadDataError
from ingero.otlp.codec import structs
from ingero.otlp.codec.convert import encode_tree, message_to_tree, tree_to_message
from ingero.otlp.names import ContentType, Signal

_MESSAGE_DECODERS: Final[dict[Signal, Callable[[bytes], Message]]] = {
    Signal.METRICS: ExportMetricsServiceRequest.FromString,
    Signal.LOGS: ExportLogsServiceRequest.FromString,
    Signal.TRACES: ExportTraceServiceRequest.FromString,
}
_TREES: Final[dict[Signal, type[structs.Request]]] = {
    Signal.METRICS: structs.MetricsRequest,
    Signal.LOGS: structs.LogsRequest,
    Signal.TRACES: structs.TracesRequest,
}
_JSON_DECODERS: Final[dict[Signal, msgspec.json.Decoder[Any]]] = {
    signal: msgspec.json.Decoder(tree, strict=False) for signal, tree in _TREES.items()
}


MetricEntry: TypeAlias = tuple[structs.Proto, structs.Proto, str, str, Sequence[structs.Proto]]
"""A metric found in an export: its ScopeMetrics, itself, its name, its kind (empty when it has none), its points."""

ResourceEntry: TypeAlias = tuple[structs.Proto, list[MetricEntry]]
"""A ResourceMetrics and its metrics in order."""

METRIC_KINDS: Final = ("gauge", "sum", "histogram", "exponential_histogram", "summary")
"""Fields of a Metric's oneof ``data``."""


_DIGITS_AS_0: Final = (
    bytes(ord("0") if chr(byte).isdecimal() else ord(" ") for byte in range(128)) + b" " * 128
)
_LONG_NUMBER: Final = b"0" * 20
_UINT64_MAX: Final = 2**64 - 1
MAX_NESTED_VALUES: Final = 30
"""Lists and maps in one another. Protobuf reads messages 100 deep: each takes three, the way to an exemplar's nine."""
_NOT_STRUCTURE: Final = bytes(set(range(256)) - set(b'[]{}"'))
_MAX_BRACKETS: Final = 3 * MAX_NESTED_VALUES
"""Within one another: with so few of them no more values can be, as a list has three."""


class Export:
    """One OTLP export request. Read-only for everyone it is handed to.

    Make one with `decode_export`, `Export.from_message` or `Export.from_tree`.

    Attributes:
        signal: Which of the three requests it is.
        size_bytes: Length of the body it was decoded from, uncompressed; 0 for one built here.
        is_message: Whether it was made of a upb message, which `root` and `metrics` are of then; of structs otherwise.
            It stays so when somebody asks for the other form: what one reader found is of the same kind for the next.
    """

    __slots__ = ("_message", "_metrics", "_n_items", "_tree", "is_message", "signal", "size_bytes")

    def __init__(
        self,
        signal: Signal,
        message: Message | None,
        tree: structs.Request | None,
        size_bytes: int = 0,
    ) -> None:
        self.signal = signal
        self.size_bytes = size_bytes
        self.is_message = message is not None
        self._message = message
        self._tree = tree
        self._n_items = -1
        self._metrics: list[ResourceEntry] | None = None

    @classmethod
    def from_message(cls, signal: Signal, message: Message, size_bytes: int = 0) -> Export:
        """Wrap a upb message of opentelemetry-proto."""
        return cls(signal, message, None, size_bytes)

    @classmethod
    def from_tree(cls, signal: Signal, tree: structs.Request, size_bytes: int = 0) -> Export:
        """Wrap a struct tree."""
        return cls(signal, None, tree, size_bytes)

    @property
    def root(self) -> structs.Proto:
        """The request as it was made: upb message or struct; both have the proto's field names."""
        return self._message if self.is_message else self._tree

    @property
    def message(self) -> structs.Proto:
        """The request as a upb message; converted and kept on first use.

        Raises:
            BadDataError: A JSON value does not fit its protobuf field.
        """
        if self._message is None:
            assert self._tree is not None
            self._message = tree_to_message(self._tree)
        return self._message

    @property
    def tree(self) -> structs.Proto:
        """The request as structs (`ingero.otlp.codec.structs`); converted and kept on first use."""
        if self._tree is None:
            assert self._message is not None
            self._tree = message_to_tree(self._message)  # type: ignore[assignment]
        return self._tree

    @property
    def metrics(self) -> list[ResourceEntry]:
        """The metrics of a metrics export by resource, found once for everyone who walks them.

        Reaching into a upb message costs more than what is read there: a caller that needs only some metrics by name,
        their kind or their number starts here.
        """
        if self._metrics is None:
            list_metrics = _list_messages if self.is_message else _list_trees
            self._metrics, self._n_items = list_metrics(self.root)
        return self._metrics

    @property
    def n_items(self) -> int:
        """Data points, log records or spans; counted once."""
        if self._n_items < 0:
            if self.signal is Signal.METRICS:
                _ = self.metrics  # counts while it lists
            elif self.signal is Signal.LOGS:
                self._n_items = _count_records(self.root)
            else:
                self._n_items = _count_spans(self.root)
        return self._n_items


def decode_export(body: bytes, signal: Signal, content_type: str) -> Export:
    """Decode the body of an OTLP/HTTP request or a gRPC message.

    Args:
        body: Uncompressed.
        signal: Which request it is.
        content_type: ``application/x-protobuf`` or ``application/json``; parameters after ``;`` are ignored.

    Raises:
        BadDataError: The body is not such a request, or the content type is neither of the two.
    """
    kind = content_type.partition(";")[0].strip().lower() if ";" in content_type else content_type
    if kind == ContentType.PROTOBUF:
        return decode_protobuf(body, signal)
    if kind == ContentType.JSON:
        return _decode_json(body, signal)
    raise BadDataError(
        f"content type {content_type!r} is neither {ContentType.PROTOBUF} nor {ContentType.JSON}"
    )


def decode_protobuf(body: bytes, signal: Signal) -> Export:
    """Decode a protobuf body. Raises BadDataError."""
    try:
        message = _MESSAGE_DECODERS[signal](body)
    except DecodeError as error:
        raise BadDataError(f"not an OTLP {signal} request in protobuf: {error}") from error
    return Export(signal, message, None, len(body))


def _decode_json(body: bytes, signal: Signal) -> Export:
    try:
        tree = _JSON_DECODERS[signal].decode(body)
    except msgspec.ValidationError as error:
        tree = _decode_json_with_nulls(body, signal, error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadDataError(f"not an OTLP {signal} request in JSON: {error}") from error
    if _LONG_NUMBER in body.translate(_DIGITS_AS_0):  # six times as fast as a regular expression
        _check_integers(tree, signal)
    if _may_be_too_deep(body):
        _check_nesting(tree, signal)
    return Export(signal, None, tree, len(body))


def _may_be_too_deep(body: bytes) -> bool:
    """Whether the walk of `_check_nesting` is needed: seldom, since it costs more than decoding.

    Most bodies have few lists and maps as values, and no letter in another spelling. Of others the brackets are looked
    at: those that enclose nothing are taken away, up to two levels at a time.
    """
    n_values = body.count(b"arrayValue") + body.count(b"kvlistValue")
    has_escapes = b"\\" in body  # one byte is found ten times as fast as several
    if n_values <= MAX_NESTED_VALUES and not (has_escapes and b"\\u00" in body):
        return False
    if has_escapes:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = body.translate(None, _NOT_STRUCTURE).replace(b'""', b"")
    if b'"' in brackets:  # some are text
        brackets = b"".join(brackets.split(b'"')[::2])
    for _ in range(_MAX_BRACKETS // 2):
        if not brackets:
            break
        brackets = brackets.replace(b"{}", b"").replace(b"[]", b"")
    return bool(brackets)


def _check_nesting(root: structs.Proto, signal: Signal) -> None:
    """Refuse a request that protobuf could not read back."""
    waiting = [(root, 0)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, list):
            waiting += [(item, depth) for item in value]
        elif isinstance(value, structs.Node):
            depth += isinstance(value, structs.ArrayValue | structs.KeyValueList)
            if depth > MAX_NESTED_VALUES:
                raise BadDataError(
                    f"not an OTLP {signal} request in JSON: more than {MAX_NESTED_VALUES} lists and maps"
                    " in one another"
                )
            waiting += [(getattr(value, name), depth) for name in value.__struct_fields__]


def _check_integers(root: structs.Proto, signal: Signal) -> None:
    """Refuse a request with an integer that no field of the proto can hold."""
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, structs.Node):
            waiting += [getattr(value, name) for name in value.__struct_fields__]
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, int) and value > _UINT64_MAX:
            raise BadDataError(f"not an OTLP {signal} request in JSON: {value!r:.40} is too large")


def _decode_json_with_nulls(
    body: bytes, signal: Signal, reason: msgspec.ValidationError
) -> structs.Request:
    """Read again without any ``"key": null``, which proto JSON allows and Go's encoder writes for nil slices."""
    if b"null" not in body:
        raise BadDataError(f"not an OTLP {signal} request in JSON: {reason}") from reason
    try:
        document = _without_nulls(msgspec.json.decode(body))
        return msgspec.convert(document, _TREES[signal], strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadDataError(f"not an OTLP {signal} request in JSON: {error}") from error


def _without_nulls(value: structs.Proto) -> structs.Proto:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def encode_protobuf(export: Export) -> bytes:
    """Serialise as protobuf. Raises BadDataError when a JSON value does not fit."""
    encoded: bytes = export.message.SerializeToString()
    return encoded


def encode_json(export: Export) -> bytes:
    """Serialise as OTLP/JSON, 64-bit integers as strings."""
    return encode_tree(export.tree)


def _list_messages(root: structs.Proto) -> tuple[list[ResourceEntry], int]:
    """The metrics of a upb request and the number of their points."""
    found: list[ResourceEntry] = []
    n_points = 0
    for entry in root.resource_metrics:
        metrics: list[MetricEntry] = []
        for scope in entry.scope_metrics:
            for metric in scope.metrics:
                kind = "gauge"
                points = metric.gauge.data_points
                n_of_metric = len(points)
                if (
                    not n_of_metric
                ):  # reading a gauge that is not there costs less than asking for the kind
                    kind = metric.WhichOneof("data") or ""
                    points = getattr(metric, kind).data_points if kind else ()
                    n_of_metric = len(points)
                n_points += n_of_metric
                metrics.append((scope, metric, metric.name, kind, points))
        found.append((entry, metrics))
    return found, n_points


def _list_trees(root: structs.Proto) -> tuple[list[ResourceEntry], int]:
    """The metrics of a struct request and the number of their points."""
    found: list[ResourceEntry] = []
    n_points = 0
    for entry in root.resource_metrics:
        metrics: list[MetricEntry] = []
        for scope in entry.scope_metrics:
            for metric in scope.metrics:
                gauge = metric.gauge
                if gauge is not None:
                    kind, points = "gauge", gauge.data_points
                else:
                    kind = find_kind(metric)
                    points = getattr(metric, kind).data_points if kind else ()
                n_points += len(points)
                metrics.append((scope, metric, metric.name, kind, points))
        found.append((entry, metrics))
    return found, n_points


def _count_records(root: structs.Proto) -> int:
    return sum(
        len(scope_logs.log_records)
        for resource_logs in root.resource_logs
        for scope_logs in resource_logs.scope_logs
    )


def _count_spans(root: structs.Proto) -> int:
    return sum(
        len(scope_spans.spans)
        for resource_spans in root.resource_spans
        for scope_spans in resource_spans.scope_spans
    )


def find_kind(metric: structs.Metric) -> str:
    """Which of `METRIC_KINDS` a metric is; empty when it is none."""
    return next((kind for kind in METRIC_KINDS if getattr(metric, kind) is not None), "")
