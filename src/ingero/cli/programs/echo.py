"""The ``ingero-echo`` program: serve the site's memory, or look after its file."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final

import click

from ingero import __version__
from ingero.cli.lazy_commands import LazyCommands
from ingero.cli.main import run_program

COMMANDS: Final[Mapping[str, str]] = {
    "serve": "ingero.cli.programs.echo_serve:serve",
    "mcp": "ingero.cli.programs.echo_serve:mcp",
    "validate": "ingero.cli.programs.echo_serve:validate",
    "config": "ingero.cli.programs.echo_serve:config",
    "backup": "ingero.cli.programs.echo_files:backup",
    "restore": "ingero.cli.programs.echo_files:restore",
    "verify": "ingero.cli.programs.echo_files:verify",
    "migrate": "ingero.cli.programs.echo_files:migrate",
    "repair": "ingero.cli.programs.echo_files:repair",
    "report": "ingero.cli.programs.echo_report:report",
    "usage": "ingero.cli.programs.echo_usage:usage",
    "help": "ingero.cli.commands.help_page:command",
}
"""Every verb of ``ingero-echo`` and where its command is, which is imported only where it is asked for."""


@click.group(
    "ingero-echo",
    commands=LazyCommands(COMMANDS),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="ingero-echo", message="%(prog)s %(version)s")
def cli() -> None:
    r"""Keep what agents and Fleet saw, and answer people, dashboards and assistants.

    \b
    Examples:
      (umask 077; openssl rand -hex 32 > token)
      ingero-echo serve --insecure-no-tls --db echo.db --auth-token-file token
      ingero-echo config --defaults > echo.yaml
    """


def main() -> None:
    """Entry point of the ``ingero-echo`` console script.

    What it writes holds every tenant's rows, so only its owner may read it.
    """
    os.umask(0o077)
    sys.exit(run_program(cli))
