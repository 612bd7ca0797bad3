r"""Help texts that keep their line breaks.

click keeps the lines of a paragraph that a backspace character marks. In a raw docstring the mark is the two
characters ``\b``, which click shows as they are and then joins the lines; this turns them into the character.
"""

from __future__ import annotations

import click


def keep_line_breaks(command: click.Command) -> None:
    """Give every marked paragraph of a command, and of those below it, the character that click looks for.

    `ingero.cli.lazy_commands` does it to each command that it imports.
    """
    if command.help is not None:
        command.help = command.help.replace("\\b\n", "\b\n")
    if isinstance(command, click.Group) and isinstance(command.commands, dict):
        for inner in command.commands.values():
            keep_line_breaks(inner)
