"""Which nodes stand out: summary, stragglers, outliers."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final

import msgspec

from ingero.echo.queries.context import (
    NODE_OF_EVENT,
    Answer,
    ListArgs,
    MetricName,
    QueryContext,
    TimeWindowArgs,
    window_of,
)
from ingero.echo.queries.stragglers import MAD_TO_SIGMA, N_SPANS, SCORE, STRAGGLER, STRAGGLERS
from ingero.echo.queries.verdicts import JUDGED
from ingero.serving.query import Query
from ingero.wire.names import FleetMetric

_N_JUDGED: Final = 2
"""How often `JUDGED` takes the span's parameters."""


class ClusterSummary(msgspec.Struct):
    """One cluster at a glance."""

    cluster_id: str
    n_nodes: int
    n_active: int
    n_idle: int
    n_calibrating: int
    median_score: float | None
    lowest_score: float | None
    lowest_node: str | None
    threshold: float | None
    n_straggler_nodes: int
    n_culprits: int
    n_open_incidents: int
    lost_gpu_seconds: float | None
    last_seen: datetime | None


class SummaryAnswer(Answer, kw_only=True):
    """One row per cluster."""

    rows: list[ClusterSummary]


_SUMMARY_SQL: Final = f"""
WITH {JUDGED}, {STRAGGLERS}, scores AS (
    SELECT cluster_id, node_id, arg_max(value_double, ts) AS score,
           arg_max(json_extract_string(attributes, '$."ingero.node.state"'), ts) AS state, max(ts) AS seen
    FROM events WHERE {{where}} AND metric_name = '{SCORE}' GROUP BY ALL
), per_cluster AS (
    SELECT cluster_id, count(*) FILTER (WHERE state = 'active' OR state IS NULL) AS n_active,
           count(*) FILTER (WHERE state = 'idle') AS n_idle, count(*) FILTER (WHERE state = 'calibrating') AS n_calibrating,
           median(score) FILTER (WHERE state = 'active' OR state IS NULL) AS median_score,
           min(score) AS lowest_score, arg_min(node_id, score) AS lowest_node
    FROM scores GROUP BY cluster_id
), seen AS (
    SELECT cluster_id, count(DISTINCT {NODE_OF_EVENT}) AS n_nodes, max(ts) AS last_seen,
           arg_max(value_double, ts) FILTER (WHERE metric_name = '{{threshold}}') AS threshold
    FROM events WHERE {{where}} GROUP BY cluster_id
), slow AS (
    SELECT cluster_id, count(*) AS n_stragglers FROM stragglers GROUP BY cluster_id
), blamed AS (
    SELECT cluster_id, count(*) FILTER (WHERE verdict IN ('culprit', 'network')) AS n_culprits FROM judged GROUP BY cluster_id
), troubled AS (
    SELECT cluster_id, count(*) FILTER (WHERE state = 'open') AS n_open FROM (
        SELECT cluster_id, incident_id, arg_max(state, ts) AS state FROM incidents WHERE {{where}} GROUP BY ALL)
    GROUP BY cluster_id
), lost AS (
    SELECT cluster_id, sum(gpu_seconds) AS gpu_seconds FROM costs WHERE {{where}} GROUP BY cluster_id
)
SELECT cluster_id, coalesce(n_nodes, 0), coalesce(n_active, 0), coalesce(n_idle, 0), coalesce(n_calibrating, 0),
       median_score, lowest_score, lowest_node, threshold, coalesce(n_stragglers, 0), coalesce(n_culprits, 0),
       coalesce(n_open, 0), gpu_seconds, last_seen
FROM seen FULL JOIN per_cluster USING (cluster_id) FULL JOIN slow USING (cluster_id) FULL JOIN blamed USING (cluster_id)
     FULL JOIN troubled USING (cluster_id) FULL JOIN lost USING (cluster_id)
ORDER BY cluster_id
"""


def _summary(ask: QueryContext, args: ListArgs) -> SummaryAnswer:
    span = ask.span(args)
    sql = _SUMMARY_SQL.format(where=span.where, threshold=FleetMetric.THRESHOLD)
    n_spans = _N_JUDGED + N_SPANS + 4  # scores, seen, troubled, lost
    rows, n_cut = ask.page(ClusterSummary, sql, span.params * n_spans, args.limit)
    return SummaryAnswer(
        window=window_of(span), coverage=ask.coverage(span, "events"), n_cut=n_cut, rows=rows
    )


class Straggler(msgspec.Struct):
    """One node that is slower than its peers."""

    cluster_id: str
    node_id: str
    severity: Annotated[
        str, msgspec.Meta(description="warn, error (2 margins below its peers) or critical (4).")
    ]
    score: float | None
    peer_median: float | None
    peer_mad: float | None
    bar: Annotated[
        float | None, msgspec.Meta(description="median − max(2 · 1.4826 · MAD, 0.05) of its peers")
    ]
    margins_below: Annotated[
        float | None, msgspec.Meta(description="How far below the median, in such margins.")
    ]
    n_events: Annotated[int, msgspec.Meta(description="Straggler events that its agent sent.")]
    dominant_signal: str | None
    first_seen: datetime | None
    last_seen: datetime | None
    verdict: Annotated[
        str | None, msgspec.Meta(description="Fleet's newest verdict: it outranks the score.")
    ]


