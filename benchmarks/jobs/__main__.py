"""``python -m benchmarks.jobs``: real jobs with real faults through `ingero up`, and one table.

Each run is kept as a recording with labels and a file of what came of it. A run that failed is tried again next time, and
counted as failed until then. The sets that take hours go on from the committed figures: what ran elsewhere is not run again.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.jobs.plan import plan_full, plan_healthy, plan_reduced
from benchmarks.jobs.report import build_page, build_tables
from benchmarks.jobs.running import run_one
from benchmarks.jobs.score import (
    LIVE,
    find_disturbed,
    judge_recording,
    read_live,
    score_cause,
    score_one,
    summarise,
    summarise_faults,
)

from ingero.config.torch import find_torch_python

HERE = Path(__file__).parent
KEPT = HERE.parents[1] / "build" / "jobs"
PLANS = {"reduced": plan_reduced, "full": plan_full, "healthy": plan_healthy}
PAGES = {
    "reduced": ("results.json", "README.md"),
    "full": ("full.json", "full.md"),
    "healthy": ("healthy.json", "healthy.md"),
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, prog="benchmarks.jobs")
    sets = parser.add_mutually_exclusive_group()
    sets.add_argument(
        "--full",
        action="store_true",
        help="every job, fault, size and seed; goes on where it ended, here or in the committed figures",
    )
    sets.add_argument(
        "--healthy",
        action="store_true",
        help="runs of five minutes in which nothing is wrong, for two hours; goes on likewise",
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the finished runs of the reduced set too"
    )
    parser.add_argument(
        "--only",
        default="",
        help="names of runs, such as 'ddp.cpu-*' or '*.none.*'; writes no table",
    )
    parser.add_argument(
        "--afresh",
        action="store_true",
        help="remove what is kept and the committed figures of the set first, and run all again",
    )
    parser.add_argument("--judge", action="store_true", help="run nothing, judge what is kept")
    parser.add_argument("--python", default="", help="runs the jobs; default as of `ingero up`")
    options = parser.parse_args()
    if options.afresh and (options.only or options.judge or options.resume):
        parser.error(
            "--afresh removes what is kept: it goes with none of --only, --judge and --resume"
        )
    return options


def is_done(path):
    """Whether a run is kept that came to its end."""
    return path.is_file() and "failed" not in json.loads(path.read_text())


def read_committed(figures):
    """What the committed figures of a set say: a row for each run that came to its end, by name, and where they ran."""
    if not figures.is_file():
        return {}, []
    results = json.loads(figures.read_text())
    return {row["name"]: row for row in results["runs"] if "failed" not in row}, results["machines"]


def run_all(runs, folder, settings, python, committed):
    """Run what is neither kept nor committed; prints a line a run."""
    for number, run in enumerate(runs, 1):
        if run.name in committed or is_done(folder / f"{run.name}.json"):
            continue
        print(f"[{number}/{len(runs)}] {run.name}", end=" ", flush=True)
        outcome = run_one(run, folder, settings, python)
        print(f"{describe(outcome)} ({outcome['took_s']:.0f} s)", flush=True)


def describe(outcome):
    """A line's end."""
    if "failed" in outcome:
        return f"FAILED: {' '.join(outcome['failed'])}"
    named = sorted(int(rank) for rank in read_live(outcome))
    cause = (outcome["diagnosis"] or {}).get("cause", "")
    return f"named {named} {cause}".rstrip()


def judge_all(runs, folder, settings, committed):
    """A row for each run that is kept, or committed."""
    rows = []
    for run in runs:
        path = folder / f"{run.name}.json"
        if not path.is_file():
            rows += [committed[run.name]] if run.name in committed else []
            continue
        outcome = json.loads(path.read_text())
        row = {
            "name": run.name,
            "kind": run.kind,
            "rank": run.rank,
            **outcome,
            "scores": {},
            "cause": None,
        }
        if "failed" not in outcome:
            row |= judge_recording(folder / f"{run.name}.parquet", settings)
            row["said"] = {LIVE: read_live(outcome), **row["said"]}
            row["scores"] = {name: score_one(run, said) for name, said in row["said"].items()}
            is_right = row["scores"][LIVE]["right"]
            row["cause"] = score_cause(run, outcome, settings) if is_right else None
            row["disturbed"] = find_disturbed(run, outcome, settings)
            row.pop("diagnosis")
        rows.append(row)
    return rows


def describe_machine(python):
    """Where the runs ran."""
    asked = [python or str(find_torch_python()), "-c", "import torch; print(torch.__version__)"]
    torch = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "torch": torch,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
    }


def main():
    options = parse_arguments()
    settings = json.loads((HERE / "settings.json").read_text())
    asked = "full" if options.full else "healthy" if options.healthy else "reduced"
    runs = PLANS[asked](settings)
    folder = KEPT / asked
    figures, page = (HERE / name for name in PAGES[asked])
    is_whole = asked == "reduced" and not (options.resume or options.judge or options.only)
    if options.afresh or is_whole:
        shutil.rmtree(folder, ignore_errors=True)
        figures.unlink(missing_ok=True)
    committed, machines = {}, []
    if asked != "reduced" and not options.only:
        committed, machines = read_committed(figures)
    folder.mkdir(parents=True, exist_ok=True)
    if options.only:
        runs = [run for run in runs if fnmatch(run.name, f"*{options.only}*")]
    began = time.monotonic()
    if not options.judge:
        run_all(runs, folder, settings, options.python, committed)
    rows = judge_all(runs, folder, settings, committed)
    here = describe_machine(options.python)
    results = {
        "set": asked,
        "planned": len(runs),
        "date": time.strftime("%Y-%m-%d"),
        "took_s": round(sum(row["took_s"] for row in rows), 1),
        "machines": machines if here in machines else [*machines, here],
        "beside": settings["beside"].get(asked, ""),
        "disturbed_pct": 100 * settings["disturbed_share"],
        "methods": summarise(rows),
        "faults": summarise_faults(rows),
        "runs": rows,
    }
    print(
        "",
        *build_tables(results),
        f"\n{time.monotonic() - began:.0f} s; kept in {folder}",
        sep="\n",
    )
    if not options.only:
        figures.write_text(json.dumps(results, indent=1) + "\n")
        page.write_text("\n".join(build_page(results)) + "\n")
    if any("failed" in row for row in rows):
        sys.exit("some runs failed; run it again with --resume to try them once more")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; finished runs are kept, go on with --resume or --full")
