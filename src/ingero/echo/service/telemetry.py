"""Every instrument of Echo, declared once. Labels are closed sets: no tenant's name is ever one.

``bearer`` is the first characters of a token's SHA-256, as the audit log has it; there are as many as there are tokens. A
bearer that may not read every cluster is shown the series with its own value and no others.
"""

from __future__ import annotations

from typing import Final

from ingero.telemetry.declare import MetricDeclaration, counter, gauge, histogram

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
CONNECTIONS: Final = gauge(
    "ingero_echo_connections_count",
    "Connections since the start that ended early: refused (too many), slow_heads, large_heads, stalled (never read).",
    "listener",
    "outcome",
)
QUESTIONS_WAITING: Final = gauge(
    "ingero_echo_questions_waiting", "Questions that wait for a place: tools, sql.", "place"
)
INGEST_REQUESTS: Final = gauge(
    "ingero_echo_ingest_requests_count",
    "OTLP requests since the start: taken, refused_auth, refused_acl, refused_pace, refused_load, refused_body, failed.",
    "outcome",
)
ROWS: Final = gauge(
    "ingero_echo_rows_count",
    "Rows since the start: written, duplicates, conflicts (written beside another value of their series and time), "
    "refused_rows, refused_full, refused_disk, aged_out, sized_out.",
    "outcome",
)
COMMITS: Final = gauge(
    "ingero_echo_commits_count", "Commits since the start: done, failed, reopened.", "outcome"
)
WAITING: Final = gauge("ingero_echo_rows_waiting", "Rows taken and not yet on disk.")
STORE_UP: Final = gauge("ingero_echo_store_up", "1 when the store writes, 0 when it only reads.")
BATCHES_REFUSED: Final = gauge(
    "ingero_echo_collective_batches_refused_count", "Collective batches that could not be read."
)
RECORDS_REFUSED: Final = gauge(
    "ingero_echo_records_refused_count",
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
