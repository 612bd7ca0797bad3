"""A `MeterRegistry` as Prometheus or OpenMetrics text.

The text is written by ``prometheus_client``, whose own counters are not used: they take a lock for each addition.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from operator import itemgetter

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


class MeterCollector(Collector):
    """What ``prometheus_client`` asks for numbers."""

    def __init__(self, meter: MeterRegistry) -> None:
        self._meter = meter

    @override
    def collect(self) -> Iterator[Family]:
        """Each instrument that has a series, by name."""
        for instrument in self._meter:
            family = build_family(instrument)
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


def encode_metrics(meter: MeterRegistry, accept: str = "") -> tuple[bytes, str]:
    """The text that a scraper which sent this ``Accept`` header wants, and its content type."""
    encoder, content_type = choose_encoder(accept)
    return encoder(MeterCollector(meter)), content_type
