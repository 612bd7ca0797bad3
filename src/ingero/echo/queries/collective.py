"""Where ranks meet: bandwidth, skew, and who made whom wait.

Operations are matched by (communicator, sequence number, op), which needs no clocks: all ranks leave together, so a
rank's wait is what it spent inside beyond the shortest of its peers. Long inside means victim.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ingero.echo.queries.context import ListAnswer, ListArgs, build_list_run
from ingero.echo.queries.costs import LOST, MIN_CHARGE_S
from ingero.echo.queries.verdicts import JUDGED
from ingero.serving.query import Query

_MATCHED: Final = """
ops AS (
    SELECT cluster_id, node_id, rank, comm, comm_rank, n_ranks, n_gpus, clock, seq, op, inside_ns, own_ns, n_bytes, ts
    FROM collectives WHERE {where}
), met AS (
    SELECT *, min(inside_ns) OVER meeting AS least, count(inside_ns) OVER meeting AS n_met,
           arg_min(node_id, inside_ns) OVER meeting AS late_node,
           arg_min(comm_rank, inside_ns) OVER meeting AS late_rank
    FROM ops WINDOW meeting AS (PARTITION BY cluster_id, comm, seq, op)
)
"""


class LinkRate(msgspec.Struct):
    """One communicator and operation."""

    cluster_id: str
    comm: str
    op: str
    n_ranks: int | None
    n_ops: int
    n_bytes: float | None
    transfer_p50_ms: Annotated[
        float | None,
        msgspec.Meta(description="Shortest time inside per operation: transfer without waiting."),
    ]
    algbw_p50_gbps: Annotated[
        float | None, msgspec.Meta(description="Bytes over transfer time, 10⁹ bits/s, median.")
    ]
    algbw_p5_gbps: float | None
    wait_share: Annotated[
        float | None, msgspec.Meta(description="Waiting as a share of the time inside.")
    ]
    clock: Annotated[
        str | None,
        msgspec.Meta(description="device and sync are real; enqueue is the host's call."),
    ]


_BANDWIDTH_SQL: Final = f"""
WITH {_MATCHED}, meetings AS (
    SELECT cluster_id, comm, op, seq, any_value(n_ranks) AS n_ranks, any_value(least) AS least,
           max(n_bytes) AS n_bytes, sum(inside_ns - least) AS waited, sum(inside_ns) AS inside, min(clock) AS clock
    FROM met GROUP BY ALL
)
SELECT cluster_id, comm, op, max(n_ranks), count(*), sum(n_bytes)::DOUBLE AS moved, median(least) / 1e6,
       median(8.0 * n_bytes / nullif(least, 0)), quantile_cont(8.0 * n_bytes / nullif(least, 0), 0.05),
       sum(waited) / nullif(sum(inside), 0), min(clock)
FROM meetings GROUP BY cluster_id, comm, op ORDER BY moved DESC NULLS LAST, cluster_id, comm, op
"""


class RankSkew(msgspec.Struct):
    """One rank of one communicator."""

    cluster_id: str
    comm: str
    node_id: str
    rank: int | None
    comm_rank: int | None
    n_ops: int
    arrival_lag_p50_ms: Annotated[
        float | None,
        msgspec.Meta(description="How long after the first member it arrived, median."),
    ]
    arrival_lag_p95_ms: float | None
    own_p50_ms: Annotated[
        float | None, msgspec.Meta(description="Its own time since its previous operation, median.")
    ]
    own_over_peers: Annotated[
        float | None, msgspec.Meta(description="That over the communicator's median rank.")
    ]
    last_share: Annotated[
        float | None, msgspec.Meta(description="Share of operations in which it came last.")
    ]
    waited_s: Annotated[float | None, msgspec.Meta(description="What it lost waiting, in all.")]


_SKEW_SQL: Final = f"""
WITH {_MATCHED}, lags AS (
    SELECT *, max(inside_ns) OVER (PARTITION BY cluster_id, comm, seq, op) - inside_ns AS lag FROM met WHERE n_met > 1
), ranks AS (
    SELECT cluster_id, comm, node_id, rank, comm_rank, count(*) AS n, median(lag) / 1e6 AS lag50,
           quantile_cont(lag, 0.95) / 1e6 AS lag95, median(own_ns) / 1e6 AS own50,
           avg(CASE WHEN comm_rank = late_rank THEN 1.0 ELSE 0.0 END) AS last_share,
           sum(inside_ns - least) / 1e9 AS waited
    FROM lags GROUP BY ALL
)
SELECT cluster_id, comm, node_id, rank, comm_rank, n, lag50, lag95, own50,
       own50 / nullif(median(own50) OVER (PARTITION BY cluster_id, comm), 0) AS ratio, last_share, waited
