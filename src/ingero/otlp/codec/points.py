"""Rows for exporters: data points and log records one at a time, with their resource's attributes at hand.

Lazy, and the same for both encodings. A resource's attributes are read once per resource and shared by its rows.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from ingero.otlp.codec import structs
from ingero.otlp.codec.export import Export, MetricEntry
from ingero.otlp.codec.values import message_attributes, message_value, tree_attributes, tree_value

NO_RECORDED_VALUE: Final = 1
"""Bit of a point's flags: the series has gone stale. Source: opentelemetry-proto, DataPointFlags."""


class PointKind(StrEnum):
    """What a point belongs to."""

    GAUGE = "gauge"
    SUM = "sum"
    HISTOGRAM = "histogram"
    EXPONENTIAL_HISTOGRAM = "exponential_histogram"
    SUMMARY = "summary"


class Temporality(StrEnum):
    """What a sum or distribution covers."""

    UNSPECIFIED = "unspecified"
    DELTA = "delta"
    CUMULATIVE = "cumulative"


_TEMPORALITIES: Final = {1: Temporality.DELTA, 2: Temporality.CUMULATIVE}


@dataclass(frozen=True, slots=True)
class PointDistribution:
    """A histogram's point.

    Attributes:
        count: Observations.
        sum: Their sum, or None.
        bounds: Upper bounds, ascending; the last bucket has none.
        bucket_counts: Observations per bucket, not cumulative; one more than ``bounds``, or empty.
    """

    count: int
    sum: float | None
    bounds: tuple[float, ...]
    bucket_counts: tuple[int, ...]


@dataclass(slots=True)
class Point:
    """One data point.

    Attributes:
        name: Metric name, as sent.
        kind: What it belongs to.
        unit: UCUM unit, as sent.
        description: As sent.
        value: Number of a gauge or sum, or None.
        distribution: Of a histogram; None otherwise. Exponential histograms and summaries carry only ``raw``.
        attributes: The point's own, by name.
        resource: The resource's, by name; shared between rows, not to be changed.
        scope: Scope name and version.
        time_unix_nano: As sent; 0 when absent.
        start_time_unix_nano: As sent; 0 when absent.
        temporality: Of sums and distributions.
        is_monotonic: Of sums.
        is_stale: The sender marked the series as having no value.
        raw: The point itself, upb message or struct.
    """

    name: str
    kind: PointKind
    unit: str
    description: str
    value: float | int | None
    distribution: PointDistribution | None
    attributes: dict[str, structs.Value]
    resource: Mapping[str, structs.Value]
    scope: tuple[str, str]
    time_unix_nano: int
    start_time_unix_nano: int
    temporality: Temporality
    is_monotonic: bool
    is_stale: bool
    raw: structs.Proto


@dataclass(slots=True)
class LogRow:
    """One log record.

    Attributes:
        event_name: ``event_name`` of the record, or empty.
        body: As a Python value.
        severity_number: OTLP's 1 to 24; 0 when absent.
        severity_text: As sent.
        attributes: The record's own, by name.
        resource: The resource's, by name; shared between rows, not to be changed.
        scope: Scope name and version.
        time_unix_nano: As sent, or the observed time when absent.
    """

    event_name: str
    body: structs.Value
    severity_number: int
    severity_text: str
    attributes: dict[str, structs.Value]
    resource: Mapping[str, structs.Value]
    scope: tuple[str, str]
    time_unix_nano: int


def iter_points(export: Export) -> Iterator[Point]:
    """Every data point of a metrics export, in order."""
    attributes_of = message_attributes if export.is_message else tree_attributes
    for entry, metrics in export.metrics:
        resource = attributes_of(entry.resource.attributes) if entry.resource else {}
        for found in metrics:
            origin = (resource, _scope(found[0].scope))
            for raw in found[4]:
                yield _point(found, raw, attributes_of(raw.attributes), origin)


