"""The two questions that reach beyond the recording, and only where the user said so: other nodes, and people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode

import msgspec

from ingero.errors import BadDataError, UnsupportedError
from ingero.model.untrusted import clean
from ingero.recording.queries.fanout import NodeAnswer, clock_warnings, join_rows
from ingero.recording.queries.paging import Tsc, cut_page
from ingero.recording.queries.recording_file import RecordingFile
from ingero.recording.store.sql import MAX_ROWS
from ingero.serving.query import Query

_SKEW_MS: Final = 10.0
_SINCE: Final = "5m"
_LINE: Final = 512
_MAX_DETAILS: Final = 256 * 1024
_ORDER: Final = {"HIGH": 0, "MEDIUM": 1, "LOW": 2}


class FleetArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to ask the nodes."""

    action: Annotated[
        Literal["chains", "ops", "overview", "sql"],
        msgspec.Meta(description="incidents, operations, what is recorded, or one SELECT"),
    ]
    since: Annotated[
        str, msgspec.Meta(description="duration back from each node's last event; empty for all")
    ] = "5m"
    pid: Annotated[int, msgspec.Meta(ge=0, description="one process")] = 0
    query: Annotated[str, msgspec.Meta(description="the SELECT, for sql")] = ""
    sql: Annotated[str, msgspec.Meta(description="another name for query")] = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS, description="rows of one page")] = 100
    cursor: str = ""
    tsc: Tsc = True


class FleetNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """One node: whether it answered, and how far its clock is off."""

    node: str
    error: Annotated[str, msgspec.Meta(description="why it did not answer")] = ""
    clock_ms: float | None = None


class FleetAnswer(msgspec.Struct, frozen=True):
    """One table of all nodes that answered; a node that failed is named, never an empty one."""

    nodes: list[FleetNode]
    columns: list[str]
    rows: list[list[Any]]
    warnings: list[str]
    next_cursor: str


def _query_fleet(context: RecordingFile, args: FleetArgs) -> FleetAnswer:
    ask = context.outside.ask_nodes
    if ask is None:
        raise UnsupportedError(
            "no nodes are configured", hint="start the server with --nodes HOST:PORT,HOST:PORT"
        )
    statement = args.query or args.sql
    if (args.action == "sql") != bool(statement):
        raise BadDataError("query is for the action sql, which needs it")
    if args.action == "sql" and (args.pid or args.since not in {"", _SINCE}):
        raise BadDataError("since and pid choose no rows of sql", hint="say it in its WHERE")
    if args.action == "sql":
        answers: list[NodeAnswer] = ask("query", {"sql": statement, "limit": MAX_ROWS})
    else:
        given = {"since": args.since, "pid": args.pid or ""}
        asked = urlencode({name: value for name, value in given.items() if value})
        answers = ask(f"{args.action}?{asked}" if asked else args.action, None)
    columns, rows, warnings = _tabulate(args.action, answers)
    page, after = cut_page(rows, args.limit, args.cursor)
    return FleetAnswer(
        [FleetNode(clean(a.node), clean(a.error, _LINE), a.clock_offset_ms) for a in answers],
        columns,
        [[clean(cell, _LINE) if isinstance(cell, str) else cell for cell in row] for row in page],
        [clean(warning, _LINE) for warning in warnings],
        after,
    )


def _tabulate(
    action: str, answers: list[NodeAnswer]
) -> tuple[list[str], list[list[Any]], list[str]]:
    """Columns, rows and warnings of one action."""
    if action == "sql":
        joined = join_rows(answers, _SKEW_MS)
        return joined.columns, joined.rows, joined.warnings
    columns, find = _TABLES[action]
    try:
        rows = [[a.node, *row] for a in answers if not a.error for row in find(a.body)]
    except (KeyError, TypeError, AttributeError) as error:
        raise BadDataError(
            f"a node answers in another shape: {error!r}",
            hint="use one version of ingero everywhere",
        ) from error
    if action == "chains":
        rows.sort(key=lambda row: _ORDER.get(row[1], len(_ORDER)))
    warnings = [f"{a.node}: {a.error}" for a in answers if a.error]
    warnings += [
        f"{a.node}: {blocks}" for a in answers if not a.error for blocks in _reservations(a.body)
    ]
    return ["node", *columns], rows, [*warnings, *clock_warnings(answers, _SKEW_MS)]


