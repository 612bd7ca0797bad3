"""The shapes of answers that several faces give: msgspec structs, from which the schemas are derived."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ingero.model.incidents import Explanation, Incident
from ingero.model.recording import Recording
from ingero.model.untrusted import clean
from ingero.recording.queries.window import Wanted

_LINE: Final = 512
_AtMost = Annotated[
    int | None,
    msgspec.Meta(
        description="calls at most, where the window cuts a minute: seen is then an estimate; else null"
    ),
]


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
    at_most: _AtMost = None


class AnnotationAnswer(msgspec.Struct, frozen=True):
    """What the workload said of itself while an incident lasted."""

    start_s: Annotated[float, msgspec.Meta(description="seconds from the first event")]
    end_s: Annotated[float, msgspec.Meta(description="the same for what was said of an instant")]
    pid: Annotated[int, msgspec.Meta(description="0: of the whole node")]
    labels: dict[str, str]


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
    places: Annotated[
        list[str],
        msgspec.Meta(
            description="innermost frames of the rows that show it, where stacks were recorded"
        ),
    ] = []
    annotations: Annotated[
        list[AnnotationAnswer] | None,
        msgspec.Meta(description="the newest that overlap it; null when they were not asked for"),
    ] = None


class UnknownAnswer(msgspec.Struct, frozen=True):
    """What could not be decided, and what is missing for it."""

    rules: list[str]
    node: str
    pid: int
    process: str
    rank: int | None
    missing: str
    how: str
    title: Annotated[
        str, msgspec.Meta(description="what the rows suggest, when only its severity is open")
    ] = ""


class SearchedAnswer(msgspec.Struct, frozen=True):
    """Which rules could say something: an empty list of incidents means only these found nothing."""

    judged: list[str]
    unknown: list[str]
    nothing_recorded: list[str]


class GroupCoverage(msgspec.Struct, frozen=True):
    """How many calls of one group have a row; page allocations, which are only counted, are left out."""

    group: str
    stored: int
    seen: int
    at_most: _AtMost = None


class WindowAnswer(msgspec.Struct, frozen=True):
    """What was looked at."""

    start: int
    end: int
    duration_s: float
    events: int
    events_stored: int
    processes: int
    truncated: bool
    missing: str = ""
    asked_s: Annotated[
        list[float] | None,
        msgspec.Meta(
            description="what was asked for, seconds from its first event; null for all, and without events"
        ),
    ] = None
    outside: Annotated[
        str,
        msgspec.Meta(
            description="where the recording begins or ends, when what was asked for lies before or after it"
        ),
    ] = ""
    coverage: list[GroupCoverage] = []


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
            incident.coverage.most,
        ),
        places=list(incident.places),
    )


def unknown_answers(explained: Explanation) -> list[UnknownAnswer]:
    """What an explanation could not decide."""
    return [
        UnknownAnswer(
            list(one.rules), clean(one.node), one.pid, clean(one.process), one.rank,
            clean(one.missing, _LINE), one.how, clean(one.title, _LINE),
        )
        for one in explained.unknown
    ]  # fmt: skip


def searched_answer(explained: Explanation) -> SearchedAnswer:
    """What an explanation looked at."""
    return SearchedAnswer(
        list(explained.judged),
        sorted({rule for one in explained.unknown for rule in one.rules}),
        [rule for rule, _ in explained.not_checked],
    )


def nothing_found(explained: Explanation) -> str:
    """What no incident means: which rules looked, which could not tell, which had nothing to look at."""
    looked = searched_answer(explained)
    parts = [f"{len(looked.judged)} rules looked and found nothing"]
    if looked.unknown:
        parts.append(f"{len(looked.unknown)} could not tell ({', '.join(looked.unknown)})")
    if looked.nothing_recorded:
        parts.append(f"{len(looked.nothing_recorded)} had nothing to look at")
    return "; ".join(parts)


def window_answer(explained: Explanation, recording: Recording) -> WindowAnswer:
    """What an explanation looked at."""
    asked = None
    if recording.is_cut and explained.n_events:
        first, last = recording.asked_ns
        moments = (first or explained.start_ns, last or explained.end_ns)
        asked = [round((at - explained.start_ns) / 1e9, 6) for at in moments]
    return WindowAnswer(
        start=explained.start_ns,
        end=explained.end_ns,
        duration_s=round((explained.end_ns - explained.start_ns) / 1e9, 6),
        events=explained.n_events,
        events_stored=explained.n_events_stored,
        processes=explained.n_processes,
        truncated=recording.is_truncated,
        missing=clean(recording.describe_missing(), _LINE),
        asked_s=asked,
        coverage=[
            GroupCoverage(one.name, one.stored, one.seen, one.most) for one in explained.groups
        ],
    )
