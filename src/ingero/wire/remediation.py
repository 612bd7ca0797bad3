"""What a remediator decided and did: one OTLP log record for each entry of its journal.

This module is the only place that knows the names on the wire: the remediator builds with it and Echo reads with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from ingero.otlp.codec import Export, build_logs, merge_exports, structs
from ingero.wire.log_records import LogSeverity, build_record
from ingero.wire.names import Attribute

REMEDIATION_EVENT: Final = "ingero.remediation"
REMEDIATION_SEQ: Final = "ingero.remediation.seq"
REMEDIATION_ENTRY: Final = "ingero.remediation.entry"
REMEDIATION_EPISODE: Final = "ingero.remediation.episode"
REMEDIATION_ACTION_ID: Final = "ingero.remediation.action_id"
REMEDIATION_TARGET: Final = "ingero.remediation.target"
REMEDIATION_ACTUATOR: Final = "ingero.remediation.actuator"
REMEDIATION_STATE: Final = "ingero.remediation.state"
REMEDIATION_EVIDENCE: Final = "ingero.remediation.evidence"
REMEDIATION_CLAUSES: Final = "ingero.remediation.clauses"
ACTION_ENTRY: Final = "action"
DECISION_ENTRY: Final = "decision"
_SCOPE: Final = "ingero.remediation"
_SERVICE: Final = "ingero-remediator"
_NOTABLE: Final = frozenset({"done", "left"})
"""States of an action in which a node is out of service, or somebody else took it over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemediationEntry:
    """One entry of a journal.

    Attributes:
        seq: Its number in that journal; never used twice.
        wall_ns: When.
        cluster_id: The cluster.
        node_id: The node, as its agent names it.
        entry: `ACTION_ENTRY`, an action changed its state; `DECISION_ENTRY`, the policy ruled otherwise than before.
        episode: The finding.
        action_id: Of an action; empty for a decision, as are the next three.
        target: The node, as the scheduler names it.
        actuator: Who was asked.
        state: Where the action is now.
        note: What was remarked, or decided.
        evidence: The finding, as JSON.
        clauses: What each clause compared, as JSON.
    """

    seq: int
    wall_ns: int
    cluster_id: str
    node_id: str
    entry: str
    episode: str
    action_id: str = ""
    target: str = ""
    actuator: str = ""
    state: str = ""
    note: str = ""
    evidence: str = ""
    clauses: str = ""


def build_remediation_records(entries: Iterable[RemediationEntry]) -> Export:
    """Entries as one logs export, a resource for each cluster, in their order within it; at least one entry."""
    by_cluster: dict[str, list[structs.LogRecord]] = {}
    for entry in entries:
        by_cluster.setdefault(entry.cluster_id, []).append(_build_record(entry))
    return merge_exports([
        build_logs(
            {str(Attribute.SERVICE_NAME): _SERVICE, str(Attribute.CLUSTER_ID): cluster_id},
            records,
            _SCOPE,
        )
        for cluster_id, records in by_cluster.items()
    ])


def _build_record(entry: RemediationEntry) -> structs.LogRecord:
    named: dict[str, Any] = {
        str(Attribute.NODE_ID): entry.node_id,
        REMEDIATION_SEQ: entry.seq,
        REMEDIATION_ENTRY: entry.entry,
        REMEDIATION_EPISODE: entry.episode,
        REMEDIATION_ACTION_ID: entry.action_id,
        REMEDIATION_TARGET: entry.target,
        REMEDIATION_ACTUATOR: entry.actuator,
        REMEDIATION_STATE: entry.state,
        REMEDIATION_EVIDENCE: entry.evidence,
        REMEDIATION_CLAUSES: entry.clauses,
    }
    attributes = {name: value for name, value in named.items() if value != ""}
    severity = LogSeverity.WARN if entry.state in _NOTABLE else LogSeverity.INFO
    return build_record(REMEDIATION_EVENT, attributes, severity, entry.note, entry.wall_ns)
