"""`Reception`: who may send how much, on both transports alike, and a line in the audit log for each request.

Nothing of a body is read before its sender is known. Refusals are never summed up: each has its line.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from ingero.echo.ingest.budget import ByteBudget
from ingero.echo.ingest.intake import Built, ForbiddenError, Intake
from ingero.echo.ingest.limits import RefusalReason
from ingero.echo.ingest.settings import Authenticate, IngestCounters, IngestSettings
from ingero.errors import BadDataError, IngeroError, RetryableError, StoreError
from ingero.otlp.codec import Export
from ingero.serving.audit import write_audit
from ingero.serving.bearer import Principal
from ingero.serving.bodies import TooLargeError
from ingero.serving.limits import RateLimiter
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_MS, NS_PER_S

_LOG: Final = logging.getLogger("ingero.echo")
_LARGE_BYTES: Final = 32 << 10
"""Bodies above this are decoded on a thread, so that one sender's large batch does not stop the others."""
_BAD_PER_SECOND: Final = 1.0
_BAD_BURST: Final = 20.0
_MAX_DELAY_S: Final = 2.0
_MAX_DELAYED: Final = 256
"""Answers to wrong tokens that are held back at once; beyond, an address with too many of them gets 429 instead."""
_TOLD_CLUSTERS: Final = 8
_TOLD_CHARS: Final = 64

# google.rpc.Code
INVALID, PERMISSION, EXHAUSTED, INTERNAL, UNAVAILABLE, UNAUTHENTICATED = 3, 7, 8, 13, 14, 16


