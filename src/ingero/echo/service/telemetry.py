"""Every instrument of Echo, declared once. Labels are closed sets: no tenant's name is ever one.

``bearer`` is the first characters of a token's SHA-256, as the audit log has it; there are as many as there are tokens.
A bearer that may not read every cluster is shown the series with its own value and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, TypeVar

from ingero.echo.db.backups import BackupCounters
from ingero.echo.db.compaction import CompactionCounters
from ingero.echo.db.replica import ReplicaBackend
from ingero.echo.db.store import Store
from ingero.echo.db.usage import UsageLedger
from ingero.echo.ingest.limits import RefusalReason
from ingero.echo.ingest.quotas import QuotaKind, SeriesMeter
from ingero.echo.ingest.settings import IngestCounters
from ingero.echo.service.fair_queue import FairQueue
from ingero.serving.bearer import Principal
from ingero.serving.connections import ConnectionCounters
from ingero.telemetry.declare import MetricDeclaration, counter, gauge, histogram
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_S

KeyT = TypeVar("KeyT")

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
    "Rows by outcome: written, duplicates, repeated (log records with a log.record.uid that is stored already), "
    "conflicts (written beside another value of their series and time), refused_rows, refused_full, refused_disk, "
    "aged_out, sized_out.",
    "outcome",
)
COMMITS: Final = counter(
    "ingero_echo_commits_total", "Commits by outcome: done, failed, reopened.", "outcome"
)
WAITING: Final = gauge("ingero_echo_rows_waiting", "Rows taken and not yet on disk.")
BEARER_ROWS: Final = counter(
    "ingero_echo_bearer_rows_total", "Rows that one bearer had kept.", "bearer"
)
BEARER_BYTES: Final = counter(
    "ingero_echo_bearer_received_bytes_total", "Bytes of OTLP bodies of one bearer.", "bearer"
)
QUOTA_REFUSED: Final = counter(
    "ingero_echo_quota_refused_total",
    "What a quota of one bearer refused: requests (rows, bytes, storage), and rows of new series (series).",
    "bearer",
    "quota",
)
QUOTA_USED: Final = gauge(
    "ingero_echo_quota_used_ratio",
    "How much of its quota a bearer has used, 1 being all: series, storage.",
    "bearer",
    "quota",
)
STORED_BYTES: Final = gauge(
    "ingero_echo_stored_bytes", "Bytes of all values that are stored, not compressed."
)
BACKUPS: Final = counter(
    "ingero_echo_backups_total", "Scheduled backups by outcome: done, failed.", "outcome"
)
BACKUP_TIME: Final = gauge(
    "ingero_echo_last_backup_timestamp_seconds",
    "When the newest scheduled backup was made, in Unix time; 0 while there is none.",
)
BACKUP_BYTES: Final = gauge("ingero_echo_last_backup_bytes", "Size of the newest scheduled backup.")
BACKUP_SECONDS: Final = gauge(
    "ingero_echo_last_backup_duration_seconds",
    "Time that the last scheduled backup took with its check; 0 until this process made one.",
)
BACKUP_INTERVAL: Final = gauge(
    "ingero_echo_backup_interval_seconds", "From one scheduled backup to the next."
)
COMPACTIONS: Final = counter(
    "ingero_echo_compactions_total",
    "Times that the file was to be made smaller, by outcome: done, failed.",
    "outcome",
)
FILE_BYTES: Final = gauge(
    "ingero_echo_file_bytes",
    "Size of the database file: used, free. Looked at every ten minutes.",
    "part",
)
REPLICA_TIME: Final = gauge(
    "ingero_echo_replica_timestamp_seconds",
    "When the backup was made that a replica answers from, in Unix time.",
)
STORE_UP: Final = gauge("ingero_echo_store_up", "1 when the store writes, 0 when it only reads.")
CLOCK_AHEAD: Final = gauge(
    "ingero_echo_clock_ahead_seconds",
    "How far the clock is ahead of the time that is known to have passed, while retention does not go by it; else 0.",
)
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
    BEARER_ROWS,
    BEARER_BYTES,
    QUOTA_REFUSED,
    QUOTA_USED,
    STORED_BYTES,
    BACKUPS,
    BACKUP_TIME,
    BACKUP_BYTES,
    BACKUP_SECONDS,
    BACKUP_INTERVAL,
    COMPACTIONS,
    FILE_BYTES,
    REPLICA_TIME,
    STORE_UP,
    CLOCK_AHEAD,
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
    for name in (
        "written", "duplicates", "repeated", "conflicts", "refused_rows", "aged_out", "sized_out",
    ):  # fmt: skip
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
    meter.gauge(STORED_BYTES).watch(lambda: float(store.usage.find_stored_bytes(None)))
    meter.gauge(STORE_UP).watch(lambda: 0.0 if store.trouble else 1.0)
    meter.gauge(CLOCK_AHEAD).watch(lambda: store.clock_ahead_s)
    meter.counter(BATCHES_REFUSED).watch(_at(ingest.records, RefusalReason.BATCH))
    for reason in RefusalReason:
        meter.counter(RECORDS_REFUSED).watch(_at(ingest.records, reason), reason=reason.value)


def watch_backups(meter: MeterRegistry, counters: BackupCounters, interval_ns: int) -> None:
    """Show what became of scheduled backups."""
    for outcome in ("done", "failed"):
        meter.counter(BACKUPS).watch(_read(counters, outcome), outcome=outcome)
    meter.gauge(BACKUP_TIME).watch(_read(counters, "last_wall_s"))
    meter.gauge(BACKUP_BYTES).watch(_read(counters, "last_bytes"))
    meter.gauge(BACKUP_SECONDS).watch(_read(counters, "last_took_s"))
    meter.gauge(BACKUP_INTERVAL).set(interval_ns / NS_PER_S)


def watch_compactor(meter: MeterRegistry, counters: CompactionCounters) -> None:
    """Show how large the file is and what was done about it."""
    for outcome in ("done", "failed"):
        meter.counter(COMPACTIONS).watch(_read(counters, outcome), outcome=outcome)
    size = meter.gauge(FILE_BYTES)
    size.watch(lambda: float(counters.file_bytes - counters.free_bytes), part="used")
    size.watch(lambda: float(counters.free_bytes), part="free")


def watch_replica(meter: MeterRegistry, backend: ReplicaBackend) -> None:
    """Show how old a replica's rows are."""
    meter.gauge(REPLICA_TIME).watch(_read(backend, "made_wall_s"))


