"""The ``ingero-echo`` program: serve the site's memory, or look after its file."""

from __future__ import annotations

import os
import sys
from typing import Final

import click

from ingero import __version__
from ingero.cli.commands import help_page
from ingero.cli.main import run_program
from ingero.cli.programs import echo_files, echo_report, echo_serve, echo_usage

COMMANDS: Final[tuple[click.Command, ...]] = (
    echo_serve.serve,
    echo_serve.mcp,
    echo_serve.validate,
    echo_serve.config,
    echo_files.backup,
    echo_files.restore,
    echo_files.verify,
    echo_files.migrate,
    echo_files.repair,
    echo_report.report,
    echo_usage.usage,
    help_page.command,
)
"""Every verb of ``ingero-echo``, in the order that ``--help`` lists them."""


@click.group(
    "ingero-echo",
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


for _command in COMMANDS:
    cli.add_command(_command)


def main() -> None:
    """Entry point of the ``ingero-echo`` console script.

    What it writes holds every tenant's rows, so only its owner may read it.
    """
    os.umask(0o077)
    sys.exit(run_program(cli))
