"""Exports → series: which family, which labels, which value.

Above the series store and naming; runs when a scrape or the drain timer asks for it, never in a push.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from ingero.fleet.exporters.prometheus.naming import build_labels, build_metric_name
from ingero.fleet.exporters.prometheus.series import (
    Distribution,
    Family,
    FamilyFacts,
    FamilyKind,
    SeriesStore,
)
from ingero.wire.otlp import Export, Point, PointKind, Temporality, iter_points

_PLAUSIBLE_NS: Final = 1_000_000_000_000_000_000
"""2001-09-09. Older agents date collective points by the time since boot, which would be 1970."""

_LONG_AGO_NS: Final = -(1 << 62)
_JOB_KEYS: Final = ("service.name", "service.namespace", "service.instance.id")
_TARGET_INFO: Final = FamilyFacts("target_info", FamilyKind.GAUGE, "Attributes of who reports.")


@dataclass(frozen=True, slots=True)
class IntakeSettings:
    """What becomes of names and attributes.

    Attributes:
        namespace: Put before each name.
        with_suffixes: Append unit and type to names.
        const_labels: Labels of every series.
        included: Patterns of resource attributes that become labels.
        excluded: Patterns of resource attributes that do not, whatever ``included`` says.
        dropped: Point attributes that never become labels.
    """

    namespace: str = ""
    with_suffixes: bool = True
    const_labels: Mapping[str, str] | None = None
    included: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    dropped: frozenset[str] = frozenset()


class Intake:
    """Walks exports into a `SeriesStore`.

    Attributes:
        n_unsupported: Points that a text exposition cannot show: exponential histograms, and points without a value.
    """

    def __init__(self, store: SeriesStore, settings: IntakeSettings) -> None:
        self.n_unsupported = 0
        self._store = store
        self._settings = settings
        self._facts: dict[tuple[str, str, PointKind, bool], FamilyFacts | None] = {}

    def apply(self, export: Export, now_ns: int, received_wall_ns: int) -> None:
        """Store the latest point of each series in a metrics export.

        Args:
            export: What was pushed.
            now_ns: Monotonic time of its arrival; what expiry counts from.
            received_wall_ns: Wall time of its arrival, for points whose own time cannot be true.
        """
        resource: Mapping[str, Any] | None = None
        resource_index, alias = 0, None
        for point in iter_points(export):
            if point.resource is not resource:
                resource = point.resource
                alias = _alias(resource)
                resource_index = self._get_resource(alias, resource, now_ns)
            facts = self._get_facts(point)
            family = None if facts is None else self._store.get_family(facts)
            if family is None:
                self.n_unsupported += facts is None
                continue
            row = self._get_row(family, (alias, resource_index), point)
            if row is not None:
                time_ns = point.time_unix_nano
                family.times_ms[row] = (
                    time_ns if time_ns > _PLAUSIBLE_NS else received_wall_ns
                ) // 1_000_000
                family.seen_ns[row] = now_ns if not point.is_stale else _LONG_AGO_NS
                self._store_value(family, row, point)

    def _get_resource(self, alias: object, attributes: Mapping[str, Any], now_ns: int) -> int:
        index = self._store.find_resource(alias)
        settings = self._settings
        if index is None:
            pairs = [
                (key, _text(value))
                for key, value in attributes.items()
                if _matches(key, settings.included) and not _matches(key, settings.excluded)
            ]
            labels = build_labels(pairs) | _job_labels(attributes)
            index = self._store.add_resource(alias, labels | dict(settings.const_labels or {}))
        if any(key in attributes for key in _JOB_KEYS):
            self._put_target_info(alias, attributes, now_ns)
        return index

    def _put_target_info(self, alias: object, attributes: Mapping[str, Any], now_ns: int) -> None:
        job = _job_labels(attributes)
        if not job:
            return
        info = ("target", alias)
        resource = self._store.find_resource(info)
        if resource is None:
            pairs = [(k, _text(v)) for k, v in attributes.items() if k not in _JOB_KEYS]
            const = dict(self._settings.const_labels or {})
            resource = self._store.add_resource(info, build_labels(pairs) | job | const)
        family = self._store.get_family(_TARGET_INFO)
        empty = self._store.find_attributes(())
        if empty is None:
            empty = self._store.add_attributes((), {})
        row = None if family is None else self._store.get_row(family, resource, empty)
        if family is not None and row is not None:
            family.values[row], family.seen_ns[row] = 1.0, now_ns

    def _get_facts(self, point: Point) -> FamilyFacts | None:
        key = (point.name, point.unit, point.kind, point.is_monotonic)
        try:
            return self._facts[key]
        except KeyError:
            facts = self._build_facts(point)
            if len(self._facts) >= 10_000:  # a sender of ever-new names costs time, not memory
                self._facts.clear()
            self._facts[key] = facts
            return facts

    def _build_facts(self, point: Point) -> FamilyFacts | None:
        if point.kind is PointKind.EXPONENTIAL_HISTOGRAM:
            return None
        is_counter = point.kind is PointKind.SUM and point.is_monotonic
        kind = (
            _KINDS[point.kind]
            if point.kind is not PointKind.SUM or is_counter
            else FamilyKind.GAUGE
        )
        name = build_metric_name(
            point.name,
            point.unit,
            is_gauge=point.kind is PointKind.GAUGE,
            is_counter=is_counter,
            namespace=self._settings.namespace,
            with_suffixes=self._settings.with_suffixes,
        )
        return FamilyFacts(name, kind, point.description) if name.strip("_") else None

    def _get_row(self, family: Family, resource: tuple[object, int], point: Point) -> int | None:
        store = self._store
        attributes = point.attributes
        for key in self._settings.dropped & attributes.keys():
            del attributes[key]
        alias = _alias(attributes)
        index = store.find_attributes(alias)
        if index is None:
            if store.is_full:
                store.n_refused += 1
                return None
            index = store.add_attributes(
                alias, build_labels((key, _text(value)) for key, value in attributes.items())
            )
        resource_alias, resource_index = resource
        overlap = store.overlap(resource_index, index)
        if overlap:
            resource_index = self._without(resource_alias, point.resource, overlap)
        return store.get_row(family, resource_index, index)

    def _without(self, alias: object, attributes: Mapping[str, Any], names: frozenset[str]) -> int:
        """The resource's labels less those that a point has itself."""
        reduced = (alias, names)
        index = self._store.find_resource(reduced)
        if index is None:
            settings = self._settings
            labels = (
                build_labels(
                    (key, _text(value))
                    for key, value in attributes.items()
                    if _matches(key, settings.included) and not _matches(key, settings.excluded)
                )
                | _job_labels(attributes)
                | dict(settings.const_labels or {})
            )
            kept = {name: value for name, value in labels.items() if name not in names}
            index = self._store.add_resource(reduced, kept)
        return index

    def _store_value(self, family: Family, row: int, point: Point) -> None:
        is_delta = point.temporality is Temporality.DELTA
        if family.facts.kind in {FamilyKind.GAUGE, FamilyKind.COUNTER}:
            value = float(point.value) if point.value is not None else float("nan")
            family.values[row] = family.values[row] + value if is_delta else value
            return
        key = family.keys[row]
        distribution = _read_summary(point) if point.distribution is None else _cumulate(point)
        before = family.distributions.get(key)
        if is_delta and before is not None:
            distribution = before.plus(distribution)
        family.distributions[key] = distribution


