"""What every question shares: arguments for cluster and time, the tenant's filter, paging, and the answer's frame."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Generic, TypeVar, get_args, get_origin

import msgspec

from ingero.echo.db.reader import Reader
from ingero.echo.db.writer import EPOCH
from ingero.errors import BadDataError
from ingero.units import NS_PER_US, parse_duration

RowT = TypeVar("RowT", bound=msgspec.Struct)
AnswerT = TypeVar("AnswerT", bound="Answer")

_RFC_3339: Final = re.compile(
    r"(?i)(\d{4}-\d\d-\d\dT\d\d:\d\d:)(\d\d)((?:\.\d+)?(?:Z|[+-]\d\d:[0-5]\d))"
)
LATEST: Final = "latest"
_IN_TIME: Final = "ts >= ? AND ts < ? AND "
NODE_OF_EVENT: Final = (
    "CASE WHEN metric_name LIKE 'ingero_fleet_%' AND node_id = host_attr THEN NULL "
    "ELSE nullif(node_id, '') END"
)
"""The node that a row of ``events`` is about; none where Fleet reports on a whole cluster as its own host."""
MAX_LIMIT: Final = 1000

# In Python a `$` also stands before a last line feed, in JSON Schema it does not: `(?!\n)$` is the same in both.
ClusterId = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[A-Za-z0-9_.-]{1,64}(?!\n)$",
        description="One cluster; left out, every cluster that this bearer may read.",
    ),
]
TimeWindow = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^([0-9]{1,6}(ms|s|m|h|d)){1,4}(?!\n)$",
        description="How far back from `until`: 15m, 1h, 1h30m, 7d.",
        max_length=16,
    ),
]
Until = Annotated[
    str,
    msgspec.Meta(
        max_length=40,
        description="End of the window: `now`, `latest` (the newest data there is), or an RFC 3339 time.",
        extra_json_schema={"anyOf": [{"enum": ["now", "latest"]}, {"format": "date-time"}]},
    ),
]
NodeId = Annotated[
    str, msgspec.Meta(min_length=1, max_length=256, description="A node, as its agent names it.")
]
MetricName = Annotated[
    str,
    msgspec.Meta(min_length=1, max_length=256, description="A metric's name, as it was sent."),
]
Limit = Annotated[int, msgspec.Meta(ge=1, le=MAX_LIMIT, description="Most rows in the answer.")]
Severity = Annotated[str, msgspec.Meta(description="warn, error or critical.")]


class ClusterRefusedError(BadDataError):
    """The question names a cluster outside the bearer's list; says nothing about whether it exists."""


class TimeWindowArgs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Arguments of every question about a time."""

    cluster_id: ClusterId | None = None
    time_window: TimeWindow = "1h"
    until: Until = "now"


class ListArgs(TimeWindowArgs, kw_only=True, forbid_unknown_fields=True):
    """The same for questions whose answer is a list."""

    limit: Limit = 100


class Window(msgspec.Struct, kw_only=True):
    """The time that an answer is about: start included, end not."""

    start: datetime
    end: datetime
    cluster_id: str | None


class AnswerCoverage(msgspec.Struct, kw_only=True):
    """What an answer rests on; no rows means unknown, not healthy."""

    source: Annotated[str, msgspec.Meta(description="Tables that were read.")]
    n_rows: Annotated[int, msgspec.Meta(description="Rows of them inside the window.")]
    n_nodes: Annotated[int, msgspec.Meta(description="Nodes among those rows.")]
    first: datetime | None
    last: datetime | None


class Answer(msgspec.Struct, kw_only=True):
    """The frame of every answer."""

    window: Window
    coverage: AnswerCoverage
    n_cut: Annotated[
        int,
        msgspec.Meta(
            description="Rows that the limit left out, or in JSON the bound of 8 MiB on an answer's rows."
        ),
    ] = 0


class ListAnswer(Answer, Generic[RowT], kw_only=True):
    """The frame and the rows, in the order that the query's description names."""

    rows: list[RowT]


