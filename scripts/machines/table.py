"""Keeps what was seen on each machine, and makes the README's table of it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from scripts.machines.catalog import MACHINES
from scripts.machines.fetch import ROOT
from scripts.machines.outcomes import Outcome

RESULTS: Final = ROOT / "docs/evidence/machines.json"
README: Final = ROOT / "README.md"
_BEGIN: Final = "<!-- made by `make test-machines RECORD=1` -->\n"
_END: Final = "<!-- end -->\n"
# How the table calls a check, in this order; those of a family are counted, and others follow by their own names.
_FAMILIES: Final = {
    "check": "`check`",
    "refused": "refused in one line",
    "counts": "exact counts",
    "first trace": "a first trace",
    "nccl identity": "NCCL identities",
    "stacks": "native and Python stacks",
    "filter": "filters",
    "fleet-push": "`fleet-push`",
    "up": "`up`",
    "look": "a look at one process",
    "rdma": "causes over RDMA",
    "caps": "sets of capabilities",
    "setting": "settings of distributions",
}

Results = dict[str, dict[str, Any]]


def record(outcomes: Iterable[Outcome], results: Path = RESULTS, readme: Path = README) -> None:
    """Keep outcomes beside those of earlier runs, the newest of each check, and write the table anew.

    Args:
        outcomes: What was seen now.
        results: The file that keeps them.
        readme: The page that has the table.
    """
    kept: Results = json.loads(results.read_text("utf-8")) if results.exists() else {}
    for outcome in outcomes:
        machine = kept.setdefault(outcome.machine, {"checks": {}})
        if outcome.check == "boot" and outcome.passed:
            if machine.get("kernel") != outcome.detail:
                machine |= {"kernel": outcome.detail, "checks": {}}
            machine["on"] = time.strftime("%Y-%m-%d", time.gmtime())
            continue
        seen = {"passed": outcome.passed, "detail": outcome.detail}
        machine["checks"][outcome.check] = seen
    results.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", "utf-8")
    readme.write_text(replace_table(readme.read_text("utf-8"), kept), "utf-8")


def replace_table(page: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with the table of these results between its two marks.

    Raises:
        ValueError: The page lacks the marks.
    """
    block = re.compile(re.escape(_BEGIN) + ".*?" + re.escape(_END), re.DOTALL)
    if block.search(page) is None:
        raise ValueError(f"the page has no {_BEGIN.strip()} … {_END.strip()}")
    table = "\n".join(_build_lines(results)) + "\n"
    return block.sub(lambda _: _BEGIN + table + _END, page)


def _build_lines(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = ["| machine | kernel | passed | failed | booted |", "|---|---|---|---|---|"]
    for machine in MACHINES:
        seen = results.get(machine.name)
        if seen is None or "kernel" not in seen:
            lines.append(f"| {machine.name} | | | | not tried |")
            continue
        passed = _list([name for name, one in seen["checks"].items() if one["passed"]])
        failed = _list([name for name, one in seen["checks"].items() if not one["passed"]])
        lines.append(
            f"| {machine.name} | {seen['kernel']} | {passed} | {failed} | {seen['on']}, emulated |"
        )
    return lines


def _list(checks: Sequence[str]) -> str:
    numbers: dict[str, int] = {}
    for check in checks:
        family = check.partition(":")[0]
        numbers[family] = numbers.get(family, 0) + 1
    families = [
        *(family for family in _FAMILIES if family in numbers),
        *sorted(numbers.keys() - _FAMILIES.keys()),
    ]
    parts = [
        _FAMILIES.get(family, family) + (f" ({numbers[family]})" if numbers[family] > 1 else "")
        for family in families
    ]
    return ", ".join(parts) or "none"
