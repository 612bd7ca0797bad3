"""An export as the body of one remote write.

Sources: Prometheus Remote-Write 1.0; prometheus ``prompb/types.proto`` (exemplars, native histograms).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

from ingero.fleet.exporters.prometheusremotewrite.config import RemoteWriteConfig
from ingero.fleet.helpers.prometheus_histograms import (
    NativeHistogram,
    SeriesExemplar,
    build_spans,
    find_in_buckets,
    read_exemplars,
    read_native,
)
from ingero.fleet.helpers.prometheus_labels import (
    JOB_KEYS,
    OWN_LABELS,
    SENDER_LABELS,
    build_point_labels,
    build_sender_labels,
    build_target_labels,
    settle_labels,
)
from ingero.fleet.helpers.prometheus_names import build_metric_name
from ingero.otlp.codec import Export, Point, PointKind, Temporality, iter_points
from ingero.otlp.codec.points import read_sum
from ingero.units import NS_PER_MS
from ingero.wire.protobuf import declare_messages

_STALE: Final[float] = struct.unpack("<d", struct.pack("<Q", 0x7FF0_0000_0000_0002))[0]
"""Prometheus' mark of a series that ended: model/value, StaleNaN."""
_WRITE_REQUEST: Final = declare_messages(
    "remote_write",
    {
        "Label": {"name": (1, "string"), "value": (2, "string")},
        "Sample": {"value": (1, "double"), "timestamp": (2, "int64")},
        "Exemplar": {"labels": (1, "*Label"), "value": (2, "double"), "timestamp": (3, "int64")},
        "BucketSpan": {"offset": (1, "sint32"), "length": (2, "uint32")},
        "Histogram": {
            "count_int": (1, "uint64"),
            "sum": (3, "double"),
            "schema": (4, "sint32"),
            "zero_threshold": (5, "double"),
            "zero_count_int": (6, "uint64"),
            "negative_spans": (8, "*BucketSpan"),
            "negative_deltas": (9, "*sint64"),
            "positive_spans": (11, "*BucketSpan"),
            "positive_deltas": (12, "*sint64"),
            "timestamp": (15, "int64"),
        },
        "TimeSeries": {
            "labels": (1, "*Label"),
            "samples": (2, "*Sample"),
            "exemplars": (3, "*Exemplar"),
            "histograms": (4, "*Histogram"),
        },
        "WriteRequest": {"timeseries": (1, "*TimeSeries")},
    },
)["WriteRequest"]

Value = float | tuple[NativeHistogram, int, float]
"""A number; or the buckets, the count and the sum of a native histogram."""
Sample = tuple[str, Mapping[str, str], Value, list[SeriesExemplar]]
"""A name, labels, a value and what it was seen with."""


@dataclass(slots=True)
class _Series:
    """Values by time in milliseconds, and exemplars."""

    values: dict[int, Value] = field(default_factory=dict)
    exemplars: list[SeriesExemplar] = field(default_factory=list)


