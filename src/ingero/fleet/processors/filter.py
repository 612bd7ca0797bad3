"""``filter``: lets pass what a name, a severity or attributes say, and counts the rest.

Source: opentelemetry-collector-contrib ``processor/filterprocessor`` (key names of ``include`` and ``exclude``; names
of counters). Left out: conditions written in OTTL, and ``expr``.

Lossy: what is left out is counted in ``otelcol_processor_filter_*_filtered_total``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import Field, model_validator
from typing_extensions import override

from ingero.config import StrictModel
from ingero.fleet.component import ComponentId, Host, Stability
from ingero.fleet.consumer import Batch, Consumer
from ingero.fleet.factory import ALL_SIGNALS, ProcessorFactory
from ingero.fleet.helpers.attribute_actions import (
    ENTRIES,
    PATTERNS,
    check_pattern,
    copy_message,
    write_scalar,
)
from ingero.otlp.codec import Export
from ingero.otlp.codec.values import message_attributes, message_value
from ingero.otlp.names import Signal
from ingero.telemetry.declare import counter

FILTERED: Final = {
    signal: counter(
        f"otelcol_processor_filter_{name}_filtered_total",
        f"The {description} that the settings leave out.",
        "processor",
    )
    for signal, name, description in (
        (Signal.METRICS, "datapoints", "metric points"),
        (Signal.LOGS, "logs", "log records"),
        (Signal.TRACES, "spans", "spans"),
    )
}
_OTTL: Final = "conditions in OTTL are not read; write include or exclude"

Fits: TypeAlias = Callable[[Any, Mapping[str, Any]], bool]
"""Whether an item, of a resource with these attributes, is meant."""


class AttributeConfig(StrictModel):
    """An attribute that must be there."""

    key: str = Field(min_length=1, description="Its name.")
    value: str | bool | int | float | None = Field(
        None,
        description="Its value: where match_type is regexp a text is a pattern, for numbers and true or false too;"
        " empty for any.",
    )


class MatchConfig(StrictModel):
    """What is meant: everything that is given must fit."""

    absent_keys: ClassVar[Mapping[str, str]] = {
        "expressions": "expressions are not read; write names or attributes",
        "regexp": "patterns are cached anyway",
    }

    match_type: Literal["strict", "regexp"] = Field(
        description=f"Whether values are equal, or texts are patterns of which a part must fit.{PATTERNS}"
    )
    resource_attributes: tuple[AttributeConfig, ...] = Field(
        (), description="All of them must be on the resource."
    )

    def build_text(self, wanted: tuple[str, ...]) -> Callable[[str], bool]:
        """Whether a text is one of these, or fits one of these patterns; any text where there are none."""
        if not wanted:
            return lambda _text: True
        if self.match_type == "strict":
            return frozenset(wanted).__contains__
        patterns = [re.compile(one) for one in wanted]
        return lambda text: any(pattern.search(text) for pattern in patterns)

    def build_attributes(
        self, wanted: tuple[AttributeConfig, ...]
    ) -> Callable[[Mapping[str, Any]], bool]:
        """Whether all of these are among some attributes."""
        tests = [(one.key, self._build_value(one.value)) for one in wanted]

        def fits(attributes: Mapping[str, Any]) -> bool:
            return all(key in attributes and test(attributes[key]) for key, test in tests)

        return fits

    def _build_value(self, wanted: object) -> Callable[[object], bool]:
        if wanted is None:
            return lambda _value: True
        if self.match_type == "strict" or not isinstance(wanted, str):
            return lambda value: type(value) is type(wanted) and value == wanted
        pattern = re.compile(wanted)
        return lambda value: (
            isinstance(value, str | bool | int | float)
            and pattern.search(write_scalar(value)) is not None
        )

    @model_validator(mode="after")
    def _check_patterns(self) -> Self:
        if self.match_type == "regexp":
            for text in _iter_texts(self.model_dump(exclude={"match_type"})):
                check_pattern(text)
        return self

    def build(self) -> Fits:
        """The test of what is meant."""
        resource = self.build_attributes(self.resource_attributes)
        own = self.build_own()
        return lambda item, attributes: resource(attributes) and own(item)

    def build_own(self) -> Callable[[Any], bool]:
        """The test of an item itself."""
        return lambda _item: True


class MetricMatchConfig(MatchConfig):
    """Metrics that are meant."""

    metric_names: tuple[str, ...] = Field((), description="One of these names.")

    @override
    def build_own(self) -> Callable[[Any], bool]:
        """Whether a metric has one of the names."""
        name = self.build_text(self.metric_names)
        return lambda metric: name(metric.name)


class MetricExcludeConfig(MetricMatchConfig):
    """Metrics that are left out: those of a name, and those of a resource.

    Source: opentelemetry-collector-contrib ``processor/filterprocessor/metrics.go`` (newSkipResExpr).
    """

    @override
    def build(self) -> Fits:
        """Either is enough; what is not given leaves nothing out."""
        name, resource = self.build_own(), self.build_attributes(self.resource_attributes)
        has_names, has_attributes = bool(self.metric_names), bool(self.resource_attributes)
        return lambda metric, attributes: (
            (has_names and name(metric)) or (has_attributes and resource(attributes))
        )


class LogMatchConfig(MatchConfig):
    """Log records that are meant."""

    record_attributes: tuple[AttributeConfig, ...] = Field(
        (), description="All of them must be on the record."
    )
    severity_texts: tuple[str, ...] = Field((), description="One of these severities.")
    bodies: tuple[str, ...] = Field((), description="One of these bodies, of those that are text.")

    @override
    def build_own(self) -> Callable[[Any], bool]:
        """By attributes, severity and body."""
        attributes = self.build_attributes(self.record_attributes)
        severity, body = self.build_text(self.severity_texts), self.build_text(self.bodies)
        has_body = bool(self.bodies)

        def fits(record: Any) -> bool:  # noqa: ANN401 - a upb message
            if not severity(record.severity_text):
                return False
            if has_body:
                value = message_value(record.body)
                if not isinstance(value, str) or not body(value):
                    return False
            return attributes(message_attributes(record.attributes))

        return fits


class SpanMatchConfig(MatchConfig):
    """Spans that are meant."""

    span_names: tuple[str, ...] = Field((), description="One of these names.")
    attributes: tuple[AttributeConfig, ...] = Field(
        (), description="All of them must be on the span."
    )

    @override
    def build_own(self) -> Callable[[Any], bool]:
        """By name and attributes."""
        name, attributes = self.build_text(self.span_names), self.build_attributes(self.attributes)
        return lambda span: name(span.name) and attributes(message_attributes(span.attributes))


class FilterMetricsConfig(StrictModel):
    """Which metrics pass."""

    absent_keys: ClassVar[Mapping[str, str]] = {"metric": _OTTL, "datapoint": _OTTL}
    include: MetricMatchConfig | None = Field(None, description="Only these pass.")
    exclude: MetricExcludeConfig | None = Field(
        None,
        description="These do not pass: where names and attributes are given either is enough.",
    )


class FilterLogsConfig(StrictModel):
    """Which log records pass."""

    absent_keys: ClassVar[Mapping[str, str]] = {"log_record": _OTTL}
    include: LogMatchConfig | None = Field(None, description="Only these pass.")
    exclude: LogMatchConfig | None = Field(None, description="These do not pass.")


class FilterSpansConfig(StrictModel):
    """Which spans pass."""

    include: SpanMatchConfig | None = Field(None, description="Only these pass.")
    exclude: SpanMatchConfig | None = Field(None, description="These do not pass.")


class FilterConfig(StrictModel):
    """What passes, by signal; a signal that is not named passes whole."""

    absent_keys: ClassVar[Mapping[str, str]] = {
        "error_mode": _OTTL, "traces": _OTTL, "metric_conditions": _OTTL, "log_conditions": _OTTL,
        "trace_conditions": _OTTL,
    }  # fmt: skip
    metrics: FilterMetricsConfig | None = Field(None, description="Which metrics pass.")
    logs: FilterLogsConfig | None = Field(None, description="Which log records pass.")
    spans: FilterSpansConfig | None = Field(None, description="Which spans pass.")


class FilterProcessor:
    """Passes batches on without what is left out; a batch of which nothing is left ends here."""

    def __init__(
        self, component: ComponentId, config: FilterConfig, signal: Signal, following: Consumer
    ) -> None:
        self._name = str(component)
        self._signal = signal
        self._following = following
        own = {
            Signal.METRICS: config.metrics,
            Signal.LOGS: config.logs,
            Signal.TRACES: config.spans,
        }
        mine = own[signal]
        self._include = mine.include.build() if mine is not None and mine.include else None
        self._exclude = mine.exclude.build() if mine is not None and mine.exclude else None

    async def start(self, host: Host) -> None:
        """Take its counters."""
        bound = {
            signal: host.meter.counter(metric).bound(processor=self._name)
            for signal, metric in FILTERED.items()
        }
        self._filtered = bound[self._signal]

    async def stop(self) -> None:
        """Nothing to release."""

    def consume(self, batch: Batch) -> None:
        """Pass on what is meant; raises PermanentError for JSON that does not fit its protobuf field."""
        if self._include is None and self._exclude is None:
            self._following.consume(batch)
            return
        export = batch.export
        copy = copy_message(export)
        self._filter(copy)
        left = Export.from_message(export.signal, copy, export.size_bytes)
        n_out = export.n_items - left.n_items
        if left.n_items:
            self._following.consume(replace(batch, export=left) if n_out else batch)
        self._filtered(n_out)

    def _filter(self, message: Any) -> None:  # noqa: ANN401 - a upb message
        resources, scopes, items = ENTRIES[self._signal]
        for entry in getattr(message, resources):
            attributes = message_attributes(entry.resource.attributes)
            for scope in getattr(entry, scopes):
                _keep(getattr(scope, items), lambda item: self._passes(item, attributes))  # noqa: B023 - called here
            _keep(getattr(entry, scopes), lambda scope: len(getattr(scope, items)) > 0)
        _keep(getattr(message, resources), lambda entry: len(getattr(entry, scopes)) > 0)

    def _passes(self, item: Any, resource: Mapping[str, Any]) -> bool:  # noqa: ANN401 - a upb message
        if self._include is not None and not self._include(item, resource):
            return False
        return self._exclude is None or not self._exclude(item, resource)


def _keep(found: Any, is_kept: Callable[[Any], bool]) -> None:  # noqa: ANN401 - a repeated field
    for at in reversed(range(len(found))):
        if not is_kept(found[at]):
            del found[at]


def _iter_texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name != "key":
                yield from _iter_texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _iter_texts(inner)


FACTORY: Final = ProcessorFactory(
    type="filter",
    config=FilterConfig,
    description="Lets pass what names, severities or attributes say.",
    signals=ALL_SIGNALS,
    stability=Stability.BETA,
    metrics=tuple(FILTERED.values()),
    create=FilterProcessor,
)
