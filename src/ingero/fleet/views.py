"""What pages and probes show of a running service: its life, its pipelines, its exporters.

Beside `ingero.fleet.component`; knows no component. Each view is a capability that its owner offers to the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from ingero.errors import RetryableError
from ingero.fleet.component import ComponentId, ComponentKind


@dataclass(frozen=True, slots=True)
class DeliveryState:
    """How an exporter with a destination does. Counts are of items, since the process began.

    Attributes:
        exporter: Its id.
        n_waiting: Batches in its queue.
        capacity: Batches that the queue can hold; 0 without a queue.
        away_s: Since when its destination takes nothing for now; None while it takes data.
        refused_s: Since when its destination refuses everything permanently; None while it takes data.
        n_sent: Taken by the destination.
        n_retries: Attempts after the first to send a batch.
        n_dropped: Lost to this exporter: refused permanently or in part, given up, or not taken by a full queue.
        last_error: What the destination, or the way to it, said last; empty when nothing failed.
        last_error_unix_s: When.
    """

    exporter: str
    n_waiting: int
    capacity: int
    away_s: float | None = None
    refused_s: float | None = None
    n_sent: int = 0
    n_retries: int = 0
    n_dropped: int = 0
    last_error: str = ""
    last_error_unix_s: float | None = None

    @property
    def trouble(self) -> str:
        """What is wrong, in one line; empty while the destination takes data."""
        if self.away_s is not None:
            description = f"its destination has taken nothing for {self.away_s} s"
        elif self.refused_s is not None:
            description = f"its destination has refused everything for {self.refused_s} s"
        else:
            return ""
        return f"{description}: {self.last_error}"


class DeliveryView(Protocol):
    """Capability of an exporter with a destination, for health and debugging pages."""

    def read_state(self) -> DeliveryState:
        """How it does now. Any thread."""
        ...


@dataclass(frozen=True, slots=True)
class ScrapeState:
    """How an exporter does that others come to fetch from.

    Attributes:
        exporter: Its id.
        n_series: What it shows.
        n_scrapes: Answered so far.
        since_s: Since the last of them; None before the first.
        interval_s: Longest pause between the last few; None before the third.
    """

    exporter: str
    n_series: int
    n_scrapes: int
    since_s: float | None
    interval_s: float | None

    @property
    def trouble(self) -> str:
        """That nobody came, in one line, half an interval after somebody was due; empty otherwise."""
        if self.since_s is None or self.interval_s is None or self.since_s < 1.5 * self.interval_s:
            return ""
        return f"nobody has scraped it for {self.since_s} s, and it was scraped every {self.interval_s} s"


class ScrapeView(Protocol):
    """Capability of an exporter that is scraped, for health and debugging pages."""

    def read_state(self) -> ScrapeState:
        """How it does now. On the event loop."""
        ...


class RefusalView(Protocol):
    """Capability of a component that at times takes nothing of what comes to its pipelines."""

    def find_refusal(self) -> RetryableError | None:
        """Why it would refuse a batch now; None while it takes them. Any thread."""
        ...


class ServiceStatus(StrEnum):
    """Where the service is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class PipelineView:
    """What is known about one running pipeline.

    Attributes:
        name: ``metrics`` or ``metrics/name``.
        receivers: Component ids as text, as are the next two.
        processors: In order.
        exporters: Each gets everything.
        n_batches: Taken and refused since the start.
        duration_bounds_s: Upper bounds of the buckets of ``durations``; one more bucket has none.
        durations: Batches per bucket of the time that `Consumer.consume` took.
        errors: Latest refusals, oldest first: wall clock in nanoseconds, and what was said.
    """

    name: str
    receivers: tuple[str, ...]
    processors: tuple[str, ...]
    exporters: tuple[str, ...]
    n_batches: int
    duration_bounds_s: tuple[float, ...]
    durations: tuple[int, ...]
    errors: tuple[tuple[int, str], ...]


class ServiceView(Protocol):
    """Capability of the service itself: what it runs and how it does; for health and debugging pages."""

    @property
    def status(self) -> ServiceStatus:
        """Where it is in its life."""
        ...

    @property
    def started_wall_ns(self) -> int:
        """When it began to run; 0 before that."""
        ...

    @property
    def config_source(self) -> str:
        """Name of the configuration file."""
        ...

    def settings(self) -> Mapping[str, Any]:
        """What is configured: section → component → its settings, defaults included, secrets as stars."""
        ...

    def pipelines(self) -> Sequence[PipelineView]:
        """Every pipeline."""
        ...

    def components(self) -> Sequence[tuple[ComponentKind, ComponentId]]:
        """Every component that runs, in start order."""
        ...
