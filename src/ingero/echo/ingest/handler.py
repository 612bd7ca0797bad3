"""`IngestHandler`: who may send how much, on both transports alike, and a line in the audit log for each request.

Nothing of a body is read before its sender is known. Refusals are never summed up: each has its line.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Final

from ingero.echo.ingest.budget import ByteBudget
from ingero.echo.ingest.intake import Built, ForbiddenError, Intake
from ingero.echo.ingest.limits import RefusalReason
from ingero.echo.ingest.quotas import QuotaKind, QuotaMeter
from ingero.echo.ingest.settings import Identify, IngestCounters, IngestSettings
from ingero.errors import BadDataError, IngeroError, RetryableError, StoreError
from ingero.serving.audit import write_audit
from ingero.serving.bearer import Principal
from ingero.serving.limits import RateLimiter
from ingero.serving.otlp.answers import AnswerStatus, OtlpAnswer, Reason, RequestRefusal
from ingero.serving.otlp.encodings import TooLargeError
from ingero.serving.otlp.handler import OtlpRequest
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_MS, NS_PER_S, format_size

_LOG: Final = logging.getLogger("ingero.echo")
_LARGE_BYTES: Final = 32 << 10
"""Bodies above this are decoded on a thread, so that one sender's large batch does not stop the others."""
_BAD_PER_SECOND: Final = 1.0
_BAD_BURST: Final = 20.0
_MAX_DELAY_S: Final = 2.0
_MAX_DELAYED: Final = 256
"""Answers to wrong tokens that are held back at once; beyond, an address with too many of them gets 429 instead."""
_MAX_CLUSTERS: Final = 8
_MAX_CLUSTER_CHARS: Final = 64

_DRAINING: Final = RequestRefusal(
    OtlpAnswer(AnswerStatus.UNAVAILABLE, "shutting down; send again", 5), Reason.DRAINING
)
_READER: Final = RequestRefusal(
    OtlpAnswer(AnswerStatus.FORBIDDEN, "this bearer may only read"), Reason.READ_ONLY
)
_REPLICA: Final = RequestRefusal(
    OtlpAnswer(
        AnswerStatus.FORBIDDEN,
        "this Echo answers from backups and takes no rows; send to the one that makes them",
    ),
    Reason.READ_ONLY,
)
_BODY_REASONS: Final = frozenset({
    Reason.CONTENT_ENCODING,
    Reason.TOO_LARGE,
    Reason.TIMEOUT,
    Reason.CUT_SHORT,
})


@dataclass(slots=True)
class IngestRequest:
    """One request, as the audit log has it.

    Attributes:
        source_ip: Who sent it.
        started_ns: On the monotonic clock.
        principal: Who is asking; None until that is known.
        n_bytes: Reserved for its body.
        clusters: What it names or writes to; of a request that is refused for them, the foreign ones.
        n_rows: Rows written, retries that were recognised included.
        n_refused: Records refused.
        is_admitted: Whether it counts as in flight.
        is_over: Whether its line is written.
    """

    source_ip: str
    started_ns: int
    principal: Principal | None = None
    n_bytes: int = 0
    clusters: frozenset[str] = field(default_factory=frozenset)
    n_rows: int = 0
    n_refused: int = 0
    is_admitted: bool = False
    is_over: bool = False

    @property
    def key(self) -> str:
        """Whose budget it is on."""
        return self.principal.digest if self.principal else ""


