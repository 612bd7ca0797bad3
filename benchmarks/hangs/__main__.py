"""``python -m benchmarks.hangs``: every labelled hang, by `ingero hang` and by PyTorch's own ``torchfrtrace``, one table."""

import json
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from benchmarks.hangs.pack import SETS, unpack
from benchmarks.hangs.score import copy_without_stacks, judge, read_label
from benchmarks.hangs.torchfrtrace import ask

RESULTS = Path(__file__).parent / "results.json"


def measure(scratch, name):
    """One row per case of a set."""
    rows = []
    cases = unpack(scratch / "all", name)
    dumps = [copy_without_stacks(folder, scratch / "alone") for folder in cases.values()]
    for (case, folder), dump, theirs in zip(cases.items(), dumps, ask(dumps), strict=True):
        label = read_label(folder)
        outcome, report = judge(folder)
        alone, _ = judge(dump)
        rows.append({
            "case": case,
            "kind": label["kind"],
            "n_ranks": label["n_ranks"],
            "at_fault": label["at_fault"],
            "outcome": outcome,
            "named": list(report.missing_ranks),
            "suspects": list(report.suspects),
            "outcome_without_stacks": alone,
            "torchfrtrace": theirs,
        })
    return rows


def build_table(rows):
    """Lines of a table in Markdown, one per kind and a sum."""
    lines = [
        "| kind | cases | right | unknown | wrong | without stacks: right | unknown | wrong | torchfrtrace |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    kinds = defaultdict(list)
    for row in rows:
        kinds[row["kind"]].append(row)
    for kind, mine in [*kinds.items(), ("**all**", rows)]:
        full = Counter(row["outcome"] for row in mine)
        alone = Counter(row["outcome_without_stacks"] for row in mine)
        theirs = Counter(row["torchfrtrace"] or "no torch here" for row in mine)
        cells = [kind, len(mine), full["right"], full["unknown"], full["wrong"]]
        cells += [alone["right"], alone["unknown"], alone["wrong"]]
        cells.append(", ".join(f"{said} {n}" for said, n in theirs.most_common()))
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return lines


def main():
    results = {}
    for name in SETS:
        with tempfile.TemporaryDirectory() as scratch:
            results[name] = measure(Path(scratch), name)
        print(f"{name}:", *build_table(results[name]), "", sep="\n")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
