"""Counters, gauges and histograms that many threads write without a lock and one scraper reads.

A thread adds to a cell that only it writes, so an addition is a dictionary lookup and no increment is lost; reading
sums the cells. Knows how to store numbers; `ingero.telemetry.exposition` knows how to show them.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import TypeVar

from typing_extensions import override

from ingero.telemetry.declare import MetricDeclaration, MetricKind

LabelValues = tuple[str, ...]


class CounterSeries:
    """The additions to one set of label values, one cell per thread."""

    __slots__ = ("_cells",)

    def __init__(self) -> None:
        self._cells: dict[int, float] = {}

    def add(self, amount: float = 1) -> None:
        """Add to this thread's cell."""
        cells, thread = self._cells, get_ident()
        try:
            cells[thread] += amount
        except KeyError:
            cells[thread] = amount

    def read(self) -> float:
        """Everything that was added so far."""
        return sum(list(self._cells.values()))


class WatchedSeries(CounterSeries):
    """A count that other code keeps; asked for at each scrape."""

    __slots__ = ("_source",)

    def __init__(self, source: Callable[[], float]) -> None:
        super().__init__()
        self._source = source

    @override
    def read(self) -> float:
        """What the other code counted so far."""
        return self._source()


class HistogramSeries:
    """The observations of one set of label values: per thread, a count per bucket and then the sum."""

    __slots__ = ("_bounds", "_cells")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._cells: dict[int, list[float]] = {}

    def record(self, value: float) -> None:
        """Count one observation; a value equal to a bound is within it, as Prometheus has it."""
        cells, thread = self._cells, get_ident()
        try:
            cell = cells[thread]
        except KeyError:
            cell = cells[thread] = [0.0] * (len(self._bounds) + 2)
        cell[bisect_left(self._bounds, value)] += 1
        cell[-1] += value

    def read(self) -> tuple[list[float], float]:
        """Observations per bucket (not cumulative; the last bucket has no bound) and their sum."""
        totals = [0.0] * (len(self._bounds) + 2)
        for cell in list(self._cells.values()):
            totals = [total + value for total, value in zip(totals, cell, strict=True)]
        return totals[:-1], totals[-1]


SeriesT = TypeVar("SeriesT", CounterSeries, HistogramSeries)


class _Instrument:
    """What the three have in common: a declaration, and label values in its order."""

    __slots__ = ("metric",)

    def __init__(self, metric: MetricDeclaration) -> None:
        self.metric = metric

    def _values(self, labels: dict[str, str]) -> LabelValues:
        try:
            values = tuple([labels[name] for name in self.metric.labels])
        except KeyError as missing:
            raise TypeError(f"{self.metric.name} needs the label {missing}") from None
        if len(labels) != len(values):
            raise TypeError(
                f"{self.metric.name} has labels {self.metric.labels}, got {tuple(labels)}"
            )
        return values


class CounterInstrument(_Instrument):
    """A counter. A series appears when it is bound or first added to."""

    __slots__ = ("series",)

    def __init__(self, metric: MetricDeclaration) -> None:
        super().__init__(metric)
        self.series: dict[LabelValues, CounterSeries] = {}

    def add(self, amount: float = 1, /, **labels: str) -> None:
        """Add to the series with these labels."""
        self._find(labels).add(amount)

    def bound(self, **labels: str) -> Callable[[float], None]:
        """The adder of one series."""
        return self._find(labels).add

    def read(self, /, **labels: str) -> float:
        """What was added to the series with these labels; 0 where there is none."""
        found = self.series.get(self._values(labels))
        return 0.0 if found is None else found.read()

    def watch(self, read: Callable[[], float], /, **labels: str) -> None:
        """Ask ``read``, which never falls, at each scrape; nothing may be added to this series."""
        self.series[self._values(labels)] = WatchedSeries(read)

    def _find(self, labels: dict[str, str]) -> CounterSeries:
        values = self._values(labels)
        found = self.series.get(values)
        return self.series.setdefault(values, CounterSeries()) if found is None else found


