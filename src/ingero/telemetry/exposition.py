"""A `MeterRegistry` as Prometheus or OpenMetrics text.

Families are those of ``prometheus_client``, whose own counters are not used: they take a lock for each addition.
OpenMetrics is written by it; text by `encode_text`, because the library writes whole numbers as ``2000.0`` and
``1.048576e+08``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from operator import itemgetter
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from typing_extensions import override

from ingero.telemetry.metrics import (
    CounterInstrument,
    GaugeInstrument,
    HistogramInstrument,
    Instrument,
    MeterRegistry,
)

_TEXT_TYPES: Final = {"unknown": "untyped"}
SUFFIXES_OF_OTHER_TYPES: Final = ("_count", "_total")
"""Of histograms and counters: ``promtool check metrics`` minds them on a gauge, and not on a series without a type."""


class MeterCollector(Collector):
    """What ``prometheus_client`` asks for numbers.

    Args:
        meter: Instruments.
        only: A label and its value: series without it are left out. None shows all.
    """

    def __init__(self, meter: MeterRegistry, only: tuple[str, str] | None = None) -> None:
        self._meter = meter
        self._only = only

    @override
    def collect(self) -> Iterator[Family]:
        """Each instrument that has a series, by name."""
        self._meter.refresh()
        for instrument in self._meter:
            family = build_family(instrument)
            if self._only is not None:
                label, value = self._only
                family.samples = [one for one in family.samples if one.labels.get(label) == value]
            if family.samples:
                yield family


def build_family(instrument: Instrument) -> Family:
    """One instrument with its series, as ``prometheus_client`` has it."""
    if isinstance(instrument, CounterInstrument):
        return _build_counter(instrument)
    if isinstance(instrument, GaugeInstrument):
        return _build_gauge(instrument)
    return _build_histogram(instrument)


def _build_counter(instrument: CounterInstrument) -> Family:
    metric = instrument.metric
    family = CounterMetricFamily(metric.name, metric.description, labels=metric.labels)
    for values, series in sorted(instrument.series.items(), key=itemgetter(0)):
        family.add_metric(values, series.read())
    return family


def _build_gauge(instrument: GaugeInstrument) -> Family:
    metric = instrument.metric
    family = GaugeMetricFamily(metric.name, metric.description, labels=metric.labels)
    for values, value in sorted(instrument.read().items()):
        family.add_metric(values, value)
    return family


def _build_histogram(instrument: HistogramInstrument) -> Family:
    metric = instrument.metric
    family = HistogramMetricFamily(metric.name, metric.description, labels=metric.labels)
    for values, series in sorted(instrument.series.items(), key=itemgetter(0)):
        counts, total = series.read()
        bounds = [*(repr(float(bound)) for bound in metric.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(counts), strict=True))
        family.add_metric(values, buckets, sum_value=total)
    return family


def encode_metrics(
    meter: MeterRegistry, accept: str = "", only: tuple[str, str] | None = None
) -> tuple[bytes, str]:
    """The text that a scraper which sent this ``Accept`` header wants, and its content type.

    Args:
        meter: Instruments.
        accept: The header.
        only: A label and its value: series without it are left out. None shows all.
    """
    encoder, content_type = choose_encoder(accept)
    collector = MeterCollector(meter, only)
    if content_type.startswith("text/plain"):
        return encode_text(collector.collect()), content_type
    return encoder(collector), content_type


def encode_text(families: Iterable[Family]) -> bytes:
    """Families as text; whole numbers are written as such, as Go's and the existing agent's pages have them.

    A gauge that the existing system named ``…_count`` or ``…_total`` is shown without a type.

    Source: Prometheus text format 0.0.4: HELP escapes backslash and newline, a label value also the quote.
    """
    lines = []
    for family in families:
        name, kind = family.name, _TEXT_TYPES.get(family.type, family.type)
        if kind == "gauge" and name.endswith(SUFFIXES_OF_OTHER_TYPES):
            kind = "untyped"
        if kind == "counter":
            name += "_total"
        help_text = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
        lines.append(f"# HELP {name} {help_text}")
        lines.append(f"# TYPE {name} {kind}")
        lines += [
            f"{sample.name}{_write_labels(sample.labels)} {_write_number(float(sample.value))}"
            for sample in family.samples
        ]
    return ("\n".join(lines) + "\n" if lines else "").encode()


def _write_labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    texts = (
        (name, value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\""))
        for name, value in sorted(labels.items())
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in texts) + "}"


def _write_number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() else repr(value)
