"""What some options of the existing agent do here, beyond standing for another option."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, TextIO

import click
from typing_extensions import override

_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class _Copied(io.TextIOBase):
    """A text stream whose text goes to a file as well, without colours."""

    def __init__(self, stream: TextIO, copy: TextIO) -> None:
        self._stream = stream
        self._copy = copy

    @override
    def write(self, text: str, /) -> int:
        self._copy.write(_ANSI.sub("", text))
        self._copy.flush()
        return self._stream.write(text)

    @override
    def flush(self) -> None:
        self._stream.flush()

    @override
    def isatty(self) -> bool:
        return self._stream.isatty()

    @override
    def fileno(self) -> int:
        return self._stream.fileno()


def copy_errors(name: str) -> None:
    """Append what is printed on standard error from now on to a file as well; a warning when it cannot be opened."""
    try:
        copy = Path(name).open("a", encoding="utf-8")  # noqa: SIM115 - for as long as the program runs
    except OSError as error:
        click.echo(
            f"warning: --log {name}: {error.strerror or error}; there is no log file", err=True
        )
        return
    sys.stderr = _Copied(sys.stderr, copy)


def log_at(level: str) -> Callable[[str], None]:
    """An effect: log from this level on."""

    def start(_value: str) -> None:
        from ingero.telemetry.log import set_up_logging

        set_up_logging(level, "console")

    return start


def offer_bearer(token: str) -> None:
    """Take a bearer token from the command line, as if the environment had it."""
    from ingero.config.environment import set_bearer

    set_bearer(token)


def choose_file(name: str) -> None:
    """Read settings of `trace` and `fleet-push` from this file where they name none."""
    from ingero.config.agent_file import choose_settings_file

    choose_settings_file(name)
