"""``ingero merge``: several recordings in one file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from ingero.cli.options import check_output, force_switch, option, output_file, with_config
from ingero.cli.render import plural
from ingero.cli.signals import unwind_on_end


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeConfig:
    """The options of ``ingero merge``."""

    output: Path = output_file()
    force: bool = force_switch()
    force_node: str = option("Node for rows that carry none.", default="", metavar="NAME")


@click.command("merge")
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path))
@with_config(MergeConfig)
@unwind_on_end()
def command(config: MergeConfig, sources: tuple[Path, ...]) -> None:
    r"""Merge recordings of several nodes, or several of one, into one file.

    Sources are only read. Every row is kept and exact counts are added. A recording that is given twice, or is in a
    merged file already, adds nothing; files that share a part of one are refused. Clocks are not adjusted: each node
    keeps its own.

    \b
    Examples:
      ingero merge node-1.db node-2.db -o cluster.db
      ingero merge old.db --force-node node-7 -o named.db
    """
    from ingero.recording.export.merge import merge_recordings

    output, force = config.output, config.force
    check_output(output, is_replaced=force)
    merged = merge_recordings(sources, output, force_node=config.force_node, is_replaced=force)
    for one in merged.files:
        more = [f"{one.n_repeated} there already"] if one.n_repeated else []
        more += [f"{one.n_damaged} rows could not be read"] if one.n_damaged else []
        details = "".join(f", {part}" for part in more)
        click.echo(
            f"{one.path}: {plural(one.n_events, 'event')} of {', '.join(one.nodes)}{details}"
        )
    click.echo(
        f"{plural(merged.n_events, 'event')} and {plural(merged.n_calls, 'counted call')} in {output}"
    )
    for note in merged.notes:
        click.echo(f"note: {note}", err=True)
