"""``ingero export``: a recording for other tools."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from ingero.cli.options import (
    check_output,
    database,
    force_switch,
    group,
    option,
    output_file,
    process_ids,
    with_config,
)
from ingero.cli.render import plural
from ingero.cli.serving import NodesConfig
from ingero.cli.signals import unwind_on_end


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    """The options of ``ingero export``."""

    form: str = option("What to write.", "--format", type=click.Choice(["perfetto"]))
    db: Path | None = database("Recording to read.", "--db", "-d")
    output: Path = output_file()
    force: bool = force_switch()
    since: str = option("Only this long before the last event.", default="", metavar="DURATION")
    pids: tuple[int, ...] = process_ids()
    limit: int = option(
        "Only the newest N events.", default=0, type=click.IntRange(0), show_default=False
    )
    timeout: str = option("Wait for a node.", default="30s", metavar="DURATION")
    among: NodesConfig = group()


@click.command("export")
@with_config(ExportConfig)
@unwind_on_end()
def command(config: ExportConfig) -> None:
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
    from ingero.config.environment import default_database
    from ingero.model.recording import describe_unprobed
    from ingero.recording.export.perfetto import export_file
    from ingero.recording.queries.transfer import join_parts
    from ingero.recording.queries.window import Wanted, load_part

    wanted = Wanted(since=config.since, pids=config.pids, last=config.limit)
    output = config.output
    if config.among.nodes:
        if config.db is not None or len(config.pids) > 1:
            raise click.UsageError("--nodes takes no --db and at most one --pid")
        check_output(output, is_replaced=config.force)
        answers = ask_parts(config.among, wanted, config.timeout)
        recording = join_parts([(one.node, one.body) for one in answers if not one.error])
    else:
        path = config.db or default_database()
        if output.exists() and path.exists() and output.samefile(path):
            raise click.UsageError("--output is the recording itself")
        check_output(output, is_replaced=config.force)
        recording = load_part(path, wanted)
    exported = export_file(recording, output)
    lost = [recording.describe_missing(), *describe_unprobed(recording.unprobed)]
    for line in filter(None, lost):
        click.echo(line, err=True)
    what = f"{plural(exported.n_events, 'event')} and {plural(exported.n_incidents, 'incident')}"
    click.echo(f"{what} in {output} ({exported.n_bytes / 1e6:.1f} MB)", err=True)
