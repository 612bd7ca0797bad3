"""``python -m benchmarks.detect``: every detection method on every data set.

Settings are read from ``settings.json``, which is written before a run. Prints the table and writes ``results.json``
beside this file, and the table and a page of plots to ``docs/evidence/detection/``.
"""

import argparse
import json
import os
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from benchmarks.detect import (
    calibrated,
    cost,
    data,
    hours,
    methods,
    plots,
    recovery,
    report,
    score,
    unlabelled,
)

HERE = Path(__file__).parent
EVIDENCE = HERE.parents[1] / "docs" / "evidence" / "detection"
QUICK = {
    "runs_per_factor": 2,
    "compared_per_factor": 1,
    "runs_per_scenario": 2,
    "simulated_ops": 200_000,
}


_shared = {}
"""The source, read before the processes are forked that all need it."""


def run_dataset(at, settings):
    """Runs of one function of data sets, by data set and method."""
    rng = np.random.default_rng([settings["seed"], at])
    found = {}
    for case in data.DATASETS[at](_shared["source"], rng):
        for name, method in methods.METHODS:
            if case.is_compared or name == methods.WINNER:
                run = score.judge_case(case, method(case.trace, settings))
                found.setdefault(case.dataset, {}).setdefault(name, []).append(run)
    return found


def run_other(name, settings):
    if name in ON_SOURCE:
        return list(ON_SOURCE[name](settings, _shared["source"]))
    if name == "calibrated_rows":
        return list(calibrated.calibrated_rows(settings))
    return list(getattr(unlabelled, name)(settings))


ON_SOURCE = {
    "recovery_rows": recovery.recovery_rows,
    "drift_rows": hours.drift_rows,
    "cost_rows": cost.cost_rows,
}
OTHERS = ("step_time_rows", "simulated_rows", "hang_rows", "calibrated_rows", *ON_SOURCE)
POOLED = (
    ("one ×1.20 to ×2.00, all", lambda name: name in data.ALARMED),
    ("nobody slow, all", lambda name: name in data.NOBODY),
)
"""Data sets taken together, for narrower intervals."""


def run_all(settings):
    """Every row, in the order of the table."""
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 4), get_context("fork")) as pool:
        long_first = pool.submit(run_other, "simulated_rows", settings)
        labelled = [pool.submit(run_dataset, at, settings) for at in range(len(data.DATASETS))]
        others = [
            long_first if name == "simulated_rows" else pool.submit(run_other, name, settings)
            for name in OTHERS
        ]
        by_dataset = {}
        for task in labelled:
            by_dataset.update(task.result())
        rows = [row for task in others for row in task.result()]
    for title, is_in in POOLED:
        pooled = by_dataset[title] = {}
        for name, by_method in by_dataset.items():
            for method, runs in by_method.items() if is_in(name) else ():
                pooled.setdefault(method, []).extend(runs)
    labelled_rows = [
        score.summarise(method, dataset, runs)
        for dataset, by_method in by_dataset.items()
        for method, runs in by_method.items()
    ]
    return [*labelled_rows, *rows]


def describe(settings, rows, took_s):
    """What has to be known to read the figures."""
    here = _shared["source"]
    injected = [
        r
        for r in rows
        if r["method"] == methods.WINNER
        and r["dataset"].startswith("one ×")
        and "all" not in r["dataset"]
    ]
    told = f"""# Detection, measured

`make bench-detect`, {time.strftime("%Y-%m-%d")}, {platform.machine()}, {os.cpu_count()} cores, {took_s:.0f} s. Settings, fixed before the
run, and what else was tried: `benchmarks/detect/settings.json`; all figures: `benchmarks/detect/results.json`; bars:
[`detection.html`](detection.html).

![Share of runs answered right](accuracy.png)
![Steps to the naming](delay.png)

Injected runs are AR made healthy ({here.saved_s_per_step:.1f} s a step less than recorded) and replayed through its dependency graph: the
unmodified replay's step times differ from the recorded ones by at most {max(here.replay_error, here.healthy_error):.1e}.
{sum(r["n_runs"] for r in injected)} runs with one slow worker. In brackets: 95 % intervals (Wilson). *ops*: compared operations from
the onset as dated to the naming; *steps*: trace time from the true onset to the naming (×1.05 and ×1.10: to the notice), in
steps; both medians; *worst*: the longest; *in 3*: share of all slow workers named within three steps. *Other drags*: healthy
workers that were reported and not paged, per 10 000 worker-steps. Of one slow worker the baselines and the detector's parts are asked in
the first {settings["compared_per_factor"]} runs of each size."""
    return told.splitlines()


def run_some(settings, names):
    """The rows of an earlier run, with those that these functions give in place of theirs."""
    with ProcessPoolExecutor(len(names), get_context("fork")) as pool:
        tasks = [pool.submit(run_other, name, settings) for name in names]
        fresh = [row for task in tasks for row in task.result()]
    keys = ("method", "dataset", "tier", "report", "notice_spread")
    by_key = {tuple(row.get(key) for key in keys): row for row in fresh}
    rows = json.loads((HERE / "results.json").read_text())
    kept = [by_key.pop(tuple(row.get(key) for key in keys), row) for row in rows]
    return [*kept, *by_key.values()]


def describe_some(names):
    """The head of the earlier run, and what is newer."""
    head = (EVIDENCE / "README.md").read_text().split("\n### ")[0].split("\nRenewed")[0]
    told = ", ".join(name.removesuffix("_rows") for name in names)
    return [*head.splitlines(), "", f"Renewed since, {time.strftime('%Y-%m-%d')}: {told}."]


def main(arguments):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detect", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few runs, nothing written")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=OTHERS,
        help="renew these rows and keep all others of results.json",
    )
    options = parser.parse_args(arguments)
    settings = json.loads((HERE / "settings.json").read_text())
    if options.quick:
        settings.update(QUICK)
    began = time.monotonic()
    _shared["source"] = data.Source(settings)
    rows = run_some(settings, options.only) if options.only else run_all(settings)
    took_s = time.monotonic() - began
    head = describe_some(options.only) if options.only else describe(settings, rows, took_s)
    lines = [*head, *report.tables(rows)]
    print("\n".join(lines))
    if options.quick:
        return 0
    (HERE / "results.json").write_text(
        "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n"
    )
    EVIDENCE.mkdir(parents=True, exist_ok=True)
    (EVIDENCE / "README.md").write_text("\n".join(lines) + "\n")
    (EVIDENCE / "detection.html").write_text(report.page(rows))
    if not options.only:
        plots.draw_accuracy(rows, EVIDENCE / "accuracy.png")
        plots.draw_delay(rows, EVIDENCE / "delay.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
