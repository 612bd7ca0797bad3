"""``explain``: what went wrong, with causes and shares."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ingero.agent.causal.engine import explain
from ingero.agent.queries.answers import (
    IncidentAnswer,
    WindowAnswer,
    incident_answer,
    window_answer,
)
from ingero.agent.queries.window import Wanted, load_part
from ingero.model.recording import Recording


class ExplainAnswer(msgspec.Struct, frozen=True):
    """Incidents, worst first, and what was looked at."""

    incidents: list[IncidentAnswer]
    window: WindowAnswer


def explain_recording(recording: Recording, top_n: int = 0) -> ExplainAnswer:
    """Explain a loaded recording; `top_n` of 0 or less gives every incident."""
    told = explain(recording)
    incidents = told.incidents[:top_n] if top_n > 0 else told.incidents
    return ExplainAnswer(
        [incident_answer(incident, told.start_ns) for incident in incidents],
        window_answer(told, is_truncated=recording.is_truncated),
    )


def explain_file(path: Path, wanted: Wanted) -> ExplainAnswer:
    """Explain part of a file.

    Raises:
        StoreError: The file cannot be read as a recording.
        BadDataError: The part is not one.
    """
    return explain_recording(load_part(path, wanted))
