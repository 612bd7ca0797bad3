"""Exports → series: which family, which labels, which value.

Above the series store and naming; runs when a scrape or the drain timer asks for it, never in a push.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final

from ingero.fleet.exporters.prometheus.config import PrometheusConfig
from ingero.fleet.exporters.prometheus.reading import (
    DELTA,
    MESSAGES,
    TREES,
    Alias,
    PointReader,
    alias_of,
)
from ingero.fleet.exporters.prometheus.repeats import PushedMetrics, Repetitions
from ingero.fleet.exporters.prometheus.series import (
    LONG_AGO_NS,
    Family,
    FamilyFacts,
    FamilyKind,
    SeriesDistribution,
    SeriesStore,
    series_key,
)
from ingero.fleet.helpers.prometheus_histograms import (
    MAX_BUCKETS,
    SeriesExemplar,
    keep_in_buckets,
    keep_latest,
    keep_native,
    read_exemplars,
    read_native,
)
from ingero.fleet.helpers.prometheus_labels import (
    JOB_KEYS,
    build_point_labels,
    build_sender_labels,
    build_target_labels,
)
from ingero.fleet.helpers.prometheus_names import build_metric_name, format_labels
from ingero.otlp.codec import Export, Point, PointKind, Temporality, iter_points
from ingero.otlp.codec import PointDistribution as Buckets
from ingero.otlp.codec.points import NO_RECORDED_VALUE, read_sum
from ingero.otlp.codec.structs import Proto
from ingero.units import NS_PER_MS
from ingero.wire.names import MIN_PLAUSIBLE_NS

_NUMBER_KINDS: Final = frozenset({str(PointKind.GAUGE), str(PointKind.SUM)})
_MAX_ALIAS_CHARS: Final = 64 << 10
"""Attributes as they arrive, labels or not, are remembered by their text: longer ones are refused."""
_MAX_HELP_CHARS: Final = 1024
_JOB_LABELS: Final = frozenset({"job", "instance"})
_TARGET_INFO: Final = FamilyFacts("target_info", FamilyKind.GAUGE, "Attributes of who reports.")


class SeriesIntake:
    """Walks exports into a `SeriesStore`.

    Attributes:
        n_unsupported: Points that no exposition can show.
        n_oversized: Points whose labels or name are over the limits of the configuration.
    """

    def __init__(self, store: SeriesStore, config: PrometheusConfig) -> None:
        self.n_unsupported = 0
        self.n_oversized = 0
        self._store = store
        self._config = config
        self._dropped = frozenset(config.drop_attributes)
        self._exclusive = frozenset(config.exclusive_attributes)
        self._facts: dict[tuple[str, str, PointKind, bool], FamilyFacts | None] = {}
        self._repetitions = Repetitions(store)

    def apply(self, export: Export, now_ns: int, received_wall_ns: int) -> None:
        """Store the latest point of each series in a metrics export.

        Args:
            export: What was pushed.
            now_ns: Monotonic time of its arrival; what expiry counts from.
            received_wall_ns: Wall time of its arrival, for points whose own time cannot be true.
        """
        self._store.drop_unused()
        reader = MESSAGES if export.is_message else TREES
        wall_ms = received_wall_ns // NS_PER_MS
        has_others = False
        for entry, metrics in export.metrics:
            sender = self._get_sender(entry.resource, reader, now_ns)
            if sender is None:
                self._count_refused(sum(len(points) for *_, points in metrics))
                continue
            push = PushedMetrics(sender, metrics, export.is_message)
            if not self._repetitions.apply(push, now_ns, wall_ms):
                has_others |= self._walk(push, sender, reader, (now_ns, wall_ms))
        if has_others:
            self._apply_others(export, now_ns, received_wall_ns)

    def repeat(self, export: Export, now_ns: int, received_wall_ns: int) -> bool:
        """Store an export all of whose senders push what they pushed last; False where it has to be given to `apply`.

        Args:
            export: What was pushed. Where it is no repetition some of its points may be stored already.
            now_ns: As for `apply`, as is the next.
            received_wall_ns: Wall time of its arrival.
        """
        reader = MESSAGES if export.is_message else TREES
        wall_ms = received_wall_ns // NS_PER_MS
        for entry, metrics in export.metrics:
            alias = reader.resource_alias(entry.resource)
            sender = self._find_sender(alias, entry.resource, reader, now_ns)
            if sender is None:
                return False
            push = PushedMetrics(sender, metrics, export.is_message)
            if not self._repetitions.apply(push, now_ns, wall_ms):
                return False
        return True

    def _walk(
        self,
        push: PushedMetrics,
        sender: int,
        reader: PointReader,
        arrival: tuple[int, int],
    ) -> bool:
        """Every gauge and sum of one sender; whether it has others."""

        def find_row(metric: Proto, kind: str, raw: Proto) -> tuple[Family, int] | None:
            facts = self._find_facts(metric, kind)
            family = None if facts is None else self._store.get_family(facts)
            row = None if family is None else self._find_row(family, sender, raw, reader)
            return None if family is None or row is None else (family, row)

        before, has_others = self._count_events(), False
        for _, metric, _, kind, points in push.metrics:
            if kind in _NUMBER_KINDS:
                self._put_numbers((metric, kind, points), sender, reader, arrival)
            else:
                has_others |= bool(kind)
        if not has_others and before == self._count_events():
            self._repetitions.learn(push, find_row)
        return has_others

    def _count_events(self) -> tuple[int, ...]:
        """Numbers that grow when a point makes a series or is not shown."""
        store = self._store
        shown = (store.n_series, store.n_refused, store.n_conflicts)
        return (*shown, self.n_unsupported, self.n_oversized)

    def _find_facts(self, metric: Proto, kind: str) -> FamilyFacts | None:
        """What a gauge or sum is called; None when it cannot be shown."""
        is_monotonic = kind == PointKind.SUM and metric.sum.is_monotonic
        return self._get_facts((metric.name, metric.unit, PointKind(kind), is_monotonic), metric)

    def _put_numbers(
        self,
        named: tuple[Proto, str, Sequence[Proto]],
        sender: int,
        reader: PointReader,
        arrival: tuple[int, int],
    ) -> None:
        """Every point of a gauge or sum: some microseconds a point."""
        metric, kind, points = named
        is_sum = kind == PointKind.SUM
        is_monotonic = is_sum and metric.sum.is_monotonic
        facts = self._find_facts(metric, kind)
        family = None if facts is None else self._store.get_family(facts, len(points))
        if family is None:
            self.n_unsupported += len(points) if facts is None else 0
            return
        is_delta = is_sum and metric.sum.aggregation_temporality == DELTA
        for raw in points:
            row = self._find_row(family, sender, raw, reader)
            if row is None:
                continue
            if is_monotonic and raw.exemplars:
                _keep_exemplars(family, row, raw, keep_latest)
            value = reader.number(raw)
            is_ended = raw.flags & NO_RECORDED_VALUE
            if is_delta and not is_ended:
                if not math.isfinite(value):  # the sum would stay so
                    self.n_unsupported += 1
                    continue
                value = _add_up(family, row, value)
            family.values[row] = value
            time_ns = raw.time_unix_nano
            family.times_ms[row] = (
                time_ns // NS_PER_MS if time_ns > MIN_PLAUSIBLE_NS else arrival[1]
            )
            if is_ended:
                family.seen_ns[row] = LONG_AGO_NS
                continue
            if family.seen_ns[row] == LONG_AGO_NS:  # it was in another state before, if any
                key = family.keys[row]
                family.end_others(key, self._store.find_alternatives(key))
            family.seen_ns[row] = arrival[0]

    def _find_row(self, family: Family, sender: int, raw: Proto, reader: PointReader) -> int | None:
        alias = reader.alias(raw.attributes, self._dropped)
        index = self._store.find_attributes(alias)
        if index is not None:
            row = family.rows.get(series_key(sender, index))
            if row is not None:
                return row
        else:
            attributes = reader.attributes(raw.attributes)
            for key in self._dropped & attributes.keys():
                del attributes[key]
            index = self._know_attributes(alias, attributes)
        return None if index is None else self._store.get_row(family, sender, index)

    def _apply_others(self, export: Export, now_ns: int, received_wall_ns: int) -> None:
        """Histograms and summaries, which are rare."""
        for point in iter_points(export):
            if point.kind in _NUMBER_KINDS:
                continue
            distribution = _read_distribution(point)
            if distribution is None:
                self.n_unsupported += 1
                continue
            key = (point.name, point.unit, point.kind, False)
            facts = self._get_facts(key, point)
            family = None if facts is None else self._store.get_family(facts)
            if family is None:
                self.n_unsupported += facts is None
                continue
            sender = self._know_sender(alias_of(point.resource), point.resource, now_ns)
            if sender is None:  # counted by `apply`
                continue
            for name in self._dropped & point.attributes.keys():
                del point.attributes[name]
            index = self._know_attributes(alias_of(point.attributes), point.attributes)
            row = None if index is None else self._store.get_row(family, sender, index)
            if row is not None:
                time_ns = point.time_unix_nano
                family.times_ms[row] = (
                    time_ns if time_ns > MIN_PLAUSIBLE_NS else received_wall_ns
                ) // NS_PER_MS
                _store_distribution(family, row, point, distribution)
                family.seen_ns[row] = now_ns if not point.is_stale else LONG_AGO_NS

    def _find_sender(
        self, alias: Alias, resource: Proto, reader: PointReader, now_ns: int
    ) -> int | None:
        """The labels of a sender that is known already; None for another."""
        index = self._store.find_resource(alias)
        if index is None:
            return None
        raw = resource.attributes if resource is not None else ()
        if not _JOB_LABELS.isdisjoint(self._store.names_of_resource(index)):
            return self._know_sender(alias, reader.attributes(raw), now_ns)
        return index

    def _get_sender(self, resource: Proto, reader: PointReader, now_ns: int) -> int | None:
        alias = reader.resource_alias(resource)
        known = self._find_sender(alias, resource, reader, now_ns)
        if known is not None:
            return known
        raw = resource.attributes if resource is not None else ()
        return self._know_sender(alias, reader.attributes(raw), now_ns)

    def _know_sender(self, alias: Alias, attributes: Mapping[str, Any], now_ns: int) -> int | None:
        """The labels of a sender; None when they are over the limits, or new and no series is taken any more."""
        index = self._store.find_resource(alias)
        if index is None:
            labels = self._build_sender_labels(attributes)
            if len(alias) > _MAX_ALIAS_CHARS or not self._is_allowed(labels):
                return None
            index = self._store.add_resource(alias, labels)
        if index is not None and not JOB_KEYS.isdisjoint(attributes):
            self._put_target_info(alias, attributes, now_ns)
        return index

    def _build_sender_labels(self, attributes: Mapping[str, Any]) -> dict[str, str]:
        config = self._config
        is_all = config.resource_to_telemetry_conversion.enabled
        chosen = config.resource_constant_labels
        return build_sender_labels(attributes, chosen, is_all=is_all) | config.const_labels

    def _count_refused(self, n_points: int) -> None:
        """Of a sender that is not taken."""
        if self._store.is_full:
            self._store.n_refused += n_points
        else:
            self.n_oversized += n_points

    def _is_allowed(self, labels: Mapping[str, str]) -> bool:
        """Whether a label set is within the limits: a series with more is refused, for a cut name would be another."""
        config = self._config
        return len(labels) <= config.label_limit and all(
            len(name) <= config.label_name_length_limit
            and len(value) <= config.label_value_length_limit
            for name, value in labels.items()
        )

    def _put_target_info(self, alias: Alias, attributes: Mapping[str, Any], now_ns: int) -> None:
        info = ("target", alias)
        resource = self._store.find_resource(info)
        if resource is None:
            target = build_target_labels(attributes)
            labels = target | self._config.const_labels
            if not target or not self._is_allowed(labels):
                return
            resource = self._store.add_resource(info, labels)
        empty = self._store.add_attributes("", {})
        if resource is None or empty is None:
            self._store.n_refused += 1
            return
        family = self._store.get_family(_TARGET_INFO)
        row = None if family is None else self._store.get_row(family, resource, empty)
        if family is not None and row is not None:
            family.values[row], family.seen_ns[row] = 1.0, now_ns

    def _get_facts(
        self, key: tuple[str, str, PointKind, bool], metric: Proto
    ) -> FamilyFacts | None:
        """What a metric is called; None when it cannot be shown. ``metric`` has a ``description``."""
        try:
            return self._facts[key]
        except KeyError:
            if max(len(key[0]), len(key[1])) > self._config.label_name_length_limit:
                return None
            facts = self._build_facts(key, metric.description[:_MAX_HELP_CHARS])
            if len(self._facts) >= 10_000:  # a sender of ever-new names costs time, not memory
                self._facts.clear()
            self._facts[key] = facts
            return facts

    def _build_facts(
        self, key: tuple[str, str, PointKind, bool], description: str
    ) -> FamilyFacts | None:
        name, unit, kind, is_monotonic = key
        is_gauge = kind is PointKind.GAUGE or (kind is PointKind.SUM and not is_monotonic)
        built = build_metric_name(
            name,
            unit,
            is_gauge=kind is PointKind.GAUGE,
            is_counter=is_monotonic,
            namespace=self._config.namespace,
            with_suffixes=self._config.add_metric_suffixes,
        )
        shown = FamilyKind.GAUGE if is_gauge else _KINDS[kind]
        help_text = description or f"{name}, which its sender did not describe."
        return FamilyFacts(built, shown, help_text) if built.strip("_") else None

    def _know_attributes(self, alias: str, attributes: Mapping[str, Any]) -> int | None:
        """The index of a point's labels; None, counted, over the limits or when new and no series is taken any more."""
        store = self._store
        index = store.find_attributes(alias)
        if index is not None:
            return index
        labels = build_point_labels(attributes)
        if len(alias) > _MAX_ALIAS_CHARS or not self._is_allowed(labels):
            self.n_oversized += 1
            return None
        exclusive, rest = self._exclusive, None
        if exclusive & attributes.keys():
            others = {key: value for key, value in attributes.items() if key not in exclusive}
            rest = format_labels(build_point_labels(others))
        index = store.add_attributes(alias, labels, rest)
        store.n_refused += index is None
        return index