@dataclass(slots=True)
class LogEntry:
    """One log record where it stands, not read yet.

    Attributes:
        event_name: ``event_name`` of the record, or empty.
        resource: The resource's attributes, by name; shared between records, not to be changed.
        record: The record itself, upb message or struct.
        scope: Its scope, likewise; may be None.
        is_message: Which of the two.
    """

    event_name: str
    resource: Mapping[str, structs.Value]
    record: structs.Proto
    scope: structs.Proto
    is_message: bool

    @property
    def attributes(self) -> dict[str, structs.Value]:
        """The record's own, by name; read anew each time."""
        return (message_attributes if self.is_message else tree_attributes)(self.record.attributes)

    @property
    def body(self) -> structs.Value:
        """As a Python value."""
        return (message_value if self.is_message else tree_value)(self.record.body)

    @property
    def time_unix_nano(self) -> int:
        """As sent, or the observed time when absent."""
        sent_ns: int = self.record.time_unix_nano or self.record.observed_time_unix_nano
        return sent_ns

    def read_row(self) -> LogRow:
        """Everything in it."""
        record = self.record
        return LogRow(
            event_name=self.event_name,
            body=self.body,
            severity_number=record.severity_number,
            severity_text=record.severity_text,
            attributes=self.attributes,
            resource=self.resource,
            scope=_scope(self.scope),
            time_unix_nano=self.time_unix_nano,
        )


def iter_log_entries(export: Export, names: Container[str] | None = None) -> Iterator[LogEntry]:
    """The records of a logs export, in order.

    Args:
        export: A logs export.
        names: Event names that are wanted; None wants every record. A resource without one of them is not read.
    """
    is_message = export.is_message
    attributes_of = message_attributes if is_message else tree_attributes
    for entry in export.root.resource_logs:
        resource = None
        for scope_logs in entry.scope_logs:
            for record in scope_logs.log_records:
                name = record.event_name
                if names is not None and name not in names:
                    continue
                if resource is None:
                    resource = attributes_of(entry.resource.attributes) if entry.resource else {}
                yield LogEntry(name, resource, record, scope_logs.scope, is_message)


class LogEntryReader(Protocol):
    """What reads records of one event name."""

    def add(self, entry: LogEntry) -> None:
        """Read one record; a bad one is counted and does not raise."""
        ...


def read_log_entries(export: Export, readers: Mapping[str, LogEntryReader]) -> None:
    """Give every record of a logs export to the reader of its event name, in one pass; others are passed over."""
    for entry in iter_log_entries(export, readers):
        readers[entry.event_name].add(entry)


def iter_log_rows(export: Export) -> Iterator[LogRow]:
    """Every record of a logs export, read, in order."""
    for entry in iter_log_entries(export):
        yield entry.read_row()


def _scope(scope: structs.Proto) -> tuple[str, str]:
    return (scope.name, scope.version) if scope is not None else ("", "")


_KINDS: Final = {str(kind): kind for kind in PointKind}


def _point(
    found: MetricEntry,
    raw: structs.Proto,
    attributes: dict[str, structs.Value],
    origin: tuple[Mapping[str, structs.Value], tuple[str, str]],
) -> Point:
    _, metric, name, kind_name, _ = found
    kind = _KINDS[kind_name]
    is_number = kind in {PointKind.GAUGE, PointKind.SUM}
    group = None if kind is PointKind.GAUGE else getattr(metric, kind_name)
    return Point(
        name=name,
        kind=kind,
        unit=metric.unit,
        description=metric.description,
        value=_number(raw) if is_number else None,
        distribution=_distribution(raw) if kind is PointKind.HISTOGRAM else None,
        attributes=attributes,
        resource=origin[0],
        scope=origin[1],
        time_unix_nano=raw.time_unix_nano,
        start_time_unix_nano=raw.start_time_unix_nano,
        temporality=_TEMPORALITIES.get(
            getattr(group, "aggregation_temporality", 0), Temporality.UNSPECIFIED
        ),
        is_monotonic=kind is PointKind.SUM and getattr(metric, kind_name).is_monotonic,
        is_stale=bool(raw.flags & NO_RECORDED_VALUE),
        raw=raw,
    )


def _number(raw: structs.Proto) -> float | int | None:
    if hasattr(raw, "WhichOneof"):
        which = raw.WhichOneof("value")
        return None if which is None else getattr(raw, which)
    return raw.as_double if raw.as_double is not None else raw.as_int  # type: ignore[no-any-return]


def _distribution(raw: structs.Proto) -> PointDistribution:
    return PointDistribution(
        count=raw.count,
        sum=read_sum(raw),
        bounds=tuple(raw.explicit_bounds),
        bucket_counts=tuple(raw.bucket_counts),
    )


def read_sum(raw: structs.Proto) -> float | None:
    """The sum of a histogram's point, of either kind and encoding; None when the sender did not keep it."""
    has_sum = raw.HasField("sum") if hasattr(raw, "HasField") else raw.sum is not None
    return raw.sum if has_sum else None
