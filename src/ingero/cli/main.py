"""The ``ingero`` program: one list of commands, one place that turns errors into exit codes.

A command's module is imported when the command is asked for, and imports its heavy libraries inside the command body,
so that ``ingero version`` and ``ingero --help``, which asks all commands for their help, start fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import click

from ingero import __version__
from ingero.cli.arguments import modernise
from ingero.cli.boundary import (
    find_error,
    is_after_interrupt,
    is_closed_output,
    is_interrupt,
    is_reader_gone,
)
from ingero.cli.entry_points import end_interrupted
from ingero.cli.help import keep_line_breaks
from ingero.cli.lazy_commands import LazyCommands
from ingero.cli.standard_files import STDOUT, choose_colour, prepare_standard_files
from ingero.errors import IngeroError

COMMANDS: Final[Mapping[str, str]] = {
    "annotate": "ingero.cli.commands.annotate:command",
    "check": "ingero.cli.commands.check:command",
    "completion": "ingero.cli.commands.completion:command",
    "config": "ingero.cli.commands.config:command",
    "dashboard": "ingero.cli.commands.dashboard:command",
    "demo": "ingero.cli.commands.demo.command:command",
    "explain": "ingero.cli.commands.explain:command",
    "export": "ingero.cli.commands.export:command",
    "fleet-push": "ingero.cli.commands.fleet_push:command",
    "hang": "ingero.cli.commands.hang:command",
    "help": "ingero.cli.commands.help_page:command",
    "mcp": "ingero.cli.commands.mcp:command",
    "merge": "ingero.cli.commands.merge:command",
    "migrate": "ingero.cli.commands.migrate:command",
    "nccl-plugin": "ingero.cli.commands.nccl_plugin:command",
    "query": "ingero.cli.commands.query:command",
    "rates": "ingero.cli.commands.rates.command:command",
    "replay": "ingero.cli.commands.replay.command:command",
    "sim": "ingero.cli.commands.sim:command",
    "trace": "ingero.cli.commands.trace.command:command",
    "up": "ingero.cli.commands.up.command:command",
    "version": "ingero.cli.commands.version:command",
}
"""Every verb of ``ingero`` and where its command is, which is imported only where it is asked for."""


@click.group(
    "ingero",
    commands=LazyCommands(COMMANDS),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with `ingero replay AR`: a real 64-GPU trace, a real push path, a named culprit.",
)
@click.version_option(__version__, prog_name="ingero", message="%(prog)s %(version)s")
def cli() -> None:
    """Name the slow rank of a GPU cluster, why it is slow, who waited, and what it cost."""


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
    prepare_standard_files()
    stdout, stderr = sys.stdout, sys.stderr
    try:
        return _run(program, args)
    except SystemExit:
        if sys.stdout is stdout:
            raise
        # Click (8.4, Command.main) swaps both and drops the error for any EPIPE, also of a connection.
        if not is_reader_gone(STDOUT):
            sys.stdout, sys.stderr = stdout, stderr
            return _show(IngeroError("the other side closed a connection (broken pipe)"))
        return 0
    except (Exception, BaseExceptionGroup, KeyboardInterrupt) as error:
        if is_closed_output(error, STDOUT):
            _discard_output()
            return 0
        if is_interrupt(error):
            return end_interrupted()
        found, is_interrupted = find_error(error), is_after_interrupt(error)
        if found is None and not is_interrupted:
            raise
        if isinstance(error, OSError) and error.filename is None:
            _discard_output()  # what did not go through would fail once more when Python ends
        status = 1 if found is None else _show(found)
        return end_interrupted() if is_interrupted else status


def _run(program: click.Command, args: Sequence[str] | None) -> int:
    try:
        given = modernise(program, sys.argv[1:] if args is None else args)
        for warning in given.warnings():
            click.echo(f"warning: {warning}", err=True)
        for option, value in given.effects:
            if option.does is not None:
                option.does(value)
        result = program.main(args=given.now, standalone_mode=False, color=choose_colour())
        sys.stdout.flush()  # what cannot be written fails here, not while Python ends
    except click.exceptions.Abort:
        return end_interrupted()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    return result if isinstance(result, int) else 0


def _show(error: IngeroError) -> int:
    colour = choose_colour()
    click.echo(click.style("error: ", fg="red", bold=True) + error.message, err=True, color=colour)
    if error.hint:
        click.echo(click.style("hint: ", fg="cyan") + error.hint, err=True, color=colour)
    return error.exit_code


def _discard_output() -> None:
    """Let nothing fail again over what is still in the buffer when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Run the program ``ingero`` as the console script does."""
    sys.exit(run_program(cli))
