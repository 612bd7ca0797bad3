"""Removes what outlives a process, at the end of a run and also when the run is killed.

A shell child gets each command as soon as there is something to remove, and runs all of them when its input
ends: closed at the end of the run, or by the kernel when the process that held it dies. What a command writes is
dropped but for what it writes to descriptor `REPORT_FD`: that is where this process's errors go.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ingero.sim.launcher import run_child

REPORT_FD: Final = 3
# Of the shell alone: minimal images have no `cat`. `command`, since a shell ends when its own exec fails, as where our
# errors are closed.
_PROGRAM: Final = f"""command exec {REPORT_FD}>&2 2>/dev/null || exec {REPORT_FD}>/dev/null 2>&1
commands=
while IFS= read -r line; do commands="$commands
$line"; done
eval "$commands"
"""
_LIMIT_S: Final = 60.0


class Cleanup:
    """Commands to run at the end. Make one with `open_cleanup`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def add(self, *command: str) -> None:
        """At the end run this command, after those added before; its failure stops none of the others."""
        assert self._process.stdin is not None
        self._process.stdin.write(shlex.join(command) + "\n")
        self._process.stdin.flush()


@contextmanager
def open_cleanup() -> Iterator[Cleanup]:
    """A cleanup that runs at the end of the context, which waits for it."""
    with run_child(["/bin/sh", "-c", _PROGRAM], _LIMIT_S, stderr=None) as process:
        yield Cleanup(process)
