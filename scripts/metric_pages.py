"""Makes a page for the metrics of Fleet and of Echo: what each is, what it means when it rises, and what to do.

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

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs/metrics"
PROGRAMS = {"fleet": "Fleet", "echo": "Echo"}


def read_declared(program: str) -> dict[str, list[str]]:
    """Cells of the reference's rows by the metric's name: those between it and where it comes from."""
    page = (ROOT / f"docs/reference/{program}-metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split(" | ")] for name, rest in rows}


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
        f"[Types and labels](../reference/{program}-metrics.md); [alerts](../alerts/README.md).",
    ]
    for name, cells in sorted(read_declared(program).items()):
        meaning = cells[2] if len(cells) > 3 else cells[1]
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
            meaning,
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
