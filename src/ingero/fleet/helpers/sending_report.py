"""What operators learn of an exporter with a destination: counters, state for pages, lines in the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from ingero.errors import DeliveryError, RetryableError
from ingero.fleet.component import Host
from ingero.fleet.consumer import Batch
from ingero.fleet.views import DeliveryState
from ingero.otlp.names import Signal
from ingero.telemetry.clock import Clock
from ingero.telemetry.declare import MetricDeclaration, counter, gauge
from ingero.telemetry.limited import RateLimitedLog
from ingero.units import NS_PER_S

_ITEMS: Final = {
    Signal.METRICS: "metric_points",
    Signal.LOGS: "log_records",
    Signal.TRACES: "spans",
}


def _by_signal(name: str, description: str) -> dict[Signal, MetricDeclaration]:
    return {
        signal: counter(
            f"otelcol_exporter_{name}_{items}_total",
            description.format(items.replace("_", " ")),
            "exporter",
        )
        for signal, items in _ITEMS.items()
    }


SENT: Final = _by_signal("sent", "The {} that the destination took.")
SEND_FAILED: Final = _by_signal(
    "send_failed", "The {} that were lost: refused for good, retries ran out, or left at the end."
)
ENQUEUE_FAILED: Final = _by_signal(
    "enqueue_failed",
    "The {} that were lost to this exporter: it did not take them, and other exporters did.",
)
QUEUE_SIZE: Final = gauge(
    "otelcol_exporter_queue_size", "Batches that wait in the sending queue.", "exporter"
)
QUEUE_CAPACITY: Final = gauge(
    "otelcol_exporter_queue_capacity", "Batches that the sending queue can hold.", "exporter"
)
REJECTED: Final = counter(
    "ingero_fleet_exporter_rejected_items_total",
    "Items that the destination refused in a partial success, or that its protocol cannot hold; they are lost.",
    "exporter",
)
RETRIES: Final = counter(
    "ingero_fleet_exporter_retries_total", "Attempts after the first to send a batch.", "exporter"
)
SENDING_METRICS: Final = (
    *SENT.values(),
    *SEND_FAILED.values(),
    QUEUE_SIZE,
    QUEUE_CAPACITY,
    RETRIES,
    REJECTED,
)

PATIENCE_NS: Final = 10 * NS_PER_S
"""A destination that took nothing for so long is away, not slow."""
_FLUSH_NS: Final = 10 * NS_PER_S
_MAX_ERROR_CHARS: Final = 512

_log = logging.getLogger("ingero.fleet.exporter")


class SendingReport:
    """What operators learn of one exporter: its counters, and lines when its destination goes away and comes back.

    Args:
        name: The exporter's id.
        host: The running service.

    Attributes:
        name: The exporter's id.
    """

    def __init__(self, name: str, host: Host) -> None:
        self.name = name
        self._clock: Clock = host.clock
        self._log = RateLimitedLog(_log, host.clock, burst=2)
        self._away_since_ns: int | None = None
        self._refused_since_ns: int | None = None
        self._last_error = (0, "")
        self._n_lost = 0
        host.every(_FLUSH_NS, self._log.flush)
        meter, labels = host.meter, {"exporter": name}
        self._sent = {of: meter.counter(one).bound(**labels) for of, one in SENT.items()}
        self._failed = {of: meter.counter(one).bound(**labels) for of, one in SEND_FAILED.items()}
        self._retried = meter.counter(RETRIES).bound(**labels)
        self._meter = meter

    @property
    def away_ns(self) -> int | None:
        """How long the destination has taken nothing; None while it takes data."""
        since_ns = self._away_since_ns
        return None if since_ns is None else self._clock.mono_ns() - since_ns

    @property
    def is_given_up(self) -> bool:
        """Whether the destination took nothing for longer than its pushers are made to wait."""
        away_ns = self.away_ns
        return away_ns is not None and away_ns > PATIENCE_NS

    def read_state(self, n_waiting: int, capacity: int) -> DeliveryState:
        """All of it, for pages about the service. Any thread."""
        error_wall_ns, error = self._last_error
        return DeliveryState(
            self.name,
            n_waiting,
            capacity,
            away_s=self._read_since_s(self._away_since_ns),
            refused_s=self._read_since_s(self._refused_since_ns),
            n_sent=self._sum(*SENT.values()),
            n_retries=self._sum(RETRIES),
            n_dropped=self._sum(*SEND_FAILED.values(), *ENQUEUE_FAILED.values(), REJECTED),
            last_error=error,
            last_error_unix_s=round(error_wall_ns / NS_PER_S, 3) if error else None,
        )

    def _read_since_s(self, since_ns: int | None) -> float | None:
        return None if since_ns is None else round((self._clock.mono_ns() - since_ns) / NS_PER_S, 1)

    def _sum(self, *metrics: MetricDeclaration) -> int:
        return int(sum(self._meter.counter(one).read(exporter=self.name) for one in metrics))

    def note_refusal(self, refusal: DeliveryError) -> None:
        """Remember why a batch was not delivered, and since when none was."""
        self._last_error = (self._clock.wall_ns(), refusal.message[:_MAX_ERROR_CHARS])
        now_ns = self._clock.mono_ns()
        if isinstance(refusal, RetryableError):
            self._away_since_ns = self._away_since_ns or now_ns
        else:
            self._refused_since_ns = self._refused_since_ns or now_ns

    def count_sent(self, batch: Batch) -> None:
        """The destination took a batch; written if it had not before."""
        self._sent[batch.signal](batch.export.n_items)
        self._refused_since_ns = None
        since_ns, self._away_since_ns = self._away_since_ns, None
        if since_ns is not None:
            self._log.write(
                "away",
                logging.INFO,
                "destination takes data again",
                exporter=self.name,
                after_s=round((self._clock.mono_ns() - since_ns) / NS_PER_S, 1),
            )

    def count_retry(self, refusal: RetryableError, n_waiting: int) -> None:
        """The destination did not take a batch for now, which will be tried again."""
        self.note_refusal(refusal)
        self._log.write(
            "away",
            logging.WARNING,
            "destination does not take data; trying again",
            exporter=self.name,
            error=refusal.message,
            waiting_batches=n_waiting,
        )
        self._retried(1)

    def count_lost(self, batch: Batch) -> None:
        """A batch is lost."""
        self._failed[batch.signal](batch.export.n_items)

    def lose(self, batches: Sequence[Batch], why: str) -> None:
        """Count batches that nobody will send any more, and say so."""
        for batch in batches:
            self.count_lost(batch)
        n_items = sum(batch.export.n_items for batch in batches)
        fields = {"exporter": self.name, "items": n_items}
        _log.warning("items lost: %s", why, extra={"fields": fields})

    def give_up(self, batch: Batch, refusal: DeliveryError) -> None:
        """Count a batch that its destination refused, or did not take in time, and say so."""
        self.count_lost(batch)
        self.note_refusal(refusal)
        self._n_lost += batch.export.n_items
        self._log.write(
            "lost",
            logging.WARNING,
            "items lost: the destination did not take them",
            exporter=self.name,
            items=batch.export.n_items,
            items_total=self._n_lost,
            error=refusal.message,
        )
