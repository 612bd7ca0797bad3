"""What a remediator decided and did: the entries of its journal."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final

import msgspec

from ingero.echo.queries.context import ListAnswer, ListArgs, NodeId, QueryContext
from ingero.serving.query import Query
from ingero.wire.remediation import (
    REMEDIATION_ACTION_ID,
    REMEDIATION_ACTUATOR,
    REMEDIATION_CLAUSES,
    REMEDIATION_ENTRY,
    REMEDIATION_EPISODE,
    REMEDIATION_EVENT,
    REMEDIATION_EVIDENCE,
    REMEDIATION_SEQ,
    REMEDIATION_STATE,
    REMEDIATION_TARGET,
)

ActionId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class RemediationRow(msgspec.Struct):
    """One entry of a remediator's journal."""

    ts: datetime
    cluster_id: str
    node_id: str | None
    seq: Annotated[int | None, msgspec.Meta(description="Its number in that journal.")]
    entry: Annotated[
        str | None,
        msgspec.Meta(
            description="`action`: an action came into a state. `decision`: the policy ruled otherwise than before."
        ),
    ]
    episode: Annotated[str | None, msgspec.Meta(description="The finding that it answers.")]
    action_id: Annotated[str | None, msgspec.Meta(description="Null for a decision.")]
    target: Annotated[str | None, msgspec.Meta(description="The node, as the scheduler names it.")]
    actuator: Annotated[str | None, msgspec.Meta(description="slurm, command, webhook.")]
    state: Annotated[
        str | None,
        msgspec.Meta(
            description="proposed, approved, rejected, expired, begun, done, undoing, undone, void or left."
        ),
    ]
    note: Annotated[str | None, msgspec.Meta(description="What was decided, or remarked.")]
    evidence: Annotated[str | None, msgspec.Meta(description="The finding, as JSON.")]
    clauses: Annotated[
        str | None,
        msgspec.Meta(
            description="What each clause of the policy compared, as JSON; `met` lets it."
        ),
    ]


class RemediationArgs(ListArgs, kw_only=True, forbid_unknown_fields=True):
    """Which entries."""

    node_id: NodeId | None = None
    action_id: ActionId | None = None


_FIELDS: Final = {
    "entry": REMEDIATION_ENTRY,
    "episode": REMEDIATION_EPISODE,
    "action_id": REMEDIATION_ACTION_ID,
    "target": REMEDIATION_TARGET,
    "actuator": REMEDIATION_ACTUATOR,
    "state": REMEDIATION_STATE,
    "evidence": REMEDIATION_EVIDENCE,
    "clauses": REMEDIATION_CLAUSES,
}
READ_FIELDS: Final = ", ".join(
    f"""json_extract_string(attributes, '$."{key}"') AS {name}""" for name, key in _FIELDS.items()
)
"""The columns of `RemediationRow` that lie in the attributes of its log record, in SQL."""
_SQL: Final = f"""
WITH entries AS (
    SELECT ts, cluster_id, nullif(node_id, '') AS node_id,
           try_cast(json_extract_string(attributes, '$."{REMEDIATION_SEQ}"') AS BIGINT) AS seq, {READ_FIELDS},
           nullif(body, '') AS note
    FROM logs WHERE {{where}} AND event_name = '{REMEDIATION_EVENT}'
)
SELECT ts, cluster_id, node_id, seq, entry, episode, action_id, target, actuator, state, note, evidence, clauses
FROM entries WHERE (? IS NULL OR node_id = ?) AND (? IS NULL OR action_id = ?)
ORDER BY ts DESC, seq DESC, cluster_id, node_id
"""


def _remediation(context: QueryContext, args: RemediationArgs) -> ListAnswer[RemediationRow]:
    span = context.span(args, "logs")
    sql, params = span.bind(_SQL)
    chosen = (args.node_id, args.node_id, args.action_id, args.action_id)
    coverage = context.coverage(span, "logs", f"event_name = '{REMEDIATION_EVENT}'")
    return context.answer(
        ListAnswer[RemediationRow], span, (sql, (*params, *chosen)), args.limit, coverage
    )


REMEDIATION: Final = Query(
    "fleet.cluster.remediation",
    "What was done about it",
    "Every entry of the remediator's journal: what its policy decided about a culprit and which clause let or stopped "
    "it, and each action on a node with its states. Newest first.",
    RemediationArgs,
    ListAnswer[RemediationRow],
    _remediation,
)
