"""A `Host` for one component under test: time and timers move when the test says so, instruments can be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ingero.config import Endpoint
from ingero.fleet.component import ComponentId
from ingero.fleet.consumer import Batch
from ingero.telemetry.metrics import CounterInstrument, GaugeInstrument, MeterRegistry
from ingero.testing.clock import ManualClock

CapabilityT = TypeVar("CapabilityT")
SharedT = TypeVar("SharedT")


class ManualHost:
    """Offers what a service offers, without one.

    Attributes:
        clock: Moved by the test.
        meter: Real instruments; read them with `read`.
        draining: What components see.
        announced: What listens where.
    """

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.meter = MeterRegistry()
        self.draining = False
        self.announced: dict[str, Endpoint] = {}
        self._offers: list[tuple[type, ComponentId | None, Any]] = []
        self._shared: dict[tuple[str, str], Any] = {}
        self._timers: list[tuple[int, Callable[[], None]]] = []
        self._due_ns: list[int] = []

    def offer(self, capability: type[CapabilityT], provider: CapabilityT) -> None:
        """Keep it for `find`."""
        self._offers.append((capability, None, provider))

    def offer_as(
        self, component: ComponentId, capability: type[CapabilityT], provider: CapabilityT
    ) -> None:
        """Keep it for `find`, also by the name of the component that would have offered it."""
        self._offers.append((capability, component, provider))

    def find(
        self, capability: type[CapabilityT], component: ComponentId | None = None
    ) -> Sequence[CapabilityT]:
        """Everything that was offered, or what `offer_as` offered in the component's name."""
        return [
            provider
            for kind, who, provider in self._offers
            if kind is capability and component in {None, who}
        ]

    def shared(self, key: tuple[str, str], build: Callable[[], SharedT]) -> SharedT:
        """Built once per key."""
        if key not in self._shared:
            self._shared[key] = build()
        found: SharedT = self._shared[key]
        return found

    def announce(self, bound: Endpoint, what: str = "") -> None:
        """Keep it for the test."""
        self.announced[what] = bound

    def every(self, interval_ns: int, action: Callable[[], None]) -> None:
        """Runs in `advance`."""
        self._timers.append((interval_ns, action))
        self._due_ns.append(self.clock.mono_ns() + interval_ns)

    def advance(self, duration_ns: int) -> None:
        """Move time forward, running each timer at the moments when it is due."""
        end_ns = self.clock.mono_ns() + duration_ns
        while self._due_ns and min(self._due_ns) <= end_ns:
            index = self._due_ns.index(min(self._due_ns))
            self.clock.advance(max(0, self._due_ns[index] - self.clock.mono_ns()))
            self._due_ns[index] += self._timers[index][0]
            self._timers[index][1]()
        self.clock.advance(end_ns - self.clock.mono_ns())

    def read(self, name: str, **labels: str) -> float | None:
        """The value of one series of a counter or gauge at a scrape now; None when there is no such series."""
        self.meter.refresh()
        for instrument in self.meter:
            if instrument.metric.name == name:
                values = tuple(labels[label] for label in instrument.metric.labels)
                if isinstance(instrument, GaugeInstrument):
                    return instrument.read().get(values)
                if isinstance(instrument, CounterInstrument):
                    series = instrument.series.get(values)
                    return None if series is None else series.read()
        return None


class KeptBatches:
    """A consumer that keeps what it is given.

    Attributes:
        batches: In order.
    """

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def consume(self, batch: Batch) -> None:
        """Keep it."""
        self.batches.append(batch)
