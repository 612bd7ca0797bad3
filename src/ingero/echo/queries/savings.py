"""What each action of a remediator was worth: the records that tell, and `ingero.detect.savings` over them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import msgspec

from ingero.detect.savings import (
    ASSUMPTION,
    NOT_SEEN,
    PACE_PARTS,
    ActedEpisode,
    Charge,
    JobMember,
    OpStretch,
    SavingsEstimate,
    estimate_savings,
    find_job,
)
from ingero.echo.db.writer import EPOCH
from ingero.echo.queries.context import Answer, ListArgs, NodeId, QueryContext, TimeWindow, aware
from ingero.echo.queries.costs import LOST, PAID
from ingero.echo.queries.remediation import READ_FIELDS, ActionId
from ingero.serving.query import Query
from ingero.units import NS_PER_US
from ingero.wire.remediation import REMEDIATION_EVENT, REMEDIATION_SEQ

_MAX_ESTIMATED: Final = 25
"""Each is five statements, so many keep a question within its deadline."""
_BACK: Final = timedelta(days=1)
"""How far before an action its culprit's operations are looked for."""
_TOGETHER: Final = timedelta(minutes=5)
"""Within which all communicators of a job are taken to have been used."""
_NO_EVIDENCE: Final = "the action's record does not say which rank was slow since when"
_HOUR_S: Final = 3600.0

_SQL: Final = f"""
WITH entries AS (
    SELECT ts, cluster_id, node_id,
           try_cast(json_extract_string(attributes, '$."{REMEDIATION_SEQ}"') AS BIGINT) AS seq,
           {READ_FIELDS}
    FROM logs WHERE {{clusters}} AND event_name = '{REMEDIATION_EVENT}'
), actions AS (
    SELECT min(ts) FILTER (WHERE state = 'done') AS acted_at, cluster_id, node_id, action_id, max(episode) AS finding,
           max(target) AS scheduler_node, max(actuator) AS asked, arg_max(state, seq) AS last_state,
           max(evidence) AS known
    FROM entries WHERE action_id IS NOT NULL AND (? IS NULL OR node_id = ?) AND (? IS NULL OR action_id = ?)
    GROUP BY cluster_id, node_id, action_id
)
SELECT acted_at, cluster_id, node_id, action_id, finding, scheduler_node, asked, last_state{{more}} FROM actions
WHERE acted_at >= ? AND acted_at < ? ORDER BY acted_at DESC, cluster_id, node_id, action_id
"""  # fmt: skip
_AGGREGATES: Final = (
    "min(ts), max(ts), min(entry_ns), max(entry_ns), min(seq), max(seq), max(n_ranks)"
)


class ActionRow(msgspec.Struct):
    """An action that took effect in the window."""

    acted_at: datetime
    cluster_id: str
    node_id: str | None
    action_id: str
    episode: Annotated[str | None, msgspec.Meta(description="The finding that it answers.")]
    target: Annotated[str | None, msgspec.Meta(description="The node, as the scheduler names it.")]
    actuator: str | None
    state: Annotated[str | None, msgspec.Meta(description="The last one: done, undone, left.")]


class ActionSavings(msgspec.Struct, kw_only=True):
    """What one action was worth; null is not known, and ``unknown`` says why."""

    action_id: str
    cluster_id: str
    node_id: str | None
    rank: Annotated[int | None, msgspec.Meta(description="The culprit.")]
    acted_at: datetime
    until: Annotated[
        datetime | None,
        msgspec.Meta(description="The job's end, or how far it is: its last operation."),
    ]
    n_gpus: Annotated[int | None, msgspec.Meta(description="Of the job.")]
    lost_gpu_seconds: Annotated[
        float | None,
        msgspec.Meta(
            description="What others waited for the culprit until then, by Fleet's cost records."
        ),
    ]
    lost_gpu_seconds_per_hour: Annotated[
        float | None, msgspec.Meta(description="The same for each hour from the onset.")
    ]
    still_lost_gpu_seconds: Annotated[
        float | None, msgspec.Meta(description="What they waited for it afterwards.")
    ]
    would_have_lost_gpu_seconds: Annotated[
        float | None,
        msgspec.Meta(
            description="What they would have waited for it afterwards, without the action."
        ),
    ]
    standstill_gpu_seconds: Annotated[
        float | None,
        msgspec.Meta(
            description="What the action cost: time of all GPUs while the job stopped, queued and started."
        ),
    ]
    took_s: Annotated[
        float | None,
        msgspec.Meta(description="From the last operation before the action to the last known."),
    ]
    would_have_taken_s: Annotated[
        float | None,
        msgspec.Meta(
            description="The same operations at the pace before the action, without the first quarter since the onset."
        ),
    ]
    saved_gpu_seconds: Annotated[
        float | None,
        msgspec.Meta(
            description="The difference of the two, times the job's GPUs; negative is a loss."
        ),
    ]
    saved_standard_error_gpu_seconds: Annotated[
        float | None,
        msgspec.Meta(
            description="Of saved_gpu_seconds, as far as it comes from a pace that varied before the action."
        ),
    ]
    saved_amount: Annotated[
        float | None,
        msgspec.Meta(description="The same at the price of the GPUs that waited."),
    ]
    currency: str | None
    unknown: Annotated[str | None, msgspec.Meta(description="Why it is not known what was saved.")]


