"""Series as Prometheus' protobuf exposition: the only format with native histograms.

A family is one message with its length in front, so it is ready only at its end; meanwhile the iterator yields nothing
after each series, and the caller can pause.

Source: Prometheus client_model, ``io/prometheus/client/metrics.proto``; a counter's name has its suffix here.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

from ingero.fleet.exporters.prometheus.series import (
    Family,
    FamilyKind,
    SeriesDistribution,
    SeriesStore,
)
from ingero.fleet.helpers.prometheus_histograms import SeriesExemplar, build_spans, find_in_buckets
from ingero.fleet.helpers.prometheus_names import read_labels
from ingero.telemetry.exposition import SUFFIXES_OF_OTHER_TYPES
from ingero.wire.protobuf import declare_messages

_NO_TYPE: Final = 3
_TYPES: Final = {
    FamilyKind.COUNTER: 0,
    FamilyKind.GAUGE: 1,
    FamilyKind.SUMMARY: 2,
    FamilyKind.HISTOGRAM: 4,
}
_MAX_UINT64: Final = (1 << 64) - 1
_MESSAGES: Final = declare_messages(
    "exposition",
    {
        "Timestamp": {"seconds": (1, "int64"), "nanos": (2, "int32")},
        "LabelPair": {"name": (1, "string"), "value": (2, "string")},
        "Gauge": {"value": (1, "double")},
        "Exemplar": {
            "label": (1, "*LabelPair"),
            "value": (2, "double"),
            "timestamp": (3, "Timestamp"),
        },
        "Counter": {"value": (1, "double"), "exemplar": (2, "Exemplar")},
        "Quantile": {"quantile": (1, "double"), "value": (2, "double")},
        "Summary": {
            "sample_count": (1, "uint64"),
            "sample_sum": (2, "double"),
            "quantile": (3, "*Quantile"),
        },
        "Bucket": {
            "cumulative_count": (1, "uint64"),
            "upper_bound": (2, "double"),
            "exemplar": (3, "Exemplar"),
        },
        "BucketSpan": {"offset": (1, "sint32"), "length": (2, "uint32")},
        "Histogram": {
            "sample_count": (1, "uint64"),
            "sample_sum": (2, "double"),
            "bucket": (3, "*Bucket"),
            "schema": (5, "sint32"),
            "zero_threshold": (6, "double"),
            "zero_count": (7, "uint64"),
            "negative_span": (9, "*BucketSpan"),
            "negative_delta": (10, "*sint64"),
            "positive_span": (12, "*BucketSpan"),
            "positive_delta": (13, "*sint64"),
            "exemplars": (16, "*Exemplar"),
        },
        "Metric": {
            "label": (1, "*LabelPair"),
            "gauge": (2, "Gauge"),
            "counter": (3, "Counter"),
            "summary": (4, "Summary"),
            "untyped": (5, "Gauge"),
            "timestamp_ms": (6, "int64"),
            "histogram": (7, "Histogram"),
        },
        "MetricFamily": {
            "name": (1, "string"),
            "help": (2, "string"),
            "type": (3, "int32"),
            "metric": (4, "*Metric"),
        },
    },
)
METRIC_FAMILY: Final = _MESSAGES["MetricFamily"]
_METRIC: Final = _MESSAGES["Metric"]
_METRIC_TAG: Final = bytes([4 << 3 | 2])
_TIMESTAMP_TAG: Final = bytes([6 << 3])
_NUMBERS: Final = {
    kind: bytes([field << 3 | 2, 9, 1 << 3 | 1]) for kind, field in ((0, 3), (1, 2), (_NO_TYPE, 5))
}
"""What stands before the eight bytes of a counter, a gauge or an untyped number: most series are one, and building a
message for each takes four times as long."""
_DOUBLE: Final = struct.Struct("<d")


def iter_protobuf(store: SeriesStore, *, with_timestamps: bool) -> Iterator[bytes]:
    """Families by name, each in one piece, and nothing after each series; lazy, as `iter_exposition`."""
    labels: dict[str, bytes] = {"": b""}
    for name in sorted(store.families):
        family = store.families.get(name)
        if family is not None:
            yield from _iter_family(store, family, labels, with_timestamps=with_timestamps)


def _iter_family(
    store: SeriesStore, family: Family, labels: dict[str, bytes], *, with_timestamps: bool
) -> Iterator[bytes]:
    facts = family.facts
    is_reserved = facts.kind is FamilyKind.GAUGE and facts.name.endswith(SUFFIXES_OF_OTHER_TYPES)
    help_text = facts.help.encode("utf-8", "replace").decode("utf-8")
    kind = _NO_TYPE if is_reserved else _TYPES[facts.kind]
    number = _NUMBERS[_NO_TYPE] if is_reserved else _NUMBERS.get(kind)
    parts = [METRIC_FAMILY(name=facts.name, help=help_text, type=kind).SerializeToString()]
    for row in range(len(family.keys)):
        key = family.keys[row]
        body = b"".join([_find_labels(text, labels) for text in store.texts_of(key)])
        if number is not None and key not in family.exemplars:
            body += number + _DOUBLE.pack(family.values[row])
        else:
            metric = _METRIC.FromString(body)
            _fill(metric, family, key, family.values[row])
            body = metric.SerializeToString()
        if with_timestamps and family.times_ms[row] > 0:
            body += _TIMESTAMP_TAG + _encode_varint(family.times_ms[row])
        parts += [_METRIC_TAG, _encode_varint(len(body)), body]
        yield b""
    message = b"".join(parts)
    yield _encode_varint(len(message)) + message


def _find_labels(text: str, labels: dict[str, bytes]) -> bytes:
    encoded = labels.get(text)
    if encoded is None:
        encoded = labels[text] = _encode_labels(text)
    return encoded


def _encode_labels(text: str) -> bytes:
    metric = _METRIC()
    for name, value in read_labels(text):
        metric.label.add(name=name, value=value)
    encoded: bytes = metric.SerializeToString()
    return encoded


def _encode_varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _fill(metric: Any, family: Family, key: int, value: float) -> None:  # noqa: ANN401 -- a upb message
    kind, exemplars = family.facts.kind, family.exemplars.get(key, ())
    if kind is FamilyKind.SUMMARY:
        _fill_summary(metric.summary, family.distributions[key])
    elif kind is FamilyKind.HISTOGRAM:
        _fill_histogram(metric.histogram, family.distributions[key], exemplars)
    else:  # a counter: a gauge has no exemplars
        metric.counter.value = value
        _fill_exemplar(metric.counter.exemplar, exemplars[0])


def _fill_summary(summary: Any, point: SeriesDistribution) -> None:  # noqa: ANN401
    summary.sample_count = _clamp(point.count)
    summary.sample_sum = math.nan if point.sum is None else point.sum
    for quantile, value in point.steps:
        summary.quantile.add(quantile=quantile, value=value)


def _fill_histogram(
    histogram: Any,  # noqa: ANN401
    point: SeriesDistribution,
    exemplars: Sequence[SeriesExemplar],
) -> None:
    """Bounds as they are, with the infinite one: it also holds an exemplar for scrapers older than field 16."""
    histogram.sample_count = _clamp(point.count)
    histogram.sample_sum = math.nan if point.sum is None else point.sum
    in_buckets = find_in_buckets(exemplars, [bound for bound, _ in point.steps])
    for index, (bound, count) in enumerate((*point.steps, (math.inf, point.count))):
        bucket = histogram.bucket.add(cumulative_count=_clamp(count), upper_bound=bound)
        if index in in_buckets:
            _fill_exemplar(bucket.exemplar, in_buckets[index])
    native = point.native
    if native is None:
        return
    histogram.schema = native.schema
    histogram.zero_threshold = native.zero_threshold
    histogram.zero_count = native.zero_count
    for side, spans, deltas in (
        (native.positive, histogram.positive_span, histogram.positive_delta),
        (native.negative, histogram.negative_span, histogram.negative_delta),
    ):
        built, differences = build_spans(side)
        for offset, length in built:
            spans.add(offset=offset, length=length)
        deltas.extend(differences)
    for one in exemplars:
        _fill_exemplar(histogram.exemplars.add(), one)


def _fill_exemplar(exemplar: Any, one: SeriesExemplar) -> None:  # noqa: ANN401
    exemplar.value = one.value
    for name, value in one.labels:
        exemplar.label.add(name=name, value=value)
    if one.time_ms:
        exemplar.timestamp.seconds, rest_ms = divmod(one.time_ms, 1000)
        exemplar.timestamp.nanos = rest_ms * 1_000_000


def _clamp(count: float) -> int:
    return min(int(count), _MAX_UINT64)
