"""``ingero export``: a recording for other tools."""

from __future__ import annotations

from pathlib import Path

import click

from ingero.cli.render import plural


@click.command("export")
@click.option(
    "--format", "form", type=click.Choice(["perfetto"]), required=True, help="What to write."
)
@click.option(
    "--db",
    "-d",
    type=click.Path(path_type=Path),
    help="Recording to read.  [default: $INGERO_DB or ~/.ingero/ingero.db]",
)
@click.option(
    "--output",
    "-o",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write.",
)
@click.option(
    "--since", default="", metavar="DURATION", help="Only this long before the last event."
)
@click.option(
    "--pid", "-p", "pids", multiple=True, type=int, help="Only this process; repeat for more."
)
@click.option("--limit", type=click.IntRange(0), default=0, help="Only the newest N events.")
def command(
    *, form: str, db: Path | None, output: Path, since: str, pids: tuple[int, ...], limit: int
) -> None:
    r"""Write a recording as a trace for ui.perfetto.dev or chrome://tracing.

    Threads have their own tracks, waits lie beside them, incidents are slices, collectives are joined by arrows.

    \b
    Examples:
      ingero export --format perfetto --db run.db -o run.json
      ingero export --format perfetto --db run.db --since 10s -o end.json
    """
    from ingero.agent.export.perfetto import export_file
    from ingero.agent.queries.window import Wanted, load_part
    from ingero.config.database import default_database

    del form
    path = db or default_database()
    if output.exists() and path.exists() and output.samefile(path):
        raise click.UsageError("--output is the recording itself")
    exported = export_file(load_part(path, Wanted(since=since, pids=pids, last=limit)), output)
    what = f"{plural(exported.n_events, 'event')} and {plural(exported.n_incidents, 'incident')}"
    click.echo(f"{what} in {output} ({exported.n_bytes / 1e6:.1f} MB)", err=True)