class RefusedError(Exception):
    """A request that gets no further.

    Args:
        status: HTTP's.
        code: google.rpc.Code.
        message: For the sender.
        retry_after_s: When to come back; 0 is not said.
    """

    def __init__(self, status: int, code: int, message: str, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class Visit:
    """One request, as the audit log tells it.

    Attributes:
        transport: ``http`` or ``grpc``.
        method: HTTP's, or gRPC's.
        path: Without the query.
        source_ip: Who sent it.
        started_ns: On the monotonic clock.
        principal: Who is asking; None until that is known.
        n_bytes: Reserved for its body.
        clusters: What it names or writes to; of a request that is refused for them, the foreign ones.
        n_rows: Rows written, retries that were recognised included.
        n_refused: Records refused.
        status: HTTP's; the same for gRPC, so that one search finds both.
        why: Reason of a refusal.
    """

    transport: str
    method: str
    path: str
    source_ip: str
    started_ns: int
    principal: Principal | None = None
    n_bytes: int = 0
    clusters: frozenset[str] = field(default_factory=frozenset)
    n_rows: int = 0
    n_refused: int = 0
    status: int = 500
    why: str = ""

    @property
    def key(self) -> str:
        """Whose budget it is on."""
        return self.principal.digest if self.principal else ""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a sender is told of a request that was taken.

    Attributes:
        n_refused: Its records that are not kept.
        why: For what reasons; with none refused, a warning.
    """

    n_refused: int
    why: str


class Reception:
    """Both OTLP listeners' front desk. One event loop owns it.

    Args:
        intake: Where exports go.
        authenticate: Who a request is from.
        settings: Limits.
        counters: Requests by how they ended.
        clock: Time.
    """

    def __init__(
        self,
        intake: Intake,
        authenticate: Authenticate,
        settings: IngestSettings,
        counters: IngestCounters,
        clock: Clock,
    ) -> None:
        self.settings = settings
        self.counters = counters
        self._intake = intake
        self._authenticate = authenticate
        self._clock = clock
        self._by_bearer = RateLimiter(settings.per_second, settings.burst, clock)
        self._bad = RateLimiter(_BAD_PER_SECOND, _BAD_BURST, clock)
        self._n_delayed = 0
        self._in_flight: Counter[str] = Counter()
        self._n_in_flight = 0
        self._budget = ByteBudget(settings.max_in_flight_bytes, settings.max_in_flight_bytes // 2)

    def visit(self, transport: str, method: str, path: str, source_ip: str) -> Visit:
        """A request that has come."""
        return Visit(transport, method, path[:256], source_ip, self._clock.mono_ns())

    @asynccontextmanager
    async def enter(self, visit: Visit, authorization: str | None) -> AsyncIterator[None]:
        """Hold a place for a known sender.

        Raises:
            RefusedError: The sender is unknown, or has no place left.
        """
        visit.principal = await self._recognise(visit, authorization)
        self._check_pace(visit)
        self._n_in_flight += 1
        self._in_flight[visit.key] += 1
        try:
            yield
        finally:
            self._n_in_flight -= 1
            self._in_flight[visit.key] -= 1
            if not self._in_flight[visit.key]:
                del self._in_flight[visit.key]
            if visit.n_bytes:
                await self._budget.give_back(visit.key, visit.n_bytes)

    async def reserve(self, visit: Visit, n_bytes: int) -> None:
        """Wait for room for more of a body; whoever reads it sets the time limit."""
        await self._budget.take(visit.key, n_bytes)
        visit.n_bytes += n_bytes

    async def shrink(self, visit: Visit, n_bytes: int) -> None:
        """Give back what a body turned out not to need."""
        surplus, visit.n_bytes = visit.n_bytes - n_bytes, n_bytes
        if surplus:
            await self._budget.give_back(visit.key, surplus)

    async def take(
        self, visit: Visit, decode: Callable[[], Export], hint: str, *, is_compressed: bool = False
    ) -> Taken:
        """Decode, check and write an export whose body was read.

        Args:
            visit: Its request.
            decode: Makes it of the body.
            hint: Cluster that the request names beside the body, or empty.
            is_compressed: It may be much larger than it came.

        Raises:
            RefusedError: Nothing of it is kept, or it is to be sent again.
        """
        principal = visit.principal
        assert principal is not None

        def build() -> Built:
            return self._intake.build(decode(), principal, hint)

        is_large = is_compressed or visit.n_bytes > _LARGE_BYTES
        try:
            built = await asyncio.to_thread(build) if is_large else build()
            visit.clusters = frozenset(built.rows.clusters)
            await self._intake.write(built.rows)
        except IngeroError as error:
            if isinstance(error, ForbiddenError):
                visit.clusters = error.clusters
            raise self._refuse(error) from error
        return self._tell(visit, built)

    def record(self, visit: Visit) -> None:
        """Write the request's line."""
        principal = visit.principal
        line = {
            "event": "otlp",
            "transport": visit.transport,
            "bearer_hash": principal.digest if principal else "",
            "bearer_key_name": principal.key_name if principal else "",
            "source_ip": visit.source_ip,
            "method": visit.method,
            "path": visit.path,
            "status": visit.status,
            "latency_ms": round((self._clock.mono_ns() - visit.started_ns) / NS_PER_MS, 3),
            "clusters": [name[:_TOLD_CHARS] for name in sorted(visit.clusters)[:_TOLD_CLUSTERS]],
            "n_clusters": len(visit.clusters),
            "n_rows": visit.n_rows,
            "n_refused": visit.n_refused,
        }
        write_audit({**line, "why": visit.why[:256]} if visit.why else line)

    def _tell(self, visit: Visit, built: Built) -> Taken:
        outcome, refusals = built.rows.outcome, built.refusals
        if outcome.n_refused:
            refusals.add_many(RefusalReason.STORE, outcome.n_refused, outcome.why)
        self.counters.records.update(refusals.by_reason)
        visit.n_refused = refusals.n_refused
        visit.n_rows = built.rows.n_rows - outcome.n_refused
        if visit.n_refused and not visit.n_rows and not built.rows.nodes:
            self.counters.refused_body += 1
            raise RefusedError(400, INVALID, f"nothing of it can be kept: {refusals.tell()}")
        self.counters.taken += 1
        why = refusals.tell()
        if outcome.n_conflicts:
            conflicts = f"{outcome.n_conflicts} have the series and time of another one with another value; both are kept"
            why = f"{why}; {conflicts}" if why else conflicts
        visit.status, visit.why = 200, why
        return Taken(visit.n_refused, why)

    async def _recognise(self, visit: Visit, authorization: str | None) -> Principal:
        if self.counters.draining:
            raise RefusedError(503, UNAVAILABLE, "shutting down; send again", 5)
        if self._n_in_flight >= self.settings.max_in_flight:
            self.counters.refused_load += 1
            raise RefusedError(429, EXHAUSTED, "too many requests at once", 1)
        principal = self._authenticate(authorization)
        if principal is not None:
            return principal
        self.counters.refused_auth += 1
        wait_s = self._bad.take(visit.source_ip)
        if wait_s and self._n_delayed >= _MAX_DELAYED:
            raise RefusedError(429, EXHAUSTED, "too many wrong tokens from this address", 5)
        if wait_s:
            self._n_delayed += 1
            try:
                await asyncio.sleep(min(wait_s, _MAX_DELAY_S))
            finally:
                self._n_delayed -= 1
        raise RefusedError(401, UNAUTHENTICATED, "missing or wrong bearer token")

    def _check_pace(self, visit: Visit) -> None:
        wait_s = self._by_bearer.take(visit.key)
        if wait_s:
            self.counters.refused_pace += 1
            retry_s = max(1, math.ceil(wait_s))
            raise RefusedError(429, EXHAUSTED, "too many requests a second", retry_s)
        if self._in_flight[visit.key] >= self.settings.max_in_flight_bearer:
            self.counters.refused_pace += 1
            raise RefusedError(429, EXHAUSTED, "too many requests of this bearer at once", 1)

    def _refuse(self, error: IngeroError) -> RefusedError:
        counters = self.counters
        if isinstance(error, RetryableError):
            counters.refused_load += 1
            seconds = max(1, math.ceil((error.retry_after_ns or NS_PER_S) / NS_PER_S))
            return RefusedError(429, EXHAUSTED, error.message, seconds)
        if isinstance(error, ForbiddenError):
            counters.refused_acl += 1
            return RefusedError(403, PERMISSION, error.message)
        if isinstance(error, BadDataError):
            counters.refused_body += 1
            status = 413 if isinstance(error, TooLargeError) else 400
            return RefusedError(status, INVALID, error.message)
        counters.failed += 1
        if isinstance(error, StoreError):
            return RefusedError(503, UNAVAILABLE, "the store cannot write now", 5)
        _LOG.error("an OTLP request failed: %s", error.message)
        return RefusedError(500, INTERNAL, "internal error")
