"""What is known of an engine's page of metrics, and since when its sums count.

Pages are other people's text: the number of models that are followed is bounded, and what is no page is bad data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ingero.agent.inference.engines import EngineMetric, ServingEngine
from ingero.agent.metrics.series import Distribution, Kind
from ingero.errors import BadDataError

MAX_MODELS: Final = 256
"""Of one engine."""
MAX_TEXT: Final = 256
MAX_LINE: Final = 16 << 10
"""Characters: the parser's time grows with the square of a line's labels."""
_MODEL_LABELS: Final = ("model_name", "model")
_UNREADABLE: Final = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError)
"""What prometheus_client's parser raises on text that is no page, and numbers that are none."""
Number = float | Distribution


@dataclass(frozen=True, slots=True)
class EnginePage:
    """What is known of a page.

    Attributes:
        numbers: By metric and model.
        started_s: When the process that made the page started, Unix time, as it says; 0 where it does not.
        unreadable: Metrics, as the engine calls them, whose samples are no numbers, or no histogram.
    """

    numbers: Mapping[tuple[EngineMetric, str], Number]
    started_s: float
    unreadable: frozenset[str] = frozenset()


@dataclass(slots=True)
class FollowedModels:
    """Which models of one engine are followed: first those that are already, so that their series stay; then by name.

    Attributes:
        n_left_out: How many were not, each time that one appeared.
    """

    n_left_out: int = 0
    _chosen: frozenset[str] = frozenset()
    _left_out: frozenset[str] = frozenset()

    def take(
        self, numbers: Mapping[tuple[EngineMetric, str], Number]
    ) -> dict[tuple[EngineMetric, str], Number]:
        """Those of a page's numbers that are of followed models."""
        models = sorted({model for _, model in numbers}, key=lambda m: (m not in self._chosen, m))
        self._chosen = frozenset(models[:MAX_MODELS])
        left_out = frozenset(models[MAX_MODELS:])
        self.n_left_out += len(left_out - self._left_out)
        self._left_out = left_out
        return {key: number for key, number in numbers.items() if key[1] in self._chosen}


@dataclass(slots=True)
class SumStarts:
    """Since when the sums of one engine count: since its start, and those of a model anew when one of them falls."""

    _started_ns: int = 0
    _models: dict[str, tuple[int, Mapping[str, float]]] = field(default_factory=dict)

    def take(
        self, numbers: Mapping[tuple[EngineMetric, str], Number], started_ns: int, now_ns: int
    ) -> dict[str, int]:
        """Starts by model, Unix time; 0 where it is not known.

        Args:
            numbers: A page's.
            started_ns: Start of the engine; 0 where it is not known.
            now_ns: When it was read.
        """
        if started_ns != self._started_ns:
            self._started_ns = started_ns
            self._models.clear()
        by_model: dict[str, dict[str, float]] = {}
        for (metric, model), number in numbers.items():
            if metric.kind is not Kind.GAUGE:
                count = sum(number.counts) if isinstance(number, Distribution) else number
                by_model.setdefault(model, {})[metric.name] = count
        for model, counts in by_model.items():
            start_ns, before = self._models.pop(model, (started_ns, {}))
            if any(count < before.get(name, count) for name, count in counts.items()):
                # The true start is not known; one before now would overlap with what was pushed meanwhile.
                start_ns, before = now_ns, {}
            self._models[model] = start_ns, {**before, **counts}
        absent = [model for model in self._models if model not in by_model]
        for model in absent[: max(0, len(self._models) - MAX_MODELS)]:
            del self._models[model]
        return {model: self._models[model][0] for model in by_model}


