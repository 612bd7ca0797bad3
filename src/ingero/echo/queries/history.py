"""What happened when: anomalies, one metric over time, one node in full."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Final, Literal

import msgspec

from ingero.echo.db.writer import EPOCH
from ingero.echo.queries.context import (
    Answer,
    ListAnswer,
    ListArgs,
    MetricName,
    NodeId,
    QueryContext,
    TimeWindowArgs,
)
from ingero.serving.query import Query
from ingero.wire.names import MetricName as WireMetric

_SCORE: Final = str(WireMetric.HEALTH_SCORE)


class AnomalyArgs(ListArgs, kw_only=True, forbid_unknown_fields=True):
    """Which anomalies."""

    severity_filter: Annotated[
        Literal["any", "warn", "error", "critical"],
        msgspec.Meta(
            description="Least severity; `any` is all of them, also incidents whose sender has other words for it."
        ),
    ] = "any"
    node_id: NodeId | None = None


class NodeAnomaly(msgspec.Struct):
    """One anomaly."""

    ts: datetime
    severity: str
    kind: str
    cluster_id: str
    node_id: str
    summary: str | None


_ANOMALY_SQL: Final = f"""
WITH found AS (
    SELECT ts, coalesce(severity, 'warn') AS severity, 'incident:' || coalesce(kind, 'unknown') AS kind, cluster_id,
           node_id, coalesce(summary, '') || CASE WHEN state IS NULL THEN '' ELSE ' [' || state || ']' END AS summary
    FROM incidents WHERE {{where}}
    UNION ALL
    SELECT ts, CASE verdict WHEN 'culprit' THEN 'critical' WHEN 'network' THEN 'error' ELSE 'warn' END,
           'verdict:' || verdict, cluster_id, node_id, coalesce(summary, coalesce(worker, node_id) || ' ' || verdict)
    FROM verdicts WHERE {{where}} AND verdict NOT IN ('ordinary', 'unknown', 'victim')
    UNION ALL
    SELECT ts, 'error', 'straggler', cluster_id, node_id,
           'straggler: score ' || coalesce(json_extract_string(attributes, '$.score'), '?') || ' under '
           || coalesce(json_extract_string(attributes, '$.threshold'), '?') || ', '
           || coalesce(json_extract_string(attributes, '$.dominant_signal'), '?')
    FROM (SELECT *, lag(value_double, 1, 0.0) OVER (PARTITION BY cluster_id, node_id, stream ORDER BY ts) AS before
          FROM events WHERE {{where}} AND metric_name = '{WireMetric.STRAGGLER_EVENT}')
    WHERE value_double = 1 AND before = 0
      AND cluster_id NOT IN (SELECT cluster_id FROM incidents WHERE {{where}} AND kind = 'straggler')
    UNION ALL
    SELECT ts, 'warn', 'degradation', cluster_id, node_id, 'the node is slower than its own past'
    FROM (SELECT *, lag(value_double, 1, 0.0) OVER (PARTITION BY cluster_id, node_id, stream ORDER BY ts) AS before
          FROM events WHERE {{where}} AND metric_name = '{WireMetric.DEGRADATION_WARNING}')
    WHERE value_double = 1 AND before = 0
    UNION ALL
    SELECT ts, severity, 'log:' || coalesce(event_name, ''), cluster_id, node_id, body
    FROM logs WHERE {{where}} AND severity IN ('warn', 'error', 'critical')
)
SELECT ts, severity, kind, cluster_id, node_id, left(summary, 500) FROM found
WHERE coalesce(list_position(['warn', 'error', 'critical'], lower(severity)), 0) >= ? AND (? IS NULL OR node_id = ?)
ORDER BY ts DESC, severity, cluster_id, node_id, kind
"""
_LEVELS: Final = {"any": 0, "warn": 1, "error": 2, "critical": 3}


def _anomalies(context: QueryContext, args: AnomalyArgs) -> ListAnswer[NodeAnomaly]:
    span = context.span(args, "events", "incidents", "verdicts", "logs")
    sql, params = span.bind(_ANOMALY_SQL)
    chosen = (_LEVELS[args.severity_filter], args.node_id, args.node_id)
    coverage = context.coverage(span, "events", node_id=args.node_id)
    return context.answer(
        ListAnswer[NodeAnomaly], span, (sql, (*params, *chosen)), args.limit, coverage
    )


class TimelineArgs(TimeWindowArgs, kw_only=True, forbid_unknown_fields=True):
    """Which metric, of whom, in how many steps."""

    metric_name: MetricName = _SCORE
    node_id: NodeId | None = None
    n_buckets: Annotated[
        int, msgspec.Meta(ge=1, le=1000, description="Steps that the window is cut into.")
    ] = 60


class Bucket(msgspec.Struct):
    """One step; a step without points is left out."""

    start: datetime
    cluster_id: str
    min: float | None
    mean: float | None
    max: float | None
    lowest_node: str | None
    n_points: int


class NodeTimelineAnswer(Answer, kw_only=True):
    """Oldest first, cluster by cluster."""

    metric_name: str
    bucket_seconds: float
    rows: list[Bucket]


_TIMELINE_SQL: Final = """
SELECT make_timestamp(?::BIGINT + ((epoch_us(ts) - ?::BIGINT) // ?::BIGINT) * ?::BIGINT) AS start, cluster_id,
       min(value_double), avg(value_double), max(value_double), arg_min(node_id, value_double), count(value_double)
FROM events WHERE {where} AND metric_name = ? AND (? IS NULL OR node_id = ?)
GROUP BY ALL ORDER BY cluster_id, start
"""
_TIMELINE_ROWS: Final = 5000


def _timeline(context: QueryContext, args: TimelineArgs) -> NodeTimelineAnswer:
    span = context.span(args)
    start_us = _epoch_us(span.start)
    step_us = max(1, (_epoch_us(span.end) - start_us + args.n_buckets - 1) // args.n_buckets)
    sql, params = span.bind(_TIMELINE_SQL)
    steps = (start_us, start_us, step_us, step_us)
    chosen = (args.metric_name, args.node_id, args.node_id)
    return context.answer(
        NodeTimelineAnswer,
        span,
        (sql, (*steps, *params, *chosen)),
        _TIMELINE_ROWS,
        context.coverage(span, "events", node_id=args.node_id, metric_name=args.metric_name),
        metric_name=args.metric_name,
        bucket_seconds=step_us / 1e6,
    )


def _epoch_us(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1)


class NodeArgs(ListArgs, kw_only=True, forbid_unknown_fields=True):
    """Which node."""

    node_id: NodeId


class NodeFacts(msgspec.Struct):
    """What the node says of itself."""

    cluster_id: str
    node_id: str
    host: str | None
    provider: str | None
    gpu_model: str | None
    gpu_count: int | None
    world_size: int | None
    node_rank: int | None
    state: str | None
    last_seen: datetime | None


class MetricNow(msgspec.Struct):
    """One metric of the node in the window."""

    cluster_id: str
    metric_name: str
    last: float | None
    min: float | None
    max: float | None
    n_points: int


class NodeVerdict(msgspec.Struct):
    """One verdict about the node."""

    ts: datetime
    cluster_id: str
    verdict: str | None
    slowdown: float | None
    summary: str | None


class NodeHistoryAnswer(Answer, kw_only=True):
    """Everything about one node."""

    facts: list[NodeFacts]
    rows: Annotated[list[MetricNow], msgspec.Meta(description="Metrics, by name.")]
    verdicts: Annotated[list[NodeVerdict], msgspec.Meta(description="Newest 20.")]


def _node(context: QueryContext, args: NodeArgs) -> NodeHistoryAnswer:
    span = context.span(args, "events", "verdicts")
    clusters, values = span.of_clusters
    facts = context.all(
        NodeFacts,
        "SELECT cluster_id, node_id, host_attr, provider, gpu_model, gpu_count, world_size, node_rank, state, ts "
        f"FROM nodes WHERE {clusters} AND node_id = ? ORDER BY cluster_id LIMIT 100",
        (*values, args.node_id),
    )
    metrics = (
        "SELECT cluster_id, metric_name, arg_max(value_double, ts), min(value_double), max(value_double), "
        f"count(*) FROM events WHERE {span.where} AND node_id = ? GROUP BY ALL ORDER BY cluster_id, metric_name"
    )
    verdicts = context.all(
        NodeVerdict,
        f"SELECT ts, cluster_id, verdict, slowdown, summary FROM verdicts WHERE {span.where} AND node_id = ? "
        "ORDER BY ts DESC LIMIT 20",
        (*span.params, args.node_id),
    )
    return context.answer(
        NodeHistoryAnswer,
        span,
        (metrics, (*span.params, args.node_id)),
        args.limit,
        context.coverage(span, "events", node_id=args.node_id),
        facts=facts,
        verdicts=verdicts,
    )


ANOMALY_LIST: Final = Query(
    "fleet.cluster.anomaly_list",
    "Anomaly list",
    "What went wrong, newest first: incidents (Fleet's episodes among them), verdicts, the start of each straggler "
    "phase where Fleet reported no episode and of each degradation, and "
    "warnings that were logged.",
    AnomalyArgs,
    ListAnswer[NodeAnomaly],
    _anomalies,
)
TIMELINE: Final = Query(
    "fleet.cluster.timeline",
    "Timeline",
    "One metric over time in equal steps, with the lowest node of each step.",
    TimelineArgs,
    NodeTimelineAnswer,
    _timeline,
)
NODE_DETAIL: Final = Query(
    "fleet.cluster.node_detail",
    "Node detail",
    "Everything about one node: what it is, each of its metrics, and the verdicts about it.",
    NodeArgs,
    NodeHistoryAnswer,
    _node,
)
