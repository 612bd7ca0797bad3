"""Metrics into ``events`` and ``histograms``, and what nodes say about themselves into ``nodes``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from ingero.echo.db.rows import NodeRow, Rows
from ingero.echo.ingest.origin import (
    Origin,
    Origins,
    Series,
    plausible_ns,
    read_origin,
    to_timestamp,
)
from ingero.echo.schema import EVENTS, HISTOGRAMS
from ingero.wire.names import Attribute, Metric
from ingero.wire.otlp import Export, Point, PointKind, Temporality, iter_points, structs

_KINDS: Final = {
    Temporality.CUMULATIVE: "cumulative",
    Temporality.DELTA: "delta",
    Temporality.UNSPECIFIED: "cumulative",
}
_MAX_BUCKETS: Final = 1024
_STATE: Final = str(Attribute.NODE_STATE)
_GPU_MODEL: Final = str(Attribute.GPU_MODEL)
_GPU_COUNT: Final = str(Attribute.GPU_COUNT)
_PROVIDER: Final = str(Attribute.PROVIDER)
_WORLD_SIZE: Final = str(Attribute.WORLD_SIZE)
_NODE_RANK: Final = str(Attribute.NODE_RANK)


def add_metrics(rows: Rows, export: Export, origins: Origins, hint: str, now_ns: int) -> None:
    """Append every data point of a metrics export.

    Args:
        rows: Where to.
        export: The request.
        origins: This thread's caches.
        hint: Cluster that the request named, or empty.
        now_ns: Arrival, for points without a plausible time.
    """
    resource, origin = None, None
    for point in iter_points(export):
        if origin is None or point.resource is not resource:
            resource, origin = point.resource, read_origin(point.resource)
        series = origins.series(origin, point.name, point.attributes, hint)
        if point.kind is PointKind.GAUGE or point.kind is PointKind.SUM:
            _add_number(rows, point, series, origin, now_ns)
        elif point.kind is PointKind.SUMMARY:
            _add_summary(rows, point, (origins, origin, hint), now_ns)
        else:
            _add_histogram(rows, point, series, now_ns)
        if series.node_id:
            _note_node(rows, point, series, origin, now_ns)


def _add_number(rows: Rows, point: Point, series: Series, origin: Origin, now_ns: int) -> None:
    sent_ns = point.time_unix_nano
    value = point.value
    rows.table(EVENTS).add(
        series.hash,
        sent_ns or now_ns,
        (
            to_timestamp(plausible_ns(sent_ns, now_ns)),
            series.cluster_id,
            series.node_id,
            point.name,
            float(value) if value is not None and math.isfinite(value) else None,
            origin.host,
            "gauge" if point.kind is PointKind.GAUGE else _KINDS[point.temporality],
            point.unit,
            series.attributes,
        ),
    )
    rows.n_rows += 1


def _add_summary(rows: Rows, point: Point, where: tuple[Origins, Origin, str], now_ns: int) -> None:
    origins, origin, hint = where
    sent_ns = point.time_unix_nano
    at = to_timestamp(plausible_ns(sent_ns, now_ns))
    for one in point.raw.quantile_values:
        attributes = {**point.attributes, "quantile": one.quantile}
        series = origins.series(origin, point.name, attributes, hint)
        value = one.value if math.isfinite(one.value) else None
        rows.table(EVENTS).add(
            series.hash,
            sent_ns or now_ns,
            (
                at,
                series.cluster_id,
                series.node_id,
                point.name,
                value,
                origin.host,
                "quantile",
                point.unit,
                series.attributes,
            ),
        )
        rows.n_rows += 1


def _add_histogram(rows: Rows, point: Point, series: Series, now_ns: int) -> None:
    sent_ns, raw = point.time_unix_nano, point.raw
    distribution = point.distribution
    if distribution is not None:
        bounds, counts = list(distribution.bounds), list(distribution.bucket_counts)
    else:
        bounds, counts = _spell_out(raw)
    rows.table(HISTOGRAMS).add(
        series.hash,
        sent_ns or now_ns,
        (
            to_timestamp(plausible_ns(sent_ns, now_ns)),
            series.cluster_id,
            series.node_id,
            point.name,
            raw.count,
            _optional(raw, "sum"),
            _optional(raw, "min"),
            _optional(raw, "max"),
            bounds,
            counts,
            _KINDS[point.temporality],
            point.unit,
            series.attributes,
        ),
    )
    rows.n_rows += 1


def _optional(raw: structs.Proto, name: str) -> float | None:
    if hasattr(raw, "HasField") and not raw.HasField(name):
        return None
    value: float | None = getattr(raw, name)
    return value if value is not None and math.isfinite(value) else None


def _spell_out(raw: structs.Proto) -> tuple[list[float], list[int]]:
    """Bounds and counts of an exponential histogram, from the most negative bucket up; zero's bucket is one of them.

    Source: opentelemetry-proto, ExponentialHistogramDataPoint: bucket i of a side covers (base^i, base^(i+1)] with
    base = 2^(2^-scale), i counted from ``offset``.
    """
    negative = list(_iter_side(raw, raw.negative))
    positive = list(_iter_side(raw, raw.positive))
    buckets = [(-low, count) for low, _, count in reversed(negative)]
    buckets.append((raw.zero_threshold, raw.zero_count))
    if positive and positive[0][0] > raw.zero_threshold:
        buckets.append((positive[0][0], 0))
    buckets += [(high, count) for _, high, count in positive]
    return [bound for bound, _ in buckets], [*(count for _, count in buckets), 0]


def _iter_side(raw: structs.Proto, side: structs.Proto) -> Iterator[tuple[float, float, int]]:
    if side is None:
        return
    counts = list(side.bucket_counts)[:_MAX_BUCKETS]
    exponent = 2.0**-raw.scale
    for i, count in enumerate(counts, start=side.offset):
        low, high = i * exponent, (i + 1) * exponent
        if abs(high) < 1023:
            yield 2.0**low, 2.0**high, count


def _note_node(rows: Rows, point: Point, series: Series, origin: Origin, now_ns: int) -> None:
    key = (series.cluster_id, series.node_id)
    row = rows.nodes.get(key)
    if row is None:
        row = rows.nodes[key] = _describe_origin(origin)
        row["ts"] = to_timestamp(plausible_ns(point.time_unix_nano, now_ns))
    if point.name == Metric.HEALTH_SCORE:
        row["state"] = _text(point.attributes.get(_STATE))
    elif point.name == Metric.NODE_INFO:
        row["gpu_model"] = _text(point.attributes.get(_GPU_MODEL))
        row["gpu_count"] = _int32(point.attributes.get(_GPU_COUNT))


def _describe_origin(origin: Origin) -> NodeRow:
    row: NodeRow = {
        "host_attr": origin.host,
        "provider": _text(origin.attributes.get(_PROVIDER)),
        "world_size": _int32(origin.attributes.get(_WORLD_SIZE)),
        "node_rank": _int32(origin.attributes.get(_NODE_RANK)),
    }
    return {name: value for name, value in row.items() if value is not None}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _int32(value: object) -> int | None:
    return value if isinstance(value, int) and -(2**31) <= value < 2**31 else None
