"""Chains, the existing system's shape of an incident: those that its agent stored while it recorded, and ours in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec

from ingero.recording.queries.explanation_answers import IncidentAnswer
from ingero.recording.queries.window import TIMES, format_wall
from ingero.recording.store.files import open_recording, store_errors, table_columns
from ingero.recording.store.typed import keep_typed

_COLUMNS: Final = "id, detected_at, severity, summary, root_cause, explanation, recommendations"


class ChainRow(msgspec.Struct, frozen=True):
    """A chain as ``explain --chains --json`` and ``/api/v1/chains`` give it."""

    id: str
    detected_at: str
    severity: str
    summary: str
    root_cause: str
    explanation: str
    recommendations: list[str]
    node: str


def list_stored_chains(
    path: Path, bounds: tuple[int | None, int | None] = (None, None)
) -> list[ChainRow]:
    """The rows of ``causal_chains``, oldest first, not vouched for; empty when the file keeps none.

    Args:
        path: The recording.
        bounds: Unix ns from and to which they were detected; None for no bound.

    Raises:
        StoreError: The file cannot be read.
    """
    with open_recording(path) as connection, store_errors(path):
        columns = table_columns(connection, "causal_chains")
        if not columns:
            return []
        node = "node" if "node" in columns else "''"
        named = f"{_COLUMNS}, {node}"
        rows = connection.execute(
            f"SELECT {named} FROM causal_chains WHERE (?1 IS NULL OR detected_at >= ?1) "  # noqa: S608 - own names
            "AND (?2 IS NULL OR detected_at <= ?2) ORDER BY detected_at, id",
            bounds,
        ).fetchall()
    rows, _ = keep_typed(rows, (str, TIMES, *[str] * 6), has_nulls=True)
    return [
        ChainRow(
            id=row[0] or "",
            detected_at=format_wall(row[1] or 0),
            severity=row[2] or "",
            summary=row[3] or "",
            root_cause=row[4] or "",
            explanation=row[5] or "",
            recommendations=_as_list(row[6] or ""),
            node=row[7] or "",
        )
        for row in rows
    ]


def build_chain(incident: IncidentAnswer) -> ChainRow:
    """An incident as a chain: its causes are the root cause, their evidence the explanation."""
    return ChainRow(
        id=incident.id,
        detected_at=format_wall(incident.start),
        severity=incident.severity,
        summary=incident.title,
        root_cause=" + ".join(cause.name for cause in incident.causes),
        explanation="; ".join(fact for cause in incident.causes for fact in cause.evidence),
        recommendations=incident.fix,
        node=incident.node,
    )


def _as_list(text: str) -> list[str]:
    try:
        value: Any = json.loads(text) if text else []
    except ValueError:
        return [text]
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]
