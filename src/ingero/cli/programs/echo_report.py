"""``ingero-echo report``: what waiting cost by week, for people, programs and FinOps tools."""

from __future__ import annotations

import csv
import io
import json
import ssl
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ingero.cli.render import plural
from ingero.errors import BadDataError, IngeroError, RetryableError

if TYPE_CHECKING:
    import httpx

_TOOL: Final = "/api/v2/tools/fleet.cluster.cost_by_week"
_LIMIT: Final = 1000
_TIMEOUT_S: Final = 60.0
_HOUR_S: Final = 3600.0
FOCUS_COLUMNS: Final = (
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd", "BillingPeriodStart",
    "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargeFrequency", "ChargePeriodEnd", "ChargePeriodStart",
    "ConsumedQuantity", "ConsumedUnit", "ContractedCost", "EffectiveCost", "InvoiceIssuerName", "ListCost",
    "PricingQuantity", "PricingUnit", "ProviderName", "PublisherName", "ResourceId", "ResourceName", "ResourceType",
    "ServiceCategory", "ServiceName", "x_GpuModel", "x_Rank", "x_RemediationActions",
)  # fmt: skip
"""Source: FinOps Open Cost and Usage Specification 1.2, columns; names with ``x_`` are custom, as it allows."""

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
@click.option("--json", "as_json", is_flag=True, help="Print Echo's rows as one JSON object.")
@click.option("--focus", is_flag=True, help="Print CSV with the columns of FOCUS 1.2.")
def report(
    url: str,
    token_file: str | None,
    ca_file: str | None,
    cluster_id: str | None,
    weeks: int,
    *,
    as_json: bool,
    focus: bool,
) -> int:
    r"""Tell what waiting for slow ranks cost in each week, whom it is charged to, and what was done about it.

    Weeks begin on Monday, UTC. It is the cost of GPU time that your provider bills already: a part of that bill, not
    beside it. FOCUS rows therefore have it as effective cost and 0 as billed cost; those without a price are left out.

    \b
    Examples:
      ingero-echo report --token-file token
      ingero-echo report --url https://echo:8081 --token-file token --weeks 8 --json | jq '.rows[0]'
      ingero-echo report --token-file token --focus > waiting.csv
    """
    if as_json and focus:
        raise click.UsageError("--json and --focus are two formats: choose one")
    now = datetime.now(UTC)
    answer = _ask(url, token_file, ca_file, _build_arguments(now, weeks, cluster_id))
    rows: list[Row] = answer["rows"]
    if answer["n_cut"]:
        click.echo(
            f"warning: {plural(answer['n_cut'], 'row')} of the oldest weeks left out; ask for fewer weeks",
            err=True,
        )
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    elif focus:
        unpriced = [row for row in rows if row["amount"] is None]
        if unpriced:
            click.echo(
                f"note: {plural(len(unpriced), 'row')} without a price left out; give Fleet your prices",
                err=True,
            )
        click.echo(_write_csv(build_focus(rows)), nl=False)
    else:
        for line in build_lines(rows):
            click.echo(line)
    return 0


def _build_arguments(now: datetime, weeks: int, cluster_id: str | None) -> dict[str, Any]:
    """From the Monday on which the first week begins, to the second."""
    monday = (now - timedelta(days=now.weekday())).replace(
        hour=0, minute=0, second=0, microsecond=0
    )
    window = now.replace(microsecond=0) - (monday - timedelta(weeks=weeks - 1))
    asked: dict[str, Any] = {
        "time_window": f"{window.days}d{window.seconds}s",
        "until": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "limit": _LIMIT,
    }
    return asked | ({"cluster_id": cluster_id} if cluster_id else {})


