"""Every instrument of Echo, declared once. Labels are closed sets: no tenant's name is ever one."""

from __future__ import annotations

from typing import Final

from ingero.telemetry.declare import Metric, counter, gauge, histogram

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
INGEST_REQUESTS: Final = gauge(
    "ingero_echo_ingest_requests_count",
    "OTLP requests since the start: taken, refused_auth, refused_acl, refused_load, refused_body, failed.",
    "outcome",
)
ROWS: Final = gauge(
    "ingero_echo_rows_count",
    "Rows since the start: written, duplicates, refused_full, refused_disk, aged_out, sized_out.",
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

METRICS: Final[tuple[Metric, ...]] = (
    REQUESTS,
    LATENCY,
    INGEST_REQUESTS,
    ROWS,
    COMMITS,
    WAITING,
    STORE_UP,
    BATCHES_REFUSED,
)
