"""``ingero-echo report``: what waiting cost by week, for people, programs and FinOps tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click

from ingero.cli.programs.echo_asker import EchoAsker
from ingero.cli.programs.echo_focus import FOCUS_FORMATS, build_focus
from ingero.cli.render import plural

_WEEKS: Final = "fleet.cluster.cost_by_week"
_SAVINGS: Final = "fleet.cluster.savings"
_LIMIT: Final = 1000
_MAX_ACTIONS: Final = 25
_TOP: Final = 20
"""Rows of a week that people are shown."""
_HOUR_S: Final = 3600.0
Row = Mapping[str, Any]


@click.command("report")
@click.option(
    "--url", default="http://127.0.0.1:8081", show_default=True, help="Echo's MCP and API."
)
@click.option("--token-file", metavar="FILE", help="File with the bearer token.")
@click.option(
    "--ca-file", metavar="FILE", help="Authority of Echo's certificate; default: the system's."
)
@click.option("--cluster-id", help="One cluster; default: every one that the token may read.")
@click.option(
    "--weeks",
    type=click.IntRange(1, 104),
    default=4,
    show_default=True,
    help="How many, the current one included.",
)
@click.option("--json", "as_json", is_flag=True, help="Print Echo's answers as one JSON object.")
@click.option(
    "--focus",
    type=click.Choice(list(FOCUS_FORMATS)),
    is_flag=False,
    flag_value="csv",
    help="Print rows with the columns of FOCUS 1.4; csv where no format is given.",
)
def report(
    url: str,
    token_file: str | None,
    ca_file: str | None,
    cluster_id: str | None,
    weeks: int,
    *,
    as_json: bool,
    focus: str | None,
) -> int:
    r"""Tell what waiting for slow ranks cost in each week, whom it is charged to, and what was done about it.

    Weeks begin on Monday, UTC. It is the cost of GPU time that your provider bills already: a part of that bill, not
    beside it. FOCUS rows therefore have it as effective cost and 0 as billed cost; those without a price are left out.
    What an action saved is estimated; the last line says on what that rests.

    \b
    Examples:
      ingero-echo report --token-file token
      ingero-echo report --url https://echo:8081 --token-file token --weeks 8 --json | jq '.rows[0]'
      ingero-echo report --token-file token --focus > waiting.csv
      ingero-echo report --token-file token --focus=ndjson > waiting.ndjson
    """
    if as_json and focus:
        raise click.UsageError("--json and --focus are two formats: choose one")
    asked = _build_arguments(datetime.now(UTC), weeks, cluster_id)
    with EchoAsker(url, token_file, ca_file) as asker:
        if focus:
            rows = asker.ask_rows(_WEEKS, asked)
            _warn_of_unpriced(rows)
            click.echo(FOCUS_FORMATS[focus](build_focus(rows)), nl=False)
            return 0
        answer = asker.ask(_WEEKS, asked | {"limit": _LIMIT})
        acted = asker.ask(_SAVINGS, asked | {"limit": _MAX_ACTIONS})
    for cut, what in ((answer["n_cut"], "row"), (acted["n_cut"], "action")):
        if cut:
            note = f"warning: {plural(cut, what)} of the oldest weeks left out; ask for fewer weeks"
            click.echo(note, err=True)
    if as_json:
        click.echo(json.dumps(answer | {"actions": acted}, indent=2))
        return 0
    for line in build_lines(answer, acted):
        click.echo(line)
    return 0


def _warn_of_unpriced(rows: Sequence[Row]) -> None:
    unpriced = sum(row["amount"] is None for row in rows)
    if unpriced:
        note = f"note: {plural(unpriced, 'row')} without a price left out; give Fleet your prices"
        click.echo(note, err=True)


def _build_arguments(now: datetime, weeks: int, cluster_id: str | None) -> dict[str, Any]:
    """From the Monday on which the first week begins, to the second."""
    monday = (now - timedelta(days=now.weekday())).replace(
        hour=0, minute=0, second=0, microsecond=0
    )
    window = now.replace(microsecond=0) - (monday - timedelta(weeks=weeks - 1))
    asked: dict[str, Any] = {
        "time_window": f"{window.days}d{window.seconds}s",
        "until": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    return asked | ({"cluster_id": cluster_id} if cluster_id else {})


def build_lines(answer: Mapping[str, Any], acted: Mapping[str, Any]) -> Iterator[str]:
    """The report for people, newest week first: sums, whom they are charged to, and what was done."""
    if not answer["totals"] and not acted["savings"]:
        yield "no cost of waiting is known in these weeks"
        return
    rows, actions = _by_week(answer["rows"], "week"), _by_week(acted["savings"], "acted_at")
    totals = _by_week(answer["totals"], "week")
    for week in sorted({*totals, *actions}, reverse=True):
        yield click.style(f"week of {week}: {_sum_totals(totals.get(week, []))}", bold=True)
        of_week = rows.get(week, [])
        yield from (f"  {_name(row)}: {_sum_up([row])}" for row in of_week[:_TOP])
        if len(of_week) > _TOP:
            yield f"  and {len(of_week) - _TOP} more with smaller losses; --json has them"
        for action in actions.get(week, []):
            yield f"  action on {_name(action)}: {_tell_saved(action)}"
    if acted["savings"]:
        yield f"assumed: {acted['assumption']}; not seen: {acted['not_seen']}"


def _by_week(rows: Iterable[Row], column: str) -> dict[str, list[Row]]:
    """Rows by the Monday that a time of theirs is after."""
    weeks: dict[str, list[Row]] = {}
    for row in rows:
        at = datetime.fromisoformat(row[column]).astimezone(UTC)
        weeks.setdefault(f"{at - timedelta(days=at.weekday()):%Y-%m-%d}", []).append(row)
    return weeks


def _name(row: Row) -> str:
    rank = "" if row["rank"] is None or row["rank"] < 0 else f" rank {row['rank']}"
    job = f" of job {row['job']}" if row.get("job") else ""
    return f"{row['cluster_id']} {row['node_id'] or 'nobody in particular'}{rank}{job}"


def _tell_saved(action: Row) -> str:
    seconds, amount = action["saved_gpu_seconds"], action["saved_amount"]
    if seconds is None:
        return f"not known what it saved: {action['unknown']}"
    verb = "saved" if seconds >= 0 else "cost more than it saved:"
    money = "" if amount is None else f", {abs(amount):.2f} {action['currency']}"
    error = _format_gpu_time(action["saved_standard_error_gpu_seconds"])
    stood = _format_gpu_time(action["standstill_gpu_seconds"])
    return f"{verb} {_format_gpu_time(abs(seconds))} (± {error}){money}, after {stood} of standing still"


def _sum_totals(totals: Iterable[Row]) -> str:
    parts = list(totals)
    if not parts:
        return "no cost of waiting is known"
    rows = [
        {
            "gpu_seconds": part["charged_gpu_seconds"] + part["unattributed_gpu_seconds"],
            "amount": None
            if part["currency"] is None
            else (part["charged_amount"] or 0.0) + (part["unattributed_amount"] or 0.0),
            "currency": part["currency"],
        }
        for part in parts
    ]
    charged_s = sum(part["charged_gpu_seconds"] for part in parts)
    return f"{_sum_up(rows)}; {_format_gpu_time(charged_s)} charged to nodes"


def _sum_up(rows: Iterable[Row]) -> str:
    """GPU time, and money by currency."""
    all_rows = list(rows)
    seconds = sum(row["gpu_seconds"] or 0.0 for row in all_rows)
    spent: dict[str, float] = {}
    for row in all_rows:
        if row["amount"] is not None:
            spent[row["currency"]] = spent.get(row["currency"], 0.0) + row["amount"]
    shown = _format_gpu_time(seconds)
    return ", ".join([shown, *(f"{amount:.2f} {currency}" for currency, amount in spent.items())])


def _format_gpu_time(seconds: float) -> str:
    if abs(seconds) >= _HOUR_S:
        return f"{seconds / _HOUR_S:.1f} GPU-hours"
    return f"{seconds:.1f} GPU-seconds"
