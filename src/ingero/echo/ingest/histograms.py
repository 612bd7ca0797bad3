"""Histogram points into bounds and counts; one that contradicts itself is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final

from ingero.echo.ingest.limits import RefusalReason, RefusedRecordError
from ingero.otlp.codec import PointDistribution, structs

Buckets = tuple[list[float], list[int]]
"""n upper bounds, strictly ascending, and n + 1 counts; or nothing where the sender kept no buckets."""

MAX_BUCKETS: Final = 4096
_SCALES: Final = range(-10, 21)
"""Source: OpenTelemetry SDK specification, "Base2 Exponential Bucket Histogram Aggregation".

MaxScale 20, minimum -10.
"""
_TOP_EXPONENT: Final = 1024
_MIN_EXPONENT: Final = -1074


def read_explicit(distribution: PointDistribution) -> Buckets:
    """Buckets of a histogram with explicit bounds.

    Source: opentelemetry-proto, HistogramDataPoint.

    Raises:
        RefusedRecordError: Its bounds or counts are not what the proto demands.
    """
    bounds, counts = list(distribution.bounds), list(distribution.bucket_counts)
    if len(counts) > MAX_BUCKETS:
        raise _refusal(f"{len(counts)} buckets; {MAX_BUCKETS} are taken")
    if not counts and not bounds:
        return bounds, counts
    if len(counts) != len(bounds) + 1:
        raise _refusal(f"{len(counts)} counts for {len(bounds)} bounds")
    if not all(math.isfinite(bound) for bound in bounds):
        raise _refusal("a bound that is not a finite number")
    if any(low >= high for low, high in itertools.pairwise(bounds)):
        raise _refusal("bounds that do not ascend")
    _check_sum(counts, distribution.count)
    return bounds, counts


def read_exponential(raw: structs.Proto) -> Buckets:
    """Buckets of an exponential histogram with their bounds spelled out, from the most negative up.

    Bounds that no double can hold are merged into their neighbour, with their counts.

    Source: opentelemetry-proto, ExponentialHistogramDataPoint: bucket i of a side covers (base^i, base^(i+1)] with
    base = 2^(2^-scale), i counted from ``offset``.

    Raises:
        RefusedRecordError: Scale, thresholds or counts make no histogram.
    """
    if raw.scale not in _SCALES:
        raise _refusal(f"scale {raw.scale}; {_SCALES[0]} to {_SCALES[-1]} are taken")
    if not math.isfinite(raw.zero_threshold) or raw.zero_threshold < 0:
        raise _refusal(f"zero threshold {raw.zero_threshold}")
    sides = [_counts(raw.negative), _counts(raw.positive)]
    if sum(map(len, sides)) > MAX_BUCKETS:
        raise _refusal(f"{sum(map(len, sides))} buckets; {MAX_BUCKETS} are taken")
    _check_sum([*sides[0], raw.zero_count, *sides[1]], raw.count)
    negative = list(_iter_side(raw.negative, raw.scale))
    positive = list(_iter_side(raw.positive, raw.scale))
    buckets = [(-low, count) for low, _, count in reversed(negative)]
    buckets.append((raw.zero_threshold, raw.zero_count))
    if positive and positive[0][0] > raw.zero_threshold:
        buckets.append((positive[0][0], 0))
    buckets += [(high, count) for _, high, count in positive]
    return _merge(buckets)


def _counts(side: structs.Proto) -> Sequence[int]:
    return side.bucket_counts if side is not None else ()


def _iter_side(side: structs.Proto, scale: int) -> Iterator[tuple[float, float, int]]:
    exponent = 2.0**-scale
    counts = _counts(side)
    for i, count in enumerate(counts, start=side.offset if counts else 0):
        yield _power(i * exponent), _power((i + 1) * exponent), count


def _power(exponent: float) -> float:
    if exponent >= _TOP_EXPONENT:
        return math.inf
    return 2.0**exponent if exponent >= _MIN_EXPONENT else 0.0


def _merge(buckets: Sequence[tuple[float, int]]) -> Buckets:
    """Strictly ascending finite bounds; what is above the last one is in the last count."""
    bounds: list[float] = []
    counts: list[int] = []
    held = 0
    for bound, count in buckets:
        if not math.isfinite(bound):
            held += count  # below every double: of the next bucket; above: of the last
        elif bounds and bound <= bounds[-1]:
            counts[-1] += count
        else:
            bounds.append(bound)
            counts.append(count + held)
            held = 0
    return bounds, [*counts, held]


def _check_sum(counts: Sequence[int], count: int) -> None:
    if sum(counts) != count:
        raise _refusal(f"buckets that add up to {sum(counts)}, and {count} observations")


def _refusal(what: str) -> RefusedRecordError:
    return RefusedRecordError(RefusalReason.HISTOGRAM, f"a histogram with {what}")
