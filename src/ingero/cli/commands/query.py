"""``ingero query``: rows of a recording, by filter or by SQL."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click

from ingero.cli.options import database, group, json_switch, option, process_ids, with_config
from ingero.cli.rolled import open_with_rolled, with_rolled
from ingero.cli.serving import NodesConfig

MAX_ROWS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryConfig:
    """The options of ``ingero query``."""

    db: Path | None = database()
    since: str = option(
        "Only this long before the last event (without SQL).", default="", metavar="DURATION"
    )
    pids: tuple[int, ...] = process_ids("Only these processes (without SQL).")
    op: str = option(
        "Only this operation, such as cudaMemcpyAsync (without SQL).", default="", metavar="NAME"
    )
    limit: int = option(
        "Rows at most; 0 is the default.", default=MAX_ROWS, type=click.IntRange(0, MAX_ROWS)
    )
    timeout: str = option("Time a statement may take.", default="30s", metavar="DURATION")
    annotations: bool = option(
        "Show what the workload said of itself at each event (ingero annotate; without SQL).",
        default=False,
    )
    include_rolled: bool = with_rolled()
    among: NodesConfig = group()
    as_json: bool = json_switch("Print a JSON list of objects.")


@click.command("query")
@click.argument("sql", required=False)
@with_config(QueryConfig)
def command(config: QueryConfig, sql: str | None) -> None:
    r"""Show events, or ask one SELECT of the recording.

    The file is opened read-only and SQLite itself refuses everything but reading: no write, no attach, no pragma.

    \b
    Examples:
      ingero query --db run.db --op cudaMemcpyAsync --since 10s
      ingero query --db run.db "SELECT source, count(*) FROM events GROUP BY source" --json
      ingero query --db run.db "SELECT name, seen_at FROM process_names"
      ingero query --nodes gpu-1:8443,gpu-2:8443 --ca-cert ca.pem "SELECT count(*) FROM events"
    """
    from ingero.config.environment import default_database

    config = replace(config, limit=config.limit or MAX_ROWS)
    if sql is not None and (config.since or config.pids or config.op or config.annotations):
        raise click.UsageError(
            "--since, --pid, --op and --annotations are about events; with SQL, say it there"
        )
    if config.among.nodes:
        if sql is None or config.db is not None or config.include_rolled:
            raise click.UsageError("--nodes takes SQL, no --db and no --include-rolled")
        _show_nodes(config, sql)
        return
    path = config.db or default_database()
    with open_with_rolled(path, is_wanted=config.include_rolled) as whole:
        if sql is None:
            _show_events(whole, config)
        else:
            _show_sql(whole, sql, config)


def _show_sql(path: Path, sql: str, config: QueryConfig) -> None:
    from ingero.model.recording import Recording
    from ingero.recording.queries.sql import plain_rows, plain_value
    from ingero.recording.store.reader import read_unwritten
    from ingero.recording.store.sql import MAX_BYTES, SqlLimits, run_sql
    from ingero.units import format_size, parse_duration

    try:
        timeout_ns = parse_duration(config.timeout)
    except ValueError as error:
        raise click.UsageError(f"--timeout: {error}") from error
    answer = run_sql(path, sql, SqlLimits(config.limit, timeout_ns))
    rows = answer.rows
    if config.as_json:
        objects = [dict(zip(answer.columns, row, strict=True)) for row in plain_rows(answer)]
        click.echo(json.dumps(objects, indent=2))
    else:
        shown = [[plain_value(value) for value in row] for row in rows]
        click.echo(_as_table(list(answer.columns), shown))
    more = ""
    if answer.is_truncated and len(rows) < config.limit:
        more = f"; there are more, beyond {format_size(MAX_BYTES)}: select less or aggregate"
    elif answer.is_truncated:
        next_step = "raise --limit" if config.limit < MAX_ROWS else "narrow it with WHERE"
        more = f"; there are more: {next_step} or aggregate"
    click.echo(f"({len(rows)} rows in {answer.duration_ns / 1e6:.1f} ms{more})", err=True)
    if missing := Recording(unwritten=read_unwritten(path)).describe_missing():
        click.echo(missing, err=True)


def _show_nodes(config: QueryConfig, sql: str) -> None:
    from ingero.recording.queries.fanout import clock_line, join_rows

    answers, skew_ms = config.among.ask(
        "query", {"sql": sql, "limit": config.limit}, config.timeout
    )
    joined = join_rows(answers, skew_ms)
    if config.as_json:
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


def _show_events(path: Path, config: QueryConfig) -> None:
    import msgspec

    from ingero.recording.queries.events import list_events
    from ingero.recording.queries.window import Wanted, load_part
    from ingero.recording.store.annotations import read_annotations

    wanted = Wanted(since=config.since, pids=config.pids, has_extras=True)
    recording = load_part(path, wanted)
    annotations = read_annotations(path) if config.annotations else ()
    listed = list_events(recording, op=config.op, limit=config.limit, annotations=annotations)
    rows = listed.rows
    if config.as_json:
        click.echo(json.dumps([msgspec.to_builtins(row) for row in rows], indent=2))
    elif config.annotations:
        lines = [
            [
                r.timestamp,
                r.pid,
                r.op,
                " ".join(f"{key}={r.labels[key]}" for key in sorted(r.labels)),
            ]
            for r in rows
        ]
        click.echo(_as_table(["TIME", "PID", "OPERATION", "LABELS"], lines))
    else:
        heads = ["TIME", "PID", "TID", "PROCESS", "OPERATION", "DURATION"]
        lines = [[r.timestamp, r.pid, r.tid, r.comm, r.op, r.duration] for r in rows]
        click.echo(_as_table(heads, lines))
    found = f"{len(rows)}"
    if listed.n_found > len(rows):
        found = f"the newest {len(rows)} of {listed.n_found} that were asked for,"
    click.echo(f"({found} of {recording.n_events_stored} events)", err=True)
    if missing := recording.describe_missing():
        click.echo(missing, err=True)


def _as_table(heads: list[str], rows: list[list[Any]]) -> str:
    """Columns padded to their widest value, numbers to the right; nothing that a terminal would obey."""
    from ingero.model.untrusted import clean_whole

    heads = [clean_whole(head) for head in heads]
    texts = [["" if value is None else clean_whole(str(value)) for value in row] for row in rows]
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