FROM ranks ORDER BY ratio DESC NULLS LAST, last_share DESC, cluster_id, comm, comm_rank
"""


class Blame(msgspec.Struct):
    """Who made whom wait."""

    cluster_id: str
    culprit_node: str
    culprit_rank: int | None
    verdict: str | None
    slowdown: float | None
    victim: Annotated[
        str | None,
        msgspec.Meta(
            description="The one that waited: a node, or with source `verdict` a worker. Null: nobody, or several that "
            "are charged together."
        ),
    ]
    waited_gpu_s: Annotated[
        float | None, msgspec.Meta(description="By this victim; null where only the sum is known.")
    ]
    culprit_lost_gpu_s: Annotated[
        float | None, msgspec.Meta(description="By all victims of this culprit.")
    ]
    source: Annotated[
        str,
        msgspec.Meta(
            description="`costs`: what Fleet charges, by node that waited. `verdict`: whom Fleet's verdict on a "
            "culprit named when it was new, where nothing is charged yet. In both inherited delay is resolved. "
            "`collectives`: the last to arrive in each operation, where Fleet said neither; a delay inherited from "
            "elsewhere is not resolved."
        ),
    ]


_BLAME_SQL: Final = f"""
WITH {_MATCHED}, {JUDGED}, charged AS (
    SELECT cluster_id, node_id, coalesce(rank, -1) AS rank_or_none, nullif(victim_node_id, '') AS victim,
           sum({LOST}) AS waited
    FROM costs WHERE {{where}} AND coalesce(attributed, 'charged') <> 'unattributed'
    GROUP BY ALL HAVING waited >= {MIN_CHARGE_S}
), last_judged AS (
    SELECT cluster_id, node_id, coalesce(rank, -1) AS rank_or_none, arg_max(verdict, last_seen) AS verdict,
           arg_max(slowdown, last_seen) AS slowdown
    FROM judged GROUP BY ALL
), named AS (
    SELECT cluster_id, node_id, rank, verdict, slowdown, unnest(victims) AS victim, lost
    FROM judged WHERE len(victims) > 0
    UNION ALL
    SELECT cluster_id, node_id, rank, verdict, slowdown, NULL, lost FROM judged WHERE coalesce(len(victims), 0) = 0
), edges AS (
    SELECT cluster_id, late_node AS culprit, node_id AS victim,
           sum((inside_ns - least) * coalesce(n_gpus, 1)) / 1e9 AS waited
    FROM met WHERE n_met > 1 AND node_id <> late_node AND clock <> 'enqueue' GROUP BY ALL
), sums AS (
    SELECT *, sum(waited) OVER (PARTITION BY cluster_id, culprit) AS lost FROM edges WHERE waited > 0
), blames AS (
    SELECT c.cluster_id, c.node_id AS culprit, nullif(c.rank_or_none, -1) AS rank, j.verdict, j.slowdown, c.victim,
           c.waited, sum(c.waited) OVER (PARTITION BY c.cluster_id, c.node_id, c.rank_or_none) AS lost,
           'costs' AS source
    FROM charged c LEFT JOIN last_judged j ON j.cluster_id = c.cluster_id AND j.node_id = c.node_id
                                          AND j.rank_or_none = c.rank_or_none
    UNION ALL
    SELECT n.cluster_id, n.node_id, n.rank, n.verdict, n.slowdown, n.victim, NULL::DOUBLE, n.lost, 'verdict'
    FROM named n
    WHERE NOT EXISTS (SELECT 1 FROM charged c WHERE c.cluster_id = n.cluster_id AND c.node_id = n.node_id
                                                AND c.rank_or_none = coalesce(n.rank, -1))
    UNION ALL
    SELECT e.cluster_id, e.culprit, NULL, NULL, NULL, e.victim, e.waited, e.lost, 'collectives' FROM sums e
    WHERE NOT EXISTS (SELECT 1 FROM judged j WHERE j.cluster_id = e.cluster_id)
      AND NOT EXISTS (SELECT 1 FROM charged c WHERE c.cluster_id = e.cluster_id)
)
SELECT * FROM blames
ORDER BY source = 'collectives', lost DESC NULLS LAST, waited DESC NULLS LAST, cluster_id, culprit, victim
"""


NCCL_BANDWIDTH: Final = Query(
    "fleet.cluster.nccl_bandwidth_summary",
    "Collective bandwidth summary",
    "Bytes, transfer time and bandwidth per communicator and operation, with waiting apart from transfer. Most bytes "
    "first.",
    ListArgs,
    ListAnswer[LinkRate],
    build_list_run(ListAnswer[LinkRate], _BANDWIDTH_SQL, "collectives"),
)
SKEW: Final = Query(
    "fleet.cluster.collective_skew",
    "Collective skew",
    "Per rank of each communicator: arrival lag, own time against its peers, how often it came last, what it lost "
    "waiting. Largest own time against the peers first: it is a cause; a large lag may be inherited.",
    ListArgs,
    ListAnswer[RankSkew],
    build_list_run(ListAnswer[RankSkew], _SKEW_SQL, "collectives"),
)
BLAME: Final = Query(
    "fleet.cluster.blame_chain",
    "Blame chain",
    "Who made whom wait and for how many GPU-seconds: the culprit of each victim, by what Fleet charges, else by its "
    "verdicts, else by who came last in each operation. What Fleet says first, then most waiting.",
    ListArgs,
    ListAnswer[Blame],
    build_list_run(ListAnswer[Blame], _BLAME_SQL, "collectives", others=("verdicts", "costs")),
)
