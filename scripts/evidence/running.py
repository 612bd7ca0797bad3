"""Run one part of the evidence: its commands, its time limit, and the file that keeps what came of it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

ROOT: Final = Path(__file__).parents[2]
INGERO: Final = (sys.executable, "-m", "ingero")


class EvidenceError(Exception):
    """A part failed; the message says why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """With what parts are run.

    Attributes:
        python: An interpreter that can import torch; None where there is none.
        is_dry: Whether a part has only to show that it starts.
        deadline_s: Monotonic time at which the part that runs is cut.
    """

    python: Path | None
    is_dry: bool
    deadline_s: float

    @property
    def device(self) -> str:
        """PyTorch's name of the device that programs use."""
        return "cpu" if self.is_dry else "cuda"

    def need_python(self) -> str:
        """The interpreter with torch.

        Raises:
            EvidenceError: There is none.
        """
        if self.python is None:
            raise EvidenceError(
                "no Python here has PyTorch; name one: INGERO_TORCH_PYTHON=/path/to/python3"
            )
        return str(self.python)

    def left_s(self) -> float:
        """Seconds until the deadline, at least a little."""
        return max(self.deadline_s - time.monotonic(), 0.1)

    def call(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command to its end.

        Raises:
            EvidenceError: It failed, or the time is over.
        """
        try:
            ended = subprocess.run(
                command,
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
                timeout=self.left_s(),
            )
        except subprocess.TimeoutExpired:
            raise EvidenceError(f"not over in time: {_describe(command)}") from None
        if ended.returncode:
            last = "\n".join((ended.stdout + ended.stderr).strip().splitlines()[-12:])
            raise EvidenceError(f"status {ended.returncode} of {_describe(command)}: {last}")
        return ended


@dataclass(frozen=True, slots=True)
class Part:
    """One part.

    Attributes:
        name: Also of its file.
        limit_s: How long it may take.
        run: Gives what was seen and one line about it; raises `EvidenceError`.
    """

    name: str
    limit_s: float
    run: Callable[[Setting], tuple[str, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a part.

    Attributes:
        part: Its name.
        passed: Whether it held.
        line: What was seen, or why not.
        seconds: How long it took.
        seen: What its file keeps.
    """

    part: str
    passed: bool
    line: str
    seconds: float
    seen: dict[str, Any]

    @override
    def __str__(self) -> str:
        return f"{'ok  ' if self.passed else 'FAIL'} {self.part:<20} {self.seconds:6.1f} s  {self.line}"


def run_part(part: Part, python: Path | None, *, is_dry: bool, left_s: float) -> Outcome:
    """Run a part within its limit and what is left of the whole time."""
    began_s = time.monotonic()
    setting = Setting(python, is_dry, began_s + min(part.limit_s, left_s))
    seen: dict[str, Any] = {}
    try:
        line, seen = part.run(setting)
        passed = True
    except EvidenceError as error:
        line, passed = str(error), False
    return Outcome(part.name, passed, line, time.monotonic() - began_s, seen)


def find_commit() -> str:
    """The commit of this checkout, with ``-dirty`` where files differ from it; empty outside of one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.stdout.strip()


def keep(outcome: Outcome, folder: Path, commit: str) -> None:
    """Write a part's file."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "part": outcome.part,
        "passed": outcome.passed,
        "line": outcome.line,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(outcome.seconds, 1),
        "commit": commit,
        "kernel": platform.release(),
        "processors": os.cpu_count(),
        "seen": outcome.seen,
    }
    _find_file(folder, outcome.part).write_text(json.dumps(content, indent=1) + "\n")


def has_passed(part: Part, folder: Path, commit: str) -> bool:
    """Whether a part's file says that it held on this commit."""
    try:
        kept = json.loads(_find_file(folder, part.name).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return bool(kept["passed"]) and kept["commit"] == commit


def _find_file(folder: Path, part: str) -> Path:
    return folder / f"{part}.json"


def _describe(command: Sequence[str]) -> str:
    words = [Path(command[0]).name, *command[1:]]
    return " ".join(words)[:200]
