"""``ingero completion``: the Tab key in your shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completion")
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    r"""Print a script that completes commands and options in bash, zsh or fish.

    \b
    Examples:
      source <(ingero completion bash)
      ingero completion bash > ~/.local/share/bash-completion/completions/ingero
      ingero completion zsh > "${fpath[1]}/_ingero"
      ingero completion fish > ~/.config/fish/completions/ingero.fish
    """
    root = context.find_root()
    name = root.info_name or "ingero"
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"no completion for {shell}")
    variable = f"_{name.replace('-', '_').upper()}_COMPLETE"
    click.echo(kind(root.command, {}, name, variable).source())
