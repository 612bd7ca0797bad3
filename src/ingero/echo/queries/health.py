"""Which nodes stand out: summary, stragglers, outliers.

One definition of a straggler serves every query that names or counts them: a node of the window whose newest score is
more than a margin below its peers' median, whose agent sent a straggler event, or whom Fleet judged culprit, drag or
network.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Final

import msgspec

from ingero.echo.queries.context import (
    NODE_OF_EVENT,
    Answer,
    ListAnswer,
    ListArgs,
    QueryContext,
    build_list_run,
)
from ingero.echo.queries.context import MetricName as MetricArg
from ingero.echo.queries.costs import LOST
from ingero.echo.queries.verdicts import JUDGED
from ingero.serving.query import Query
from ingero.wire.names import FleetMetric, MetricName

_SCORE: Final = str(MetricName.HEALTH_SCORE)
_STRAGGLER: Final = str(MetricName.STRAGGLER_EVENT)
_MAD_TO_SIGMA: Final = 1.4826
_K: Final = 2.0
_MIN_MARGIN: Final = 0.05
_MAX_OPEN: Final = timedelta(days=7)
"""How long before the window's end an incident may have opened; the end of one may be lost with its sender."""

_STRAGGLERS: Final = f"""
latest AS (
    SELECT cluster_id, node_id, arg_max(value_double, ts) AS score,
           arg_max(coalesce(json_extract_string(attributes, '$."ingero.cgroup_path_hash"'), ''), ts) AS cohort,
           arg_max(coalesce(json_extract_string(attributes, '$."ingero.node.state"'), 'active'), ts) AS state
    FROM events WHERE {{where}} AND metric_name = '{_SCORE}' AND value_double IS NOT NULL GROUP BY cluster_id, node_id
), active AS (
    SELECT * FROM latest WHERE state = 'active'
), sizes AS (
    SELECT cluster_id, cohort, count(*) AS n FROM active GROUP BY ALL
), grouped AS (
    SELECT a.*, CASE WHEN s.n >= 3 THEN a.cohort ELSE '*' END AS peers
    FROM active a JOIN sizes s ON a.cluster_id = s.cluster_id AND a.cohort = s.cohort
), peer_groups AS (
    SELECT cluster_id, cohort AS peers, median(score) AS med, mad(score) AS mad, count(*) AS n
    FROM active GROUP BY cluster_id, cohort
    UNION ALL
    SELECT cluster_id, '*', median(score), mad(score), count(*) FROM active GROUP BY cluster_id
), measured AS (
    SELECT g.cluster_id, g.node_id, g.score, b.med, b.mad, b.n,
           greatest({_K} * {_MAD_TO_SIGMA} * b.mad, {_MIN_MARGIN}) AS margin
    FROM grouped g JOIN peer_groups b ON g.cluster_id = b.cluster_id AND g.peers = b.peers
), claimed AS (
    SELECT cluster_id, node_id, count(*) FILTER (WHERE value_double = 1) AS n_events,
           arg_max(json_extract_string(attributes, '$.dominant_signal'), ts) AS dominant_signal,
           min(ts) FILTER (WHERE value_double = 1) AS first_seen, max(ts) FILTER (WHERE value_double = 1) AS last_seen
    FROM events WHERE {{where}} AND metric_name = '{_STRAGGLER}' GROUP BY cluster_id, node_id
), verdict AS (
    SELECT cluster_id, node_id, arg_max(verdict, last_seen) AS verdict, min(first_seen) AS first_seen,
           max(last_seen) AS last_seen
    FROM judged GROUP BY cluster_id, node_id
), joined AS (
    SELECT coalesce(j.cluster_id, t.cluster_id, v.cluster_id) AS cluster_id,
           coalesce(j.node_id, t.node_id, v.node_id) AS node_id,
           j.score, j.med, j.mad, j.med - j.margin AS bar,
           CASE WHEN j.n >= 3 THEN (j.med - j.score) / j.margin END AS below,
           coalesce(t.n_events, 0) AS n_events, t.dominant_signal,
           coalesce(t.first_seen, v.first_seen) AS first_seen, coalesce(t.last_seen, v.last_seen) AS last_seen,
           v.verdict
    FROM measured j FULL JOIN claimed t ON j.cluster_id = t.cluster_id AND j.node_id = t.node_id
         FULL JOIN verdict v ON coalesce(j.cluster_id, t.cluster_id) = v.cluster_id
                            AND coalesce(j.node_id, t.node_id) = v.node_id
), stragglers AS (
    SELECT * FROM joined WHERE below > 1 OR n_events > 0 OR verdict IS NOT NULL
)
"""
"""CTEs ``joined``, every node of the window, and ``stragglers``; they need those of `JUDGED` before them."""


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
    n_open_incidents: Annotated[
        int,
        msgspec.Meta(
            description="At the window's end, of those that opened in it or in the week before that end."
        ),
    ]
    lost_gpu_seconds: float | None
    last_seen: datetime | None


