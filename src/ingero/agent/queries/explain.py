"""``explain``: what went wrong, with causes and shares."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ingero.agent.causal.engine import explain
from ingero.agent.queries.answers import (
    IncidentAnswer,
    RecordingFile,
    WindowAnswer,
    WindowArgs,
    incident_answer,
    wanted_part,
    window_answer,
)
from ingero.agent.queries.window import Wanted, load_part
from ingero.model.recording import Recording
from ingero.serving.query import Query


class ExplainArgs(WindowArgs, frozen=True, forbid_unknown_fields=True):
    """Which part, and how many incidents."""

    top_n: int = 10


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


def _run(context: RecordingFile, args: ExplainArgs) -> ExplainAnswer:
    return explain_recording(load_part(context.path, wanted_part(args)), args.top_n)


EXPLAIN = Query(
    name="get_incidents",
    title="Incidents",
    says=(
        "What went wrong in this recording: each problem once, worst first, with its causes, the share of the lost "
        "time each explains, what was ruled out, and the next step. Ask this first."
    ),
    args=ExplainArgs,
    result=ExplainAnswer,
    run=_run,
)
