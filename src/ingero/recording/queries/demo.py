"""``run_demo``: a known fault and what is said about it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ingero.errors import BadDataError
from ingero.recording.causal.engine import explain
from ingero.recording.queries.assistant import ShortIncident, short_incident
from ingero.recording.queries.recording_file import RecordingFile
from ingero.recording.scenarios.catalog import SCENARIOS
from ingero.serving.query import Query


class DemoArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which demo."""

    scenario: Annotated[
        str, msgspec.Meta(description="one of: " + ", ".join(s.name for s in SCENARIOS))
    ] = "incident"


class DemoAnswer(msgspec.Struct, frozen=True):
    """The story and the diagnosis."""

    scenario: str
    story: str
    events: int
    synthetic: bool
    incidents: list[ShortIncident]


def _demo(context: RecordingFile, args: DemoArgs) -> DemoAnswer:
    del context
    chosen = [s for s in SCENARIOS if args.scenario in {s.name, *s.aliases}]
    if not chosen:
        names = ", ".join(scenario.name for scenario in SCENARIOS)
        raise BadDataError(f"no demo is called {args.scenario!r}", hint=f"one of: {names}")
    explained = explain(chosen[0].build().build())
    incidents = [short_incident(incident, explained.start_ns) for incident in explained.incidents]
    return DemoAnswer(
        chosen[0].name,
        chosen[0].description,
        explained.n_events,
        synthetic=True,
        incidents=incidents,
    )


DEMO = Query(
    name="run_demo",
    title="Known faults",
    description="Play a synthetic fault and show what the engine says about it; needs no GPU and no recording.",
    args=DemoArgs,
    result=DemoAnswer,
    run=_demo,
)
