"""The questions an assistant asks of one node: short answers first, the full form on request.

Names are those of the existing system's tools; the short keys are its key map (``op n p50 p95 p99 w% sev sum rc rec``).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ingero.model.incidents import Incident
from ingero.model.recording import Recording, describe_unprobed
from ingero.model.untrusted import clean
from ingero.recording.causal.engine import explain
from ingero.recording.queries.explanation_answers import (
    IncidentAnswer,
    SearchedAnswer,
    UnknownAnswer,
    incident_answer,
    nothing_found,
    searched_answer,
    unknown_answers,
    wanted_part,
)
from ingero.recording.queries.operations import OperationAnswer, list_operations
from ingero.recording.queries.paging import PageArgs, cut_page
from ingero.recording.queries.recording_file import RecordingFile
from ingero.recording.queries.window import Wanted
from ingero.serving.query import Query


class ShortOperation(msgspec.Struct, frozen=True, omit_defaults=True):
    """One operation of one process; times in µs."""

    op: str
    n: int
    p50: float
    p95: float
    p99: float
    w: Annotated[float, msgspec.Meta(description="share of wall time, %")] = msgspec.field(
        name="w%"
    )
    p: Annotated[int, msgspec.Meta(description="pid")] = 0
    pn: Annotated[str, msgspec.Meta(description="process name")] = ""
    nd: Annotated[str, msgspec.Meta(description="node")] = ""
    est: Annotated[
        str, msgspec.Meta(description="estimate or unknown, when not every call was counted")
    ] = ""
    rs: Annotated[float, msgspec.Meta(description="part of the calls that has a row")] = 1.0


class StatsAnswer(msgspec.Struct, frozen=True):
    """Operations, most time first."""

    n: Annotated[int, msgspec.Meta(description="events looked at")]
    stored_events: int
    ops: list[ShortOperation]
    next_cursor: str
    full: list[OperationAnswer] | msgspec.UnsetType = msgspec.UNSET


def _stats(context: RecordingFile, args: PageArgs) -> StatsAnswer:
    recording = context.load(wanted_part(args))
    page, after = cut_page(list_operations(recording), args.limit, args.cursor)
    short = [
        ShortOperation(
            op=o.op, n=o.count, p50=o.p50_us, p95=o.p95_us, p99=o.p99_us, w=o.wall_pct, p=o.pid,
            pn=clean(o.process), nd=clean(o.node), rs=o.row_share,
            est=o.basis if o.basis in {"estimate", "unknown"} else "",
        )
        for o in page
    ]  # fmt: skip
    full = msgspec.UNSET if args.tsc else list(page)
    return StatsAnswer(len(recording.events), recording.n_events_stored, short, after, full)


STATS = Query(
    name="get_trace_stats",
    title="Operation statistics",
    description=(
        "Count (exact where the recording counted), p50, p95 and p99 in µs and share of wall time of every operation "
        "of every process, most time first."
    ),
    args=PageArgs,
    result=StatsAnswer,
    run=_stats,
)


class ShortCause(msgspec.Struct, frozen=True):
    """A cause and the part of the lost time it explains."""

    c: str
    share: float


class ShortIncident(msgspec.Struct, frozen=True, omit_defaults=True):
    """One problem."""

    id: str
    sev: str
    sum: str
    rc: list[ShortCause]
    rec: list[str]
    p: int = 0
    nd: str = ""
    t: Annotated[
        list[float], msgspec.Meta(description="start and end, seconds from the first event")
    ] = []


Missing = Annotated[
    list[str] | msgspec.UnsetType,
    msgspec.Meta(
        description="what the recording lacks though it should have it, or was not read of it; left out if whole"
    ),
]


def _missing(recording: Recording) -> list[str] | msgspec.UnsetType:
    lines = [clean(recording.describe_missing(), 512), *describe_unprobed(recording.unprobed)]
    return [line for line in lines if line] or msgspec.UNSET


class ChainsAnswer(msgspec.Struct, frozen=True):
    """Problems, worst first; where there is none, ``looked`` says which rules looked."""

    chains: list[ShortIncident]
    total: int
    next_cursor: str
    unknown: list[UnknownAnswer]
    missing: Missing = msgspec.UNSET
    looked: SearchedAnswer | msgspec.UnsetType = msgspec.UNSET
    full: list[IncidentAnswer] | msgspec.UnsetType = msgspec.UNSET


class ChainsArgs(PageArgs, frozen=True, forbid_unknown_fields=True):
    """Which part of the recording, and which page."""

    top_n: Annotated[
        int,
        msgspec.Meta(
            description="at most so many, worst first; 0 for the page's limit, negative for all"
        ),
    ] = 0
    pid: Annotated[int, msgspec.Meta(ge=0, description="one process; the same as pids")] = 0


def short_incident(incident: Incident, start_ns: int) -> ShortIncident:
    """An incident in the short form."""
    return ShortIncident(
        id=incident.id,
        sev=incident.severity.value,
        sum=clean(incident.title, 512),
        rc=[ShortCause(clean(cause.name), cause.share) for cause in incident.causes],
        rec=list(incident.fix[:2]),
        p=incident.pid,
        nd=clean(incident.node),
        t=[round((at - start_ns) / 1e9, 3) for at in (incident.start_ns, incident.end_ns)],
    )


def _chains(context: RecordingFile, args: ChainsArgs) -> ChainsAnswer:
    pids = (*args.pids, *((args.pid,) if args.pid else ()))
    recording = context.load(Wanted(since=args.since, pids=pids))
    explained = explain(recording)
    n_wanted = args.top_n or args.limit
    if n_wanted < 0:
        n_wanted = max(len(explained.incidents), 1)
    page, after = cut_page(explained.incidents, n_wanted, args.cursor)
    full = msgspec.UNSET if args.tsc else [incident_answer(i, explained.start_ns) for i in page]
    return ChainsAnswer(
        [short_incident(i, explained.start_ns) for i in page], len(explained.incidents), after,
        unknown_answers(explained), _missing(recording),
        msgspec.UNSET if args.tsc and explained.incidents else searched_answer(explained), full,
    )  # fmt: skip


CHAINS = Query(
    name="get_causal_chains",
    title="What went wrong",
    description=(
        "Problems of this recording, each once, worst first: severity, what happened, causes with the share of the "
        "lost time each explains (below 20 % nothing is named; 'unexplained' is an answer), next steps. tsc=false adds "
        "evidence, what was ruled out and data coverage. An empty list means that the rules in looked.judged found "
        "nothing; those in unknown could not tell, and say what is missing."
    ),
    args=ChainsArgs,
    result=ChainsAnswer,
    run=_chains,
)


class InvestigateArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nothing to choose: it looks at everything."""


