"""What a processor sends of its own accord: down the rest of the first pipeline of each signal that names it."""

from __future__ import annotations

from collections.abc import Callable

from ingero.errors import DeliveryError
from ingero.fleet.component import PushContext
from ingero.fleet.consumer import Batch, Consumer
from ingero.otlp.codec import Export
from ingero.otlp.names import Signal
from ingero.telemetry.clock import Clock


class Downstream:
    """The consumers that follow a processor, one a signal.

    Args:
        clock: Dates what is sent.
        count_lost: Called with 1 for each report that a consumer refuses.
    """

    def __init__(self, clock: Clock, count_lost: Callable[[float], None]) -> None:
        self._clock = clock
        self._count_lost = count_lost
        self._following: dict[Signal, Consumer] = {}

    def __contains__(self, signal: Signal) -> bool:
        return signal in self._following

    def clear(self) -> None:
        """Forget the pipelines: a reload brings others."""
        self._following.clear()

    def join(self, signal: Signal, following: Consumer) -> None:
        """Add a pipeline; only the first of each signal counts."""
        self._following.setdefault(signal, following)

    def send(self, signal: Signal, export: Export | None) -> bool:
        """Send a report; False when it was refused, and so is lost. Without a pipeline or an item nothing is sent."""
        following = self._following.get(signal)
        if following is None or export is None or not export.n_items:
            return True
        try:
            following.consume(Batch(signal, export, self._clock.wall_ns(), PushContext()))
        except DeliveryError:
            self._count_lost(1)
            return False
        return True
