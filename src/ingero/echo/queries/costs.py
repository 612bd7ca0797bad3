"""What the waiting cost, and whom it is charged to."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ingero.echo.queries.context import (
    Answer,
    AnswerCoverage,
    ListAnswer,
    ListArgs,
    QueryContext,
    TimeSpan,
)
from ingero.echo.queries.verdicts import JUDGED
from ingero.serving.query import Query


class Cost(msgspec.Struct):
    """One cluster, currency and hardware."""

    cluster_id: str
    currency: str | None
    provider: Annotated[str | None, msgspec.Meta(description="Of the GPUs that waited.")]
    gpu_model: str | None
    gpu_seconds: float | None
    charged_gpu_seconds: Annotated[
        float | None, msgspec.Meta(description="The part with a known culprit.")
    ]
    amount: Annotated[
        float | None, msgspec.Meta(description="In the currency; null where no rate is known.")
    ]


_LOST: Final = "ingero_fleet_lost_gpu_seconds"

_CHARGES: Final = f"""
recorded AS (
    SELECT cluster_id, node_id, rank, victim_node_id, gpu_seconds, amount, currency, provider, gpu_model,
           coalesce(attributed, 'charged') AS attributed
    FROM costs WHERE {{where}}
), gauged AS (
    SELECT cluster_id, node_id, json_extract_string(attributes, '$.rank') AS rank,
           json_extract_string(attributes, '$.worker') AS worker, arg_max(value_double, ts) AS gpu_seconds
    FROM events WHERE {{where}} AND metric_name = '{_LOST}' GROUP BY ALL
), charges AS (
    SELECT * FROM recorded
    UNION ALL
    SELECT g.cluster_id, g.node_id, try_cast(g.rank AS INTEGER), NULL, g.gpu_seconds, NULL, NULL, n.provider,
           n.gpu_model, 'charged'
    FROM gauged g LEFT JOIN nodes n ON n.cluster_id = g.cluster_id AND n.node_id = g.node_id
    WHERE NOT EXISTS (SELECT 1 FROM recorded b WHERE b.cluster_id = g.cluster_id)
)
"""

_COST_SQL: Final = f"""
WITH {_CHARGES}
SELECT cluster_id, currency, provider, gpu_model, sum(gpu_seconds) AS lost,
       sum(gpu_seconds) FILTER (WHERE attributed <> 'unattributed'), sum(amount)
FROM charges GROUP BY ALL ORDER BY lost DESC NULLS LAST, 1, 2, 3, 4
"""


def _cost(context: QueryContext, args: ListArgs) -> ListAnswer[Cost]:
    span = context.span(args)
    return context.answer(
        ListAnswer[Cost], span, span.bind(_COST_SQL), args.limit, _coverage(context, span)
    )


def _coverage(context: QueryContext, span: TimeSpan) -> AnswerCoverage:
    recorded = context.coverage(span, "costs")
    if recorded.n_rows:
        return recorded
    return context.coverage(span, "events", f"metric_name = '{_LOST}'")


class CulpritCost(msgspec.Struct):
    """What one culprit is charged with."""

    cluster_id: str
    node_id: str
    rank: int | None
    n_victims: int
    gpu_seconds: float | None
    amount: float | None
    currency: str | None
    verdict: str | None


class CulpritCostAnswer(Answer, kw_only=True):
    """Largest first; ``unattributed_gpu_seconds`` is what is charged to no node.

    Negative is what was charged before the window and taken back in it.
    """

    unattributed_gpu_seconds: float | None
    rows: list[CulpritCost]


_CULPRIT_SQL: Final = f"""
WITH {_CHARGES}, {JUDGED}, blamed AS (
    SELECT cluster_id, node_id, arg_max(verdict, last_seen) AS verdict, max(len(victims)) AS n_victims FROM judged
    GROUP BY cluster_id, node_id
), summed AS (
    SELECT cluster_id, node_id, rank, count(DISTINCT victim_node_id) AS n_victims, sum(gpu_seconds) AS lost,
           sum(amount) AS amount, currency
    FROM charges WHERE attributed <> 'unattributed' GROUP BY ALL HAVING abs(lost) >= 0.001
)
SELECT b.cluster_id, b.node_id, b.rank, greatest(b.n_victims, coalesce(j.n_victims, 0)), b.lost, b.amount, b.currency,
       j.verdict
FROM summed b LEFT JOIN blamed j ON j.cluster_id = b.cluster_id AND j.node_id = b.node_id
ORDER BY b.lost DESC NULLS LAST, 1, 2, 3
"""


def _cost_by_culprit(context: QueryContext, args: ListArgs) -> CulpritCostAnswer:
    span = context.span(args)
    rest = context.reader.row(
        f"SELECT sum(gpu_seconds) FROM costs WHERE {span.where} AND attributed = 'unattributed'",
        span.params,
    )
    return context.answer(
        CulpritCostAnswer,
        span,
        span.bind(_CULPRIT_SQL),
        args.limit,
        _coverage(context, span),
        unattributed_gpu_seconds=rest[0],
    )


COST: Final = Query(
    "fleet.cluster.cost",
    "Cost of waiting",
    "GPU-seconds lost to waiting in the window and what they cost, by currency and by provider and model of the GPUs "
    "that waited; charged and unattributed parts add up to the total; largest loss first. From a sender "
    "without cost records: what its gauge "
    "says, since the last onset of each culprit and without money.",
    ListArgs,
    ListAnswer[Cost],
    _cost,
)
COST_BY_CULPRIT: Final = Query(
    "fleet.cluster.cost_by_culprit",
    "Cost by culprit",
    "The same, charged to the node that made the others wait.",
    ListArgs,
    CulpritCostAnswer,
    _cost_by_culprit,
)