class SavingsAnswer(Answer, kw_only=True):
    """Newest first; ``rows`` are the actions, ``savings`` what each was worth."""

    assumption: str
    not_seen: Annotated[str, msgspec.Meta(description="What the records cannot show.")]
    savings: Annotated[
        list[ActionSavings], msgspec.Meta(description=f"Of the first {_MAX_ESTIMATED} actions.")
    ]
    rows: list[ActionRow]


class SavingsArgs(ListArgs, kw_only=True, forbid_unknown_fields=True):
    """Which actions: those that took effect in the window."""

    time_window: TimeWindow = "28d"
    limit: Annotated[
        int, msgspec.Meta(ge=1, le=_MAX_ESTIMATED, description="Most actions in the answer.")
    ] = 20
    node_id: NodeId | None = None
    action_id: ActionId | None = None


@dataclass(frozen=True, slots=True)
class _Culprit:
    """Who was slow, in the cluster's operations."""

    cluster_id: str
    node_id: str
    rank: int | None
    labels: str
    onset_entry_ns: int

    @property
    def same_rank(self) -> tuple[str, tuple[Any, ...]]:
        """The condition that finds its number, or its labels where it has none, on any node; and the values."""
        if self.rank is None:
            return "rank IS NULL AND labels = ?", (self.labels,)
        return "rank = ?", (self.rank,)


def _savings(context: QueryContext, args: SavingsArgs) -> SavingsAnswer:
    span = context.span(args, "logs")
    clusters, values = span.of_clusters
    chosen = (args.node_id, args.node_id, args.action_id, args.action_id)
    params = (*values, *chosen, span.start, span.end)
    sql = _SQL.replace("{clusters}", clusters)
    found, _ = context.reader.page_rows(
        sql.replace("{more}", ", known"), params, min(args.limit, _MAX_ESTIMATED)
    )
    return context.answer(
        SavingsAnswer,
        span,
        (sql.replace("{more}", ""), params),
        args.limit,
        context.coverage(span, "logs", f"event_name = '{REMEDIATION_EVENT}'"),
        assumption=ASSUMPTION,
        not_seen=NOT_SEEN,
        savings=[_estimate(context, row) for row in found],
    )


