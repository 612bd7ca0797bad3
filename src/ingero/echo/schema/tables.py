"""Tables as columns with their Arrow types, from which the statements for DuckDB and for ClickHouse are made.

Every table has ``cluster_id``, which is the tenant boundary, ``ts`` in UTC microseconds from the sender's clock (from
ours where the sender's was implausible) and ``ingested_at`` from ours, which retention goes by. Absent is NULL, never
zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa

TS: Final = pa.timestamp("us")
TEXT: Final = pa.string()
DOUBLE: Final = pa.float64()
BIGINT: Final = pa.int64()
UBIGINT: Final = pa.uint64()
INT: Final = pa.int32()


@dataclass(frozen=True, slots=True)
class Table:
    """One table.

    Attributes:
        name: In SQL.
        description: What a row is, for the documentation that tenants read.
        columns: Name and Arrow type, in the table's order, without ``ingested_at``, which the writer adds.
    """

    name: str
    description: str
    columns: tuple[tuple[str, pa.DataType], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Column names without ``ingested_at``."""
        return tuple(name for name, _ in self.columns)

    def arrow_schema(self) -> pa.Schema:
        """The whole table's Arrow schema."""
        return pa.schema([*self.columns, ("ingested_at", TS)])


WHO: Final = (("ts", TS), ("cluster_id", TEXT), ("node_id", TEXT))
STREAM: Final = ("stream", TEXT)
"""Which points of one name, node and attributes are of one sender: a hash of resource, scope, kind and unit, as 16
hexadecimal digits, which DuckDB packs better than a number. NULL in rows of a release before it."""

