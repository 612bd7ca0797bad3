"""What the waiting cost, whom it is charged to, and what was done about it."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final

import msgspec

from ingero.echo.queries.context import (
    Answer,
    AnswerCoverage,
    ListAnswer,
    ListArgs,
    QueryContext,
    TimeSpan,
    TimeWindow,
)
from ingero.echo.queries.verdicts import JUDGED
from ingero.serving.query import Query
from ingero.wire.costs import MAX_CHARGE
from ingero.wire.names import Attribute
from ingero.wire.process_resource import ResourceKey
from ingero.wire.remediation import REMEDIATION_ACTION_ID, REMEDIATION_EVENT, REMEDIATION_STATE

MAX_TOTALS: Final = 10_000


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


LOST: Final = f"CASE WHEN abs(gpu_seconds) <= {MAX_CHARGE:.0f} THEN gpu_seconds END"
PAID: Final = f"CASE WHEN abs(amount) <= {MAX_CHARGE:.0f} THEN amount END"
"""A stored charge and its price, null where it is too large to be added up: files of older versions have such."""
MIN_CHARGE_S: Final = 0.001
"""GPU-seconds: what is left of charges that were taken back is not exactly 0."""
_LOST: Final = "ingero_fleet_lost_gpu_seconds"

_CHARGES: Final = f"""
recorded AS (
    SELECT cluster_id, node_id, rank, victim_node_id, {LOST} AS gpu_seconds, {PAID} AS amount, currency, provider,
           gpu_model, coalesce(attributed, 'charged') AS attributed
    FROM costs WHERE {{where}}
), gauged AS (
    SELECT cluster_id, node_id, json_extract_string(attributes, '$.rank') AS rank,
           json_extract_string(attributes, '$.worker') AS worker, arg_max(value_double, ts) AS gpu_seconds
    FROM events WHERE {{where}} AND metric_name = '{_LOST}'
                      AND cluster_id NOT IN (SELECT cluster_id FROM costs WHERE {{clusters}})
    GROUP BY ALL
), charges AS (
    SELECT * FROM recorded
    UNION ALL
    SELECT g.cluster_id, g.node_id, try_cast(g.rank AS INTEGER), NULL, g.gpu_seconds, NULL, NULL, n.provider,
           n.gpu_model, 'charged'
    FROM gauged g LEFT JOIN nodes n ON n.cluster_id = g.cluster_id AND n.node_id = g.node_id
)
"""

_COST_SQL: Final = f"""
WITH {_CHARGES}
SELECT cluster_id, currency, provider, gpu_model, sum(gpu_seconds) AS lost,
       sum(gpu_seconds) FILTER (WHERE attributed <> 'unattributed'), sum(amount)
FROM charges GROUP BY ALL ORDER BY lost DESC NULLS LAST, 1, 2, 3, 4
"""


def _cost(context: QueryContext, args: ListArgs) -> ListAnswer[Cost]:
    span = context.span(args, "costs", "events")
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
    FROM charges WHERE attributed <> 'unattributed' GROUP BY ALL HAVING abs(lost) >= {MIN_CHARGE_S}
)
SELECT b.cluster_id, b.node_id, b.rank, greatest(b.n_victims, coalesce(j.n_victims, 0)), b.lost, b.amount, b.currency,
       j.verdict
FROM summed b LEFT JOIN blamed j ON j.cluster_id = b.cluster_id AND j.node_id = b.node_id
ORDER BY b.lost DESC NULLS LAST, 1, 2, 3
"""


