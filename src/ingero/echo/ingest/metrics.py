"""Metrics into ``events`` and ``histograms``, and what nodes say about themselves into ``nodes``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from ingero.echo.db.deduplication import stable_hash
from ingero.echo.db.rows import NodeKey, NodeRow, Rows, build_reports
from ingero.echo.ingest.histograms import Buckets, read_explicit, read_exponential
from ingero.echo.ingest.limits import Refusals, RefusedRecordError
from ingero.echo.ingest.origin import (
    Origin,
    Origins,
    OriginSeries,
    plausible_ns,
    row_ns,
    to_timestamp,
)
from ingero.echo.schema.tables import EVENTS, HISTOGRAMS
from ingero.otlp.codec import Export, Point, PointKind, Temporality, iter_points, structs
from ingero.wire.names import Attribute, MetricName
from ingero.wire.typed import read_small, read_text

_KINDS: Final = {
    Temporality.CUMULATIVE: "cumulative",
    Temporality.DELTA: "delta",
    Temporality.UNSPECIFIED: "cumulative",
}
_STATE: Final = str(Attribute.NODE_STATE)
_GPU_MODEL: Final = str(Attribute.GPU_MODEL)
_GPU_COUNT: Final = str(Attribute.GPU_COUNT)
_PROVIDER: Final = str(Attribute.PROVIDER)
_WORLD_SIZE: Final = str(Attribute.WORLD_SIZE)
_NODE_RANK: Final = str(Attribute.NODE_RANK)


_Where = tuple[Origins, Origin, str]
_Stream = tuple[int, str]
"""Hash of kind, temporality, unit and scope, and the column ``stream``, in which the resource is, too."""
_Streams = dict[tuple[str | int, ...], _Stream]
"""By the resource's hash and these; of the points of one request."""


@dataclass(slots=True)
class _NodeFacts:
    """What the points of one request say of nodes.

    Attributes:
        facts: By node, of each column of NODES that is known its newest value and the time of that.
        seen_ns: When there last was anything at all of a node in the resource with this hash.
    """

    facts: dict[NodeKey, dict[str, tuple[datetime, Any]]] = field(default_factory=dict)
    seen_ns: dict[tuple[NodeKey, int], int] = field(default_factory=dict)


def add_metrics(rows: Rows, export: Export, origins: Origins, hint: str, now_ns: int) -> Refusals:
    """Append every data point of a metrics export that can be kept.

    Args:
        rows: Where to.
        export: The request.
        origins: The caches.
        hint: Cluster that the request named, or empty.
        now_ns: Arrival, for points without a plausible time.

    Returns:
        The points that were not appended.
    """
    refusals, streams, noted = Refusals(), _Streams(), _NodeFacts()
    resource, origin = None, None
    for point in iter_points(export):
        if origin is None or point.resource is not resource:
            resource, origin = point.resource, origins.read(point.resource)
            rows.name_cluster(origin.cluster_id)
        try:
            _add_point(rows, point, (origins, origin, hint), (streams, noted), now_ns)
        except RefusedRecordError as error:
            refusals.add(error)
    for key, facts in noted.facts.items():
        rows.nodes[key] = build_reports(facts)
    return refusals


def _add_point(
    rows: Rows, point: Point, where: _Where, request: tuple[_Streams, _NodeFacts], now_ns: int
) -> None:
    (origins, origin, hint), (streams, noted) = where, request
    origins.limits.check_name(point.unit, "unit")
    series = origins.series(origin, point.name, point.attributes, hint)
    rows.clusters.add(series.cluster_id)
    stream = _find_stream(point, origin, streams)
    if point.kind is PointKind.GAUGE or point.kind is PointKind.SUM:
        _add_number(rows, point, series, (origin, stream), now_ns)
    else:
        if point.kind is PointKind.SUMMARY:
            _add_quantiles(rows, point, where, stream, now_ns)
        _add_distribution(rows, point, series, stream, now_ns)
    if series.node_id:
        at_ns = min(plausible_ns(point.time_unix_nano, now_ns), now_ns)
        _note_node(noted, point, (series.cluster_id, series.node_id), origin, at_ns)


def _find_stream(point: Point, origin: Origin, streams: _Streams) -> _Stream:
    """What tells points of one name, resource, attributes and time apart beside their value.

    Source: OpenTelemetry metrics data model, "Timeseries Model": the scope, kind, unit and temporality are part of
    what identifies a stream, beside name, resource and attributes.
    """
    parts = (point.kind, point.temporality, point.unit, *point.scope)
    key = (origin.hash, *parts)
    found = streams.get(key)
    if found is None:
        of_points = stable_hash(*(part.encode() for part in parts))
        of_sender = stable_hash(origin.hash.to_bytes(8, "little"), of_points.to_bytes(8, "little"))
        found = streams[key] = (of_points, f"{of_sender:016x}")
    return found


