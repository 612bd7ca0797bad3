"""Limits of both OTLP listeners, and what they count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ingero.echo.ingest.limits import RecordLimits, RefusalReason
from ingero.echo.ingest.quotas import QuotaKind
from ingero.serving.bearer import Principal
from ingero.units import NS_PER_S

Identify = Callable[[str | None, Sequence[str]], Principal | None]
"""Who sent an ``Authorization`` value, or showed a certificate of these names."""


@dataclass(frozen=True, slots=True)
class IngestSettings:
    """What one request, one bearer and all of them together may take.

    Attributes:
        max_body_bytes: Largest body, before and after decompression.
        read_timeout_ns: Longest time for a body to arrive.
        max_in_flight: Requests at once, on both transports.
        max_in_flight_bytes: Bytes of bodies that are read or written at once; one bearer gets half at most.
        per_second: Requests a second of one bearer.
        burst: Requests at once of one bearer after a pause.
        max_in_flight_bearer: Requests at once of one bearer.
        trust_proxy: Take the sender's address from X-Forwarded-For.
        records: What one record may hold.
        is_read_only: Nothing is taken from anybody.
    """

    max_body_bytes: int = 32 << 20
    read_timeout_ns: int = 30 * NS_PER_S
    max_in_flight: int = 2048
    max_in_flight_bytes: int = 512 << 20
    per_second: float = 1000
    burst: int = 2000
    max_in_flight_bearer: int = 512
    trust_proxy: bool = False
    records: RecordLimits = field(default_factory=RecordLimits)
    is_read_only: bool = False


@dataclass(slots=True)
class IngestCounters:
    """Requests by how they ended; written by the event loop, read by the scrape.

    Attributes:
        taken: Rows on disk, or nothing to write.
        refused_auth: No token, or a wrong one.
        refused_acl: A cluster that the bearer may not write to, or it may only read.
        refused_pace: One bearer's rate, requests at once, or share of the memory.
        refused_quota: More rows or bytes than the bearer may write, or more stored than its clusters may have.
        refused_load: Too much of everybody.
        refused_body: Nothing of it could be read or kept.
        failed: The store cannot write.
        records: Records that were refused out of requests, by reason.
        bytes_of_bearer: Bytes of bodies that were read, by the bearer's label.
        quotas: What quotas refused, by the bearer's label and the quota: requests, and of series rows.
        draining: Shutting down.
    """

    taken: int = 0
    refused_auth: int = 0
    refused_acl: int = 0
    refused_pace: int = 0
    refused_quota: int = 0
    refused_load: int = 0
    refused_body: int = 0
    failed: int = 0
    records: Counter[RefusalReason] = field(default_factory=Counter)
    bytes_of_bearer: Counter[str] = field(default_factory=Counter)
    quotas: Counter[tuple[str, QuotaKind]] = field(default_factory=Counter)
    draining: bool = False