def _cost_by_culprit(context: QueryContext, args: ListArgs) -> CulpritCostAnswer:
    span = context.span(args, "costs", "events")
    rest = context.reader.row(
        f"SELECT sum({LOST}) FROM costs WHERE {span.where} AND attributed = 'unattributed'",
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


class WeekCost(msgspec.Struct):
    """What one node is charged with in one week, or what nobody is."""

    week: Annotated[datetime, msgspec.Meta(description="Its Monday, 00:00 UTC.")]
    cluster_id: str
    node_id: Annotated[str | None, msgspec.Meta(description="Null: charged to no node.")]
    rank: int | None
    provider: Annotated[str | None, msgspec.Meta(description="Of the GPUs that waited.")]
    gpu_model: str | None
    currency: str | None
    gpu_seconds: float | None
    amount: Annotated[
        float | None, msgspec.Meta(description="In the currency; null where no rate is known.")
    ]
    job: Annotated[
        str | None,
        msgspec.Meta(
            description="The only job that verdicts of the week name for that rank: Slurm's id, else the rank's own."
        ),
    ]
    n_actions: Annotated[
        int,
        msgspec.Meta(
            description="Actions that took effect on the node in the week, each once, at its first."
        ),
    ]


class WeekTotal(msgspec.Struct):
    """One cluster in one week, in one currency."""

    week: Annotated[datetime, msgspec.Meta(description="Its Monday, 00:00 UTC.")]
    cluster_id: str
    currency: Annotated[str | None, msgspec.Meta(description="Null: what has no price.")]
    charged_gpu_seconds: float
    unattributed_gpu_seconds: float
    charged_amount: float | None
    unattributed_amount: float | None


class WeeksAnswer(ListAnswer[WeekCost], kw_only=True):
    """Rows by node, and their sums, from which the limit leaves out nothing."""

    totals: Annotated[
        list[WeekTotal], msgspec.Meta(description=f"Newest week first, {MAX_TOTALS} at most.")
    ]


class WeeksArgs(ListArgs, kw_only=True, forbid_unknown_fields=True):
    """Which weeks: every one that the window touches, as far as it does."""

    time_window: TimeWindow = "28d"


_WEEK: Final = "date_trunc('week', ts)::TIMESTAMP"
_WEEK_SQL: Final = f"""
WITH weekly AS (
    SELECT {_WEEK} AS week, cluster_id, nullif(node_id, '') AS node_id, rank, provider, gpu_model, currency,
           sum({LOST}) AS lost, sum({PAID}) AS paid
    FROM costs WHERE {{where}} GROUP BY ALL HAVING abs(lost) >= {MIN_CHARGE_S}
), done AS (
    SELECT min(ts) AS ts, cluster_id, nullif(node_id, '') AS node_id,
           json_extract_string(attributes, '$."{REMEDIATION_ACTION_ID}"') AS action_id
    FROM logs WHERE {{clusters}} AND event_name = '{REMEDIATION_EVENT}'
                    AND json_extract_string(attributes, '$."{REMEDIATION_STATE}"') = 'done'
    GROUP BY ALL
), acted AS (
    SELECT {_WEEK} AS week, cluster_id, node_id, count(DISTINCT action_id) AS n_actions FROM done WHERE {{where}}
    GROUP BY ALL
), judged AS (
    SELECT {_WEEK} AS week, cluster_id, nullif(node_id, '') AS node_id, coalesce(rank, -1) AS rank_or_none,
           coalesce(json_extract_string(attributes, '$."{ResourceKey.SLURM_JOB_ID}"'),
                    json_extract_string(attributes, '$."{Attribute.RANK_JOB}"')) AS job
    FROM verdicts WHERE {{where}}
), jobs AS (
    SELECT week, cluster_id, node_id, rank_or_none, min(job) AS job FROM judged
    GROUP BY week, cluster_id, node_id, rank_or_none HAVING count(DISTINCT job) = 1
)
SELECT w.week, w.cluster_id, w.node_id, w.rank, w.provider, w.gpu_model, w.currency, w.lost, w.paid, j.job,
       coalesce(a.n_actions, 0)
FROM weekly w LEFT JOIN acted a ON a.week = w.week AND a.cluster_id = w.cluster_id AND a.node_id = w.node_id
LEFT JOIN jobs j ON j.week = w.week AND j.cluster_id = w.cluster_id AND j.node_id = w.node_id
                AND j.rank_or_none = coalesce(w.rank, -1)
ORDER BY w.week DESC, w.lost DESC, w.cluster_id, w.node_id, w.rank, w.provider, w.gpu_model
"""
_TOTALS_SQL: Final = f"""
SELECT {_WEEK} AS week, cluster_id, currency,
       coalesce(sum({LOST}) FILTER (WHERE nullif(node_id, '') IS NOT NULL), 0.0),
       coalesce(sum({LOST}) FILTER (WHERE nullif(node_id, '') IS NULL), 0.0),
       sum({PAID}) FILTER (WHERE nullif(node_id, '') IS NOT NULL),
       sum({PAID}) FILTER (WHERE nullif(node_id, '') IS NULL)
FROM costs WHERE {{where}} GROUP BY week, cluster_id, currency
ORDER BY week DESC, cluster_id, currency NULLS LAST LIMIT {MAX_TOTALS}
"""


def _cost_by_week(context: QueryContext, args: WeeksArgs) -> WeeksAnswer:
    span = context.span(args, "costs", "logs")
    return context.answer(
        WeeksAnswer,
        span,
        span.bind(_WEEK_SQL),
        args.limit,
        context.coverage(span, "costs"),
        totals=context.all(WeekTotal, *span.bind(_TOTALS_SQL)),
    )


COST_BY_WEEK: Final = Query(
    "fleet.cluster.cost_by_week",
    "Cost by week",
    "What waiting cost in each calendar week (UTC, from Monday), by the node that is charged and by provider and model "
    "of the GPUs that waited, with the job and the actions that a remediator finished on that node; newest week first, "
    "then the largest loss; and the sums of each cluster. `ingero-echo report` shows it, and exports it in FOCUS "
    "columns.",
    WeeksArgs,
    WeeksAnswer,
    _cost_by_week,
)
