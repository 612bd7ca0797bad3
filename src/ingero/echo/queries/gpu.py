"""What the GPUs' own metrics say: memory fragmentation, kernel launches, copy bandwidth."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ingero.echo.queries.context import ListAnswer, ListArgs, build_list_run
from ingero.serving.query import Query

# Names of the agent's trace pusher and of its Prometheus page, as recorded on the wire.
_FRAGMENTATION: Final = "gpu.memory.fragmentation_estimate"
_FRAGMENTING: Final = "gpu.memfrag.ioctl_event_total"
_LAUNCHES: Final = ("ingero.node.cuda_kernel_launch_total", "gpu.kernel.launch.count")
_OP_COUNT: Final = "gpu.cuda.operation.count"
_OP_DURATION: Final = "gpu.cuda.operation.duration"
_COPIED: Final = ("gpu.memcpy.bytes_total", "ingero.node.cuda_memcpy_bytes_total")
_COPY_TIME: Final = "gpu.memcpy.duration_ms"
_DIRECTION: Final = '$."ingero.memcpy.direction"'

_BEFORE: Final = (
    "OVER (PARTITION BY cluster_id, node_id, metric_name, attributes, stream ORDER BY ts) AS before"
)
"""Of one sender: two that count under one name would be a counter that goes up and down."""
_STEP: Final = """CASE WHEN kind = 'delta' THEN value_double WHEN before IS NULL THEN 0.0
            WHEN value_double >= before THEN value_double - before ELSE value_double END"""
"""What a counter grew by since the point ``before``; one that is smaller has begun again from 0."""
_TIMED: Final = f"sum({_STEP}) FILTER (WHERE before IS NOT NULL)"
"""What it grew by between its first and its last point; a first delta is of the time before."""


class Hotspot(msgspec.Struct):
    """One GPU, or one node where the GPU is not named."""

    cluster_id: str
    node_id: str
    gpu: str | None
    fragmentation_last: float | None
    fragmentation_max: float | None
    n_events: Annotated[
        float | None, msgspec.Meta(description="Fragmenting driver calls in the window.")
    ]


_HOTSPOTS_SQL: Final = f"""
WITH points AS (
    SELECT cluster_id, node_id, attributes, stream, metric_name, kind, ts, value_double,
           coalesce(json_extract_string(attributes, '$."gpu.uuid"'),
                    json_extract_string(attributes, '$.gpu_uuid')) AS gpu
    FROM events WHERE {{where}} AND metric_name IN ('{_FRAGMENTATION}', '{_FRAGMENTING}')
), steps AS (
    SELECT cluster_id, node_id, gpu, kind, value_double, lag(value_double) {_BEFORE}
    FROM points WHERE metric_name = '{_FRAGMENTING}' AND value_double IS NOT NULL
), counted AS (
    SELECT cluster_id, node_id, gpu, sum({_STEP}) AS n_events FROM steps GROUP BY ALL
), shares AS (
    SELECT cluster_id, node_id, gpu, arg_max(value_double, ts) AS last, max(value_double) AS most
    FROM points WHERE metric_name = '{_FRAGMENTATION}' GROUP BY ALL
)
SELECT coalesce(s.cluster_id, c.cluster_id) AS cluster_id, coalesce(s.node_id, c.node_id) AS node_id,
       coalesce(s.gpu, c.gpu) AS gpu, s.last, s.most, c.n_events
FROM shares s FULL JOIN counted c
  ON s.cluster_id = c.cluster_id AND s.node_id = c.node_id AND s.gpu IS NOT DISTINCT FROM c.gpu
ORDER BY s.most DESC NULLS LAST, c.n_events DESC NULLS LAST, 1, 2, 3
"""


class Launches(msgspec.Struct):
    """One node's kernel launches."""

    cluster_id: str
    node_id: str
    n_launches: Annotated[
        float | None, msgspec.Meta(description="Growth of the counter in the window.")
    ]
    launches_per_s: float | None
    peer_median_per_s: float | None
    share_of_median: Annotated[
        float | None, msgspec.Meta(description="1.0 is the median node of the cluster.")
    ]
    launch_p50_us: float | None
    launch_p99_us: float | None


