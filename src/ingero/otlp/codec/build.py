"""Making exports: for agents that push, processors that emit, and batching.

Built as structs, so JSON needs no conversion and protobuf needs one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ingero.errors import BadDataError
from ingero.otlp.codec import structs
from ingero.otlp.codec.export import Export, find_kind
from ingero.otlp.names import Signal

CUMULATIVE = 2
"""AggregationTemporality of every sum this project sends."""


def build_value(value: object) -> structs.AnyValue:
    """A Python value as an AnyValue: str, bool, int, float, bytes, a sequence or a mapping of these, or None.

    Raises:
        BadDataError: Of another type, or an integer beyond 64 bits.
    """
    if value is None:
        return structs.AnyValue()
    if isinstance(value, bool):  # before int: a bool is one
        return structs.AnyValue(bool_value=value)
    if isinstance(value, str):
        return structs.AnyValue(string_value=str(value))
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise BadDataError(f"{value} does not fit a 64-bit attribute")
        return structs.AnyValue(int_value=int(value))
    if isinstance(value, float):
        return structs.AnyValue(double_value=float(value))
    return _build_container(value)


def _build_container(value: object) -> structs.AnyValue:
    if isinstance(value, bytes):
        return structs.AnyValue(bytes_value=value)
    if isinstance(value, Mapping):
        return structs.AnyValue(kvlist_value=structs.KeyValueList(build_attributes(value)))
    if isinstance(value, Sequence):
        return structs.AnyValue(array_value=structs.ArrayValue([build_value(v) for v in value]))
    raise BadDataError(f"an attribute cannot hold a {type(value).__name__}")


def build_attributes(attributes: Mapping[str, Any]) -> list[structs.KeyValue]:
    """Attributes in the mapping's order. Raises BadDataError."""
    return [structs.KeyValue(str(key), build_value(value)) for key, value in attributes.items()]


def build_number(
    value: float, time_unix_nano: int, attributes: Mapping[str, Any] | None = None
) -> structs.NumberDataPoint:
    """A point: an int stays an int on the wire, a float a double."""
    is_int = isinstance(value, int)
    return structs.NumberDataPoint(
        attributes=build_attributes(attributes) if attributes else [],
        time_unix_nano=time_unix_nano,
        as_int=int(value) if is_int else None,
        as_double=None if is_int else float(value),
    )


def build_gauge(
    name: str, points: Sequence[structs.NumberDataPoint], unit: str = "1", description: str = ""
) -> structs.Metric:
    """A gauge with its points."""
    return structs.Metric(
        name=name, unit=unit, description=description, gauge=structs.Gauge(list(points))
    )


def build_sum(
    name: str, points: Sequence[structs.NumberDataPoint], unit: str = "1", description: str = ""
) -> structs.Metric:
    """A monotonic cumulative sum with its points."""
    return structs.Metric(
        name=name,
        unit=unit,
        description=description,
        sum=structs.Sum(list(points), aggregation_temporality=CUMULATIVE, is_monotonic=True),
    )


def build_metrics(
    resource: Mapping[str, Any],
    metrics: Sequence[structs.Metric],
    scope: str,
    version: str = "",
) -> Export:
    """A metrics export of one resource and one scope."""
    scoped = structs.ScopeMetrics(structs.InstrumentationScope(scope, version), list(metrics))
    entry = structs.ResourceMetrics(structs.Resource(build_attributes(resource)), [scoped])
    return Export.from_tree(Signal.METRICS, structs.MetricsRequest([entry]))


def build_logs(
    resource: Mapping[str, Any], records: Sequence[structs.LogRecord], scope: str, version: str = ""
) -> Export:
    """A logs export of one resource and one scope."""
    scoped = structs.ScopeLogs(structs.InstrumentationScope(scope, version), list(records))
    entry = structs.ResourceLogs(structs.Resource(build_attributes(resource)), [scoped])
    return Export.from_tree(Signal.LOGS, structs.LogsRequest([entry]))


def build_traces(
    resource: Mapping[str, Any], spans: Sequence[structs.Span], scope: str, version: str = ""
) -> Export:
    """A traces export of one resource and one scope."""
    scoped = structs.ScopeSpans(structs.InstrumentationScope(scope, version), list(spans))
    entry = structs.ResourceSpans(structs.Resource(build_attributes(resource)), [scoped])
    return Export.from_tree(Signal.TRACES, structs.TracesRequest([entry]))


