"""Ten seeds of each fault through `ingero up`: who was named, who was wrongly, and how long it took.

Needs root; runs of a case "without root" are started as another user. Prints a row of the table in
``docs/evidence/live/README.md`` per case; ``--out FOLDER`` writes each run to its ``runs.jsonl`` as it ends, in place
of the earlier runs of that case. A run ends as soon as its fault was named; one without a fault lasts ``--quiet``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.unprivileged import AS_UNPRIVILEGED, NOBODY

PROGRAM = "from ingero.cli.main import main; main()"


@dataclass(frozen=True)
class Case:
    """What to run: a fault, empty for none, on so many ranks."""

    fault: str
    n_ranks: int = 8
    has_root: bool = True

    @property
    def name(self) -> str:
        """Its row."""
        return self.fault if self.has_root else f"{self.fault} without root"

    @property
    def is_detected(self) -> bool:
        """Whether somebody must be named."""
        return self.fault not in {"", "imbalance"}


CASES = {
    case.name: case
    for case in (
        Case("slow-rank:3:1.3x"),
        Case("slow-rank:3:1.15x"),
        Case("pause:5"),
        Case("kill:2"),
        Case(
            "kill:1", 3
        ),  # a deleted workload, as the existing system's own test has it: quorum three
        Case("slow-link:3"),
        Case("cpu-hog:3"),
        Case("io-hog:3"),
        Case("imbalance"),
        Case("slow-rank:3:1.3x", has_root=False),
        Case("pause:5", has_root=False),
        Case(""),
    )
}


def run(case: Case, seed: int, quiet: str) -> dict:
    """One run's result, with the machine's load average before it; a run that failed says why."""
    load = round(os.getloadavg()[0], 1)
    command = [sys.executable, "-c", PROGRAM, "up", "--json", "--ranks", str(case.n_ranks)]
    command += ["--seed", str(seed)]
    command += ["--fault", case.fault] if case.fault else []
    command += ["--duration", "30s" if case.is_detected else quiet]
    with tempfile.TemporaryDirectory() as home:
        if not case.has_root and os.geteuid() == 0:
            os.chown(home, NOBODY, NOBODY)
            command = [*AS_UNPRIVILEGED, *command]
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "HOME": home, "TMPDIR": home},
        )
    about = {"fault": case.name, "seed": seed, "load": load}
    if result.returncode:
        said = [line for line in result.stderr.splitlines() if line.startswith("error")]
        return {**about, "failed": said or [f"status {result.returncode}"]}
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
    return {**about, **{name: found[name] for name in kept}}


def describe(case: Case, runs: list[dict]) -> str:
    """One row of the table."""
    good = [one for one in runs if "failed" not in one]
    delays = [one["detection_s"] for one in good if one["detection_s"] is not None]
    right = len(delays) if case.is_detected else sum(not one["wrongly_named"] for one in good)
    wrong = sum(bool(one["wrongly_named"]) for one in good)
    times = f"{statistics.median(delays):.1f} / {max(delays):.1f}" if delays else "–"
    watched = sum(one["watched_s"] for one in good)
    name = case.name or "none"
    return (
        f"| {name} | {case.n_ranks} | {right} of {len(runs)} | {wrong} | {times} | {watched:.0f} |"
    )


def write(path: Path, case: Case, runs: list[dict]) -> None:
    """Put these runs in the place of earlier ones of the same case."""
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [line for line in lines if json.loads(line)["fault"] != case.name]
    path.write_text("".join(line + "\n" for line in kept + [json.dumps(one) for one in runs]))


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--quiet", default="60s")
    parser.add_argument("--fault", action="append", choices=CASES)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for name in options.fault or CASES:
        runs: list[dict] = []
        for seed in range(options.seeds):
            runs.append(run(CASES[name], seed, options.quiet))
            if options.out:
                write(options.out / "runs.jsonl", CASES[name], runs)
        print(describe(CASES[name], runs), flush=True)


if __name__ == "__main__":
    main()