def _add_up(family: Family, row: int, delta: float) -> float:
    """A sum so far with what comes to it; that alone where the series is new or had ended."""
    is_over = family.seen_ns[row] == LONG_AGO_NS
    return delta if is_over else family.values[row] + delta


def _store_distribution(
    family: Family, row: int, point: Point, distribution: SeriesDistribution
) -> None:
    """Keep a point, added to what there is where it is a delta, unless the series had ended."""
    key = family.keys[row]
    is_over = family.seen_ns[row] == LONG_AGO_NS
    before = None if is_over else family.distributions.get(key)
    if point.temporality is Temporality.DELTA and before is not None:
        distribution = before.plus(distribution)
    family.distributions[key] = distribution
    if point.kind is PointKind.EXPONENTIAL_HISTOGRAM:
        _keep_exemplars(family, row, point.raw, keep_native)
    elif point.kind is PointKind.HISTOGRAM:
        bounds = [bound for bound, _ in distribution.steps]
        _keep_exemplars(family, row, point.raw, partial(keep_in_buckets, bounds=bounds))


def _keep_exemplars(
    family: Family,
    row: int,
    raw: Proto,
    keep: Callable[
        [Sequence[SeriesExemplar], Sequence[SeriesExemplar]], tuple[SeriesExemplar, ...]
    ],
) -> None:
    fresh = read_exemplars(raw)
    if fresh:
        key = family.keys[row]
        family.exemplars[key] = keep(family.exemplars.get(key, ()), fresh)


