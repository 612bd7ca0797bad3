"""Records of conclusions as rows: which table one belongs in, and what its columns hold.

The names on the wire are known to `ingero.wire` only; here are the names of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from ingero.echo.ingest.origin import to_timestamp
from ingero.echo.schema.tables import COSTS, HANGS, INCIDENTS, VERDICTS, Table
from ingero.errors import BadDataError
from ingero.otlp.codec import LogRow
from ingero.wire.costs import is_cost, read_cost
from ingero.wire.episodes import is_episode, read_episode
from ingero.wire.hangs import BEGAN, ENDED, is_hang, read_hang
from ingero.wire.verdicts import is_verdict, read_verdict


@dataclass(frozen=True, slots=True)
class RecordKind:
    """One kind of record with a table of its own.

    Attributes:
        table: Where its rows go.
        is_named: Whether an event name is of this kind.
        read: The columns of a record beside ``ts``, ``cluster_id`` and ``attributes``, by name; absent is None. Raises
            BadDataError where the record breaks its specification.
    """

    table: Table
    is_named: Callable[[str], bool]
    read: Callable[[LogRow], Mapping[str, Any]]


def read_record(record: LogRow) -> tuple[Table, Mapping[str, Any]] | None:
    """The table of a record and its columns beside ``ts``, ``cluster_id`` and ``attributes``, by name; absent is None.

    Returns:
        None for a record that is only a log: of another name, or a hang that breaks its specification.
    """
    for kind in RECORD_KINDS:
        if kind.is_named(record.event_name):
            try:
                return kind.table, kind.read(record)
            except BadDataError:
                return None
    return None


def _read_verdict(record: LogRow) -> Mapping[str, Any]:
    verdict = read_verdict(record)
    lost_gpu_ms, victims = verdict.lost_gpu_ms, verdict.victims
    return {
        "node_id": verdict.node_id or None,
        "rank": verdict.rank,
        "worker": verdict.worker or None,
        "comm": verdict.comm or None,
        "verdict": verdict.kind or None,
        "slowdown": verdict.slowdown,
        "evidence": verdict.evidence_log10,
        "lost_gpu_seconds": None if lost_gpu_ms is None else lost_gpu_ms / 1e3,
        "victims": None if victims is None else list(victims),
        "before": verdict.before or None,
        "summary": verdict.summary or None,
    }


def _read_cost(record: LogRow) -> Mapping[str, Any]:
    cost = read_cost(record)
    return {
        "node_id": cost.node_id or None,
        "rank": cost.rank,
        "victim_node_id": cost.victim_node_id or None,
        "gpu_seconds": cost.gpu_seconds,
        "amount": cost.amount,
        "currency": cost.currency or None,
        "provider": cost.provider or None,
        "gpu_model": cost.gpu_model or None,
        "attributed": cost.attributed or None,
    }


def _read_episode(record: LogRow) -> Mapping[str, Any]:
    episode = read_episode(record)
    return {
        "node_id": episode.node_id or None,
        "incident_id": episode.incident_id or None,
        "kind": episode.kind or None,
        "severity": episode.severity or None,
        "state": episode.state or None,
        "summary": episode.summary or None,
        "score": episode.score,
        "threshold": episode.threshold,
        "dominant_signal": episode.dominant_signal or None,
        "start_ts": _moment(episode.start_ns),
        "end_ts": _moment(episode.end_ns),
    }


def _read_hang(record: LogRow) -> Mapping[str, Any]:
    hang = read_hang(record)
    return {
        "node_id": hang.node_id or None,
        "rank": hang.rank,
        "job": hang.job or None,
        "comm": hang.comm,
        "state": ENDED if hang.is_over else BEGAN,
        "cause": hang.cause or None,
        "missing_seq": hang.missing_seq,
        "last_finished_seq": hang.last_finished_seq,
        "blocks": list(hang.blocks),
        "standing_s": hang.standing_s,
        "summary": hang.summary or None,
    }


def _moment(wall_ns: int | None) -> datetime | None:
    return None if wall_ns is None else to_timestamp(wall_ns)


RECORD_KINDS: Final = (
    RecordKind(VERDICTS, is_verdict, _read_verdict),
    RecordKind(INCIDENTS, is_episode, _read_episode),
    RecordKind(COSTS, is_cost, _read_cost),
    RecordKind(HANGS, is_hang, _read_hang),
)
"""Everything with a table of its own; other records are logs."""