_SUMMARY_SQL: Final = f"""
WITH {JUDGED}, {_STRAGGLERS}, scores AS (
    SELECT cluster_id, node_id, arg_max(value_double, ts) AS score,
           arg_max(json_extract_string(attributes, '$."ingero.node.state"'), ts) AS state, max(ts) AS seen
    FROM events WHERE {{where}} AND metric_name = '{_SCORE}' GROUP BY ALL
), per_cluster AS (
    SELECT cluster_id, count(*) FILTER (WHERE state = 'active' OR state IS NULL) AS n_active,
           count(*) FILTER (WHERE state = 'idle') AS n_idle,
           count(*) FILTER (WHERE state = 'calibrating') AS n_calibrating,
           median(score) FILTER (WHERE state = 'active' OR state IS NULL) AS median_score,
           min(score) AS lowest_score, arg_min(node_id, score) AS lowest_node
    FROM scores GROUP BY cluster_id
), seen AS (
    SELECT cluster_id, count(DISTINCT {NODE_OF_EVENT}) AS n_nodes, max(ts) AS last_seen,
           arg_max(value_double, ts) FILTER (WHERE metric_name = '{FleetMetric.THRESHOLD}') AS threshold
    FROM events WHERE {{where}} GROUP BY cluster_id
), slow AS (
    SELECT cluster_id, count(*) AS n_stragglers FROM stragglers GROUP BY cluster_id
), blamed AS (
    SELECT cluster_id, count(*) FILTER (WHERE verdict IN ('culprit', 'network')) AS n_culprits
    FROM judged GROUP BY cluster_id
), troubled AS (
    SELECT cluster_id, count(*) AS n_open FROM (
        SELECT cluster_id, incident_id, arg_max(state, ts) AS state FROM incidents WHERE {{lately}} GROUP BY ALL)
    WHERE state IN ('open', 'updated') GROUP BY cluster_id
), lost AS (
    SELECT cluster_id, sum({LOST}) AS gpu_seconds FROM costs WHERE {{where}} GROUP BY cluster_id
)
SELECT cluster_id, coalesce(n_nodes, 0), coalesce(n_active, 0), coalesce(n_idle, 0), coalesce(n_calibrating, 0),
       median_score, lowest_score, lowest_node, threshold, coalesce(n_stragglers, 0), coalesce(n_culprits, 0),
       coalesce(n_open, 0), gpu_seconds, last_seen
FROM seen FULL JOIN per_cluster USING (cluster_id) FULL JOIN slow USING (cluster_id) FULL JOIN blamed USING (cluster_id)
     FULL JOIN troubled USING (cluster_id) FULL JOIN lost USING (cluster_id)
ORDER BY cluster_id
"""


def _summary(context: QueryContext, args: ListArgs) -> ListAnswer[ClusterSummary]:
    span = context.span(args, "events", "verdicts", "incidents", "costs")
    lately = span.reaching_back(_MAX_OPEN)
    (head, before), (tail, after) = map(span.bind, _SUMMARY_SQL.split("{lately}"))
    statement = head + lately.where + tail, (*before, *lately.params, *after)
    coverage = context.coverage(span, "events")
    return context.answer(ListAnswer[ClusterSummary], span, statement, args.limit, coverage)


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


_STRAGGLERS_SQL: Final = f"""
WITH {JUDGED}, {_STRAGGLERS}
SELECT cluster_id, node_id,
       CASE WHEN below >= 4 OR verdict IN ('culprit', 'network') THEN 'critical'
            WHEN below >= 2 THEN 'error' ELSE 'warn' END AS severity,
       score, med, mad, bar, below, n_events, dominant_signal, first_seen, last_seen, verdict
FROM stragglers
ORDER BY (verdict = 'culprit') DESC NULLS LAST, below DESC NULLS LAST, n_events DESC, cluster_id, node_id
"""


class OutlierArgs(ListArgs, kw_only=True, forbid_unknown_fields=True):
    """Which metric, and how far is far."""

    metric_name: MetricArg = _SCORE
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


_OUTLIERS_SQL: Final = f"""
WITH means AS (
    SELECT cluster_id, node_id, avg(value_double) AS mean, count(value_double) AS n
    FROM events WHERE {{where}} AND metric_name = ? AND value_double IS NOT NULL GROUP BY cluster_id, node_id
), centre AS (
    SELECT cluster_id, median(mean) AS med, mad(mean) AS mad, count(*) AS n_nodes FROM means GROUP BY cluster_id
), judged AS (
    SELECT m.cluster_id, m.node_id, m.mean, c.med, m.n,
           (m.mean - c.med) / greatest({_MAD_TO_SIGMA} * c.mad, 0.01 * abs(c.med), 1e-12) AS deviations
    FROM means m JOIN centre c ON m.cluster_id = c.cluster_id WHERE c.n_nodes >= 3
)
SELECT cluster_id, node_id, mean, med, deviations, n FROM judged
WHERE abs(deviations) >= ? ORDER BY abs(deviations) DESC, cluster_id, node_id
"""


def _outliers(context: QueryContext, args: OutlierArgs) -> OutliersAnswer:
    span = context.span(args)
    sql, params = span.bind(_OUTLIERS_SQL)
    return context.answer(
        OutliersAnswer,
        span,
        (sql, (*params, args.metric_name, args.min_deviations)),
        args.limit,
        context.coverage(span, "events", metric_name=args.metric_name),
        metric_name=args.metric_name,
    )


SUMMARY: Final = Query(
    "fleet.cluster.summary",
    "Cluster summary",
    "Each cluster at a glance: nodes by state, scores and threshold, stragglers, culprits, open incidents, lost "
    "GPU time. Ask this first; without cluster_id it lists every cluster you may read.",
    ListArgs,
    ListAnswer[ClusterSummary],
    _summary,
)
FIND_STRAGGLERS: Final = Query(
    "fleet.cluster.find_stragglers",
    "Find stragglers",
    "Nodes whose health score is far below their peers' (median and MAD of the same cohort), whose agents called "
    "themselves stragglers, or whom Fleet judged culprit, drag or network. Worst first; empty with good coverage "
    "means none.",
    ListArgs,
    ListAnswer[Straggler],
    build_list_run(
        ListAnswer[Straggler],
        _STRAGGLERS_SQL,
        condition=f"metric_name IN ('{_SCORE}', '{_STRAGGLER}')",
        others=("verdicts",),
    ),
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