def _reservations(body: dict[str, Any]) -> Iterator[str]:
    """What one node's answer cannot say; a version that does not tell has none."""
    if undecided := body.get("undecided"):
        yield f"rules that could not decide: {', '.join(undecided)}"
    if missing := body.get("missing"):
        yield missing
    yield from body.get("not_probed", [])


def _chain_rows(body: dict[str, Any]) -> list[list[Any]]:
    return [
        [one["severity"], one["summary"], one["root_cause"], one["id"]] for one in body["chains"]
    ]


def _op_rows(body: dict[str, Any]) -> list[list[Any]]:
    names = (
        "operation",
        "process",
        "pid",
        "count",
        "p50_us",
        "p95_us",
        "p99_us",
        "wall_pct",
        "basis",
    )
    return [[one[name] for name in names] for one in body["ops"]]


def _overview_rows(body: dict[str, Any]) -> list[list[Any]]:
    worst = body.get("top_chain", {}).get("summary", "")
    return [[body["event_count"], body.get("duration_s", 0.0), body["incident_count"], worst]]


_TABLES: Final = {
    "chains": (["sev", "sum", "rc", "id"], _chain_rows),
    "ops": (["op", "pn", "p", "n", "p50", "p95", "p99", "w%", "basis"], _op_rows),
    "overview": (["events", "duration_s", "incidents", "worst"], _overview_rows),
}

FLEET = Query(
    name="query_fleet",
    title="The same of other nodes",
    description=(
        "Ask the dashboards of the nodes that the server was started with: incidents, operations, an overview, or one "
        "SELECT. One table, node first; nodes that failed are named; times are µs. Rows are not shifted by "
        "clock offsets."
    ),
    args=FleetArgs,
    result=FleetAnswer,
    run=_query_fleet,
    is_open_world=True,
)


class PagerArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to tell people."""

    summary: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    severity: Literal["info", "warning", "error", "critical"]
    source: Annotated[str, msgspec.Meta(max_length=256, description="what is affected")] = "ingero"
    dedup_key: Annotated[
        str, msgspec.Meta(max_length=255, description="repeats of one key are one incident")
    ] = ""
    custom_details: dict[str, Any] = {}


class PageAnswer(msgspec.Struct, frozen=True):
    """What PagerDuty said."""

    dedup_key: str
    status: str


def _page(context: RecordingFile, args: PagerArgs) -> PageAnswer:
    page = context.outside.page
    if page is None:
        raise UnsupportedError(
            "paging is not configured, so nothing was sent",
            hint="set INGERO_PAGERDUTY_KEY; over HTTP the server needs a bearer, too",
        )
    if len(msgspec.json.encode(args.custom_details)) > _MAX_DETAILS:
        raise BadDataError("custom_details are over 256 KiB", hint="send less")
    alert: dict[str, Any] = {
        "summary": clean(args.summary, 1024),
        "severity": args.severity,
        "source": clean(args.source),
        "custom_details": args.custom_details,
    }
    return PageAnswer(page(alert, clean(args.dedup_key)), "sent")


PAGE = Query(
    name="pagerduty_trigger",
    title="Page people",
    description=(
        "Open a PagerDuty incident: wakes people. Only when the user asked for it, and only with findings of the other "
        "tools. Answers an error and sends nothing unless the server was given a routing key."
    ),
    args=PagerArgs,
    result=PageAnswer,
    run=_page,
    is_read_only=False,
    is_open_world=True,
)
