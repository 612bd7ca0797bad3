"""Checks of what the kernel lets us do: prerequisites, stacks, filters, refusals."""

from __future__ import annotations

import json
from typing import Any, Final

from scripts.machines.guest.running import CheckError, compare, run_ingero

# No guest has a GPU.
_ABSENT: Final = frozenset({"nvidia device", "nvml", "cuda libraries"})


def check_prerequisites() -> str:
    """`ingero check` finds all that tracing needs."""
    report: dict[str, Any] = json.loads(run_ingero("check", "--json").out)
    missing = [
        f"{one['name']}: {one['value']}"
        for one in report["checks"]
        if not one["pass"] and one["name"] not in _ABSENT
    ]
    if missing:
        raise CheckError("; ".join(missing))
    return next(str(one["value"]) for one in report["checks"] if one["name"] == "kernel")


def check_refusal() -> str:
    """A kernel that is too old is named by `ingero check`, and refused by `ingero trace` in one line."""
    report: dict[str, Any] = json.loads(run_ingero("check", "--json").out)
    kernel = next(one for one in report["checks"] if one["name"] == "kernel")
    compare("`ingero check` takes the kernel", kernel["pass"], wanted=False)
    refused = run_ingero("trace", "--no-record", "--duration", "1s", is_checked=False)
    compare("exit status of `ingero trace`", refused.status, 3)
    errors = [line for line in refused.err.splitlines() if line.startswith("error: ")]
    if len(errors) != 1 or "Linux" not in errors[0]:
        raise CheckError(f"`ingero trace` did not name the kernel in one line: {refused.err}")
    return errors[0]
