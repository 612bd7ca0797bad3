"""Limits of both OTLP listeners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ingero.serving.bearer import Principal
from ingero.units import NS_PER_S

Authenticate = Callable[[str | None], Principal | None]


@dataclass(frozen=True, slots=True)
class IngestSettings:
    """What one request and all of them together may take.

    Attributes:
        max_body_bytes: Largest body, before and after decompression.
        read_timeout_ns: Longest time for a body to arrive.
        max_in_flight: Requests at once, on each transport.
    """

    max_body_bytes: int = 32 << 20
    read_timeout_ns: int = 30 * NS_PER_S
    max_in_flight: int = 2048


@dataclass(slots=True)
class IngestCounters:
    """Requests by how they ended; written by the event loop, read by the scrape."""

    taken: int = 0
    refused_auth: int = 0
    refused_acl: int = 0
    refused_load: int = 0
    refused_body: int = 0
    failed: int = 0
    draining: bool = False