def _ask(
    url: str, token_file: str | None, ca_file: str | None, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    import httpx

    try:
        headers = {}
        if token_file:
            headers["Authorization"] = f"Bearer {Path(token_file).read_text('ascii').strip()}"
        verify = ssl.create_default_context(cafile=ca_file)
    except (OSError, UnicodeDecodeError) as error:
        raise IngeroError(f"{ca_file or token_file} cannot be read: {error}") from error
    try:
        with httpx.Client(headers=headers, verify=verify, timeout=_TIMEOUT_S) as client:
            answer = client.post(f"{url.rstrip('/')}{_TOOL}", json={"args": arguments})
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RetryableError(
            f"no Echo answers at {url}: {str(error) or type(error).__name__}",
            hint="--url is its MCP and API address",
        ) from error
    return _read_answer(answer, url)


def _read_answer(answer: httpx.Response, url: str) -> dict[str, Any]:
    if answer.status_code == 401:
        raise IngeroError(f"{url} does not know this bearer", hint="give --token-file FILE")
    if answer.status_code == 404:
        raise IngeroError(f"{url} is no Echo that has this report", hint="its release may be older")
    try:
        document = answer.json()
    except ValueError as error:
        raise BadDataError(f"{url} answers {answer.status_code} with what is no JSON") from error
    if answer.status_code != 200:
        raise IngeroError(f"{url} answers {answer.status_code}: {document}"[:300])
    result: dict[str, Any] = document["result"]
    return result


def build_lines(rows: Sequence[Row]) -> Iterator[str]:
    """The report for people, newest week first."""
    if not rows:
        yield "no cost of waiting is known in these weeks"
    for week, those in groupby(rows, key=lambda row: str(row["week"])[:10]):
        of_week = list(those)
        yield click.style(f"week of {week}: {_sum_up(of_week)}", bold=True)
        for row in of_week:
            where = f"{row['cluster_id']} {row['node_id'] or 'nobody in particular'}"
            rank = f" rank {row['rank']}" if row["rank"] is not None and row["rank"] >= 0 else ""
            acted = f", {plural(row['n_actions'], 'action')} on it" if row["n_actions"] else ""
            yield f"  {where}{rank}: {_sum_up([row])}{acted}"


def _sum_up(rows: Iterable[Row]) -> str:
    """GPU time, and money by currency."""
    all_rows = list(rows)
    seconds = sum(row["gpu_seconds"] or 0.0 for row in all_rows)
    spent: dict[str, float] = {}
    for row in all_rows:
        if row["amount"] is not None:
            spent[row["currency"]] = spent.get(row["currency"], 0.0) + row["amount"]
    shown = (
        f"{seconds / _HOUR_S:.1f} GPU-hours"
        if abs(seconds) >= _HOUR_S
        else f"{seconds:.1f} GPU-seconds"
    )
    return ", ".join([shown, *(f"{amount:.2f} {currency}" for currency, amount in spent.items())])


def build_focus(rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """Rows with a price as records of FOCUS, the charged node as their resource."""
    for row in rows:
        if row["amount"] is None:
            continue
        start = datetime.fromisoformat(row["week"]).astimezone(UTC)
        begin, end = (_format_time(one) for one in (start, start + timedelta(weeks=1)))
        hours, amount = row["gpu_seconds"] / _HOUR_S, row["amount"]
        who = row["node_id"] or "no node in particular"
        yield {
            "BilledCost": 0,
            "BillingAccountId": row["cluster_id"], "BillingAccountName": row["cluster_id"],
            "BillingCurrency": row["currency"], "BillingPeriodEnd": end, "BillingPeriodStart": begin,
            "ChargeCategory": "Usage", "ChargeClass": "Correction" if amount < 0 else None,
            "ChargeDescription": f"GPUs that waited for {who}; a part of what the provider bills for them",
            "ChargeFrequency": "Usage-Based", "ChargePeriodEnd": end, "ChargePeriodStart": begin,
            "ConsumedQuantity": hours, "ConsumedUnit": "GPU-Hours",
            "ContractedCost": amount, "EffectiveCost": amount, "InvoiceIssuerName": "Ingero", "ListCost": amount,
            "PricingQuantity": hours, "PricingUnit": "GPU-Hours",
            "ProviderName": row["provider"] or "unknown", "PublisherName": "Ingero",
            "ResourceId": row["node_id"], "ResourceName": row["node_id"],
            "ResourceType": "Node" if row["node_id"] else None,
            "ServiceCategory": "AI and Machine Learning", "ServiceName": "Waiting for slow ranks",
            "x_GpuModel": row["gpu_model"], "x_Rank": row["rank"], "x_RemediationActions": row["n_actions"],
        }  # fmt: skip


def _format_time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _write_csv(records: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, FOCUS_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)  # None is written as nothing, which is FOCUS' null
    return text.getvalue()
