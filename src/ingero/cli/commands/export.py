"""``ingero export``: a recording for other tools."""

from __future__ import annotations

from pathlib import Path

import click

from ingero.cli.options import FORCE, check_output, read_pids
from ingero.cli.render import plural
from ingero.cli.serving import NODE_OPTIONS, NodeOptions, add_options


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
@FORCE
@click.option(
    "--since", default="", metavar="DURATION", help="Only this long before the last event."
)
@click.option(
    "--pid",
    "-p",
    "pids",
    multiple=True,
    callback=read_pids,
    metavar="PID[,PID]",
    help="Only these processes.",
)
@click.option("--limit", type=click.IntRange(0), default=0, help="Only the newest N events.")
@click.option(
    "--timeout", default="30s", show_default=True, metavar="DURATION", help="Wait for a node."
)
@add_options(NODE_OPTIONS)
def command(
    *, form: str, db: Path | None, output: Path, force: bool, since: str, pids: tuple[int, ...], limit: int,
    timeout: str, nodes: str, ca_cert: str, client_cert: str, client_key: str, no_tls: bool, skew: str,
) -> None:  # fmt: skip
    r"""Write a recording as a trace for ui.perfetto.dev or chrome://tracing.

    Threads have their own tracks, waits lie beside them, incidents are slices, collectives are joined by arrows. Of
    several nodes each keeps its own clock; the offsets are shown.

    \b
    Examples:
      ingero export --format perfetto --db run.db -o run.json
      ingero export --format perfetto --db run.db --since 10s -o end.json
      ingero export --format perfetto --nodes gpu-1:8443,gpu-2:8443 --ca-cert ca.pem -o both.json
    """
    from ingero.cli.nodes import ask_parts
    from ingero.config.database import default_database
    from ingero.model.recording import describe_unprobed
    from ingero.recording.export.perfetto import export_file
    from ingero.recording.queries.part import join_parts
    from ingero.recording.queries.window import Wanted, load_part

    del form
    wanted = Wanted(since=since, pids=pids, last=limit)
    among = NodeOptions(nodes, ca_cert, client_cert, client_key, no_tls, skew)
    if among.nodes:
        if db is not None or len(pids) > 1:
            raise click.UsageError("--nodes takes no --db and at most one --pid")
        check_output(output, is_replaced=force)
        answers = ask_parts(among, wanted, timeout)
        recording = join_parts([(one.node, one.body) for one in answers if not one.error])
    else:
        path = db or default_database()
        if output.exists() and path.exists() and output.samefile(path):
            raise click.UsageError("--output is the recording itself")
        check_output(output, is_replaced=force)
        recording = load_part(path, wanted)
    exported = export_file(recording, output)
    lost = [recording.say_missing(), *describe_unprobed(recording.unprobed)]
    for line in filter(None, lost):
        click.echo(line, err=True)
    what = f"{plural(exported.n_events, 'event')} and {plural(exported.n_incidents, 'incident')}"
    click.echo(f"{what} in {output} ({exported.n_bytes / 1e6:.1f} MB)", err=True)
