"""Runs the checks of a guest one after another; each tells the host its outcome in a line of its own on the console.

A line is ``@machine`` and a JSON object: first the names of all checks (``plan``), then one outcome each, then ``end``.
"""

from __future__ import annotations

import importlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Final

from scripts.machines.guest import filters, privileges, stacks, traced
from scripts.machines.guest.probing import (
    check_prerequisites,
    check_refusal,
)
from scripts.machines.guest.running import CheckError

from ingero.errors import IngeroError

_MARK: Final = "@machine "
_FAULTS: Final = (
    CheckError,
    IngeroError,
    OSError,
    ValueError,
    KeyError,
    subprocess.SubprocessError,
)

Check = Callable[[], str]


def _import_later(module: str, function: str, *arguments: str) -> Check:
    """A check whose module is imported when it is run: imports are slow in a guest, and seldom are all checks run."""

    def check() -> str:
        found: Callable[..., str] = getattr(
            importlib.import_module(f"{__package__}.{module}"), function
        )
        return found(*arguments)

    return check


RDMA: Final = ("clean", "loss", "receiver", "others", "uncounted")


SUPPORTED: Final[Mapping[str, Check]] = {
    "check": check_prerequisites,
    **{f"counts: {name}": partial(traced.check_counts, name) for name in traced.WORKLOAD_NAMES},
    "counts: losses": traced.check_losses,
    "first trace": privileges.check_first_trace,
    "nccl identity": traced.check_nccl,
    "stacks: native": stacks.check_native,
    "stacks: Python": stacks.check_python,
    "stacks: without frame pointers": stacks.check_chain,
    **{f"filter: {name}": partial(filters.check_filter, name) for name in filters.FILTERS},
    "look": _import_later("looks", "check_look"),
    "fleet-push": _import_later("cluster", "check_push"),
    "up": _import_later("cluster", "check_up"),
    **{f"caps: {name}": partial(privileges.check_set, name) for name in privileges.SETS},
    **{f"setting: {name}": partial(privileges.check_setting, name) for name in privileges.SETTINGS},
}
KINDS: Final[Mapping[str, Mapping[str, Check]]] = {
    "supported": SUPPORTED,
    "refused": {"refused": check_refusal},
    "rdma": {f"rdma: {name}": _import_later("rdma", "check_causes", name) for name in RDMA},
}


def tell(**facts: object) -> None:
    """One line to the host."""
    print(_MARK + json.dumps(facts), flush=True)


def main(kind: str, *patterns: str) -> None:
    """Run the checks of a kind of machine; all of them, or those of the patterns."""
    known = KINDS[kind]
    checks = {
        name: check
        for name, check in known.items()
        if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    tell(plan=list(checks), release=platform.release())
    for name, check in checks.items():
        start_s = time.monotonic()
        try:
            passed, detail = True, check()
        except _FAULTS as error:
            passed, detail = False, f"{type(error).__name__}: {error}"
        tell(check=name, passed=passed, detail=detail, took_s=round(time.monotonic() - start_s, 1))
    tell(end=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