class RemoteWriteRequest:
    """Builds the body of one request."""

    def __init__(self, config: RemoteWriteConfig) -> None:
        self._config = config

    def encode(self, export: Export, wall_ns: int) -> bytes:
        """A WriteRequest, compressed; points without a time are of ``wall_ns``."""
        import cramjam  # noqa: PLC0415 -- not for collectors without this exporter

        return bytes(cramjam.snappy.compress_raw(self.build(export, wall_ns).SerializeToString()))

    def build(self, export: Export, wall_ns: int) -> Any:  # noqa: ANN401 - a upb message
        """A WriteRequest, series by series, the samples of each in the order of their times."""
        written: dict[tuple[tuple[str, str], ...], _Series] = {}
        for point in iter_points(export):
            time_ms = (point.time_unix_nano or wall_ns) // NS_PER_MS
            for name, labels, value, exemplars in self._iter_series(point):
                key = tuple(sorted({**labels, "__name__": name}.items()))
                series = written.setdefault(key, _Series())
                series.values[time_ms] = value
                series.exemplars += exemplars
        request = _WRITE_REQUEST()
        for key, found in written.items():
            series = request.timeseries.add()
            for name, text in key:
                if text:  # Prometheus has no empty labels
                    series.labels.add(name=name, value=_clean(text))
            for time_ms in sorted(found.values):
                _write(series, time_ms, found.values[time_ms])
            for one in sorted(found.exemplars, key=attrgetter("time_ms")):
                shown = series.exemplars.add(value=one.value, timestamp=one.time_ms)
                for name, text in one.labels:
                    shown.labels.add(name=name, value=text)
        return request

    def _iter_series(self, point: Point) -> Iterator[Sample]:
        name = self.find_name(point)
        if not name:
            return
        config = self._config
        is_all = config.resource_to_telemetry_conversion.enabled
        chosen, external = config.resource_constant_labels, config.external_labels
        sender = build_sender_labels(point.resource, chosen, is_all=is_all) | external
        attributes = point.attributes.items()
        own = {key: value for key, value in attributes if key not in config.drop_attributes}
        own_label = OWN_LABELS.get(point.kind, "")
        fixed = SENDER_LABELS | external.keys()
        settled = settle_labels(sender, build_point_labels(own), own_label, fixed)
        labels = settled.sender | settled.point
        exemplars: list[SeriesExemplar] = []
        if config.send_exemplars and point.kind is not PointKind.GAUGE:
            exemplars = [one for one in read_exemplars(point.raw) if one.time_ms]
        if point.distribution is not None:
            yield from _iter_histogram(name, labels, point, exemplars)
        elif point.kind is PointKind.EXPONENTIAL_HISTOGRAM:
            native = read_native(point.raw)
            assert native is not None
            total = read_sum(point.raw)
            ended = _STALE if point.is_stale else math.nan if total is None else total
            yield name, labels, (native, point.raw.count, ended), exemplars
        else:
            is_ended = point.is_stale or point.value is None
            yield name, labels, _STALE if is_ended else float(point.value or 0), exemplars
        if config.target_info.enabled and point.resource.keys() - JOB_KEYS:
            target = build_target_labels(point.resource)
            if target:
                yield "target_info", target | external, 1.0, []

    def find_name(self, point: Point) -> str:
        """The name of a point's series; empty for what the protocol cannot hold."""
        is_number = point.kind in {PointKind.GAUGE, PointKind.SUM}
        if not is_number and point.distribution is None and not self._is_native(point):
            return ""
        if point.kind is not PointKind.GAUGE and point.temporality is Temporality.DELTA:
            return ""
        if is_number and point.value is None and not point.is_stale:
            return ""
        return build_metric_name(
            point.name,
            point.unit,
            is_gauge=point.kind is PointKind.GAUGE,
            is_counter=point.kind is PointKind.SUM and point.is_monotonic,
            namespace=self._config.namespace,
            with_suffixes=self._config.add_metric_suffixes,
        )

    def _is_native(self, point: Point) -> bool:
        is_wanted = self._config.send_native_histograms
        is_exponential = point.kind is PointKind.EXPONENTIAL_HISTOGRAM
        return is_wanted and is_exponential and read_native(point.raw) is not None


def _write(series: Any, time_ms: int, value: Value) -> None:  # noqa: ANN401 -- a upb message
    if isinstance(value, float):
        series.samples.add(timestamp=time_ms, value=value)
        return
    native, count, total = value
    found = series.histograms.add(
        count_int=count,
        sum=total,
        schema=native.schema,
        zero_threshold=native.zero_threshold,
        zero_count_int=native.zero_count,
        timestamp=time_ms,
    )
    for side, spans, deltas in (
        (native.positive, found.positive_spans, found.positive_deltas),
        (native.negative, found.negative_spans, found.negative_deltas),
    ):
        built, differences = build_spans(side)
        for offset, length in built:
            spans.add(offset=offset, length=length)
        deltas.extend(differences)


def _iter_histogram(
    name: str, labels: Mapping[str, str], point: Point, exemplars: Sequence[SeriesExemplar]
) -> Iterator[Sample]:
    found = point.distribution
    assert found is not None
    in_buckets = find_in_buckets(exemplars, found.bounds) if exemplars else {}
    total = n_below = 0
    steps = [*zip(found.bounds, found.bucket_counts, strict=False), (math.inf, 0)]
    for bucket, (bound, count) in enumerate(steps):
        n_below += count
        total = found.count if bound == math.inf else n_below
        value = _STALE if point.is_stale else float(total)
        shown = [in_buckets[bucket]] if bucket in in_buckets else []
        yield (
            f"{name}_bucket",
            {**labels, "le": "+Inf" if bound == math.inf else repr(float(bound))},
            value,
            shown,
        )
    yield f"{name}_count", labels, _STALE if point.is_stale else float(found.count), []
    if found.sum is not None:
        yield f"{name}_sum", labels, _STALE if point.is_stale else found.sum, []


def _clean(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