def _read_distribution(point: Point) -> SeriesDistribution | None:
    """Of a histogram or summary; None where its buckets are none."""
    if point.kind is PointKind.SUMMARY:
        return _read_summary(point) if len(point.raw.quantile_values) <= MAX_BUCKETS else None
    found = point.distribution
    if found is not None:
        is_small = len(found.bounds) <= MAX_BUCKETS
        return _cumulate(point) if is_small and _is_whole(found) else None
    native = read_native(point.raw)
    if native is None:
        return None
    return SeriesDistribution(float(point.raw.count), read_sum(point.raw), (), native)


_KINDS: Final = {
    PointKind.GAUGE: FamilyKind.GAUGE,
    PointKind.SUM: FamilyKind.COUNTER,
    PointKind.HISTOGRAM: FamilyKind.HISTOGRAM,
    PointKind.EXPONENTIAL_HISTOGRAM: FamilyKind.HISTOGRAM,
    PointKind.SUMMARY: FamilyKind.SUMMARY,
}


@lru_cache(maxsize=4096)
def _is_whole(found: Buckets) -> bool:
    """Whether a histogram has one bucket more than bounds, as OTLP asks, and its bounds ascend; it may have neither.

    Buckets that hold more than its count would fall to the infinite one, which shows that count.
    """
    if not found.bounds and not found.bucket_counts:
        return True
    if sum(found.bucket_counts) > found.count:
        return False
    return len(found.bucket_counts) == len(found.bounds) + 1 and all(
        low < high for low, high in itertools.pairwise(found.bounds)
    )


def _cumulate(point: Point) -> SeriesDistribution:
    found = point.distribution
    assert found is not None
    total, steps = 0, []
    for bound, count in zip(found.bounds, found.bucket_counts, strict=False):
        total += count
        steps.append((bound, float(total)))
    return SeriesDistribution(float(found.count), found.sum, tuple(steps))


def _read_summary(point: Point) -> SeriesDistribution:
    raw = point.raw
    steps = tuple((step.quantile, step.value) for step in raw.quantile_values)
    return SeriesDistribution(float(raw.count), raw.sum, steps)