def _add_number(
    rows: Rows,
    point: Point,
    series: OriginSeries,
    of: tuple[Origin, _Stream],
    now_ns: int,
) -> None:
    origin, (of_points, stream) = of
    sent_ns = point.time_unix_nano
    value = point.value
    rows.table(EVENTS).add(
        series.hash,
        row_ns(sent_ns),
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
            stream,
        ),
        of_points,
    )
    rows.n_rows += 1


def _add_quantiles(rows: Rows, point: Point, where: _Where, of: _Stream, now_ns: int) -> None:
    of_points, stream = of
    origins, origin, hint = where
    sent_ns = point.time_unix_nano
    of_row_ns = row_ns(sent_ns)
    at = to_timestamp(plausible_ns(sent_ns, now_ns))
    quantiles = [
        (
            origins.series(
                origin, point.name, {**point.attributes, "quantile": one.quantile}, hint
            ),
            one,
        )
        for one in point.raw.quantile_values
    ]
    for series, one in quantiles:
        rows.table(EVENTS).add(
            series.hash,
            of_row_ns,
            (
                at,
                series.cluster_id,
                series.node_id,
                point.name,
                _finite(one.value),
                origin.host,
                "quantile",
                point.unit,
                series.attributes,
                stream,
            ),
            of_points,
        )
        rows.n_rows += 1


def _add_distribution(
    rows: Rows, point: Point, series: OriginSeries, of: _Stream, now_ns: int
) -> None:
    of_points, stream = of
    sent_ns, raw = point.time_unix_nano, point.raw
    bounds, counts = _read_buckets(point)
    numbers: tuple[float | None, ...] = raw.count, _finite(raw.sum), None, None
    if point.kind is not PointKind.SUMMARY:
        numbers = raw.count, *(_optional(raw, name) for name in ("sum", "min", "max"))
    rows.table(HISTOGRAMS).add(
        series.hash,
        row_ns(sent_ns),
        (
            to_timestamp(plausible_ns(sent_ns, now_ns)),
            series.cluster_id,
            series.node_id,
            point.name,
            *numbers,
            bounds,
            counts,
            _KINDS[point.temporality],
            point.unit,
            series.attributes,
            stream,
        ),
        stable_hash(repr((of_points, *numbers, bounds, counts)).encode()),
    )
    rows.n_rows += 1


def _read_buckets(point: Point) -> Buckets:
    if point.kind is PointKind.SUMMARY:
        return [], []
    if point.distribution is not None:
        return read_explicit(point.distribution)
    return read_exponential(point.raw)


def _optional(raw: structs.Proto, name: str) -> float | None:
    if hasattr(raw, "HasField") and not raw.HasField(name):
        return None
    return _finite(getattr(raw, name))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _note_node(
    noted: _NodeFacts,
    point: Point,
    key: NodeKey,
    origin: Origin,
    at_ns: int,
) -> None:
    """Keep of each fact what was said last, by the time of the points and not by their order.

    A sender whose clock is ahead is taken to speak now, or nobody could correct it before its time has come.
    """
    facts: NodeRow = {}
    if at_ns > noted.seen_ns.get((key, origin.hash), -1):
        noted.seen_ns[key, origin.hash] = at_ns
        facts = _describe_origin(origin)
        facts["ts"] = to_timestamp(at_ns)
    if point.name == MetricName.HEALTH_SCORE:
        facts["state"] = read_text(point.attributes.get(_STATE))
    elif point.name == MetricName.NODE_INFO:
        facts["gpu_model"] = read_text(point.attributes.get(_GPU_MODEL))
        facts["gpu_count"] = read_small(point.attributes.get(_GPU_COUNT))
    if not facts:
        return
    known, at = noted.facts.setdefault(key, {}), to_timestamp(at_ns)
    for name, value in facts.items():
        if value is not None and (name not in known or at >= known[name][0]):
            known[name] = at, value


def _describe_origin(origin: Origin) -> NodeRow:
    return {
        "host_attr": origin.host,
        "provider": read_text(origin.attributes.get(_PROVIDER)),
        "world_size": read_small(origin.attributes.get(_WORLD_SIZE)),
        "node_rank": read_small(origin.attributes.get(_NODE_RANK)),
    }
