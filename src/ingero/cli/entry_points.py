"""The console scripts: an interrupt ends a program with 130 and no traceback also while its modules are imported.

That takes a tenth of a second or more, within which one interrupts a command that was mistyped. This module imports
nothing but the standard library, so that little is left before it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Final

PROGRAMS: Final = {
    "ingero": "ingero.cli.main",
    "ingero-alerter": "ingero.cli.programs.alerter",
    "ingero-echo": "ingero.cli.programs.echo",
    "ingero-fleet": "ingero.cli.programs.fleet",
    "ingero-remediator": "ingero.cli.programs.remediator",
    "ingero-sink": "ingero.cli.programs.sink",
    "straggler-sink": "ingero.cli.programs.sink",
}
"""Where the program of each console script is that is started from here."""


def run_ingero() -> None:
    """Entry point of ``ingero``."""
    _run("ingero")


def run_alerter() -> None:
    """Entry point of ``ingero-alerter``."""
    _run("ingero-alerter")


def run_echo() -> None:
    """Entry point of ``ingero-echo``."""
    _run("ingero-echo")


def run_fleet() -> None:
    """Entry point of ``ingero-fleet``."""
    _run("ingero-fleet")


def run_remediator() -> None:
    """Entry point of ``ingero-remediator``."""
    _run("ingero-remediator")


def run_sink() -> None:
    """Entry point of ``ingero-sink`` and ``straggler-sink``."""
    _run("ingero-sink")


def end_interrupted() -> int:
    """130, also under ``python -m`` and after an interrupt amid imports.

    CPython (Python/pythonrun.c, run_eval_code_obj) notes an interrupt that passes through an `exec` of text, as
    `dataclasses` does, and in the end kills itself by SIGINT instead of giving our status. The next `exec` resets it.
    """
    exec("")  # noqa: S102 - nothing of anybody's
    return 130


def _run(script: str) -> None:
    try:
        main = import_module(PROGRAMS[script]).main
    except KeyboardInterrupt:
        sys.exit(end_interrupted())
    main()
