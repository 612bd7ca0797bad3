"""Who never arrived: by Fleet's records, else by the silence of communicators.

A hang that Fleet reported lasts until Fleet reports its end. An end is lost with a Fleet that stops meanwhile, so a
rank that later finished the operation is not listed either, and a beginning counts for a day, or for the window where
that is longer; what the rank finished is looked up as far back. Where Fleet never reported a hang, silence is all there
is: members of a communicator behind the others.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Final

import msgspec

from ingero.echo.queries.context import ListAnswer, ListArgs, QueryContext
from ingero.serving.query import Query

_MAX_AGE: Final = timedelta(days=1)
"""How long before the window's end a hang may have begun."""


class Hang(msgspec.Struct):
    """One rank that others wait for, or one silent communicator on which members are behind."""

    cluster_id: str
    source: Annotated[
        str,
        msgspec.Meta(
            description="`record`: Fleet named the rank. `silence`: Fleet never reported a hang of this cluster, and "
            "nothing was reported on the communicator; which rank is at fault is not known."
        ),
    ]
    comm: str
    op: Annotated[str | None, msgspec.Meta(description="By silence only.")]
    seq: Annotated[
        int,
        msgspec.Meta(
            description="By record: the operation where the rank is missed. "
            "By silence: the newest that any member entered."
        ),
    ]
    n_ranks: Annotated[int | None, msgspec.Meta(description="By silence only.")]
    n_waiting: Annotated[
        int,
        msgspec.Meta(
            description="By record: ranks that wait, directly or through others. By silence: members that entered it."
        ),
    ]
    node_id: Annotated[str | None, msgspec.Meta(description="Of the rank that is missed.")]
    rank: Annotated[
        int | None, msgspec.Meta(description="Global rank that is missed; null by silence.")
    ]
    job: str | None
    cause: Annotated[
        str | None,
        msgspec.Meta(
            description=(
                "By record: absent (never entered), stuck (never left), silent (it reports nothing),"
                " stopped (its process is) or ended (before the others of the job)."
            )
        ),
    ]
    last_finished_seq: int | None
    blocks: Annotated[
        list[int], msgspec.Meta(description="By record: global ranks that wait, ascending.")
    ]
    behind: Annotated[
        list[str],
        msgspec.Meta(
            description="By silence: members seen in the window that did not enter it, `node/comm_rank at seq`."
        ),
    ]
    never_seen: Annotated[
        int, msgspec.Meta(description="By silence: members that reported nothing at all.")
    ]
    last_heard: Annotated[
        datetime | None, msgspec.Meta(description="Fleet's record, or the last report.")
    ]
    silent_s: Annotated[
        float | None,
        msgspec.Meta(
            description="To the window's end: since the first rank waits, or from the last report on the communicator."
        ),
    ]


class HangsArgs(ListArgs, kw_only=True, forbid_unknown_fields=True):
    """When silence is a hang."""

    min_silent_s: Annotated[
        float,
        msgspec.Meta(
            ge=0,
            le=1e6,
            description="Least silence, where Fleet never reported a hang; reports arrive in batches.",
        ),
    ] = 60.0


_SQL: Final = """
WITH reported AS (
    SELECT cluster_id, comm, missing_seq, rank, job, arg_max(state, ts) AS state, arg_max(cause, ts) AS cause,
           arg_max(node_id, ts) AS node_id, arg_max(last_finished_seq, ts) AS last_finished,
           arg_max(blocks, ts) AS blocks,
           arg_max(standing_s, ts) AS standing_s, max(ts) AS reported_at
    FROM hangs WHERE {where} GROUP BY cluster_id, comm, missing_seq, rank, job
), moved AS (
    SELECT cluster_id, comm, rank, max(seq) AS seq FROM collectives
    WHERE {where} AND comm IN (SELECT comm FROM reported WHERE state = 'began') GROUP BY cluster_id, comm, rank
), named AS (
    SELECT t.*, epoch(?::TIMESTAMP) - epoch(t.reported_at) + t.standing_s AS silent_s
    FROM reported t LEFT JOIN moved m ON m.cluster_id = t.cluster_id AND m.comm = t.comm AND m.rank = t.rank
    WHERE t.state = 'began' AND (t.cause = 'stuck' OR m.seq IS NULL OR m.seq < t.missing_seq)
), members AS (
    SELECT cluster_id, comm, node_id, comm_rank, max(seq) AS seq, arg_max(op, seq) AS op, max(n_ranks) AS n_ranks,
           max(ts) AS reported_at, arg_max(inside_ns, seq) AS inside
    FROM collectives WHERE {where} AND cluster_id NOT IN (SELECT cluster_id FROM hangs WHERE {where})
    GROUP BY cluster_id, comm, node_id, comm_rank
), fronts AS (
    SELECT *, max(seq) OVER (PARTITION BY cluster_id, comm) AS front FROM members
), comms AS (
    SELECT cluster_id, comm, arg_max(op, seq) AS op, any_value(front) AS front, max(n_ranks) AS n_ranks,
           count(*) FILTER (WHERE seq = front) AS n_waiting, count(*)::BIGINT AS n_seen,
           list(node_id || '/' || comm_rank || ' at ' || seq ORDER BY comm_rank) FILTER (WHERE seq < front) AS behind,
           max(reported_at) AS reported_at, count(*) FILTER (WHERE seq = front AND inside IS NULL) AS n_inside
    FROM fronts GROUP BY cluster_id, comm
), silent AS (
    SELECT *, epoch(?::TIMESTAMP) - epoch(reported_at) AS silent_s FROM comms
), found AS (
    SELECT cluster_id, 'record' AS source, comm, NULL AS op, missing_seq AS seq, NULL AS n_ranks,
           len(blocks)::BIGINT AS n_waiting,
           nullif(node_id, '') AS node_id, rank, job, cause, last_finished, blocks, [] AS behind,
           0::BIGINT AS never_seen, reported_at, silent_s
    FROM named
    UNION ALL
    SELECT cluster_id, 'silence', comm, op, front, n_ranks, n_waiting::BIGINT, NULL, NULL, NULL, NULL, NULL, [],
           coalesce(behind, []), greatest(coalesce(n_ranks, n_seen) - n_seen, 0)::BIGINT,
           reported_at, silent_s
    FROM silent WHERE silent_s >= ? AND (len(behind) > 0 OR n_seen < coalesce(n_ranks, 0) OR n_inside > 0)
)
SELECT * FROM found ORDER BY silent_s DESC, cluster_id, comm, rank
"""


def _hangs(context: QueryContext, args: HangsArgs) -> ListAnswer[Hang]:
    span = context.span(args, "collectives", "hangs")
    clusters = span.params[2:]
    ever = datetime.min  # noqa: DTZ901 - naive UTC, as the store has it
    reach = span.reaching_back(_MAX_AGE).params
    params = (
        *reach,
        *reach,
        span.end,
        *(span.params),
        *(ever, span.end, *clusters),
        *(span.end, args.min_silent_s),
    )
    statement = span.bind(_SQL)[0], params
    coverage = context.coverage(span, "collectives")
    return context.answer(ListAnswer[Hang], span, statement, args.limit, coverage)


HANGS: Final = Query(
    "fleet.cluster.hangs",
    "Hangs",
    "Who never arrived where others wait, by Fleet's records; for clusters of which Fleet never reported a hang, "
    "silent communicators on which members are behind. `source` says which of the two. Longest first.",
    HangsArgs,
    ListAnswer[Hang],
    _hangs,
)