class StragglersAnswer(Answer, kw_only=True):
    """Worst first."""

    rows: list[Straggler]


_STRAGGLERS_SQL: Final = f"""
WITH {JUDGED}, {STRAGGLERS}
SELECT cluster_id, node_id,
       CASE WHEN below >= 4 OR verdict IN ('culprit', 'network') THEN 'critical'
            WHEN below >= 2 THEN 'error' ELSE 'warn' END AS severity,
       score, med, mad, bar, below, n_events, dominant_signal, first_seen, last_seen, verdict
FROM stragglers
ORDER BY (verdict = 'culprit') DESC NULLS LAST, below DESC NULLS LAST, n_events DESC, cluster_id, node_id
"""


def _stragglers(ask: QueryContext, args: ListArgs) -> StragglersAnswer:
    span = ask.span(args)
    sql = _STRAGGLERS_SQL.format(where=span.where)
    rows, n_cut = ask.page(Straggler, sql, span.params * (_N_JUDGED + N_SPANS), args.limit)
    coverage = ask.coverage(span, "events", f"metric_name IN ('{SCORE}', '{STRAGGLER}')")
    return StragglersAnswer(window=window_of(span), coverage=coverage, n_cut=n_cut, rows=rows)


class OutlierArgs(ListArgs, kw_only=True, forbid_unknown_fields=True):
    """Which metric, and how far is far."""

    metric_name: MetricName = SCORE
    min_deviations: Annotated[
        float,
        msgspec.Meta(ge=0, le=1000, description="Robust standard deviations from the median."),
    ] = 3.0


class Outlier(msgspec.Struct):
    """One node whose mean is far from its peers' on either side."""

    cluster_id: str
    node_id: str
    mean: float | None
    peer_median: float | None
    deviations: float | None
    n_points: int


class OutliersAnswer(Answer, kw_only=True):
    """Farthest first."""

    metric_name: str
    rows: list[Outlier]


_OUTLIERS_SQL: Final = """
WITH means AS (
    SELECT cluster_id, node_id, avg(value_double) AS mean, count(value_double) AS n
    FROM events WHERE {where} AND metric_name = ? AND value_double IS NOT NULL GROUP BY cluster_id, node_id
), centre AS (
    SELECT cluster_id, median(mean) AS med, mad(mean) AS mad, count(*) AS n_nodes FROM means GROUP BY cluster_id
), judged AS (
    SELECT m.cluster_id, m.node_id, m.mean, c.med, m.n,
           (m.mean - c.med) / greatest({sigma} * c.mad, 0.01 * abs(c.med), 1e-12) AS deviations
    FROM means m JOIN centre c ON m.cluster_id = c.cluster_id WHERE c.n_nodes >= 3
)
SELECT cluster_id, node_id, mean, med, deviations, n FROM judged
WHERE abs(deviations) >= ? ORDER BY abs(deviations) DESC, cluster_id, node_id
"""


def _outliers(ask: QueryContext, args: OutlierArgs) -> OutliersAnswer:
    span = ask.span(args)
    sql = _OUTLIERS_SQL.format(where=span.where, sigma=MAD_TO_SIGMA)
    params = (*span.params, args.metric_name, args.min_deviations)
    rows, n_cut = ask.page(Outlier, sql, params, args.limit)
    coverage = ask.coverage(span, "events", f"metric_name = '{args.metric_name}'")
    return OutliersAnswer(
        window=window_of(span),
        coverage=coverage,
        n_cut=n_cut,
        rows=rows,
        metric_name=args.metric_name,
    )


SUMMARY: Final = Query(
    "fleet.cluster.summary",
    "Cluster summary",
    "Each cluster at a glance: nodes by state, scores and threshold, stragglers, culprits, open incidents, lost "
    "GPU time. Ask this first; without cluster_id it lists every cluster you may read.",
    ListArgs,
    SummaryAnswer,
    _summary,
)
FIND_STRAGGLERS: Final = Query(
    "fleet.cluster.find_stragglers",
    "Find stragglers",
    "Nodes whose health score is far below their peers' (median and MAD of the same cohort), whose agents called "
    "themselves stragglers, or whom Fleet judged culprit, drag or network. Worst first; empty with good coverage "
    "means none.",
    ListArgs,
    StragglersAnswer,
    _stragglers,
)
FIND_OUTLIERS: Final = Query(
    "fleet.cluster.find_outlier_nodes",
    "Find outlier nodes",
    "Nodes whose mean of any metric is far from the other nodes' on either side. Ask when there is no straggler "
    "and something is odd.",
    OutlierArgs,
    OutliersAnswer,
    _outliers,
)

__all__ = ["FIND_OUTLIERS", "FIND_STRAGGLERS", "SUMMARY", "TimeWindowArgs"]