_KINDS: Final = {
    PointKind.GAUGE: FamilyKind.GAUGE,
    PointKind.SUM: FamilyKind.COUNTER,
    PointKind.HISTOGRAM: FamilyKind.HISTOGRAM,
    PointKind.SUMMARY: FamilyKind.SUMMARY,
}


def _alias(attributes: Mapping[str, Any]) -> object:
    """Something hashable that is equal for equal attributes, types included."""
    alias = tuple(attributes.items())
    try:
        hash(alias)
    except TypeError:
        return repr(alias)
    # 1 == True == 1.0 in Python, and not in a label.
    return (alias, tuple(map(type, attributes.values())))


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _job_labels(attributes: Mapping[str, Any]) -> dict[str, str]:
    """``job`` and ``instance`` as the OpenTelemetry specification derives them; empty when there is no service."""
    labels = {}
    name = _text(attributes.get("service.name", ""))
    namespace = _text(attributes.get("service.namespace", ""))
    if name:
        labels["job"] = f"{namespace}/{name}" if namespace else name
    if instance := _text(attributes.get("service.instance.id", "")):
        labels["instance"] = instance
    return labels


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | dict):
        return json.dumps(value, default=_bytes_text, separators=(",", ":"))
    return _bytes_text(value) if isinstance(value, bytes) else "" if value is None else str(value)


def _bytes_text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _cumulate(point: Point) -> Distribution:
    found = point.distribution
    assert found is not None
    total, steps = 0, []
    for bound, count in zip(found.bounds, found.bucket_counts, strict=False):
        total += count
        steps.append((bound, float(total)))
    return Distribution(float(found.count), found.sum, tuple(steps))


def _read_summary(point: Point) -> Distribution:
    raw = point.raw
    steps = tuple((step.quantile, step.value) for step in raw.quantile_values)
    return Distribution(float(raw.count), raw.sum, steps)
