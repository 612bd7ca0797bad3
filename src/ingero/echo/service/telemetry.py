"""Every instrument of Echo, declared once. Labels are closed sets: no tenant's name is ever one.

``bearer`` is the first characters of a token's SHA-256, as the audit log has it; there are as many as there are tokens.
A bearer that may not read every cluster is shown the series with its own value and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from ingero.echo.db.store import Store
from ingero.echo.ingest.limits import RefusalReason
from ingero.echo.ingest.settings import IngestCounters
from ingero.echo.service.fair_queue import FairQueue
from ingero.serving.connections import ConnectionCounters
from ingero.telemetry.declare import MetricDeclaration, counter, gauge, histogram
from ingero.telemetry.metrics import MeterRegistry

REQUESTS: Final = counter(
    "ingero_echo_requests_total",
    "Requests of the MCP and API listener.",
    "handler",
    "status_class",
    "api_version",
)
LATENCY: Final = histogram(
    "ingero_echo_request_duration_seconds",
    "Time from a request's first byte to its answer's.",
    (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
    "handler",
    "status_class",
    "api_version",
)
BEARER_REQUESTS: Final = counter(
    "ingero_echo_bearer_requests_total",
    "Requests of one bearer to the MCP and API listener.",
    "bearer",
    "handler",
    "status_class",
)
BEARER_SECONDS: Final = counter(
    "ingero_echo_bearer_seconds_total",
    "Time that one bearer's requests took, waiting for a place included.",
    "bearer",
    "handler",
)
BAD_BEARERS: Final = counter(
    "ingero_echo_bad_bearers_total",
    "Requests with a token that nobody has: refused with 401, or slowed with 429.",
    "outcome",
)
CONNECTIONS: Final = counter(
    "ingero_echo_connections_total",
    "Connections that ended early: refused (too many), slow_heads, large_heads, stalled (never read).",
    "listener",
    "outcome",
)
QUESTIONS_WAITING: Final = gauge(
    "ingero_echo_questions_waiting", "Questions that wait for a place: tools, sql.", "place"
)
INGEST_REQUESTS: Final = counter(
    "ingero_echo_ingest_requests_total",
    "OTLP requests by outcome: taken, refused_auth, refused_acl, refused_pace, refused_quota, refused_load, "
    "refused_body, failed.",
    "outcome",
)
ROWS: Final = counter(
    "ingero_echo_rows_total",
    "Rows by outcome: written, duplicates, conflicts (written beside another value of their series and time), "
    "refused_rows, refused_full, refused_disk, aged_out, sized_out.",
    "outcome",
)
COMMITS: Final = counter(
    "ingero_echo_commits_total", "Commits by outcome: done, failed, reopened.", "outcome"
)
WAITING: Final = gauge("ingero_echo_rows_waiting", "Rows taken and not yet on disk.")
STORE_UP: Final = gauge("ingero_echo_store_up", "1 when the store writes, 0 when it only reads.")
BATCHES_REFUSED: Final = counter(
    "ingero_echo_collective_batches_refused_total", "Collective batches that could not be read."
)
RECORDS_REFUSED: Final = counter(
    "ingero_echo_records_refused_total",
    "Points, log records and spans refused out of OTLP requests, by reason.",
    "reason",
)

METRICS: Final[tuple[MetricDeclaration, ...]] = (
    REQUESTS,
    LATENCY,
    BEARER_REQUESTS,
    BEARER_SECONDS,
    BAD_BEARERS,
    CONNECTIONS,
    QUESTIONS_WAITING,
    INGEST_REQUESTS,
    ROWS,
    COMMITS,
    WAITING,
    STORE_UP,
    BATCHES_REFUSED,
    RECORDS_REFUSED,
)


def watch_connections(meter: MeterRegistry, counters: ConnectionCounters, listener: str) -> None:
    """Show one listener's connections."""
    for outcome in ("refused", "slow_heads", "large_heads", "stalled"):
        reading = _read(counters, outcome)
        meter.counter(CONNECTIONS).watch(reading, listener=listener, outcome=outcome)


def watch_service(
    meter: MeterRegistry, store: Store, ingest: IngestCounters, queues: Mapping[str, FairQueue]
) -> None:
    """Show what happened to rows and to OTLP requests, and who waits."""
    written = store.counters
    rows, commits = meter.counter(ROWS), meter.counter(COMMITS)
    for name in (*("written", "duplicates", "conflicts", "refused_rows", "aged_out", "sized_out"),):
        rows.watch(_read(written, name), outcome=name)
    for name in ("refused_full", "refused_disk"):
        rows.watch(_read(store, name), outcome=name)
    for name, shown in {
        "commits": "done",
        "failed_commits": "failed",
        "reopened": "reopened",
    }.items():
        commits.watch(_read(written, name), outcome=shown)
    for name in (
        *("taken", "refused_auth", "refused_acl", "refused_pace", "refused_quota"),
        *("refused_load", "refused_body", "failed"),
    ):
        meter.counter(INGEST_REQUESTS).watch(_read(ingest, name), outcome=name)
    for place, queue in queues.items():
        meter.gauge(QUESTIONS_WAITING).watch(_read(queue, "n_waiting"), place=place)
    meter.gauge(WAITING).watch(lambda: store.n_waiting)
    meter.gauge(STORE_UP).watch(lambda: 0.0 if store.trouble else 1.0)
    meter.counter(BATCHES_REFUSED).watch(_count(ingest.records, RefusalReason.BATCH))
    for reason in RefusalReason:
        meter.counter(RECORDS_REFUSED).watch(_count(ingest.records, reason), reason=reason.value)


def _read(source: object, name: str) -> Callable[[], float]:
    return lambda: float(getattr(source, name))


def _count(counts: Mapping[RefusalReason, int], reason: RefusalReason) -> Callable[[], float]:
    return lambda: float(counts[reason])
