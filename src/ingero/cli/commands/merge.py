"""``ingero merge``: several recordings in one file."""

from __future__ import annotations

from pathlib import Path

import click

from ingero.cli.options import FORCE, check_output
from ingero.cli.render import plural


@click.command("merge")
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--output",
    "-o",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write.",
)
@FORCE
@click.option("--force-node", default="", metavar="NAME", help="Node for rows that carry none.")
def command(*, sources: tuple[Path, ...], output: Path, force: bool, force_node: str) -> None:
    r"""Merge recordings of several nodes, or several of one, into one file.

    Sources are only read. Every row is kept and exact counts are added. A recording that is given twice, or is in a merged
    file already, adds nothing; files that share a part of one are refused. Clocks are not adjusted: each node keeps its own.

    \b
    Examples:
      ingero merge node-1.db node-2.db -o cluster.db
      ingero merge old.db --force-node node-7 -o named.db
    """
    from ingero.recording.export.merge import merge_recordings

    check_output(output, is_replaced=force)
    merged = merge_recordings(sources, output, force_node=force_node, is_replaced=force)
    for one in merged.files:
        more = [f"{one.n_repeated} there already"] if one.n_repeated else []
        more += [f"{one.n_damaged} rows could not be read"] if one.n_damaged else []
        told = "".join(f", {part}" for part in more)
        click.echo(f"{one.path}: {plural(one.n_events, 'event')} of {', '.join(one.nodes)}{told}")
    click.echo(
        f"{plural(merged.n_events, 'event')} and {plural(merged.n_calls, 'counted call')} in {output}"
    )
    for note in merged.notes:
        click.echo(f"note: {note}", err=True)
