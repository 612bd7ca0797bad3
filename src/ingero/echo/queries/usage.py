"""Who had how much kept, and what is stored now."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final, Literal

import msgspec

from ingero.echo.queries.context import ListAnswer, ListArgs, QueryContext
from ingero.serving.query import Query

_STEP_US: Final = {"hour": 3_600_000_000, "day": 86_400_000_000}


class UsageArgs(ListArgs, kw_only=True, forbid_unknown_fields=True):
    """Which rows."""

    step: Annotated[
        Literal["window", "day", "hour"],
        msgspec.Meta(
            description="A row for the whole window, or for each day or hour (UTC) of it."
        ),
    ] = "window"


class UsageRow(msgspec.Struct):
    """What one bearer had kept for one cluster."""

    since: datetime
    cluster_id: str
    bearer: Annotated[
        str | None,
        msgspec.Meta(
            description="First characters of the token's SHA-256, as in the audit log; null for rows that were "
            "counted when Echo started."
        ),
    ]
    n_rows: int
    n_bytes: Annotated[int, msgspec.Meta(description="Of their values, not compressed.")]
    n_series: Annotated[
        int | None,
        msgspec.Meta(
            description="Different series of metrics in the five minutes with most of them, within 3 %."
        ),
    ]
    first: datetime
    last: datetime


_SQL: Final = """
WITH entries AS (
    SELECT {since} AS since, ts, cluster_id, nullif(bearer, '') AS bearer, of_table, n_rows, n_bytes, n_series,
           ingested_at
    FROM usage WHERE {where}
), tables AS (
    SELECT since, cluster_id, bearer, of_table, sum(n_rows) AS n_rows, sum(n_bytes) AS n_bytes,
           max(n_series) AS most, min(ts) AS began, max(ingested_at) AS ended
    FROM entries GROUP BY since, cluster_id, bearer, of_table
)
SELECT since, cluster_id, bearer, sum(n_rows)::BIGINT AS kept, sum(n_bytes)::BIGINT,
       (sum(most) FILTER (WHERE of_table IN ('events', 'histograms')))::BIGINT, min(began), max(ended)
FROM tables GROUP BY since, cluster_id, bearer ORDER BY since DESC, kept DESC, cluster_id, bearer
"""


def _usage(context: QueryContext, args: UsageArgs) -> ListAnswer[UsageRow]:
    span = context.span(args, "usage")
    step_us = _STEP_US.get(args.step)
    since = (
        "?::TIMESTAMP"
        if step_us is None
        else f"make_timestamp(epoch_us(ts) // {step_us} * {step_us})"
    )
    sql, params = span.bind(_SQL.replace("{since}", since))
    if step_us is None:
        params = (span.start, *params)
    return context.answer(
        ListAnswer[UsageRow], span, (sql, params), args.limit, context.coverage(span, "usage")
    )


USAGE: Final = Query(
    "fleet.cluster.usage",
    "Who stores how much",
    "Rows, bytes and series that each bearer had kept for each cluster, over the window or by day or hour. Counted "
    "every five minutes; what a quota refused is not in it. With the window as long as retention it is what is stored. "
    "Newest first, the largest first within a step.",
    UsageArgs,
    ListAnswer[UsageRow],
    _usage,
)