def read_page(text: str, engine: ServingEngine) -> EnginePage:
    """What is known of a page.

    Samples of one model, such as those of several ranks, are added up; of a share the greatest counts. A metric that
    cannot be read is left out, and the others are taken.

    Raises:
        BadDataError: It is no page in Prometheus' text format, or nothing that is known of it can be read.
    """
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

    longest = max(map(len, text.splitlines()), default=0)
    if longest > MAX_LINE:
        raise BadDataError(f"not a page of metrics: a line of {longest} characters")
    samples: dict[str, list[Any]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(sample)
        started = samples.get("process_start_time_seconds")
        started_s = float(started[0].value) if started else 0.0
    except _UNREADABLE as error:
        raise BadDataError(f"not a page of metrics: {error!r}"[:MAX_TEXT]) from error
    found: dict[tuple[EngineMetric, str], Number] = {}
    known: set[str] = set()
    unreadable: dict[str, Exception] = {}
    for metric in engine.metrics:
        if metric.name in known:
            continue
        try:
            numbers = _read_metric(metric, samples)
        except _UNREADABLE as error:
            unreadable[metric.theirs] = error
            continue
        known |= {metric.name} if numbers else set()
        found |= {(metric, model): number for model, number in numbers.items()}
    if unreadable and not found:
        why = next(iter(unreadable.values()))
        raise BadDataError(f"not a page of metrics: {why!r}"[:MAX_TEXT]) from why
    return EnginePage(found, started_s, frozenset(unreadable))


def _read_metric(metric: EngineMetric, samples: Mapping[str, list[Any]]) -> Mapping[str, Number]:
    if metric.kind is Kind.HISTOGRAM:
        sums = _group(metric, samples.get(f"{metric.theirs}_sum", ()))
        buckets = _group(metric, samples.get(f"{metric.theirs}_bucket", ()))
        return {model: _add_up(some, sums.get(model, [])) for model, some in buckets.items()}
    # The parser gives counters that lack it the suffix that OpenMetrics wants.
    found = samples.get(metric.theirs, samples.get(f"{metric.theirs}_total", ()))
    add_up = max if metric.name.endswith(".utilization") else sum
    numbers: dict[str, Number] = {}
    for model, some in _group(metric, found).items():
        number = _read_number(metric.scale * add_up([_read_number(one.value) for one in some]))
        if metric.kind is Kind.SUM and number < 0:
            raise ValueError(f"a counter of {number}")
        numbers[model] = number
    return numbers


def _group(metric: EngineMetric, samples: Iterable[Any]) -> dict[str, list[Any]]:
    """Samples of a metric by model, in the order of their names."""
    by_model: dict[str, list[Any]] = {}
    for sample in samples:
        if metric.only is None or sample.labels.get(metric.only[0]) == metric.only[1]:
            keys = (key for key in _MODEL_LABELS if key in sample.labels)
            model = next((sample.labels[key][:MAX_TEXT] for key in keys), "")
            by_model.setdefault(model, []).append(sample)
    return dict(sorted(by_model.items()))


def _read_number(value: float) -> float:
    """A number that can be added up.

    Raises:
        ValueError: It is not finite.
    """
    number = float(value)
    if not abs(number) < float("inf"):
        raise ValueError(f"{value} is not finite")
    return number


def _add_up(buckets: list[Any], sums: list[Any]) -> Distribution:
    """A histogram out of cumulative buckets of several label sets, which have the same bounds."""
    cumulative: dict[float, float] = {}
    for bucket in buckets:
        bound = float(bucket.labels["le"])
        if math.isnan(bound):
            raise ValueError("a bucket without a bound")
        cumulative[bound] = cumulative.get(bound, 0.0) + _read_number(bucket.value)
    bounds = sorted(cumulative)
    if not bounds or bounds[-1] != float("inf"):
        raise ValueError("a histogram without a last bucket")
    counts, before = [], 0.0
    for bound in bounds:
        counts.append(round(cumulative[bound] - before))
        before = cumulative[bound]
    if min(counts) < 0:
        raise ValueError("buckets that are not cumulative")
    total = _read_number(sum(_read_number(one.value) for one in sums))
    return Distribution(tuple(bounds[:-1]), tuple(counts), total)
