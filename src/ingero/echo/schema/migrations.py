"""Numbered steps from an empty database to today's. A step that was released is never edited; add the next one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Migration:
    """One step, applied in one transaction.

    Attributes:
        number: 1, 2, 3 … without a gap.
        title: What it does.
        statements: SQL, in order.
    """

    number: int
    title: str
    statements: tuple[str, ...]


MIGRATIONS: Final = (
    Migration(
        1,
        "events, histograms, collectives, incidents, verdicts, costs, logs, spans, nodes",
        (
            """CREATE TABLE events (
                ts TIMESTAMP NOT NULL, cluster_id VARCHAR NOT NULL, node_id VARCHAR NOT NULL,
                metric_name VARCHAR NOT NULL, value_double DOUBLE, host_attr VARCHAR,
                kind VARCHAR, unit VARCHAR, attributes VARCHAR, ingested_at TIMESTAMP NOT NULL)""",
            """CREATE TABLE histograms (
                ts TIMESTAMP NOT NULL, cluster_id VARCHAR NOT NULL, node_id VARCHAR NOT NULL,
                metric_name VARCHAR NOT NULL, count UBIGINT, sum DOUBLE, min DOUBLE, max DOUBLE,
                bounds DOUBLE[], bucket_counts UBIGINT[],
                kind VARCHAR, unit VARCHAR, attributes VARCHAR, ingested_at TIMESTAMP NOT NULL)""",
            """CREATE TABLE collectives (
                ts TIMESTAMP NOT NULL, cluster_id VARCHAR NOT NULL, node_id VARCHAR NOT NULL,
                rank INTEGER, comm VARCHAR, comm_rank INTEGER, n_ranks INTEGER, n_gpus INTEGER, clock VARCHAR,
                seq UBIGINT, op VARCHAR, entry_ns BIGINT, inside_ns BIGINT, own_ns BIGINT, n_bytes BIGINT,
                labels VARCHAR, ingested_at TIMESTAMP NOT NULL)""",
            """CREATE TABLE incidents (
                ts TIMESTAMP NOT NULL, cluster_id VARCHAR NOT NULL, node_id VARCHAR NOT NULL,
                incident_id VARCHAR, kind VARCHAR, severity VARCHAR, state VARCHAR, summary VARCHAR,
                score DOUBLE, threshold DOUBLE, dominant_signal VARCHAR, start_ts TIMESTAMP, end_ts TIMESTAMP,
                attributes VARCHAR, ingested_at TIMESTAMP NOT NULL)""",
            """CREATE TABLE verdicts (
                ts TIMESTAMP NOT NULL, cluster_id VARCHAR NOT NULL, node_id VARCHAR NOT NULL,
                rank INTEGER, worker VARCHAR, comm VARCHAR, verdict VARCHAR, slowdown DOUBLE, evidence DOUBLE,
                lost_gpu_seconds DOUBLE, victims VARCHAR[], before VARCHAR, summary VARCHAR,
                attributes VARCHAR, ingested_at TIMESTAMP NOT NULL)""",
            """CREATE TABLE costs (
                ts TIMESTAMP NOT NULL, cluster_id VARCHAR NOT NULL, node_id VARCHAR NOT NULL,
                rank INTEGER, victim_node_id VARCHAR, gpu_seconds DOUBLE, amount DOUBLE, currency VARCHAR,
                provider VARCHAR, gpu_model VARCHAR, attributed VARCHAR,
                attributes VARCHAR, ingested_at TIMESTAMP NOT NULL)""",
            """CREATE TABLE logs (
                ts TIMESTAMP NOT NULL, cluster_id VARCHAR NOT NULL, node_id VARCHAR NOT NULL,
                event_name VARCHAR, severity VARCHAR, body VARCHAR,
                attributes VARCHAR, ingested_at TIMESTAMP NOT NULL)""",
            """CREATE TABLE spans (
                ts TIMESTAMP NOT NULL, cluster_id VARCHAR NOT NULL, node_id VARCHAR NOT NULL,
                name VARCHAR, trace_id VARCHAR, span_id VARCHAR, parent_span_id VARCHAR, end_ts TIMESTAMP,
                status VARCHAR, attributes VARCHAR, ingested_at TIMESTAMP NOT NULL)""",
            """CREATE TABLE nodes (
                ts TIMESTAMP NOT NULL, cluster_id VARCHAR NOT NULL, node_id VARCHAR NOT NULL,
                host_attr VARCHAR, provider VARCHAR, gpu_model VARCHAR, gpu_count INTEGER, world_size INTEGER,
                node_rank INTEGER, state VARCHAR, attributes VARCHAR, ingested_at TIMESTAMP NOT NULL,
                PRIMARY KEY (cluster_id, node_id))""",
            # What was written lately, so that a sender's retry after our restart is still recognised.
            "CREATE TABLE ingest_keys (key UBIGINT NOT NULL, ingested_at TIMESTAMP NOT NULL)",
        ),
    ),
    Migration(
        2,
        "a secret of the database in the keys of rows",
        (
            "CREATE TABLE ingest_secret (secret UBIGINT NOT NULL)",
            "INSERT INTO ingest_secret SELECT hash(gen_random_uuid())",
            "DELETE FROM ingest_keys",  # made without it, so no row will ever match them
        ),
    ),
    Migration(
        3,
        "hangs",
        (
            """CREATE TABLE hangs (
                ts TIMESTAMP NOT NULL, cluster_id VARCHAR NOT NULL, node_id VARCHAR NOT NULL,
                rank INTEGER, job VARCHAR, comm VARCHAR, state VARCHAR, cause VARCHAR,
                missing_seq UBIGINT, last_finished_seq UBIGINT, blocks INTEGER[], standing_s DOUBLE, summary VARCHAR,
                attributes VARCHAR, ingested_at TIMESTAMP NOT NULL)""",
        ),
    ),
)
"""Every step; the last one's number is the schema's version."""
