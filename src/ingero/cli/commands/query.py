"""``ingero query``: rows of a recording, by filter or by SQL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import click

from ingero.cli.options import read_pids
from ingero.cli.rolled import INCLUDE_ROLLED, open_with_rolled
from ingero.cli.serving import NODE_OPTIONS, NodeOptions, add_options

_MOST_ROWS: Final = 10_000


@click.command("query")
@click.argument("sql", required=False)
@click.option(
    "--db",
    type=click.Path(path_type=Path),
    help="Recording to read.  [default: $INGERO_DB or ~/.ingero/ingero.db]",
)
@click.option(
    "--since",
    default="",
    metavar="DURATION",
    help="Only this long before the last event (without SQL).",
)
@click.option(
    "--pid",
    "-p",
    "pids",
    multiple=True,
    callback=read_pids,
    metavar="PID[,PID]",
    help="Only these processes (without SQL).",
)
@click.option(
    "--op",
    default="",
    metavar="NAME",
    help="Only this operation, such as cudaMemcpyAsync (without SQL).",
)
@click.option(
    "--limit",
    type=click.IntRange(0, _MOST_ROWS),
    default=_MOST_ROWS,
    show_default=True,
    help="Rows at most; 0 is the default.",
)
@click.option(
    "--timeout",
    default="30s",
    show_default=True,
    metavar="DURATION",
    help="Time a statement may take.",
)
@INCLUDE_ROLLED
@add_options(NODE_OPTIONS)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of objects.")
def command(
    *, sql: str | None, db: Path | None, since: str, pids: tuple[int, ...], op: str, limit: int,
    timeout: str, as_json: bool, nodes: str, ca_cert: str, client_cert: str, client_key: str, no_tls: bool,
    skew: str, include_rolled: bool,
) -> None:  # fmt: skip
    r"""Show events, or ask one SELECT of the recording.

    The file is opened read-only and SQLite itself refuses everything but reading: no write, no attach, no pragma.

    \b
    Examples:
      ingero query --db run.db --op cudaMemcpyAsync --since 10s
      ingero query --db run.db "SELECT source, count(*) FROM events GROUP BY source" --json
      ingero query --db run.db "SELECT name, seen_at FROM process_names"
      ingero query --nodes gpu-1:8443,gpu-2:8443 --ca-cert ca.pem "SELECT count(*) FROM events"
    """
    from ingero.config.database import default_database

    path, limit = db or default_database(), limit or _MOST_ROWS
    among = NodeOptions(nodes, ca_cert, client_cert, client_key, no_tls, skew)
    if among.nodes:
        if sql is None or db is not None:
            raise click.UsageError("--nodes takes SQL and no --db")
        _show_nodes(among, sql, limit, timeout, as_json=as_json)
        return
    with open_with_rolled(path, is_wanted=include_rolled) as whole:
        _show_file(whole, sql, (since, pids, op, limit), timeout, as_json=as_json)


def _show_file(
    path: Path,
    sql: str | None,
    asked: tuple[str, tuple[int, ...], str, int],
    timeout: str,
    *,
    as_json: bool,
) -> None:
    since, pids, op, limit = asked
    if sql is not None:
        if since or pids or op:
            raise click.UsageError(
                "--since, --pid and --op filter events; with SQL, say it in WHERE"
            )
        _show_sql(path, sql, limit, timeout, as_json=as_json)
    else:
        _show_events(path, asked, as_json=as_json)


def _show_sql(path: Path, sql: str, limit: int, timeout: str, *, as_json: bool) -> None:
    from ingero.model.recording import Recording
    from ingero.recording.queries.sql import plain_value
    from ingero.recording.store.reader import read_unwritten
    from ingero.recording.store.sql import SqlLimits, run_sql
    from ingero.units import parse_duration

    try:
        timeout_ns = parse_duration(timeout)
    except ValueError as error:
        raise click.UsageError(f"--timeout: {error}") from error
    answer = run_sql(path, sql, SqlLimits(limit, timeout_ns))
    rows = [[plain_value(value) for value in row] for row in answer.rows]
    if as_json:
        click.echo(
            json.dumps([dict(zip(answer.columns, row, strict=True)) for row in rows], indent=2)
        )
    else:
        click.echo(_as_table(list(answer.columns), rows))
    more = "; there are more: raise --limit or aggregate" if answer.is_truncated else ""
    click.echo(f"({len(rows)} rows in {answer.duration_ns / 1e6:.1f} ms{more})", err=True)
    if missing := Recording(unwritten=read_unwritten(path)).say_missing():
        click.echo(missing, err=True)


def _show_nodes(among: NodeOptions, sql: str, limit: int, timeout: str, *, as_json: bool) -> None:
    from ingero.recording.queries.fanout import clock_line, join_rows

    answers, skew_ms = among.ask("query", {"sql": sql, "limit": limit}, timeout)
    joined = join_rows(answers, skew_ms)
    if as_json:
        click.echo(
            json.dumps(
                [dict(zip(joined.columns, row, strict=True)) for row in joined.rows], indent=2
            )
        )
    else:
        click.echo(_as_table(joined.columns, joined.rows))
    for warning in joined.warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(clock_line(answers), err=True)
    n_answered = sum(not answer.error for answer in answers)
    click.echo(f"({len(joined.rows)} rows from {n_answered} of {len(answers)} nodes)", err=True)


def _show_events(
    path: Path, asked: tuple[str, tuple[int, ...], str, int], *, as_json: bool
) -> None:
    import msgspec

    from ingero.recording.queries.events import list_events
    from ingero.recording.queries.window import Wanted, load_part

    since, pids, op, limit = asked
    recording = load_part(path, Wanted(since=since, pids=pids, has_extras=True))
    rows = list_events(recording, op=op, limit=limit)
    if as_json:
        click.echo(json.dumps([msgspec.to_builtins(row) for row in rows], indent=2))
    else:
        heads = ["TIME", "PID", "TID", "PROCESS", "OPERATION", "DURATION"]
        lines = [[r.timestamp, r.pid, r.tid, r.comm, r.op, r.duration] for r in rows]
        click.echo(_as_table(heads, lines))
    click.echo(f"({len(rows)} of {recording.n_events_stored} events)", err=True)
    if missing := recording.say_missing():
        click.echo(missing, err=True)


def _as_table(heads: list[str], rows: list[list[Any]]) -> str:
    """Columns padded to their widest value, numbers to the right."""
    texts = [["" if value is None else str(value) for value in row] for row in rows]
    widths = [max(len(head), *(len(row[i]) for row in texts), 0) for i, head in enumerate(heads)]
    is_number = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(heads))]
    lines = [
        "  ".join(
            text.rjust(width) if number else text.ljust(width)
            for text, width, number in zip(row, widths, is_number, strict=True)
        ).rstrip()
        for row in [heads, *texts]
    ]
    return "\n".join(lines)