class HistogramInstrument(_Instrument):
    """A histogram. A series appears when it is bound or first recorded to."""

    __slots__ = ("series",)

    def __init__(self, metric: MetricDeclaration) -> None:
        super().__init__(metric)
        self.series: dict[LabelValues, HistogramSeries] = {}

    def record(self, value: float, /, **labels: str) -> None:
        """Count one observation."""
        self._find(labels).record(value)

    def bound(self, **labels: str) -> Callable[[float], None]:
        """The recorder of one series."""
        return self._find(labels).record

    def _find(self, labels: dict[str, str]) -> HistogramSeries:
        values = self._values(labels)
        found = self.series.get(values)
        if found is None:
            found = self.series.setdefault(values, HistogramSeries(self.metric.bounds))
        return found


class GaugeInstrument(_Instrument):
    """A gauge: set values, and values asked for at each scrape."""

    __slots__ = ("_watched", "series")

    def __init__(self, metric: MetricDeclaration) -> None:
        super().__init__(metric)
        self.series: dict[LabelValues, float] = {}
        self._watched: dict[LabelValues, Callable[[], float]] = {}

    def set(self, value: float, /, **labels: str) -> None:
        """Replace the value of the series with these labels."""
        self.series[self._values(labels)] = value

    def remove(self, /, **labels: str) -> None:
        """Forget the series."""
        values = self._values(labels)
        self.series.pop(values, None)
        self._watched.pop(values, None)

    def watch(self, read: Callable[[], float], /, **labels: str) -> None:
        """Ask ``read`` at each scrape."""
        self._watched[self._values(labels)] = read

    def read(self) -> dict[LabelValues, float]:
        """Every series now."""
        return dict(self.series) | {values: read() for values, read in list(self._watched.items())}


Instrument = CounterInstrument | GaugeInstrument | HistogramInstrument


class MeterRegistry:
    """Every instrument of a process, one for each declaration.

    Making one is locked; using one is not, on any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._instruments: dict[str, Instrument] = {}
        self._refreshers: dict[str, Callable[[], None]] = {}

    def refresh_with(self, owner: str, action: Callable[[], None]) -> None:
        """Call ``action`` in each `refresh`; a later one of the same owner replaces it."""
        self._refreshers[owner] = action

    def refresh(self) -> None:
        """Bring up to date what is set rather than counted; before a scrape."""
        for action in list(self._refreshers.values()):
            action()

    def __iter__(self) -> Iterator[Instrument]:
        with self._lock:
            return iter(sorted(self._instruments.values(), key=lambda one: one.metric.name))

    def counter(self, metric: MetricDeclaration) -> CounterInstrument:
        """The counter that this declares."""
        return self._make(CounterInstrument, metric, MetricKind.COUNTER)

    def gauge(self, metric: MetricDeclaration) -> GaugeInstrument:
        """The gauge that this declares."""
        return self._make(GaugeInstrument, metric, MetricKind.GAUGE)

    def histogram(self, metric: MetricDeclaration) -> HistogramInstrument:
        """The histogram that this declares."""
        return self._make(HistogramInstrument, metric, MetricKind.HISTOGRAM)

    def _make(self, form: type[FormT], metric: MetricDeclaration, kind: MetricKind) -> FormT:
        if metric.kind is not kind:
            raise TypeError(f"{metric.name} is declared as a {metric.kind}, not as a {kind}")
        with self._lock:
            found = self._instruments.get(metric.name)
            if found is None:
                found = self._instruments[metric.name] = form(metric)
        if not isinstance(found, form) or found.metric != metric:
            raise TypeError(f"{metric.name} is declared twice, and differently")
        return found


FormT = TypeVar("FormT", CounterInstrument, GaugeInstrument, HistogramInstrument)
