"""What a processor sends of its own accord: down the rest of the first pipeline of each signal that names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ingero.errors import DeliveryError, RetryableError
from ingero.fleet.component import Host, PushContext, ReportLedger, ReportSender
from ingero.fleet.consumer import Batch, Consumer
from ingero.otlp.codec import Export
from ingero.otlp.names import Signal
from ingero.telemetry.clock import Clock


class Downstream:
    """The consumers that follow a processor, one a signal; a `ReportSender`.

    Args:
        clock: Dates what is sent.
        count_lost: Called with 1 for each report that a consumer refuses.

    Attributes:
        name: The processor's id; known when a service begins.
    """

    def __init__(self, clock: Clock, count_lost: Callable[[float], None]) -> None:
        self.name = ""
        self._clock = clock
        self._count_lost = count_lost
        self._following: dict[Signal, Consumer] = {}
        self._ledger: ReportLedger | None = None

    def __contains__(self, signal: Signal) -> bool:
        return signal in self._following

    @property
    def has_ledger(self) -> bool:
        """Whether what is reported is written down; then reports about one thing each are best."""
        return self._ledger is not None

    def begin(self, host: Host, name: str) -> None:
        """Forget the pipelines, and ask where reports are written down: a service begins, or a reload brings others."""
        self.name = name
        self._following.clear()
        ledgers = host.find(ReportLedger)
        self._ledger = ledgers[0] if ledgers else None
        host.offer(ReportSender, self)

    def join(self, signal: Signal, following: Consumer) -> None:
        """Add a pipeline; only the first of each signal counts."""
        self._following.setdefault(signal, following)

    def send(self, signal: Signal, export: Export | None) -> bool:
        """Send a report; False when it was refused, and so is lost. Without a pipeline or an item nothing is sent."""
        try:
            self._pass_on(signal, export)
        except DeliveryError:
            self._count_lost(1)
            return False
        return True

    def try_send(self, export: Export | None) -> bool:
        """See `ReportSender`; what may be taken later is not lost."""
        try:
            self._pass_on(Signal.LOGS, export)
        except RetryableError:
            return False
        except DeliveryError:
            self._count_lost(1)
        return True

    def _pass_on(self, signal: Signal, export: Export | None) -> None:
        following = self._following.get(signal)
        if following is not None and export is not None and export.n_items:
            following.consume(Batch(signal, export, self._clock.wall_ns(), PushContext()))

    def report(
        self,
        cluster_id: str,
        reported: Mapping[str, str | None],
        export: Export | None,
    ) -> None:
        """Send log records that must leave once, whichever Fleet judges the cluster.

        Args:
            cluster_id: The cluster.
            reported: What it says, by what it is about; None where there is nothing to remember any more.
            export: The report; None where there is nothing to send.
        """
        if self._ledger is None:
            self.send(Signal.LOGS, export)
        elif reported:
            self._ledger.report(cluster_id, reported, self, export)
