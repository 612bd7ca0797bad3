"""Makes a page for the metrics of each program: what each is, what it means when it rises, and what to do.

The facts come from the declarations, what to do from ``docs/metrics/PROGRAM.yaml``, the alerts from the shipped rules.
`make docs` runs it; ``tests/docs/test_metric_pages.py`` wants each metric to have its entry.
"""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import yaml
from scripts.shown_series import Shown, list_shown

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs/metrics"
WITH_REFERENCE = {"fleet": "Fleet", "echo": "Echo"}
"""Whose declarations have a page of the reference, by how people call them."""
PROGRAMS = {
    **WITH_REFERENCE,
    "agent": "the agent",
    "sink": "ingero-sink",
    "alerter": "ingero-alerter",
    "remediator": "ingero-remediator",
}


def read_declared(program: str) -> dict[str, tuple[str, str]]:
    """By a metric's name, what it is, and a line about its type where no page of the reference has it."""
    if program not in WITH_REFERENCE:
        return {one.name: (one.meaning, _describe(one)) for one in list_shown(program)}
    page = (ROOT / f"docs/reference/{program}-metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE)
    cells = {name: [cell.strip() for cell in rest.split(" | ")] for name, rest in rows}
    return {name: (row[2] if len(row) > 3 else row[1], "") for name, row in cells.items()}


def _describe(one: Shown) -> str:
    return f"A {one.kind}{f'; with `{one.by}`' if one.by else ''}."


def read_written(program: str) -> dict[str, tuple[str, str]]:
    """What is written, by name or pattern: what a rise means, what to do."""
    written: dict[str, tuple[str, str]] = yaml.safe_load((FOLDER / f"{program}.yaml").read_text())
    return written


def find_entries(name: str, written: Iterable[str]) -> list[str]:
    """Keys of the written text that stand for a metric."""
    return [key for key in written if fnmatch.fnmatchcase(name, key)]


def find_alerts() -> dict[str, str]:
    """Alerts and what they ask for."""
    return {
        rule["alert"]: rule["expr"]
        for file in sorted((ROOT / "deploy/prometheus").glob("*.rules.yml"))
        for group in yaml.safe_load(file.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }


def build_page(program: str) -> str:
    """The page of a program's metrics."""
    written, alerts = read_written(program), find_alerts()
    title = PROGRAMS[program]
    lines = [
        f"# Metrics of {title}: when they rise",
        "",
        "<!-- Written by `make docs` from the declarations and the YAML beside it; edit those instead. -->",
        "",
        f"[Types and labels](../reference/{program}-metrics.md); [alerts](../alerts/README.md)."
        if program in WITH_REFERENCE
        else "[Alerts](../alerts/README.md).",
    ]
    for name, (meaning, kind) in sorted(read_declared(program).items()):
        entries = find_entries(name, written)
        if len(entries) != 1:
            sys.exit(
                f"docs/metrics/{program}.yaml has {len(entries)} texts for {name}; it wants one"
            )
        rises, todo = written[entries[0]]
        lines += [
            "",
            f"## {name}",
            "",
            f"{meaning} {kind}".strip(),
            "",
            f"**When it rises.** {rises}",
            "",
            f"**What to do.** {todo}",
        ]
        asked = [
            alert
            for alert, expr in alerts.items()
            if re.search(rf"\b{name}(_bucket|_sum|_count)?\b", expr)
        ]
        if asked:
            links = ", ".join(f"[{alert}](../alerts/{alert}.md)" for alert in asked)
            lines += ["", f"Alert: {links}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for one in PROGRAMS:
        (FOLDER / f"{one}.md").write_text(build_page(one))
    sys.exit(0)
