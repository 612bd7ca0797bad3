"""What the waiting cost, and whom it is charged to."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ingero.echo.queries.ask import Answer, Ask, ListArgs, window_of
from ingero.serving.query import Query


class Cost(msgspec.Struct):
    """One cluster, currency and hardware."""

    cluster_id: str
    currency: str | None
    provider: str | None
    gpu_model: str | None
    gpu_seconds: float | None
    charged_gpu_seconds: Annotated[
        float | None, msgspec.Meta(description="The part with a known culprit.")
    ]
    amount: Annotated[
        float | None, msgspec.Meta(description="In the currency; null where no rate is known.")
    ]


class CostAnswer(Answer, kw_only=True):
    """Largest loss first."""

    rows: list[Cost]


_COST_SQL: Final = """
SELECT cluster_id, currency, provider, gpu_model, sum(gpu_seconds) AS lost,
       sum(gpu_seconds) FILTER (coalesce(attributed, 'charged') <> 'unattributed'), sum(amount)
FROM costs WHERE {where} GROUP BY ALL ORDER BY lost DESC NULLS LAST, 1, 2, 3, 4
"""


def _cost(ask: Ask, args: ListArgs) -> CostAnswer:
    span = ask.span(args, "costs")
    rows, n_cut = ask.page(Cost, _COST_SQL.format(where=span.where), span.params, args.limit)
    return CostAnswer(
        window=window_of(span), coverage=ask.coverage(span, "costs"), n_cut=n_cut, rows=rows
    )


class CulpritCost(msgspec.Struct):
    """One culprit's bill."""

    cluster_id: str
    node_id: str
    rank: int | None
    n_victims: int
    gpu_seconds: float | None
    amount: float | None
    currency: str | None
    verdict: str | None


class CulpritCostAnswer(Answer, kw_only=True):
    """Largest first; ``unattributed_gpu_seconds`` is what nobody is charged with."""

    unattributed_gpu_seconds: float | None
    rows: list[CulpritCost]


_CULPRIT_SQL: Final = """
WITH blamed AS (
    SELECT cluster_id, node_id, arg_max(verdict, ts) AS verdict FROM verdicts
    WHERE {where} AND verdict IN ('culprit', 'drag', 'network') GROUP BY cluster_id, node_id
), bills AS (
    SELECT cluster_id, node_id, rank, count(DISTINCT victim_node_id) AS n_victims, sum(gpu_seconds) AS lost,
           sum(amount) AS amount, currency
    FROM costs WHERE {where} AND coalesce(attributed, 'charged') <> 'unattributed' GROUP BY ALL
)
SELECT b.cluster_id, b.node_id, b.rank, b.n_victims, b.lost, b.amount, b.currency, j.verdict
FROM bills b LEFT JOIN blamed j ON j.cluster_id = b.cluster_id AND j.node_id = b.node_id
ORDER BY b.lost DESC NULLS LAST, 1, 2, 3
"""


def _cost_by_culprit(ask: Ask, args: ListArgs) -> CulpritCostAnswer:
    span = ask.span(args, "costs")
    sql = _CULPRIT_SQL.format(where=span.where)
    rows, n_cut = ask.page(CulpritCost, sql, span.params * 2, args.limit)
    rest = ask.reader.row(
        f"SELECT sum(gpu_seconds) FROM costs WHERE {span.where} AND attributed = 'unattributed'",
        span.params,
    )
    return CulpritCostAnswer(
        window=window_of(span),
        coverage=ask.coverage(span, "costs"),
        n_cut=n_cut,
        unattributed_gpu_seconds=rest[0],
        rows=rows,
    )


COST: Final = Query(
    "fleet.cluster.cost",
    "Cost of waiting",
    "GPU-seconds lost to waiting and what they cost, by provider, GPU model and currency; charged and unattributed "
    "parts add up to the total.",
    ListArgs,
    CostAnswer,
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
