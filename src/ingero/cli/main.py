"""The ``ingero`` program: one list of commands, one place that turns errors into exit codes.

Command modules import their heavy libraries inside the command body, so that ``ingero --help`` and
``ingero version`` start fast.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Final

import click

from ingero import __version__
from ingero.cli.commands import (
    annotate,
    check,
    completion,
    dashboard,
    demo,
    explain,
    export,
    fleet_push,
    hang,
    mcp,
    merge,
    nccl_plugin,
    query,
    rates,
    replay,
    sim,
    trace,
    up,
    version,
)
from ingero.cli.help import keep_line_breaks
from ingero.errors import IngeroError

COMMANDS: Final[tuple[click.Command, ...]] = (
    annotate.command,
    check.command,
    completion.command,
    dashboard.command,
    demo.command,
    explain.command,
    export.command,
    fleet_push.command,
    hang.command,
    mcp.command,
    merge.command,
    nccl_plugin.command,
    query.command,
    rates.command,
    replay.command,
    sim.command,
    trace.command,
    up.command,
    version.command,
)
"""Every verb of ``ingero``, in the order that ``--help`` lists them."""


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with `ingero replay AR`: a real 64-GPU trace, a real push path, a named culprit.",
)
@click.version_option(__version__, prog_name="ingero", message="%(prog)s %(version)s")
def cli() -> None:
    """Name the slow rank of a GPU cluster, why it is slow, who waited, and what it cost."""


for _command in COMMANDS:
    cli.add_command(_command)


def run_program(program: click.Command, args: Sequence[str] | None = None) -> int:
    """Run a click program and return its exit status; print our errors the one way we print them.

    Args:
        program: The root command.
        args: Arguments without the program's name; None takes ``sys.argv``.

    Returns:
        0 on success; 1 for a failed run; 2 for wrong usage or configuration; 3 for something this machine cannot do;
        4 for a database that failed; 130 after Ctrl-C. A reader that closed the pipe is not an error.
    """
    keep_line_breaks(program)
    stdout = sys.stdout
    try:
        return _run(program, args)
    except SystemExit:
        if sys.stdout is stdout:
            raise
        return 0  # click swaps the stream when the reader closed the pipe
    except BrokenPipeError:
        _discard_output()
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _discard_output()
        click.echo("error: the output cannot be written: no space left on device", err=True)
        return 1


def _run(program: click.Command, args: Sequence[str] | None) -> int:
    try:
        result = program.main(args=list(args) if args is not None else None, standalone_mode=False)
        sys.stdout.flush()  # what cannot be written is told here, not while Python ends
    except (click.exceptions.Abort, KeyboardInterrupt):
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except IngeroError as error:
        click.echo(click.style("error: ", fg="red", bold=True) + error.message, err=True)
        if error.hint:
            click.echo(click.style("hint: ", fg="cyan") + error.hint, err=True)
        return error.exit_code
    return result if isinstance(result, int) else 0


def _discard_output() -> None:
    """Let nothing fail again over what is still in the buffer when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Entry point of the ``ingero`` console script."""
    sys.exit(run_program(cli))
