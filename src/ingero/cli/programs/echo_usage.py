"""``ingero-echo usage``: who had how much kept, for people and programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import click

from ingero.cli.programs.echo_asker import EchoAsker
from ingero.cli.render import plural
from ingero.units import format_size

_TOOL: Final = "fleet.cluster.usage"
_LIMIT: Final = 1000


@click.command("usage")
@click.option(
    "--url", default="http://127.0.0.1:8081", show_default=True, help="Echo's MCP and API."
)
@click.option("--token-file", metavar="FILE", help="File with the bearer token.")
@click.option(
    "--ca-file", metavar="FILE", help="Authority of Echo's certificate; default: the system's."
)
@click.option("--cluster-id", help="One cluster; default: every one that the token may read.")
@click.option(
    "--window", default="30d", show_default=True, metavar="DURATION", help="How far back from now."
)
@click.option(
    "--step",
    type=click.Choice(["window", "day", "hour"]),
    default="window",
    show_default=True,
    help="A row for all of the window, or for each day or hour of it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print Echo's rows as one JSON object.")
def usage(
    url: str,
    token_file: str | None,
    ca_file: str | None,
    cluster_id: str | None,
    window: str,
    step: str,
    *,
    as_json: bool,
) -> None:
    r"""Tell how many rows, bytes and series each bearer had kept, by cluster, and when.

    Bytes are those of values, not compressed; bearers are named by the first characters of the token's SHA-256, as in
    the audit log. Echo counts every five minutes.

    \b
    Examples:
      ingero-echo usage --token-file token
      ingero-echo usage --token-file token --window 7d --step day --json | jq '.rows[0]'
    """
    arguments = {"time_window": window, "step": step, "limit": _LIMIT}
    if cluster_id:
        arguments["cluster_id"] = cluster_id
    with EchoAsker(url, token_file, ca_file) as asker:
        answer = asker.ask(_TOOL, arguments)
    if answer["n_cut"]:
        cut = plural(answer["n_cut"], "row")
        click.echo(f"warning: {cut} left out; ask for a shorter window", err=True)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    for line in build_lines(answer["rows"], with_time=step != "window"):
        click.echo(line)


def build_lines(rows: Sequence[Mapping[str, Any]], *, with_time: bool) -> Iterator[str]:
    """The report for people."""
    if not rows:
        yield "nothing was kept in this window, or it was not counted yet"
    for row in rows:
        who = row["bearer"] or "(counted at a start)"
        series = "" if row["n_series"] is None else f", {row['n_series']} series"
        when = f"{row['since'][:16]}Z  " if with_time else ""
        yield (
            f"{when}{row['cluster_id']}  {who}  {plural(row['n_rows'], 'row')}, "
            f"{format_size(row['n_bytes'])}{series}, last {row['last'][:16]}Z"
        )
