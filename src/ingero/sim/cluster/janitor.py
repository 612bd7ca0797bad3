"""Removes what outlives a process, at the end of a run and also when the run is killed.

A shell child is told each clearing command as soon as there is something to clear, and runs all of them when its input
ends: closed at the end of the run, or by the kernel when the process that held it dies.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ingero.sim.child import run_tied

_PROGRAM: Final = 'owed=$(cat); eval "$owed"'
_LIMIT_S: Final = 20.0


class Janitor:
    """Who is owed what. Make one with `open_janitor`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def owe(self, *command: str) -> None:
        """At the end run this command, after those told before; its failure stops none of the others."""
        assert self._process.stdin is not None
        self._process.stdin.write(shlex.join(command) + "\n")
        self._process.stdin.flush()


@contextmanager
def open_janitor() -> Iterator[Janitor]:
    """A janitor for as long as the context lasts, which ends once everything is cleared."""
    with run_tied(["/bin/sh", "-c", _PROGRAM], _LIMIT_S) as process:
        yield Janitor(process)
