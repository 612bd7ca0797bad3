"""Ten seeds of each fault through `ingero up`: who was named, who was wrongly, and how long it took.

Needs root. Prints a row of the table in ``docs/evidence/live/README.md`` per fault; ``--out FOLDER`` appends each run to its
``runs.jsonl``. A run ends as soon as its fault was named; one without a fault lasts ``--quiet``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

PROGRAM = "from ingero.cli.main import main; main()"
FAULTS = ("slow-rank:3:1.3x", "slow-rank:3:1.15x", "pause:5", "kill:2", "imbalance", "")


def run(fault: str, seed: int, ranks: int, quiet: str) -> dict:
    """One run's result; a run that failed says why."""
    command = [sys.executable, "-c", PROGRAM, "up", "--json", "--ranks", str(ranks)]
    command += ["--seed", str(seed)]
    command += ["--fault", fault] if fault else []
    command += ["--duration", quiet if fault in {"", "imbalance"} else "30s"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        return {"fault": fault, "seed": seed, "failed": result.stderr.strip().splitlines()[-1:]}
    found = json.loads(result.stdout)
    kept = (
        "culprits",
        "network",
        "victims",
        "missing_ranks",
        "wrongly_named",
        "detection_s",
        "watched_s",
    )
    return {"fault": fault, "seed": seed, **{name: found[name] for name in kept}}


def describe(fault: str, runs: list[dict]) -> str:
    """One row of the table."""
    good = [one for one in runs if "failed" not in one]
    delays = [one["detection_s"] for one in good if one["detection_s"] is not None]
    right = (
        len(delays)
        if fault not in {"", "imbalance"}
        else sum(not one["wrongly_named"] for one in good)
    )
    wrong = sum(bool(one["wrongly_named"]) for one in good)
    times = f"{statistics.median(delays):.1f} / {max(delays):.1f}" if delays else "–"
    watched = sum(one["watched_s"] for one in good)
    return f"| {fault or 'none'} | {right} of {len(runs)} | {wrong} | {times} | {watched:.0f} |"


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--quiet", default="60s")
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for fault in options.fault or FAULTS:
        runs = [run(fault, seed, options.ranks, options.quiet) for seed in range(options.seeds)]
        rows.append(describe(fault, runs))
        print(rows[-1], flush=True)
        if options.out:
            with (options.out / "runs.jsonl").open("a") as file:
                file.writelines(json.dumps(one) + "\n" for one in runs)


if __name__ == "__main__":
    main()
