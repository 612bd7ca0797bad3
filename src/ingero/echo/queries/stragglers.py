"""Who is a straggler: one definition for every question that names or counts them.

A node of the window whose newest score is more than a margin below its peers' median, whose agent called itself one, or
whom Fleet judged culprit, drag or network.
"""

from __future__ import annotations

from typing import Final

from ingero.wire.names import MetricName

SCORE: Final = str(MetricName.HEALTH_SCORE)
STRAGGLER: Final = str(MetricName.STRAGGLER_EVENT)
MAD_TO_SIGMA: Final = 1.4826
_K: Final = 2.0
_MIN_MARGIN: Final = 0.05
N_SPANS: Final = 2
"""How often the span's parameters are taken, in order, after those of `JUDGED`."""

_CTES: Final = """
latest AS (
    SELECT cluster_id, node_id, arg_max(value_double, ts) AS score,
           arg_max(coalesce(json_extract_string(attributes, '$."ingero.cgroup_path_hash"'), ''), ts) AS cohort,
           arg_max(coalesce(json_extract_string(attributes, '$."ingero.node.state"'), 'active'), ts) AS state
    FROM events WHERE {where} AND metric_name = '{score}' AND value_double IS NOT NULL GROUP BY cluster_id, node_id
), active AS (
    SELECT * FROM latest WHERE state = 'active'
), sizes AS (
    SELECT cluster_id, cohort, count(*) AS n FROM active GROUP BY ALL
), grouped AS (
    SELECT a.*, CASE WHEN s.n >= 3 THEN a.cohort ELSE '*' END AS peers
    FROM active a JOIN sizes s ON a.cluster_id = s.cluster_id AND a.cohort = s.cohort
), bars AS (
    SELECT cluster_id, cohort AS peers, median(score) AS med, mad(score) AS mad, count(*) AS n
    FROM active GROUP BY cluster_id, cohort
    UNION ALL
    SELECT cluster_id, '*', median(score), mad(score), count(*) FROM active GROUP BY cluster_id
), measured AS (
    SELECT g.cluster_id, g.node_id, g.score, b.med, b.mad, b.n,
           greatest({k} * {sigma} * b.mad, {floor}) AS margin
    FROM grouped g JOIN bars b ON g.cluster_id = b.cluster_id AND g.peers = b.peers
), claimed AS (
    SELECT cluster_id, node_id, count(*) FILTER (WHERE value_double = 1) AS n_events,
           arg_max(json_extract_string(attributes, '$.dominant_signal'), ts) AS dominant_signal,
           min(ts) FILTER (WHERE value_double = 1) AS first_seen, max(ts) FILTER (WHERE value_double = 1) AS last_seen
    FROM events WHERE {where} AND metric_name = '{straggler}' GROUP BY cluster_id, node_id
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
STRAGGLERS: Final = _CTES.format(
    where="{where}", score=SCORE, straggler=STRAGGLER, k=_K, sigma=MAD_TO_SIGMA, floor=_MIN_MARGIN
)
"""CTEs ``joined``, every node that was heard of, and ``stragglers``, one row each; they need those of `JUDGED` before them."""