class InvestigateAnswer(msgspec.Struct, frozen=True):
    """Where to begin: what was recorded, what went wrong, what to ask next."""

    says: str
    duration_s: float
    events: int
    processes: list[str]
    incidents: list[ShortIncident]
    unknown: list[UnknownAnswer]
    busiest: list[ShortOperation]
    next: list[str]
    missing: Missing = msgspec.UNSET


def _investigate(context: RecordingFile, args: InvestigateArgs) -> InvestigateAnswer:
    del args
    recording = context.load(wanted_part(PageArgs()))
    explained = explain(recording)
    stats = _stats(context, PageArgs(limit=5))
    worst = explained.incidents[0] if explained.incidents else None
    names = sorted({f"{clean(o.pn)} ({o.p})" for o in stats.ops})
    ask = ["get_causal_chains with tsc=false for evidence and what was ruled out"] if worst else []
    ask += [
        "get_trace_stats for every operation",
        "run_sql for single events",
        "get_stacks for code paths",
    ]
    return InvestigateAnswer(
        says=clean(worst.title, 512) if worst else f"No incident: {nothing_found(explained)}.",
        duration_s=round((explained.end_ns - explained.start_ns) / 1e9, 3),
        events=explained.n_events,
        processes=names,
        incidents=[short_incident(i, explained.start_ns) for i in explained.incidents[:3]],
        unknown=unknown_answers(explained),
        busiest=stats.ops,
        next=ask,
        missing=_missing(recording),
    )


INVESTIGATE: Query[Any, Any, Any] = Query(
    name="investigate",
    title="Begin here",
    description="One call that begins an investigation: what was recorded, the worst problems, the busiest "
    "operations, what to ask next.",
    args=InvestigateArgs,
    result=InvestigateAnswer,
    run=_investigate,
)