EVENTS: Final = Table(
    "events",
    "One number data point: a gauge, a sum as sent, or one quantile of a summary.",
    (
        *WHO,
        ("metric_name", TEXT),
        ("value_double", DOUBLE),
        ("host_attr", TEXT),  # host.name, else k8s.node.name, else NULL
        ("kind", TEXT),  # gauge, cumulative, delta, quantile
        ("unit", TEXT),
        ("attributes", TEXT),  # JSON object, keys sorted
        STREAM,
    ),
)
HISTOGRAMS: Final = Table(
    "histograms",
    "One histogram data point; exponential ones with their bounds spelled out. Of a summary its count and sum, without "
    "buckets.",
    (
        *WHO,
        ("metric_name", TEXT),
        ("count", UBIGINT),
        ("sum", DOUBLE),
        ("min", DOUBLE),
        ("max", DOUBLE),
        ("bounds", pa.list_(DOUBLE)),  # n upper bounds, ascending
        ("bucket_counts", pa.list_(UBIGINT)),  # n + 1 counts
        ("kind", TEXT),  # cumulative, delta
        ("unit", TEXT),
        ("attributes", TEXT),
        STREAM,
    ),
)
COLLECTIVES: Final = Table(
    "collectives",
    "One collective operation as one rank saw it.",
    (
        *WHO,
        ("rank", INT),  # global rank, NULL when unknown
        ("comm", TEXT),  # communicator id hash
        ("comm_rank", INT),
        ("n_ranks", INT),
        ("n_gpus", INT),  # GPUs that wait when this rank waits
        ("clock", TEXT),  # enqueue, sync, device
        ("seq", UBIGINT),
        ("op", TEXT),  # all_reduce, …
        ("entry_ns", BIGINT),  # the rank's own clock
        ("inside_ns", BIGINT),
        ("own_ns", BIGINT),
        ("n_bytes", BIGINT),
        ("labels", TEXT),  # JSON object: the launcher's coordinates
    ),
)
INCIDENTS: Final = Table(
    "incidents",
    "One state of one episode or incident: the same incident_id again when its state changes.",
    (
        *WHO,
        ("incident_id", TEXT),
        ("kind", TEXT),  # straggler, panic, cause rules of the agent, …
        ("severity", TEXT),  # warn, error, critical
        ("state", TEXT),  # open, updated, resolved, state_change, lost
        ("summary", TEXT),
        ("score", DOUBLE),
        ("threshold", DOUBLE),
        ("dominant_signal", TEXT),
        ("start_ts", TS),
        ("end_ts", TS),
        ("attributes", TEXT),
    ),
)
VERDICTS: Final = Table(
    "verdicts",
    "What a detector concluded about one worker, group or cluster in one window.",
    (
        *WHO,
        ("rank", INT),
        ("worker", TEXT),  # as the detector names it
        ("comm", TEXT),
        (
            "verdict",
            TEXT,
        ),  # culprit, drag, victim, imbalance:stage, imbalance:data, network, cluster, unknown
        ("slowdown", DOUBLE),  # 1.25 = 25 % slower than the median peer
        ("evidence", DOUBLE),  # log10 of the e-value
        ("lost_gpu_seconds", DOUBLE),  # what it cost its victims, since onset
        ("victims", pa.list_(TEXT)),  # who waited for it, longest first
        ("before", TEXT),  # the verdict that this one replaces
        ("summary", TEXT),
        ("attributes", TEXT),
    ),
)
HANGS: Final = Table(
    "hangs",
    "Which rank a hung job waits for, as Fleet reported it: a row when a rank is first named, one when no rank waits.",
    (
        *WHO,  # node_id is the missed rank's
        ("rank", INT),  # the global rank that is missed
        ("job", TEXT),  # where ranks of several have the same numbers
        ("comm", TEXT),
        ("state", TEXT),  # began, ended
        ("cause", TEXT),  # absent, stuck, silent, stopped, ended
        ("missing_seq", UBIGINT),  # the operation that it did not enter, or did not leave
        ("last_finished_seq", UBIGINT),
        ("blocks", pa.list_(INT)),  # global ranks that wait for it
        ("standing_s", DOUBLE),  # how long the longest has waited; NULL when it ended
        ("summary", TEXT),
        ("attributes", TEXT),
    ),
)
COSTS: Final = Table(
    "costs",
    "Lost GPU time and money since the sender's last report of the same; negative is a charge taken back.",
    (
        *WHO,  # node_id is who is charged
        ("rank", INT),
        ("victim_node_id", TEXT),  # NULL for several that share the hardware
        ("gpu_seconds", DOUBLE),
        ("amount", DOUBLE),
        ("currency", TEXT),
        ("provider", TEXT),  # of the GPUs that waited
        ("gpu_model", TEXT),
        ("attributed", TEXT),  # charged, unattributed
        ("attributes", TEXT),
    ),
)
LOGS: Final = Table(
    "logs",
    "A log record that is none of the kinds above.",
    (
        *WHO,
        ("event_name", TEXT),
        ("severity", TEXT),
        ("body", TEXT),
        ("attributes", TEXT),
    ),
)
SPANS: Final = Table(
    "spans",
    "One trace span, such as a detection from rising to falling edge.",
    (
        *WHO,
        ("name", TEXT),
        ("trace_id", TEXT),
        ("span_id", TEXT),
        ("parent_span_id", TEXT),
        ("end_ts", TS),
        ("status", TEXT),  # unset, ok, error
        ("attributes", TEXT),
    ),
)
NODES: Final = Table(
    "nodes",
    "One node as it last described itself.",
    (
        *WHO,  # ts is that of its last report
        ("host_attr", TEXT),
        ("provider", TEXT),
        ("gpu_model", TEXT),
        ("gpu_count", INT),
        ("world_size", INT),
        ("node_rank", INT),
        ("state", TEXT),
        ("attributes", TEXT),
    ),
)

USAGE: Final = Table(
    "usage",
    "What one bearer had kept in one table, over some minutes; written by Echo itself.",
    (
        *WHO,  # ts is when these minutes began; node_id is empty
        (
            "bearer",
            TEXT,
        ),  # first characters of its SHA-256; empty where Echo found the rows when it started
        ("of_table", TEXT),
        ("n_rows", BIGINT),
        ("n_bytes", BIGINT),  # of their values, not compressed
        (
            "n_series",
            BIGINT,
        ),  # different series in these minutes, within 3 %; NULL where that is not known
    ),
)

SENT: Final = (EVENTS, HISTOGRAMS, COLLECTIVES, INCIDENTS, VERDICTS, HANGS, COSTS, LOGS, SPANS)
"""Tables whose rows senders send."""
APPENDED: Final = (*SENT, USAGE)
"""Tables that only grow; NODES is replaced row by row."""

TABLES: Final = {table.name: table for table in (*APPENDED, NODES)}
TENANT_TABLES: Final = tuple(TABLES)
"""What a tenant's SQL may name."""
