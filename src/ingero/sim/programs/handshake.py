"""How a program of a demo and the process that started it communicate: a line of JSON each way.

The program says ``{"ready": PIDS}``, with the other processes that belong to it, waits for a line and runs. What
stops it, at any time, is ``{"error": MESSAGE, "hint": HINT}``, and its end.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ingero.errors import IngeroError, UnsupportedError

_MODULE: Final = "ingero.sim.programs.program"


def start_program(
    name: str, library: str, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a program, executed anew: a context of its own.

    Args:
        name: The program.
        library: Its libcudart.
        environment: All of its environment; None for ours.
    """
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE, name, library],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        close_fds=False,  # a shared simulated device is an inheritable one
        text=True,
    )


def read_ready(program: subprocess.Popen[str]) -> tuple[int, ...]:
    """Wait until a program is ready; returns the other processes that belong to it.

    Raises:
        UnsupportedError: It cannot run here; the message and the hint are its own.
        IngeroError: It ended without a word.
    """
    answer = _read(program)
    if "ready" not in answer:
        raise IngeroError(f"the program ended with {program.wait()} before it was ready")
    return tuple(answer["ready"])


def begin(program: subprocess.Popen[str]) -> None:
    """Let a program run that is ready."""
    if program.stdin is not None:
        program.stdin.write("\n")
        program.stdin.flush()


def check_end(program: subprocess.Popen[str]) -> None:
    """Whether a program that has ended did all it was to do.

    Raises:
        UnsupportedError: Something stopped it; the message and the hint are its own.
        IngeroError: It failed without a word.
    """
    _read(program)
    if program.wait():
        raise IngeroError(f"the program ended with {program.returncode}")


def report_ready(pids: Sequence[int]) -> None:
    """A program: say that all is ready."""
    _report({"ready": list(pids)})


def report_error(error: IngeroError) -> None:
    """A program: say what stopped it."""
    _report({"error": error.message, "hint": error.hint})


def _read(program: subprocess.Popen[str]) -> dict[str, Any]:
    line = program.stdout.readline() if program.stdout else ""
    answer: dict[str, Any] = json.loads(line or "{}")
    if "error" in answer:
        raise UnsupportedError(answer["error"], hint=answer["hint"])
    return answer


def _report(what: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()
