"""``help``: what ``--help`` shows, and the options of the existing agent."""

from __future__ import annotations

import click

TOPIC = "compatibility"


@click.command("help")
@click.argument("names", nargs=-1, metavar="[COMMAND]...")
@click.pass_context
def command(context: click.Context, /, names: tuple[str, ...]) -> None:
    r"""Show the help of a command, or with "compatibility" the old options that are still taken.

    \b
    Examples:
      ingero help trace
      ingero help compatibility
    """
    root = context.find_root()
    if names == (TOPIC,):
        click.echo("\n".join(_list_old(root.command)))
        return
    shown, at = root.command, root
    for name in names:
        inner = shown.commands.get(name) if isinstance(shown, click.Group) else None
        if inner is None:
            raise click.UsageError(f"there is no command {' '.join(names)!r}", context)
        at = click.Context(inner, info_name=name, parent=at, **inner.context_settings)
        shown = inner
    click.echo(shown.get_help(at))


def _list_old(program: click.Command) -> list[str]:
    from ingero.cli.arguments import iter_old

    lines = ["Options of the existing agent that are accepted and not shown by --help:"]
    where = ""
    for old in iter_old(program):
        if old.where != where:
            where = old.where
            lines += ["", where if " " in where else f"{where}, before or after any command"]
        effect = "" if old.has_effect else "refused: " if old.is_refused else "no effect: "
        lines.append(f"  {old.names.replace(' ', ', ')}{f' {old.takes}' if old.takes else ''}")
        lines.append(f"      {effect}{old.description}")
    if not where:
        return [f"{program.name} has the existing one's options; see --help."]
    lines += [
        "",
        "A switch may have a value (--record=false), and a long name one dash (-listen :9464).",
    ]
    return lines