_LAUNCHES_SQL: Final = f"""
WITH points AS (
    SELECT cluster_id, node_id, metric_name, attributes, stream, kind, ts, value_double FROM events
    WHERE {{where}} AND (metric_name IN {_LAUNCHES} OR metric_name IN ('{_OP_COUNT}', '{_OP_DURATION}'))
), steps AS (
    SELECT cluster_id, node_id, metric_name, attributes, stream, kind, ts, value_double, lag(value_double) {_BEFORE}
    FROM points WHERE metric_name IN {_LAUNCHES} AND value_double IS NOT NULL
), grown AS (
    SELECT cluster_id, node_id, metric_name, attributes, stream, sum({_STEP}) AS n, {_TIMED} AS timed,
           epoch(max(ts)) - epoch(min(ts)) AS seconds
    FROM steps GROUP BY ALL
), rates AS (
    SELECT cluster_id, node_id, sum(n) AS n, sum(timed / nullif(seconds, 0)) AS per_s FROM grown GROUP BY ALL
), times AS (
    SELECT cluster_id, node_id,
           avg(value_double) FILTER (WHERE json_extract_string(attributes, '$.percentile') IN ('p50', '50')) AS p50,
           max(value_double) FILTER (WHERE json_extract_string(attributes, '$.percentile') IN ('p99', '99')) AS p99
    FROM points WHERE metric_name = '{_OP_DURATION}'
      AND json_extract_string(attributes, '$.operation') ILIKE '%LaunchKernel%' GROUP BY ALL
), peers AS (
    SELECT cluster_id, median(per_s) AS med FROM rates GROUP BY cluster_id
)
SELECT coalesce(r.cluster_id, t.cluster_id) AS cluster_id, coalesce(r.node_id, t.node_id) AS node_id, r.n, r.per_s,
       p.med, r.per_s / nullif(p.med, 0) AS share, t.p50, t.p99
FROM rates r FULL JOIN times t ON r.cluster_id = t.cluster_id AND r.node_id = t.node_id
     LEFT JOIN peers p ON p.cluster_id = r.cluster_id
ORDER BY share NULLS LAST, 1, 2
"""


class CopyBandwidth(msgspec.Struct):
    """One node and direction."""

    cluster_id: str
    node_id: str
    direction: str
    n_bytes: Annotated[float | None, msgspec.Meta(description="Copied in the window.")]
    bytes_per_s: float | None
    n_copies: Annotated[float | None, msgspec.Meta(description="From the duration histogram.")]
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None