def watch_bearers(
    meter: MeterRegistry,
    principals: Iterable[Principal],
    usage: UsageLedger,
    ingest: IngestCounters,
    series: SeriesMeter,
) -> None:
    """Show what each bearer writes, against its quotas; called again when bearers change."""
    used = meter.gauge(QUOTA_USED)
    for labels in list(used.read()):
        used.remove(bearer=labels[0], quota=labels[1])
    for principal in principals:
        name, quota = principal.label, principal.quota
        meter.counter(BEARER_ROWS).watch(_at(usage.rows_of_bearer, name), bearer=name)
        meter.counter(BEARER_BYTES).watch(_at(ingest.bytes_of_bearer, name), bearer=name)
        for kind in QuotaKind:
            reading = _at(ingest.quotas, (name, kind))
            meter.counter(QUOTA_REFUSED).watch(reading, bearer=name, quota=kind.value)
        if quota.max_series is not None:
            reading = _share(partial(series.count, principal), quota.max_series)
            used.watch(reading, bearer=name, quota=QuotaKind.SERIES.value)
        if quota.max_stored_bytes is not None:
            stored = partial(usage.find_stored_bytes, principal.clusters)
            reading = _share(stored, quota.max_stored_bytes)
            used.watch(reading, bearer=name, quota=QuotaKind.STORAGE.value)


def _at(counts: Mapping[KeyT, int], key: KeyT) -> Callable[[], float]:
    return lambda: float(counts.get(key, 0))


def _share(read: Callable[[], int], limit: int) -> Callable[[], float]:
    return lambda: read() / limit


def _read(source: object, name: str) -> Callable[[], float]:
    return lambda: float(getattr(source, name))