def _estimate(context: QueryContext, row: Sequence[Any]) -> ActionSavings:
    acted_at, cluster_id, node_id, action_id, *_, evidence = row
    culprit = _read_culprit(cluster_id, node_id, evidence)
    if culprit is None:
        estimate = SavingsEstimate(unknown=_NO_EVIDENCE)
    else:
        estimate = estimate_savings(_collect(context, culprit, acted_at))
    rate = estimate.lost_gpu_s_per_s
    until = estimate.until_ns
    moment = None if until is None else EPOCH + timedelta(microseconds=until // NS_PER_US)
    return ActionSavings(
        action_id=action_id,
        cluster_id=cluster_id,
        node_id=node_id,
        rank=None if culprit is None else culprit.rank,
        acted_at=acted_at.replace(tzinfo=UTC),
        until=aware(moment),
        n_gpus=estimate.n_gpus,
        lost_gpu_seconds=estimate.lost_gpu_s,
        lost_gpu_seconds_per_hour=None if rate is None else rate * _HOUR_S,
        still_lost_gpu_seconds=estimate.still_lost_gpu_s,
        would_have_lost_gpu_seconds=estimate.would_have_lost_gpu_s,
        standstill_gpu_seconds=estimate.standstill_gpu_s,
        took_s=estimate.took_s,
        would_have_taken_s=estimate.would_have_taken_s,
        saved_gpu_seconds=estimate.saved_gpu_s,
        saved_standard_error_gpu_seconds=estimate.saved_error_gpu_s,
        saved_amount=estimate.amount,
        currency=estimate.currency or None,
        unknown=estimate.unknown or None,
    )


class _Evidence(msgspec.Struct):
    """What a culprit's finding says, within what the store's columns hold."""

    onset_entry_ns: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    rank: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
    labels: dict[str, str] | None = None


def _read_culprit(cluster_id: str, node_id: str | None, evidence: str | None) -> _Culprit | None:
    """What the finding says; it was sent by somebody, and may be anything."""
    try:
        found = msgspec.json.decode(evidence or "", type=_Evidence)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return None
    if node_id is None:
        return None
    labels = msgspec.json.encode(found.labels or {}, order="sorted").decode()  # as Echo keeps them
    rank = found.rank if found.rank >= 0 else None
    return _Culprit(cluster_id, node_id, rank, labels, found.onset_entry_ns)


def _collect(context: QueryContext, culprit: _Culprit, acted_at: datetime) -> ActedEpisode:
    """The records of one action."""
    now = EPOCH + timedelta(microseconds=context.now_ns // NS_PER_US + 1)
    own, values = culprit.same_rank
    before = context.reader.rows(
        "WITH own AS (SELECT comm, ts, entry_ns, seq, n_ranks FROM collectives WHERE cluster_id = ? "
        f"AND ts >= ? AND ts <= ? AND node_id = ? AND {own} AND entry_ns >= ?), "
        "span AS (SELECT min(entry_ns) AS begin_ns, max(entry_ns) AS end_ns FROM own) "
        f"SELECT comm, {_AGGREGATES} FROM own, span "
        f"GROUP BY comm, floor((entry_ns::DOUBLE - begin_ns) * {PACE_PARTS} / (end_ns::DOUBLE - begin_ns + 1)) "
        "ORDER BY comm, min(entry_ns)",
        (culprit.cluster_id, acted_at - _BACK, acted_at, culprit.node_id, *values, culprit.onset_entry_ns),
    )  # fmt: skip
    after = context.reader.rows(
        f"SELECT comm, {_AGGREGATES} FROM collectives WHERE cluster_id = ? AND ts > ? AND ts < ? AND {own} "
        "AND entry_ns IS NOT NULL GROUP BY comm, node_id ORDER BY comm, node_id",
        (culprit.cluster_id, acted_at, now, *values),
    )
    onset = min((row[1] for row in before), default=acted_at - _BACK)
    last = max((row[2] for row in before), default=acted_at)
    members = _find_members(context, culprit.cluster_id, last)
    nodes = _find_nodes(context, culprit.cluster_id, (acted_at, now), {row[0] for row in after})
    worker = _name_worker(culprit.node_id, culprit.rank, culprit.labels)
    return ActedEpisode(
        done_ns=_to_ns(acted_at),
        job=find_job(members, worker),
        before=[_read_stretch(row, nodes) for row in before],
        after=[_read_stretch(row, nodes) for row in after],
        charges=_find_charges(context, culprit, (onset, now)),
    )


def _find_members(context: QueryContext, cluster_id: str, last: datetime) -> list[JobMember]:
    rows = context.reader.rows(
        "SELECT comm, node_id, rank, labels, max(n_gpus), count(*) FROM collectives "
        "WHERE cluster_id = ? AND ts >= ? AND ts <= ? AND node_id IS NOT NULL GROUP BY comm, node_id, rank, labels",
        (cluster_id, last - _TOGETHER, last),
    )
    return [
        JobMember(comm, _name_worker(node_id, rank, labels), node_id, n_gpus)
        for comm, node_id, rank, labels, n_gpus, _ in rows
    ]


def _find_nodes(
    context: QueryContext, cluster_id: str, span: tuple[datetime, datetime], comms: set[str]
) -> Mapping[str, frozenset[str]]:
    nodes: dict[str, set[str]] = defaultdict(set)
    if comms:
        named = sorted(comms)
        for comm, node_id in context.reader.rows(
            "SELECT comm, node_id FROM collectives WHERE cluster_id = ? AND ts > ? AND ts < ? "
            f"AND comm IN ({', '.join('?' * len(named))}) AND node_id IS NOT NULL GROUP BY comm, node_id",
            (cluster_id, *span, *named),
        ):
            nodes[comm].add(node_id)
    return {comm: frozenset(of) for comm, of in nodes.items()}


def _find_charges(
    context: QueryContext, culprit: _Culprit, span: tuple[datetime, datetime]
) -> list[Charge]:
    own = ("rank IS NULL", ()) if culprit.rank is None else ("rank = ?", (culprit.rank,))
    rows = context.reader.rows(
        f"SELECT ts, sum({LOST}), sum({PAID}), currency FROM costs WHERE cluster_id = ? AND ts >= ? AND ts < ? "
        f"AND node_id = ? AND {own[0]} AND ({LOST}) IS NOT NULL GROUP BY ts, currency ORDER BY ts, currency",
        (culprit.cluster_id, *span, culprit.node_id, *own[1]),
    )
    return [
        Charge(_to_ns(ts), gpu_s, amount, currency or "") for ts, gpu_s, amount, currency in rows
    ]


def _read_stretch(row: Sequence[Any], nodes: Mapping[str, frozenset[str]]) -> OpStretch:
    comm, first, last, first_entry_ns, last_entry_ns, first_seq, last_seq, n_ranks = row
    return OpStretch(
        comm,
        n_ranks or 0,
        nodes.get(comm, frozenset()),
        (_to_ns(first), _to_ns(last)),
        (first_entry_ns, last_entry_ns),
        (first_seq, last_seq),
    )


def _name_worker(node_id: str, rank: int | None, labels: str | None) -> str:
    return f"{node_id}/{labels if rank is None else rank}"


def _to_ns(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1) * NS_PER_US


SAVINGS: Final = Query(
    "fleet.cluster.savings",
    "What actions saved",
    "What each action of a remediator that took effect in the window was worth: GPU time that others lost to the "
    "culprit until then, what it would have gone on to cost until the job's end or now, what the action itself cost, "
    "and what it saved in GPU time and money, with the assumption behind it. Unknown is null, with the reason.",
    SavingsArgs,
    SavingsAnswer,
    _savings,
)
