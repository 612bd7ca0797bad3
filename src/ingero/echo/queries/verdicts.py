"""SQL that several questions share: who was judged culprit, drag or network in the window.

Fleet sends a record when a verdict changes and a gauge while it lasts, so a window without a change still has it.
Workers of two jobs on one node may have the same rank; ``worker`` then names the job.
"""

from __future__ import annotations

from typing import Final

JUDGED: Final = """
reported AS (
    SELECT ts, cluster_id, node_id, rank, worker, verdict, slowdown, victims, 1 AS is_record, lost_gpu_seconds
    FROM verdicts WHERE {where} AND verdict IN ('culprit', 'drag', 'network')
    UNION ALL
    SELECT ts, cluster_id, node_id, try_cast(json_extract_string(attributes, '$.rank') AS INTEGER),
           json_extract_string(attributes, '$.worker'), json_extract_string(attributes, '$.verdict'), NULL, [], 0, NULL
    FROM events WHERE {where} AND metric_name = 'ingero_fleet_verdict' AND value_double = 1
      AND json_extract_string(attributes, '$.verdict') IN ('culprit', 'drag', 'network')
), judged AS (
    SELECT cluster_id, node_id, rank, arg_max(verdict, ts) AS verdict, arg_max(slowdown, ts) AS slowdown,
           arg_max(victims, ts) FILTER (WHERE is_record = 1) AS victims, max(lost_gpu_seconds) AS lost,
           min(ts) AS first_seen, max(ts) AS last_seen
    FROM reported GROUP BY cluster_id, node_id, rank, worker
)
"""
"""CTEs ``reported`` and ``judged``."""
