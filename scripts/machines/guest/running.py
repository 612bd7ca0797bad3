"""Runs our programs in the guest, and reads what they print."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ingero.config.environment import START_TIMEOUT

INGERO: Final = (sys.executable, "-m", "ingero")
LIMIT_S: Final = 2400.0
"""Of one program: emulated, and beside other work on the machine that emulates."""
ENVIRONMENT: Final = {
    "PATH": "/usr/bin:/usr/sbin",
    "HOME": "/root",
    "PYTHONPATH": str(Path.cwd()),
    START_TIMEOUT: str(LIMIT_S / 2),
}
_PLAIN: Final = ("--json", "--no-record", "--no-incidents")


class CheckError(Exception):
    """Something is not as it must be; the message says what."""


@dataclass(frozen=True)
class Ended:
    """A program that ended.

    Attributes:
        status: Its exit status.
        out: What it wrote on standard output.
        err: What it wrote on standard error.
    """

    status: int
    out: str
    err: str

    @functools.cached_property
    def lines(self) -> list[dict[str, Any]]:
        """Its output, a JSON object a line; read once, as there are many lines and many checks of one trace."""
        return [json.loads(line) for line in self.out.splitlines()]

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        """The lines of this ``type``."""
        return [line for line in self.lines if line["type"] == kind]


def run(*command: str | int, is_checked: bool = True) -> Ended:
    """Run a program to its end.

    Raises:
        CheckError: It failed, or did not end within the limit.
    """
    words = [str(word) for word in command]
    try:
        ended = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=LIMIT_S, env=ENVIRONMENT
        )
    except subprocess.TimeoutExpired as error:
        raise CheckError(f"{' '.join(words[2:6])} … did not end within {LIMIT_S:.0f} s") from error
    if is_checked and ended.returncode:
        raise CheckError(
            f"{' '.join(words[2:6])} … ended with {ended.returncode}: {shorten(ended.stderr)}"
        )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def run_ingero(*arguments: str | int, is_checked: bool = True) -> Ended:
    """Run ``ingero``."""
    return run(*INGERO, *arguments, is_checked=is_checked)


def trace(*arguments: str | int, is_checked: bool = True) -> Ended:
    """Run ``ingero trace`` without a recording; its lines are JSON."""
    return run_ingero("trace", *_PLAIN, *arguments, is_checked=is_checked)


def trace_until_met(name: str, *arguments: str | int) -> Ended:
    """Run `trace` with a program that waits for a line; it gets one when a process of this name is probed and examined.

    Raises:
        CheckError: It failed, or did not end within the limit.
    """
    command = [*INGERO, "trace", *_PLAIN, *map(str, arguments)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=ENVIRONMENT,
        ) as tracer,
    ):
        assert tracer.stdin is not None
        assert tracer.stdout is not None
        limit = threading.Timer(LIMIT_S, tracer.kill)
        limit.start()
        lines = []
        for text in tracer.stdout:
            lines.append(text)
            line = json.loads(text)
            if line["type"] == "process" and line["process_name"].startswith(name):
                tracer.stdin.write("go\n")
                tracer.stdin.flush()
        status = tracer.wait()
        limit.cancel()
        errors.seek(0)
        said = errors.read()
    if status:
        raise CheckError(f"`ingero trace` ended with {status}: {shorten(said)}")
    return Ended(status, "".join(lines), said)


def shorten(text: str) -> str:
    """The end of what a program wrote, in one line."""
    return " | ".join(text.split("\n"))[-600:].strip(" |")


def compare(what: str, found: object, wanted: object) -> None:
    """Hold something found against what it must be.

    Raises:
        CheckError: They differ.
    """
    if found != wanted:
        raise CheckError(f"{what}: {found}, not {wanted}")


def refuse_denials(traced: Ended) -> None:
    """Hold against root's trace that something was refused.

    Raises:
        CheckError: It says so.
    """
    if "ermission denied" in traced.err:
        raise CheckError(f"root was refused something: {traced.err}")


def sum_launches(traced: Ended) -> dict[str, int]:
    """Exact counts of cudaLaunchKernel, of all processes; empty where none was counted."""
    counts = traced.of_type("counts")
    pids = sorted({line["pid"] for line in counts if line["op"] == "cudaLaunchKernel"})
    return sum_calls(counts, pids).get(("cuda", "cudaLaunchKernel"), {})


def sum_calls(
    counts: Sequence[Mapping[str, Any]], pids: Sequence[int]
) -> dict[tuple[str, str], dict[str, int]]:
    """Exact counts of these processes added up, by source and operation."""
    sums: dict[tuple[str, str], dict[str, int]] = {}
    for line in counts:
        if line["pid"] in pids:
            into = sums.setdefault((line["source"], line["op"]), {})
            for name in ("entered", "seen", "nested", "errors", "bytes", "lost"):
                into[name] = into.get(name, 0) + int(line[name])
    return sums
