"""How an instrument of our own telemetry is declared: once, as a constant beside the code that counts.

The declaration is what makes the instrument, what the reference of metrics is generated from, and what the conformance
test reads, so name, labels and meaning cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class MetricKind(StrEnum):
    """The instruments there are; the value is Prometheus' type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricDeclaration:
    """One instrument.

    Attributes:
        name: Prometheus' name; a counter ends in ``_total``.
        kind: Which of the three.
        description: One sentence that says what the number means to an operator.
        labels: The closed set of label names.
        bounds: Upper bounds of a histogram, ascending; empty for the others.
    """

    name: str
    kind: MetricKind
    description: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


def counter(name: str, description: str, *labels: str) -> MetricDeclaration:
    """Declare a counter."""
    return MetricDeclaration(name, MetricKind.COUNTER, description, labels)


def gauge(name: str, description: str, *labels: str) -> MetricDeclaration:
    """Declare a gauge."""
    return MetricDeclaration(name, MetricKind.GAUGE, description, labels)


def histogram(
    name: str, description: str, bounds: Sequence[float], *labels: str
) -> MetricDeclaration:
    """Declare a histogram."""
    return MetricDeclaration(name, MetricKind.HISTOGRAM, description, labels, tuple(bounds))
