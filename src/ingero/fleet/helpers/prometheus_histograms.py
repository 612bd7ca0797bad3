"""OTLP's exponential histograms as Prometheus' native ones, and its exemplars. Pure; for scrapes and for remote writes.

Sources: OpenTelemetry specification, "Prometheus and OpenMetrics Compatibility" (exponential histograms, exemplars);
Prometheus client_model ``metrics.proto`` (spans, deltas, schemas); OpenMetrics 1.0, "Exemplars" (128 characters).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ingero.fleet.helpers.prometheus_labels import label_text
from ingero.fleet.helpers.prometheus_names import build_label_name
from ingero.otlp.codec.structs import Proto
from ingero.otlp.codec.values import message_attributes, tree_attributes
from ingero.units import NS_PER_MS

_MIN_SCHEMA: Final = -4
_MAX_SCHEMA: Final = 8
_ZERO_THRESHOLD: Final = 1e-128
"""What the Collector takes where the sender says 0: with a threshold of 0 an empty histogram is not a native one."""
MAX_BUCKETS: Final = 4096
"""Of one histogram, or of each side of an exponential one."""
_MAX_INDEX: Final = 1 << 29
"""Far beyond what a double can hold at any scale."""
_MAX_COUNT: Final = 1 << 62
"""So that the difference of two fits into 64 bits with a sign."""
MAX_EXEMPLAR_CHARS: Final = 128
_MAX_READ: Final = 256
_MAX_NATIVE_EXEMPLARS: Final = 10
"""As many as Prometheus' own client keeps of a native histogram."""

BucketCounts = Mapping[int, int]
"""Observations by index: bucket ``i`` reaches from ``base ** (i - 1)``, without it, to ``base ** i``."""


class BucketRun(NamedTuple):
    """A run of buckets: how many are left out before it, and how many it has."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class NativeHistogram:
    """Buckets of a native histogram.

    Attributes:
        schema: Its base is ``2 ** (2 ** -schema)``.
        zero_threshold: What is nearer to zero is in ``zero_count``.
        zero_count: Observations.
        positive: Those above zero.
        negative: Those below, by the index of their absolute value.
    """

    schema: int
    zero_threshold: float
    zero_count: int
    positive: BucketCounts
    negative: BucketCounts

    def plus(self, delta: NativeHistogram) -> NativeHistogram | None:
        """This and a delta over it, in the coarser of both resolutions; None when they cannot be added."""
        if self.zero_threshold != delta.zero_threshold:
            return None
        schema = min(self.schema, delta.schema)
        one, other = self.widen(schema), delta.widen(schema)
        added = NativeHistogram(
            schema,
            self.zero_threshold,
            one.zero_count + other.zero_count,
            _add(one.positive, other.positive),
            _add(one.negative, other.negative),
        )
        return added if added.count() < _MAX_COUNT else None

    def widen(self, schema: int) -> NativeHistogram:
        """The same in a coarser resolution."""
        shift = self.schema - schema
        if not shift:
            return self
        sides = (_widen(side, shift) for side in (self.positive, self.negative))
        return NativeHistogram(schema, self.zero_threshold, self.zero_count, *sides)

    def count(self) -> int:
        """Observations in all buckets."""
        return self.zero_count + sum(self.positive.values()) + sum(self.negative.values())


def read_native(raw: Proto) -> NativeHistogram | None:
    """Buckets of an exponential point, of either encoding.

    None for what Prometheus has no schema for, and for what it refuses a whole scrape for: counts that do not add up.
    """
    if raw.scale < _MIN_SCHEMA or raw.count >= _MAX_COUNT:
        return None
    shift = max(0, raw.scale - _MAX_SCHEMA)
    sides = [_read_side(side, shift) for side in (raw.positive, raw.negative)]
    positive, negative = sides
    if positive is None or negative is None or not 0 <= raw.zero_threshold < float("inf"):
        return None
    schema = min(raw.scale, _MAX_SCHEMA)
    threshold = raw.zero_threshold or _ZERO_THRESHOLD
    found = NativeHistogram(schema, threshold, raw.zero_count, positive, negative)
    return found if found.count() == raw.count else None


def _read_side(side: Proto | None, shift: int) -> dict[int, int] | None:
    if side is None:
        return {}
    if len(side.bucket_counts) > MAX_BUCKETS or abs(side.offset) > _MAX_INDEX:
        return None
    found: dict[int, int] = {}
    for index, count in enumerate(side.bucket_counts, side.offset):
        if count:
            at = (index >> shift) + 1  # OTLP's bucket i reaches from base ** i to base ** (i + 1)
            found[at] = found.get(at, 0) + count
    return found


def _widen(side: BucketCounts, shift: int) -> dict[int, int]:
    found: dict[int, int] = {}
    for index, count in side.items():
        at = ((index - 1) >> shift) + 1
        found[at] = found.get(at, 0) + count
    return found


def _add(one: BucketCounts, other: BucketCounts) -> dict[int, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in {*one, *other}}


def build_spans(side: BucketCounts) -> tuple[list[BucketRun], list[int]]:
    """Runs of buckets and the difference of each count from the one before, as Prometheus' messages have them."""
    spans: list[BucketRun] = []
    deltas = []
    count = end = 0
    for index in sorted(side):
        if spans and index == end:
            spans[-1] = BucketRun(spans[-1].offset, spans[-1].length + 1)
        else:
            spans.append(BucketRun(index - end, 1))
        deltas.append(side[index] - count)
        count, end = side[index], index + 1
    return spans, deltas


