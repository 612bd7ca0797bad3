"""A tenant's own SQL, on its own rows, in the sandbox."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from ingero.echo.queries.context import (
    ClusterId,
    Limit,
    QueryContext,
    TimeWindow,
    TimeWindowArgs,
    Until,
    window_of,
)
from ingero.echo.queries.context import Window as AnswerWindow
from ingero.echo.schema.tables import SENT
from ingero.serving.query import Query

MAX_SQL_CHARS: Final = 16_384

Sql = Annotated[
    str,
    msgspec.Meta(
        min_length=1,
        max_length=MAX_SQL_CHARS,
        description="One SELECT in DuckDB's SQL over events, histograms, collectives, incidents, verdicts, hangs, "
        "costs, usage, logs, spans and nodes; they hold this bearer's rows of the window and nothing else.",
    ),
]


class AnalysisArgs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The statement and the rows it sees."""

    sql: Sql
    limit: Limit = 1000
    cluster_id: ClusterId | None = None
    time_window: TimeWindow = "1d"
    until: Until = "now"


class AnalysisAnswer(msgspec.Struct, kw_only=True):
    """Columns and rows, as arrays."""

    columns: Annotated[list[str], msgspec.Meta(description="A repeated name is numbered: a, a_2.")]
    rows: list[list[Any]]
    is_cut: Annotated[
        bool, msgspec.Meta(description="There were more rows than the limit or the byte cap.")
    ]
    n_unseen: Annotated[
        int,
        msgspec.Meta(
            description="Rows of the named tables that lie in the window and that the statement was not given, "
            "because there are more than it may see (sql_max_rows_in); the oldest ones. "
            "Not 0: counts and sums are too low."
        ),
    ] = 0
    window: AnswerWindow


def _analyse(context: QueryContext, args: AnalysisArgs) -> AnalysisAnswer:
    where = TimeWindowArgs(
        cluster_id=args.cluster_id, time_window=args.time_window, until=args.until
    )
    span = context.span(where, *(table.name for table in SENT))
    answer = context.run_sql(args.sql, span, args.limit)
    return AnalysisAnswer(
        columns=answer.columns,
        rows=answer.rows,
        is_cut=answer.is_cut,
        n_unseen=answer.n_unseen,
        window=window_of(span),
    )


RUN_ANALYSIS: Final = Query(
    "fleet.cluster.run_analysis",
    "Run SQL",
    "Answers one SELECT over this bearer's own rows. Ask when no other tool fits. Tables and columns: "
    "docs/guides/echo.md.",
    AnalysisArgs,
    AnalysisAnswer,
    _analyse,
)