class IngestHandler:
    """What both OTLP listeners do with requests. One event loop owns it.

    Args:
        intake: Where exports go.
        identify: Who a request is from.
        settings: Limits.
        counters: Requests by how they ended.
        clock: Time.

    Attributes:
        settings: Limits, which the listeners keep too.
    """

    def __init__(
        self,
        intake: Intake,
        identify: Identify,
        settings: IngestSettings,
        counters: IngestCounters,
        clock: Clock,
    ) -> None:
        self.settings = settings
        self._counters = counters
        self._intake = intake
        self._identify = identify
        self._clock = clock
        self._by_bearer = RateLimiter(settings.per_second, settings.burst, clock)
        self._quotas = QuotaMeter(clock)
        self._bad = RateLimiter(_BAD_PER_SECOND, _BAD_BURST, clock)
        self._n_delayed = 0
        self._in_flight: Counter[str] = Counter()
        self._budget = ByteBudget(settings.max_in_flight_bytes, settings.max_in_flight_bytes // 2)

    def open(self, request: OtlpRequest) -> IngestRequest:
        """Begin the request's line."""
        source_ip = request.peer
        if self.settings.trust_proxy and request.forwarded_for:
            source_ip = request.forwarded_for.rpartition(",")[2].strip()
        return IngestRequest(source_ip, self._clock.mono_ns())

    def admit(self, request: OtlpRequest, *, is_full: bool) -> RequestRefusal | None:
        """Hold a place for a known sender that has one left."""
        del is_full  # requests in flight are counted over both listeners
        ingest: IngestRequest = request.context
        counters, settings = self._counters, self.settings
        if counters.draining:
            return _DRAINING
        if self._in_flight.total() >= settings.max_in_flight:
            counters.refused_load += 1
            return _overload("too many requests at once", 1)
        ingest.principal = self._identify(request.authorization, request.peer_names)
        if ingest.principal is None:
            return self._slow_down(ingest.source_ip)
        refusal = self._hold_to_rights(ingest.principal)
        if refusal is not None:
            return refusal
        if self._in_flight[ingest.key] >= settings.max_in_flight_bearer:
            counters.refused_pace += 1
            return _overload("too many requests of this bearer at once", 1)
        self._in_flight[ingest.key] += 1
        ingest.is_admitted = True
        return None

    def _hold_to_rights(self, principal: Principal) -> RequestRefusal | None:
        """Refuse a bearer that may not write, or that sends or has written more than it may."""
        counters = self._counters
        if self.settings.is_read_only or "write" not in principal.scopes:
            counters.refused_acl += 1
            return _REPLICA if self.settings.is_read_only else _READER
        wait_s = self._by_bearer.take(principal.digest)
        if wait_s:
            counters.refused_pace += 1
            return _overload("too many requests a second", max(1, math.ceil(wait_s)))
        return self._hold_to_quotas(principal)

    def _hold_to_quotas(self, principal: Principal) -> RequestRefusal | None:
        """Refuse a bearer that must wait for rows or bytes, and one whose clusters have stored all they may."""
        quota, wait = principal.quota, self._quotas.find_wait(principal)
        if wait is not None:
            self._count_quota(principal, wait.kind)
            limit = quota.rows_per_second if wait.kind is QuotaKind.ROWS else quota.bytes_per_second
            message = f"this bearer has written its quota of {limit} {wait.kind} a second"
            return _overload(message, math.ceil(wait.wait_ns / NS_PER_S))
        most = quota.max_stored_bytes
        if most is not None and self._intake.find_stored_bytes(principal) >= most:
            self._count_quota(principal, QuotaKind.STORAGE)
            message = f"the clusters of this bearer have stored its max_stored_bytes of {format_size(most)}"
            answer = OtlpAnswer(AnswerStatus.STORAGE_FULL, message)
            return RequestRefusal(answer, Reason.OVERLOADED)
        return None

    def _count_quota(self, principal: Principal, kind: QuotaKind) -> None:
        self._counters.refused_quota += 1
        self._counters.quotas[principal.label, kind] += 1

    def _slow_down(self, source_ip: str) -> RequestRefusal:
        """Answer a wrong token, later where there were many from this address."""
        self._counters.refused_auth += 1
        wait_s = self._bad.take(source_ip)
        if wait_s and self._n_delayed >= _MAX_DELAYED:
            return _overload("too many wrong tokens from this address", 5)
        self._n_delayed += wait_s > 0
        answer = OtlpAnswer(AnswerStatus.UNAUTHENTICATED, "missing or wrong bearer token")
        delay_ns = round(min(wait_s, _MAX_DELAY_S) * NS_PER_S)
        return RequestRefusal(answer, Reason.UNAUTHENTICATED, delay_ns)

    def reserve(self, request: OtlpRequest) -> Awaitable[RequestRefusal | None] | None:
        """Room for the body: as large as declared, else as the largest, until its size is known."""
        ingest: IngestRequest = request.context
        n_bytes = request.n_declared_bytes
        if n_bytes is None:
            n_bytes = self.settings.max_body_bytes
        if self._budget.try_take(ingest.key, n_bytes):
            ingest.n_bytes = n_bytes
            return None
        return self._wait_for_room(ingest, n_bytes)

    async def _wait_for_room(self, ingest: IngestRequest, n_bytes: int) -> RequestRefusal | None:
        try:
            async with asyncio.timeout(self.settings.read_timeout_ns / NS_PER_S):
                await self._budget.take(ingest.key, n_bytes)
        except TimeoutError:
            self._counters.refused_load += 1
            return _overload("too many bytes are being read at once", 1)
        ingest.n_bytes = n_bytes
        return None

    async def take(self, request: OtlpRequest, body: bytes) -> OtlpAnswer:
        """Decode, check and write a body; the answer says that its rows are on disk."""
        ingest: IngestRequest = request.context
        answer = OtlpAnswer(AnswerStatus.PERMANENT, "internal error")
        surplus, ingest.n_bytes = ingest.n_bytes - len(body), len(body)
        self._budget.give_back(ingest.key, surplus)
        try:
            answer = await self._write(request, ingest, body)
        finally:
            self._end(request, answer)
        return answer

    def refused(self, request: OtlpRequest, refusal: RequestRefusal) -> None:
        """Count a request that the listener ended, and write its line."""
        self._n_delayed -= refusal.delay_ns > 0
        self._counters.refused_body += refusal.reason in _BODY_REASONS
        self._counters.failed += refusal.reason is Reason.INTERNAL
        self._end(request, refusal.answer)

    def find_headers(self, request: OtlpRequest) -> None:
        """None: there is nothing to add."""

    async def _write(self, request: OtlpRequest, ingest: IngestRequest, body: bytes) -> OtlpAnswer:
        principal = ingest.principal
        assert principal is not None
        self._quotas.charge(principal, n_bytes=len(body))
        self._counters.bytes_of_bearer[principal.label] += len(body)

        def build() -> Built:
            export = request.decode(body, self.settings.max_body_bytes)
            return self._intake.build(export, principal, request.hint)

        is_large = bool(request.encoding) or len(body) > _LARGE_BYTES
        try:
            built = await asyncio.to_thread(build) if is_large else build()
            ingest.clusters = frozenset(built.rows.clusters)
            await self._intake.write(built.rows)
        except IngeroError as error:
            if isinstance(error, ForbiddenError):
                ingest.clusters = error.clusters
            return self._explain(error)
        return self._settle(ingest, built)

    def _settle(self, ingest: IngestRequest, built: Built) -> OtlpAnswer:
        """The answer to a request whose rows were given to the store."""
        outcome, refusals = built.rows.outcome, built.refusals
        if outcome.n_refused:
            refusals.add_many(RefusalReason.STORE, outcome.n_refused, outcome.why)
        self._counters.records.update(refusals.by_reason)
        assert ingest.principal is not None
        if n_series := refusals.by_reason.get(RefusalReason.QUOTA):
            self._counters.quotas[ingest.principal.label, QuotaKind.SERIES] += n_series
        ingest.n_refused = refusals.n_refused
        ingest.n_rows = built.rows.n_rows - outcome.n_refused
        why = refusals.tell()
        if ingest.n_refused and not ingest.n_rows:
            self._counters.refused_body += 1
            return OtlpAnswer(AnswerStatus.BAD_DATA, f"nothing of it can be kept: {why}")
        self._counters.taken += 1
        self._quotas.charge(ingest.principal, n_rows=ingest.n_rows)
        if outcome.n_conflicts:
            n = outcome.n_conflicts
            conflicts = (
                f"{n} have the series and time of another one with another value, kind, unit or scope;"
                " both are kept"
            )
            why = f"{why}; {conflicts}" if why else conflicts
        return OtlpAnswer(AnswerStatus.TAKEN, why, n_rejected=ingest.n_refused)

    def _explain(self, error: IngeroError) -> OtlpAnswer:
        """The answer to a request that was not written."""
        counters = self._counters
        if isinstance(error, RetryableError):
            counters.refused_load += 1
            seconds = max(1, math.ceil((error.retry_after_ns or NS_PER_S) / NS_PER_S))
            return OtlpAnswer(AnswerStatus.OVERLOADED, error.message, seconds)
        if isinstance(error, ForbiddenError):
            counters.refused_acl += 1
            return OtlpAnswer(AnswerStatus.FORBIDDEN, error.message)
        if isinstance(error, BadDataError):
            counters.refused_body += 1
            is_large = isinstance(error, TooLargeError)
            return OtlpAnswer(
                AnswerStatus.TOO_LARGE if is_large else AnswerStatus.BAD_DATA, error.message
            )
        counters.failed += 1
        if isinstance(error, StoreError):
            return OtlpAnswer(AnswerStatus.UNAVAILABLE, "the store cannot write now", 5)
        _LOG.error("an OTLP request failed: %s", error.message)
        return OtlpAnswer(AnswerStatus.PERMANENT, "internal error")

    def _end(self, request: OtlpRequest, answer: OtlpAnswer) -> None:
        """Give back what the request holds, and write its line; nothing where no head could be read."""
        ingest: IngestRequest = request.context
        if ingest.is_over:
            return
        ingest.is_over = True
        if ingest.is_admitted:
            self._in_flight[ingest.key] -= 1
            if not self._in_flight[ingest.key]:
                del self._in_flight[ingest.key]
        if ingest.n_bytes:
            self._budget.give_back(ingest.key, ingest.n_bytes)
        if request.path:
            self._write_line(request, ingest, answer)

    def _write_line(self, request: OtlpRequest, ingest: IngestRequest, answer: OtlpAnswer) -> None:
        principal, clusters = ingest.principal, sorted(ingest.clusters)
        line = {
            "event": "otlp",
            "transport": request.transport,
            "bearer_hash": principal.digest if principal else "",
            "bearer_key_name": principal.key_name if principal else "",
            "source_ip": ingest.source_ip,
            "method": request.method,
            "path": request.path[:256],
            "status": answer.status.http,
            "latency_ms": round((self._clock.mono_ns() - ingest.started_ns) / NS_PER_MS, 3),
            "clusters": [name[:_MAX_CLUSTER_CHARS] for name in clusters[:_MAX_CLUSTERS]],
            "n_clusters": len(clusters),
            "n_rows": ingest.n_rows,
            "n_refused": ingest.n_refused,
        }
        write_audit({**line, "why": answer.message[:256]} if answer.message else line)


def _overload(message: str, retry_after_s: int) -> RequestRefusal:
    return RequestRefusal(
        OtlpAnswer(AnswerStatus.OVERLOADED, message, retry_after_s), Reason.OVERLOADED
    )