_OF_COPIES: Final = (
    "OVER (PARTITION BY cluster_id, node_id, attributes, stream, bounds ORDER BY ts)"
)
"""One sender's points of equal bounds; a histogram grew by each point after which it begins again, less the first."""
_COPY_SQL: Final = f"""
WITH steps AS (
    SELECT cluster_id, node_id, metric_name, attributes, stream, kind, ts, value_double, lag(value_double) {_BEFORE}
    FROM events WHERE {{where}} AND metric_name IN {_COPIED} AND value_double IS NOT NULL
), moved AS (
    SELECT cluster_id, node_id, attributes, stream,
           coalesce(json_extract_string(attributes, '{_DIRECTION}'), 'unknown') AS direction, metric_name,
           sum({_STEP}) AS n, {_TIMED} AS timed, epoch(max(ts)) - epoch(min(ts)) AS seconds
    FROM steps GROUP BY ALL
), bytes AS (
    SELECT cluster_id, node_id, direction, sum(n) AS n, sum(timed / nullif(seconds, 0)) AS per_s FROM moved GROUP BY ALL
), points AS (
    SELECT cluster_id, node_id, attributes, kind, bounds, bucket_counts, count, lag(count) {_OF_COPIES} AS before,
           lead(count) {_OF_COPIES} AS after
    FROM histograms WHERE {{where}} AND metric_name = '{_COPY_TIME}' AND len(bucket_counts) = len(bounds) + 1
), weighed AS (
    SELECT cluster_id, node_id, coalesce(json_extract_string(attributes, '{_DIRECTION}'), 'unknown') AS direction,
           bounds, bucket_counts,
           CASE WHEN kind = 'delta' THEN 1.0
                ELSE CASE WHEN after IS NULL OR after < count THEN 1.0 ELSE 0.0 END
                     - CASE WHEN before IS NULL THEN 1.0 ELSE 0.0 END END AS weight
    FROM points
), numbered AS (
    SELECT *, unnest(range(1, len(bucket_counts) + 1)) AS i FROM weighed WHERE weight <> 0
), buckets AS (
    SELECT cluster_id, node_id, direction, CASE WHEN i > len(bounds) THEN 'inf'::DOUBLE ELSE bounds[i] END AS bound,
           greatest(sum(weight * bucket_counts[i]::DOUBLE), 0.0) AS grown
    FROM numbered GROUP BY ALL
), ranked AS (
    SELECT *, sum(grown) OVER (PARTITION BY cluster_id, node_id, direction ORDER BY bound) AS upto,
           sum(grown) OVER (PARTITION BY cluster_id, node_id, direction) AS n FROM buckets
), times AS (
    SELECT cluster_id, node_id, direction, any_value(n) AS n,
           min(bound) FILTER (WHERE upto >= 0.5 * n) AS p50, min(bound) FILTER (WHERE upto >= 0.95 * n) AS p95,
           min(bound) FILTER (WHERE upto >= 0.99 * n) AS p99
    FROM ranked WHERE n > 0 GROUP BY ALL
)
SELECT coalesce(b.cluster_id, t.cluster_id) AS cluster_id, coalesce(b.node_id, t.node_id) AS node_id,
       coalesce(b.direction, t.direction) AS direction, b.n, b.per_s, t.n,
       CASE WHEN isinf(t.p50) THEN NULL ELSE t.p50 END, CASE WHEN isinf(t.p95) THEN NULL ELSE t.p95 END,
       CASE WHEN isinf(t.p99) THEN NULL ELSE t.p99 END
FROM bytes b FULL JOIN times t
  ON b.cluster_id = t.cluster_id AND b.node_id = t.node_id AND b.direction = t.direction
ORDER BY 1, 2, 3
"""


MEMFRAG: Final = Query(
    "fleet.cluster.memfrag_hotspots",
    "Memory fragmentation hot spots",
    "GPUs whose memory is fragmented most, and how often their driver was asked to fragment it further. "
    "Worst first.",
    ListArgs,
    ListAnswer[Hotspot],
    build_list_run(
        ListAnswer[Hotspot],
        _HOTSPOTS_SQL,
        condition=f"metric_name IN ('{_FRAGMENTATION}', '{_FRAGMENTING}')",
    ),
)
KERNEL_LAUNCHES: Final = Query(
    "fleet.cluster.kernel_launch_summary",
    "Kernel launch summary",
    "Kernel launches per node against the cluster's median node, with the launch call's p50 and p99. A node far "
    "under the median starves or waits. Slowest first.",
    ListArgs,
    ListAnswer[Launches],
    build_list_run(ListAnswer[Launches], _LAUNCHES_SQL, condition=f"metric_name IN {_LAUNCHES}"),
)
MEMCPY: Final = Query(
    "fleet.cluster.memcpy_bandwidth_summary",
    "Copy bandwidth summary",
    "Bytes copied per node and direction, their rate, and percentiles of a copy's duration (the upper "
    "bounds of buckets).",
    ListArgs,
    ListAnswer[CopyBandwidth],
    build_list_run(ListAnswer[CopyBandwidth], _COPY_SQL, condition=f"metric_name IN {_COPIED}"),
)