_PLACES: Final = re.compile(r"\{where\}|\{clusters\}")


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """A resolved window.

    Attributes:
        start: Included.
        end: Not included.
        cluster_id: As asked.
        where: SQL condition on ``ts`` and ``cluster_id``, with `params`.
        params: Its parameters.
    """

    start: datetime
    end: datetime
    cluster_id: str | None
    where: str
    params: tuple[Any, ...]

    @property
    def of_clusters(self) -> tuple[str, tuple[Any, ...]]:
        """The condition on ``cluster_id`` alone, and its parameters: for what does not belong to a time."""
        return self.where.removeprefix(_IN_TIME), self.params[2:]

    def reaching_back(self, least: timedelta) -> TimeSpan:
        """The same, begun at least so long before its end."""
        first = max(self.end, datetime.min + least) - least  # noqa: DTZ901 - naive UTC, as the store has it
        start = min(self.start, first)
        return replace(self, start=start, params=(start, *self.params[1:]))

    def bind(self, sql: str) -> tuple[str, tuple[Any, ...]]:
        """A statement with the condition at each ``{where}`` or ``{clusters}``, and the parameters of these."""
        clusters, of_clusters = self.of_clusters
        given = {"{where}": self.params, "{clusters}": of_clusters}
        params = tuple(one for place in _PLACES.findall(sql) for one in given[place])
        return sql.replace("{where}", self.where).replace("{clusters}", clusters), params


@dataclass(frozen=True, slots=True)
class SqlAnswer:
    """What a tenant's statement gave.

    Attributes:
        columns: Names, of which none repeats.
        rows: JSON-able values, one list per row.
        is_cut: There was more.
        n_unseen: Rows of the tables it names that the statement was not given.
    """

    columns: list[str]
    rows: list[list[Any]]
    is_cut: bool
    n_unseen: int = 0


SqlRunner = Callable[[str, TimeSpan, int], SqlAnswer]


@dataclass(frozen=True, slots=True)
class PageStatement:
    """The rows of an answer as a statement that was not run yet.

    Attributes:
        row: What a row is; its fields name the columns.
        sql: Ordered, without the limit.
        params: Its parameters.
        limit: Most rows.
    """

    row: type[msgspec.Struct]
    sql: str
    params: tuple[Any, ...]
    limit: int