@dataclass(frozen=True, slots=True)
class SeriesExemplar:
    """One measured value with what leads to its trace.

    Attributes:
        value: What was measured.
        time_ms: When, since 1970; 0 where the sender did not say.
        labels: Names and values; ``trace_id`` and ``span_id`` first.
    """

    value: float
    time_ms: int
    labels: tuple[tuple[str, str], ...]


def read_exemplars(raw: Proto) -> list[SeriesExemplar]:
    """The exemplars of a point, of either encoding, with as many of their labels as OpenMetrics allows."""
    found = []
    for one in itertools.islice(raw.exemplars, _MAX_READ):
        is_message = hasattr(one, "WhichOneof")
        which = one.WhichOneof("value") if is_message else None
        if is_message:
            value = None if which is None else getattr(one, which)
        else:
            value = one.as_int if one.as_double is None else one.as_double
        if value is None:
            continue
        attributes_of = message_attributes if is_message else tree_attributes
        own = attributes_of(one.filtered_attributes).items()
        pairs = [
            ("trace_id", _read_id(one.trace_id)),
            ("span_id", _read_id(one.span_id)),
            *((build_label_name(key), label_text(text)) for key, text in own),
        ]
        found.append(
            SeriesExemplar(float(value), one.time_unix_nano // NS_PER_MS, _choose_labels(pairs))
        )
    return found


def _read_id(text: bytes | str) -> str:
    shown = text.hex() if isinstance(text, bytes) else text.lower()
    return shown if shown.strip("0") else ""


def _choose_labels(pairs: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    chosen: dict[str, str] = {}
    n_left = MAX_EXEMPLAR_CHARS
    for name, text in pairs:
        n_chars = len(name) + len(text)
        if text and name not in chosen and n_chars <= n_left:
            chosen[name] = text.encode("utf-8", "replace").decode("utf-8")
            n_left -= n_chars
    return tuple(chosen.items())


def keep_latest(
    before: Sequence[SeriesExemplar], fresh: Sequence[SeriesExemplar]
) -> tuple[SeriesExemplar, ...]:
    """The latest one: what a counter can show."""
    return (max((*before, *fresh), key=_get_time),)


def keep_native(
    before: Sequence[SeriesExemplar], fresh: Sequence[SeriesExemplar]
) -> tuple[SeriesExemplar, ...]:
    """The ten newest exemplars."""
    return tuple(sorted({*before, *fresh}, key=_get_time)[-_MAX_NATIVE_EXEMPLARS:])


def keep_in_buckets(
    before: Sequence[SeriesExemplar], fresh: Sequence[SeriesExemplar], bounds: Sequence[float]
) -> tuple[SeriesExemplar, ...]:
    """The latest one of each bucket, by their values."""
    return tuple(find_in_buckets((*before, *fresh), bounds).values())


def find_in_buckets(
    exemplars: Sequence[SeriesExemplar], bounds: Sequence[float]
) -> dict[int, SeriesExemplar]:
    """The latest exemplar of each bucket that has one, by the bucket's index; the last bucket has no bound."""
    ordered = sorted(exemplars, key=_get_time)
    return {bisect_left(bounds, one.value): one for one in ordered}


def _get_time(one: SeriesExemplar) -> int:
    return one.time_ms
