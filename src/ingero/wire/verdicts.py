"""What Fleet's detection concluded about a worker, sent when it changes: one OTLP log record per change.

``docs/specs/verdict.md`` is the specification. This module is the only place that knows the names on the wire: Fleet
builds with it and Echo reads with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ingero.otlp.codec import Export, LogRow, structs
from ingero.wire.log_records import LogFacts, LogSeverity, build_fleet_logs, build_record, last_word
from ingero.wire.names import Attribute
from ingero.wire.process_resource import ProcessResource, read_process_resource
from ingero.wire.record_uids import RECORD_UID, build_record_uid
from ingero.wire.typed import read_number, read_small, read_text, read_texts

VERDICT_EVENT: Final = "ingero.verdict"
_KIND: Final = "ingero.verdict.kind"
_BEFORE: Final = "ingero.verdict.before"
_WORKER: Final = "ingero.verdict.worker"
_REASON: Final = "ingero.verdict.reason"
_EVIDENCE_LOG10: Final = "ingero.verdict.evidence_log10"
_LOST_GPU_MS: Final = "ingero.verdict.lost_gpu_ms"
_VICTIMS: Final = "ingero.verdict.victims"
_SLOWDOWN: Final = "ingero.verdict.slowdown"
_MS_PER_S: Final = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRecord:
    """What one record says. Its cluster is the resource's.

    A record of another sender may leave out anything; empty and None are "not known".

    Attributes:
        kind: A value of `ingero.model.verdicts.VerdictKind`.
        before: The kind that this one replaces; empty for the first.
        node_id: The worker's node.
        rank: The worker's global rank; None when unknown.
        job: The worker's job, where ranks of several have the same numbers; otherwise empty.
        resource: Where the worker's process runs.
        worker: As the detector names it.
        comm: The communicator, where the verdict is about one; Fleet names none.
        reason: Why, in one line.
        evidence_log10: log10 of the e-value.
        lost_gpu_ms: GPU time that it cost its victims since onset, in milliseconds.
        slowdown: Times its median peer: 1.25 takes a quarter longer.
        victims: Who waited for it, longest first.
        summary: The body: one line for a person.
        is_alarm: Whether it calls for action now: severity WARN, or above.
    """

    kind: str = ""
    before: str = ""
    node_id: str = ""
    rank: int | None = None
    job: str = ""
    resource: ProcessResource = ()
    worker: str = ""
    comm: str = ""
    reason: str = ""
    evidence_log10: float | None = None
    lost_gpu_ms: float | None = None
    slowdown: float | None = None
    victims: tuple[str, ...] | None = None
    summary: str = ""
    is_alarm: bool = False


def build_verdict_records(
    cluster_id: str, verdicts: Sequence[VerdictRecord], wall_ns: int
) -> Export:
    """The records of one cluster as a logs export, all of one time."""
    records = [_build_record(cluster_id, verdict, wall_ns) for verdict in verdicts]
    return build_fleet_logs({cluster_id: records})


def _build_record(cluster_id: str, verdict: VerdictRecord, wall_ns: int) -> structs.LogRecord:
    attributes: dict[str, Any] = {
        Attribute.NODE_ID: verdict.node_id,
        Attribute.CLUSTER_ID: cluster_id,
        _KIND: verdict.kind,
        _BEFORE: verdict.before,
        _WORKER: verdict.worker,
        _REASON: verdict.reason,
    }
    named = {
        _EVIDENCE_LOG10: verdict.evidence_log10,
        _LOST_GPU_MS: verdict.lost_gpu_ms,
        _VICTIMS: verdict.victims,
        Attribute.RANK: verdict.rank,
        Attribute.RANK_JOB: verdict.job or None,
        _SLOWDOWN: verdict.slowdown,
        Attribute.COLLECTIVE_COMM: verdict.comm or None,
    }
    attributes |= {name: value for name, value in named.items() if value is not None}
    attributes |= dict(verdict.resource)
    attributes[RECORD_UID] = build_record_uid(
        VERDICT_EVENT, cluster_id, verdict.node_id, verdict.job, verdict.rank, verdict.worker, verdict.comm,
        verdict.before, verdict.kind, verdict.evidence_log10, wall_ns,
    )  # fmt: skip
    severity = LogSeverity.WARN if verdict.is_alarm else LogSeverity.INFO
    return build_record(VERDICT_EVENT, attributes, severity, verdict.summary, wall_ns)


def is_verdict(event_name: str) -> bool:
    """Whether a record of this event name is a verdict, of any sender."""
    return last_word(event_name) == last_word(VERDICT_EVENT)


def read_verdict(record: LogRow) -> VerdictRecord:
    """Read a record of which `is_verdict` is true; what is missing or of another type is left out, nothing raises.

    Of other senders the last words ``verdict``, ``evidence`` and ``lost_gpu_seconds`` are understood too.
    """
    facts = LogFacts(record.attributes)
    lost_gpu_s = read_number(facts.find("lost_gpu_seconds"))
    return VerdictRecord(
        kind=read_text(facts.find(_KIND, "verdict", "kind")) or "",
        before=read_text(facts.find(_BEFORE)) or "",
        node_id=read_text(facts.find(Attribute.NODE_ID, "node_id")) or "",
        rank=read_small(facts.find(Attribute.RANK)),
        job=read_text(facts.find(Attribute.RANK_JOB)) or "",
        resource=read_process_resource(record.attributes),
        worker=read_text(facts.find(_WORKER)) or "",
        comm=read_text(facts.find(Attribute.COLLECTIVE_COMM)) or "",
        reason=read_text(facts.find(_REASON)) or "",
        evidence_log10=read_number(facts.find(_EVIDENCE_LOG10, "evidence", "evidence_log10")),
        lost_gpu_ms=read_number(facts.find(_LOST_GPU_MS))
        if lost_gpu_s is None
        else lost_gpu_s * _MS_PER_S,
        slowdown=read_number(facts.find(_SLOWDOWN)),
        victims=read_texts(facts.find(_VICTIMS)),
        summary=read_text(facts.find("summary")) or read_text(record.body) or "",
        is_alarm=record.severity_number >= LogSeverity.WARN,
    )
