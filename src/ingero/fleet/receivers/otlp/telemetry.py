"""What the ``otlp`` receiver counts."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from ingero.fleet.component import ComponentId
from ingero.fleet.helpers.certificates import HANDSHAKES_REFUSED
from ingero.otlp.names import Signal
from ingero.serving.otlp.answers import Reason
from ingero.telemetry.declare import counter
from ingero.telemetry.metrics import MeterRegistry

_NOUNS: Final = {
    Signal.METRICS: ("metric_points", "Data points"),
    Signal.LOGS: ("log_records", "Log records"),
    Signal.TRACES: ("spans", "Spans"),
}
ACCEPTED: Final = {
    signal: counter(
        f"otelcol_receiver_accepted_{noun}_total",
        f"{description} that a pipeline took.",
        "receiver",
        "transport",
    )
    for signal, (noun, description) in _NOUNS.items()
}
REFUSED: Final = {
    signal: counter(
        f"otelcol_receiver_refused_{noun}_total",
        f"{description} that a pipeline did not take; the sender got an error.",
        "receiver",
        "transport",
    )
    for signal, (noun, description) in _NOUNS.items()
}
REQUESTS_REFUSED: Final = counter(
    "ingero_fleet_receiver_refused_requests_total",
    "Requests answered with an error before their data reached a pipeline.",
    "receiver",
    "transport",
    "reason",
)
CERTIFICATE_ERRORS: Final = counter(
    "ingero_fleet_receiver_certificate_errors_total",
    "Renewed certificates that could not be loaded; the old one is still in use.",
    "receiver",
    "transport",
)
METRICS: Final = (
    *ACCEPTED.values(),
    *REFUSED.values(),
    REQUESTS_REFUSED,
    CERTIFICATE_ERRORS,
    HANDSHAKES_REFUSED,
)


class TransportLabel(StrEnum):
    """Value of the label ``transport``; the Collector's words."""

    GRPC = "grpc"
    HTTP = "http"


class Tally:
    """The receiver's counters for one transport, bound once. Any thread."""

    __slots__ = ("_accepted", "_bad_certificate", "_reasons", "_refused")

    def __init__(
        self, meter: MeterRegistry, component: ComponentId, transport: TransportLabel
    ) -> None:
        labels = {"receiver": str(component), "transport": str(transport)}
        self._accepted = {s: meter.counter(m).bound(**labels) for s, m in ACCEPTED.items()}
        self._refused = {s: meter.counter(m).bound(**labels) for s, m in REFUSED.items()}
        requests = meter.counter(REQUESTS_REFUSED)
        self._reasons = {r: requests.bound(**labels, reason=str(r)) for r in Reason}
        self._bad_certificate = meter.counter(CERTIFICATE_ERRORS).bound(**labels)

    def accept(self, signal: Signal, n_items: int) -> None:
        """Items that a pipeline took."""
        self._accepted[signal](n_items)

    def refuse(self, signal: Signal, n_items: int) -> None:
        """Items that a pipeline did not take."""
        self._refused[signal](n_items)

    def refuse_request(self, reason: Reason) -> None:
        """A request that never became items."""
        self._reasons[reason](1)

    def count_bad_certificate(self) -> None:
        """A renewed certificate that could not be loaded."""
        self._bad_certificate(1)