@dataclass(frozen=True, slots=True)
class QueryContext:
    """What one query is answered with.

    Attributes:
        reader: A cursor with a deadline.
        clusters: What the bearer may read; None is everything.
        now_ns: Wall time of the question.
        run_sql: Runs a tenant's statement in the sandbox on the rows of a span.
        pages: Where `page` leaves its statement instead of running it, for an answer whose rows are streamed.
    """

    reader: Reader
    clusters: frozenset[str] | None
    now_ns: int
    run_sql: SqlRunner
    pages: list[PageStatement] | None = None

    def span(self, args: TimeWindowArgs, *tables: str) -> TimeSpan:
        """Resolve a question's window and its tenant filter.

        Args:
            args: The question's.
            tables: Where ``latest`` is looked up; the newest row of any is inside the window, those of other tables
                may lie after it. ``events`` when none is named.

        Raises:
            ClusterRefusedError: The cluster is not the bearer's.
            BadDataError: The times cannot be.
        """
        where, params = self._clusters(args.cluster_id)
        end = self._end(args.until, tables or ("events",), where, params)
        try:
            start = end - timedelta(microseconds=parse_duration(args.time_window) // NS_PER_US)
        except OverflowError:
            start = datetime.min  # noqa: DTZ901 - naive UTC, as the store has it
        return TimeSpan(
            start,
            end,
            args.cluster_id,
            f"{_IN_TIME}{where}",
            (start, end, *params),
        )

    def _clusters(self, cluster_id: str | None) -> tuple[str, tuple[str, ...]]:
        if cluster_id is not None:
            if self.clusters is not None and cluster_id not in self.clusters:
                raise ClusterRefusedError("this bearer may not read that cluster")
            return "cluster_id = ?", (cluster_id,)
        if self.clusters is None:
            return "TRUE", ()
        names = tuple(sorted(self.clusters))
        return f"cluster_id IN ({', '.join('?' * len(names))})", names

    def _end(
        self, until: str, tables: tuple[str, ...], where: str, params: tuple[str, ...]
    ) -> datetime:
        now = EPOCH + timedelta(microseconds=self.now_ns // NS_PER_US + 1)
        if until == "now":
            return now
        if until == LATEST:
            found = [
                self.reader.row(f"SELECT max(ts) FROM {table} WHERE {where}", params)[0]
                for table in tables
            ]
            newest = max((one for one in found if one is not None), default=None)
            return now if newest is None else newest + timedelta(microseconds=1)
        return _parse_time(until)

    def answer(
        self,
        answer: type[AnswerT],
        span: TimeSpan,
        statement: tuple[str, Sequence[Any]],
        limit: int,
        coverage: AnswerCoverage,
        **more: Any,  # noqa: ANN401 - fields of any type
    ) -> AnswerT:
        """Fill an answer whose ``rows`` are a statement's.

        Args:
            answer: What is answered; the type of its ``rows`` names the columns.
            span: The window that it is about.
            statement: An ordered statement and its parameters.
            limit: Maximum number of rows.
            coverage: What it rests on.
            more: Its other fields.
        """
        (rows,) = (field for field in msgspec.structs.fields(answer) if field.name == "rows")
        more["rows"], n_cut = self.page(_get_row_type(rows.type), *statement, limit)
        return answer(window=window_of(span), coverage=coverage, n_cut=n_cut, **more)

    def page(
        self, row: type[RowT], sql: str, params: Sequence[Any], limit: int
    ) -> tuple[list[RowT], int]:
        """The first rows of an ordered statement, and how many are left out; no rows where `pages` is set."""
        if self.pages is not None:
            self.pages.append(PageStatement(row, sql, tuple(params), limit))
            return [], 0
        found, n_all = self.reader.page_rows(sql, params, limit)
        return [row(*_aware(values)) for values in found], n_all - len(found)

    def all(self, row: type[RowT], sql: str, params: Sequence[Any]) -> list[RowT]:
        """Every row of a statement whose answer is small by nature."""
        return [row(*_aware(values)) for values in self.reader.rows(sql, params)]

    def coverage(
        self,
        span: TimeSpan,
        table: str,
        extra: str = "TRUE",
        node_id: str | None = None,
        metric_name: str | None = None,
    ) -> AnswerCoverage:
        """What one table holds inside the window, of one node and one metric where these are named.

        Args:
            span: The window.
            table: Its name; of a metric, one that has the column.
            extra: A condition of ours.
            node_id: A node.
            metric_name: A metric.
        """
        named = {"node_id": node_id, "metric_name": metric_name}
        chosen = {column: value for column, value in named.items() if value is not None}
        where = " AND ".join((span.where, extra, *(f"{column} = ?" for column in chosen)))
        node = NODE_OF_EVENT if table == "events" else "nullif(node_id, '')"
        n_rows, n_nodes, first, last = self.reader.row(
            f"SELECT count(*), count(DISTINCT {node}), min(ts), max(ts) FROM {table} WHERE {where}",
            (*span.params, *chosen.values()),
        )
        return AnswerCoverage(
            source=table, n_rows=n_rows, n_nodes=n_nodes, first=aware(first), last=aware(last)
        )


def build_list_run(
    answer: type[AnswerT],
    sql: str,
    table: str = "events",
    condition: str = "TRUE",
    others: tuple[str, ...] = (),
) -> Callable[[QueryContext, ListArgs], AnswerT]:
    """What runs a query whose answer is the rows of one statement on the window, and nothing more.

    Args:
        answer: Its frame and rows.
        sql: Ordered, with ``{where}`` wherever the window's condition belongs.
        table: What its coverage counts, and where the newest row is looked up.
        condition: Which rows of the table its coverage counts.
        others: Further tables where the newest row is looked up.
    """

    def run(context: QueryContext, args: ListArgs) -> AnswerT:
        span = context.span(args, table, *others)
        coverage = context.coverage(span, table, condition)
        return context.answer(answer, span, span.bind(sql), args.limit, coverage)

    return run


def _get_row_type(rows: Any) -> type[msgspec.Struct]:  # noqa: ANN401 - an annotation
    """The struct of ``list[Struct]``, also where that is annotated."""
    listed = rows.__origin__ if get_origin(rows) is Annotated else rows
    (row,) = get_args(listed)
    found: type[msgspec.Struct] = row
    return found


def _parse_time(text: str) -> datetime:
    """RFC 3339 into naive UTC; a leap second is the one before it, and what leaves the calendar stays at its edge."""
    found = _RFC_3339.fullmatch(text)
    if found is None:
        raise BadDataError(f"until {text!r} is no time; write 2026-01-31T12:00:00Z")
    try:
        to_minute, second, rest = found.groups()
        second = "59" if second == "60" else second
        moment = datetime.fromisoformat(f"{to_minute}{second}{rest}".upper())
    except ValueError as error:
        raise BadDataError(f"until {text!r} is no time: {error}") from error
    try:
        return moment.astimezone(UTC).replace(tzinfo=None)
    except OverflowError:
        return moment.replace(tzinfo=None)


def window_of(span: TimeSpan) -> Window:
    """The window as an answer shows it."""
    return Window(
        start=span.start.replace(tzinfo=UTC),
        end=span.end.replace(tzinfo=UTC),
        cluster_id=span.cluster_id,
    )


def aware(moment: datetime | None) -> datetime | None:
    """The store's UTC timestamp with its zone, so that it prints with a Z."""
    return None if moment is None else moment.replace(tzinfo=UTC)


def _aware(values: Sequence[Any]) -> list[Any]:
    return [aware(value) if isinstance(value, datetime) else value for value in values]