_ENTRIES = {
    Signal.METRICS: "resource_metrics",
    Signal.LOGS: "resource_logs",
    Signal.TRACES: "resource_spans",
}
_REQUESTS: dict[Signal, type[structs.Request]] = {
    Signal.METRICS: structs.MetricsRequest,
    Signal.LOGS: structs.LogsRequest,
    Signal.TRACES: structs.TracesRequest,
}


def merge_exports(exports: Sequence[Export]) -> Export:
    """One export with the resources of several of one signal, in order; the inputs stay as they are.

    Stays protobuf when every input is; otherwise becomes structs, which share their parts with the inputs.

    Raises:
        BadDataError: There is none, or their signals differ.
    """
    if not exports or any(export.signal is not exports[0].signal for export in exports):
        raise BadDataError("only exports of one signal can be merged")
    if len(exports) == 1:
        return exports[0]
    signal = exports[0].signal
    entries = _ENTRIES[signal]
    size_bytes = sum(export.size_bytes for export in exports)
    if all(export.is_message for export in exports):
        merged = type(exports[0].message)()
        for export in exports:
            merged.MergeFrom(export.message)
        return Export.from_message(signal, merged, size_bytes)
    gathered = [entry for export in exports for entry in getattr(export.tree, entries)]
    return Export.from_tree(signal, _REQUESTS[signal](gathered), size_bytes)


def split_export(export: Export, max_items: int) -> list[Export]:
    """Cut an export into ones of at most ``max_items`` points, records or spans each, in order.

    A metric's points may fall into two exports; resources, scopes and metric headers are repeated. Byte sizes are
    shared out by item count.
    """
    if max_items <= 0:
        raise ValueError(f"max_items is {max_items}; it must be positive")
    n_items = export.n_items
    if n_items <= max_items:
        return [export]
    parts: list[Export] = []
    rest = export.tree
    while True:
        taken, rest = _cut(rest, max_items)
        part = Export.from_tree(export.signal, taken)
        part.size_bytes = export.size_bytes * part.n_items // n_items
        parts.append(part)
        if rest is None:
            return parts


_CHILDREN: dict[type[structs.Node], str] = {
    structs.MetricsRequest: "resource_metrics",
    structs.ResourceMetrics: "scope_metrics",
    structs.ScopeMetrics: "metrics",
    structs.LogsRequest: "resource_logs",
    structs.ResourceLogs: "scope_logs",
    structs.ScopeLogs: "log_records",
    structs.TracesRequest: "resource_spans",
    structs.ResourceSpans: "scope_spans",
    structs.ScopeSpans: "spans",
}


def _children(node: structs.Proto) -> list[Any]:
    if isinstance(node, structs.Metric):
        kind = find_kind(node)
        return getattr(node, kind).data_points if kind else []
    return getattr(node, _CHILDREN[type(node)])  # type: ignore[no-any-return]


def _n_items(node: structs.Proto) -> int:
    if isinstance(node, structs.Metric | structs.ScopeLogs | structs.ScopeSpans):
        return len(_children(node))
    if type(node) not in _CHILDREN:
        return 1
    return sum(_n_items(child) for child in _children(node))


def _with_children(node: structs.Proto, children: list[Any]) -> structs.Proto:
    if not isinstance(node, structs.Metric):
        return replace(node, **{_CHILDREN[type(node)]: children})
    kind = find_kind(node)
    return replace(node, **{kind: replace(getattr(node, kind), data_points=children)})


def _cut(node: structs.Proto, room: int) -> tuple[Any, Any]:
    """The first ``room`` items under a node and the rest, or None when all fit."""
    children = _children(node)
    taken = []
    for index, child in enumerate(children):
        n_items = _n_items(child)
        if n_items <= room:
            taken.append(child)
            room -= n_items
            continue
        rest = [child, *children[index + 1 :]]
        if room:
            head, rest[0] = _cut(child, room)
            taken.append(head)
        return _with_children(node, taken), _with_children(node, rest)
    return node, None
