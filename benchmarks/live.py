"""Ten seeds of each fault through `ingero up`: who was named, who was wrongly, and how long it took.

Needs root. Prints a row of the table in ``docs/evidence/live/README.md`` per fault; ``--out FOLDER`` writes each run to its
``runs.jsonl``, in place of earlier runs of that fault. A run ends as soon as its fault was named; one without a fault lasts ``--quiet``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

PROGRAM = "from ingero.cli.main import main; main()"
CASES = {
    "slow-rank:3:1.3x": 8,
    "slow-rank:3:1.15x": 8,
    "pause:5": 8,
    "kill:2": 8,
    "kill:1": 3,  # a deleted workload, as the existing system's own test has it: three hosts, quorum three
    "slow-link:3": 8,
    "cpu-hog:3": 8,
    "imbalance": 8,
    "": 8,
}
"""Faults and how many ranks."""


def run(fault: str, seed: int, quiet: str) -> dict:
    """One run's result; a run that failed says why."""
    command = [sys.executable, "-c", PROGRAM, "up", "--json", "--ranks", str(CASES[fault])]
    command += ["--seed", str(seed)]
    command += ["--fault", fault] if fault else []
    command += ["--duration", quiet if fault in {"", "imbalance"} else "30s"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        said = [line for line in result.stderr.splitlines() if line.startswith("error")]
        return {"fault": fault, "seed": seed, "failed": said or [f"status {result.returncode}"]}
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
    return f"| {fault or 'none'} | {CASES[fault]} | {right} of {len(runs)} | {wrong} | {times} | {watched:.0f} |"


def write(path: Path, fault: str, runs: list[dict]) -> None:
    """Put these runs in the place of earlier ones of the same fault."""
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [line for line in lines if json.loads(line)["fault"] != fault]
    path.write_text("".join(line + "\n" for line in kept + [json.dumps(one) for one in runs]))


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--quiet", default="60s")
    parser.add_argument("--fault", action="append", choices=CASES)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for fault in options.fault or CASES:
        runs = [run(fault, seed, options.quiet) for seed in range(options.seeds)]
        rows.append(describe(fault, runs))
        print(rows[-1], flush=True)
        if options.out:
            write(options.out / "runs.jsonl", fault, runs)


if __name__ == "__main__":
    main()
