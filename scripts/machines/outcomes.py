"""Reads what a guest tells on its console, and says of each check how it ended."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from typing_extensions import override

MARK: Final = "@machine "


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one check ended on one machine.

    Attributes:
        machine: The machine's name.
        check: The check's name.
        passed: Whether all was as it must be.
        detail: What was found.
        took_s: How long it took, in the guest's own seconds.
    """

    machine: str
    check: str
    passed: bool
    detail: str
    took_s: float = 0.0

    @override
    def __str__(self) -> str:
        mark = "ok  " if self.passed else "FAIL"
        return f"{mark} {self.machine:16}  {self.check:18}  {self.took_s:5.1f} s  {self.detail}"


def parse_line(line: str) -> dict[str, Any] | None:
    """What a line of the console tells, or None when it is nobody's, or was cut by one of the kernel's."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    try:
        told = json.loads(text)
    except ValueError:
        return None
    return told if isinstance(told, dict) else None


def read_outcomes(machine: str, lines: Iterable[str]) -> Iterator[Outcome]:
    """One outcome per check that the guest planned, also of those that it never came to; at least one in all."""
    planned: list[str] = []
    is_ended = False
    for line in lines:
        told = parse_line(line)
        if told is None:
            continue
        if "plan" in told:
            planned = [str(name) for name in told["plan"]]
            yield Outcome(machine, "boot", passed=True, detail=f"Linux {told['release']}")
        elif "check" in told:
            name = str(told["check"])
            if name in planned:
                planned.remove(name)
            yield Outcome(
                machine, name, bool(told["passed"]), str(told["detail"]), float(told["took_s"])
            )
        is_ended = is_ended or "end" in told
    if not is_ended and not planned:
        planned = ["boot"]
    for name in planned:
        yield Outcome(machine, name, passed=False, detail="the guest did not tell how it ended")
