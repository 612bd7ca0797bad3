"""The shapes of answers that several faces give: msgspec structs, from which the schemas are derived."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ingero.agent.queries.window import Wanted
from ingero.model.incidents import Explanation, Incident
from ingero.model.untrusted import clean

_LINE: Final = 512


class CauseAnswer(msgspec.Struct, frozen=True):
    """One reason, with the part of the lost time that overlaps it."""

    name: str
    share: Annotated[float, msgspec.Meta(ge=0, le=1, description="part of the lost time, 0 to 1")]
    evidence: list[str]


class RuledOutAnswer(msgspec.Struct, frozen=True):
    """A reason that was checked and is not it."""

    name: str
    share: float
    why: str


class CoverageAnswer(msgspec.Struct, frozen=True):
    """How much of what happened has a row: exact, sampled or unknown."""

    state: str
    stored: int
    seen: int | None
    lost: int | None


class IncidentAnswer(msgspec.Struct, frozen=True):
    """One problem."""

    id: str
    severity: str
    title: str
    rule: str
    node: str
    pid: int
    process: str
    tid: int
    rank: int | None
    op: str
    start: Annotated[int, msgspec.Meta(description="Unix time, ns")]
    end: Annotated[int, msgspec.Meta(description="Unix time, ns")]
    start_s: Annotated[float, msgspec.Meta(description="seconds from the first event")]
    end_s: float
    lost_ms: Annotated[float, msgspec.Meta(description="time that the problem took")]
    window_share: Annotated[float, msgspec.Meta(description="lost time / watched time")]
    watched_ms: Annotated[
        float, msgspec.Meta(description="how long the process was watched; 0 for a node")
    ]
    cases: int
    causes: list[CauseAnswer]
    ruled_out: list[RuledOutAnswer]
    fix: list[str]
    coverage: CoverageAnswer


class WindowAnswer(msgspec.Struct, frozen=True):
    """What was looked at."""

    start: int
    end: int
    duration_s: float
    events: int
    events_stored: int
    processes: int
    truncated: bool


class WindowArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which part of the recording."""

    since: Annotated[
        str,
        msgspec.Meta(description="duration back from the last event, such as 5m; empty for all"),
    ] = ""
    pids: list[int] = []


def wanted_part(args: WindowArgs) -> Wanted:
    """The part of the recording that arguments ask for."""
    return Wanted(since=args.since, pids=tuple(args.pids))


def incident_answer(incident: Incident, start_ns: int) -> IncidentAnswer:
    """An incident as every face shows it."""
    return IncidentAnswer(
        id=incident.id,
        severity=incident.severity.value,
        title=clean(incident.title, _LINE),
        rule=incident.rule,
        node=clean(incident.node),
        pid=incident.pid,
        process=clean(incident.process),
        tid=incident.tid,
        rank=incident.rank,
        op=incident.op,
        start=incident.start_ns,
        end=incident.end_ns,
        start_s=round((incident.start_ns - start_ns) / 1e9, 6),
        end_s=round((incident.end_ns - start_ns) / 1e9, 6),
        lost_ms=round(incident.lost_ns / 1e6, 3),
        window_share=incident.window_share,
        watched_ms=round(incident.watched_ns / 1e6, 3),
        cases=incident.n_cases,
        causes=[
            CauseAnswer(clean(c.name), c.share, [clean(fact, _LINE) for fact in c.evidence])
            for c in incident.causes
        ],
        ruled_out=[RuledOutAnswer(clean(r.name), r.share, r.why) for r in incident.ruled_out],
        fix=list(incident.fix),
        coverage=CoverageAnswer(
            incident.coverage.state,
            incident.coverage.stored,
            incident.coverage.seen,
            incident.coverage.lost,
        ),
    )


def window_answer(told: Explanation, *, is_truncated: bool) -> WindowAnswer:
    """What an explanation looked at."""
    return WindowAnswer(
        start=told.start_ns,
        end=told.end_ns,
        duration_s=round((told.end_ns - told.start_ns) / 1e9, 6),
        events=told.n_events,
        events_stored=told.n_events_stored,
        processes=told.n_processes,
        truncated=is_truncated,
    )
