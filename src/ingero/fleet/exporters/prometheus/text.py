"""Series as Prometheus' text format 0.0.4 and as OpenMetrics 1.0.

An exponential histogram has no buckets in either: it is shown with its count and sum. Exemplars are OpenMetrics' alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ingero.fleet.exporters.prometheus.series import (
    Family,
    FamilyKind,
    SeriesDistribution,
    SeriesStore,
)
from ingero.fleet.helpers.prometheus_histograms import SeriesExemplar, find_in_buckets
from ingero.fleet.helpers.prometheus_names import escape_help, format_labels
from ingero.telemetry.exposition import SUFFIXES_OF_OTHER_TYPES


@dataclass(frozen=True, slots=True)
class ExpositionSettings:
    """How the text is written.

    Attributes:
        open_metrics: OpenMetrics 1.0 instead of Prometheus' text format 0.0.4.
        with_timestamps: Write each sample's own time.
    """

    open_metrics: bool = False
    with_timestamps: bool = False


def iter_exposition(store: SeriesStore, settings: ExpositionSettings) -> Iterator[str]:
    """Lines with their newline, families by name; lazy, so that the caller can pause between two of them.

    The store may gain points meanwhile, on the same thread; a family is read in one piece up to the rows it had.
    """
    for name in sorted(store.families):
        family = store.families.get(name)
        if family is not None:
            yield from _iter_family(store, family, settings)
    if settings.open_metrics:
        yield "# EOF\n"


def _iter_family(store: SeriesStore, family: Family, settings: ExpositionSettings) -> Iterator[str]:
    facts = family.facts
    name = facts.name
    if settings.open_metrics and facts.kind is FamilyKind.COUNTER:
        name = name.removesuffix("_total")
    if facts.help:
        yield f"# HELP {name} {escape_help(facts.help)}\n"
    is_reserved = facts.kind is FamilyKind.GAUGE and name.endswith(SUFFIXES_OF_OTHER_TYPES)
    kind = "untyped" if is_reserved and not settings.open_metrics else facts.kind
    yield f"# TYPE {name} {kind}\n"
    samples = _DISTRIBUTION_SAMPLES.get(facts.kind)
    name = facts.name
    keys, values, times = family.keys, family.values, family.times_ms
    exemplars = family.exemplars if settings.open_metrics else {}
    for row in range(len(keys)):
        labels = store.labels_of(keys[row])
        tail = _format_time(times[row], settings)
        if samples is None:
            found = exemplars.get(keys[row]) if exemplars else None
            more = _format_exemplar(found[0]) if found else ""
            yield f"{name}{{{labels}}} {format_value(values[row])}{tail}{more}\n"
        else:
            found = exemplars.get(keys[row], ())
            yield from samples(name, labels, family.distributions[keys[row]], tail, found)


def _format_time(time_ms: int, settings: ExpositionSettings) -> str:
    if not settings.with_timestamps or time_ms <= 0:
        return ""
    return f" {time_ms / 1000:.3f}" if settings.open_metrics else f" {time_ms}"


def format_value(value: float) -> str:
    """A float as both text formats spell it."""
    if value - value == 0.0:
        return repr(value)
    return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"  # noqa: PLR0124 - only NaN differs from itself


def _format_exemplar(one: SeriesExemplar) -> str:
    labels = format_labels(dict(one.labels))
    time = f" {one.time_ms / 1000:.3f}" if one.time_ms else ""
    return f" # {{{labels}}} {format_value(one.value)}{time}"


def _iter_histogram(
    name: str,
    labels: str,
    point: SeriesDistribution,
    tail: str,
    exemplars: Sequence[SeriesExemplar],
) -> Iterator[str]:
    lead = f"{labels}," if labels else ""
    steps = (*point.steps, (math.inf, point.count))
    found = find_in_buckets(exemplars, [bound for bound, _ in point.steps]) if exemplars else {}
    for bucket, (bound, count) in enumerate(steps):
        more = _format_exemplar(found[bucket]) if bucket in found else ""
        yield f'{name}_bucket{{{lead}le="{format_value(bound)}"}} {format_value(count)}{tail}{more}\n'
    if point.sum is not None:
        yield f"{name}_sum{{{labels}}} {format_value(point.sum)}{tail}\n"
    yield f"{name}_count{{{labels}}} {format_value(point.count)}{tail}\n"


def _iter_summary(
    name: str,
    labels: str,
    point: SeriesDistribution,
    tail: str,
    exemplars: Sequence[SeriesExemplar],
) -> Iterator[str]:
    del exemplars  # the formats have none of summaries
    lead = f"{labels}," if labels else ""
    for quantile, value in point.steps:
        yield f'{name}{{{lead}quantile="{format_value(quantile)}"}} {format_value(value)}{tail}\n'
    if point.sum is not None:
        yield f"{name}_sum{{{labels}}} {format_value(point.sum)}{tail}\n"
    yield f"{name}_count{{{labels}}} {format_value(point.count)}{tail}\n"


_DISTRIBUTION_SAMPLES: Final = {
    FamilyKind.HISTOGRAM: _iter_histogram,
    FamilyKind.SUMMARY: _iter_summary,
}
