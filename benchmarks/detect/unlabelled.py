"""Data without labelled workers: step times of real jobs, simulated exchangeable peers, flight recorder dumps."""

import gzip
import json
import re
from pathlib import Path

import numpy as np
from benchmarks.detect import false_alarms
from benchmarks.detect.score import ratio

from ingero.detect.hang import find_hang
from ingero.detect.ranks.edetector import EDetector
from ingero.detect.ranks.settings import EDetectorSettings
from ingero.wire.flight_recorder.job import read_job

STEP_TIMES = Path(__file__).parent / "data" / "job_step_times.json.gz"
WARM_UP = 5
"""First steps of a job that are left out: compilation, caches."""
GROUP = 8
DUMPS = Path(__file__).parents[2] / "tests" / "data" / "flight_recorder"


def read_step_times():
    """Step times of each job in seconds, without its first steps; jobs of fewer than 30 steps are left out."""
    with gzip.open(STEP_TIMES, "rt") as stream:
        jobs = json.load(stream)
    times = [np.array(job["t"], float)[WARM_UP:] for job in jobs]
    return [t[np.isfinite(t) & (t > 0)] for t in times if t.size >= 30]


def as_peers(times):
    """A job's step times as operations of ``GROUP`` peers: consecutive steps dealt out in turn, shape (T, GROUP).

    Unlabelled runs say how often a method cries wolf on real noise: every "peer" is the same machine.
    """
    n = times.size // GROUP
    return times[: n * GROUP].reshape(n, GROUP)


def _mad_alarms(x, floor):
    middle = np.median(x, axis=1, keepdims=True)
    spread = 1.4826 * np.median(np.abs(x - middle), axis=1, keepdims=True)
    return x > middle + np.maximum(2.0 * spread, floor * middle)


def _in_a_row(alarms, n):
    run = alarms.copy()
    for back in range(1, n):
        run[back:] &= alarms[:-back]
    run[: n - 1] = False
    return run


def _cusum_alarms(x, options):
    alarms = np.zeros(x.shape, bool)
    value = np.zeros(x.shape[1])
    for t, row in enumerate(x):
        others = np.array([np.median(np.delete(row, i)) for i in range(row.size)])
        gain = np.clip(
            np.log(row / others) - options["allowance"], -options["clip"], options["clip"]
        )
        value = np.maximum(value + gain, 0.0)
        alarms[t] = value > options["limit"]
        value[alarms[t]] = 0.0
    return alarms


def _edetector_alarms(x, config):
    found = EDetector(x.shape[1], config)
    crossings, _ = found.observe(found.add_groups(1), x[:, None, :] * 1e9, np.array([x.shape[0]]))
    return sum(c.is_alarm and c.tier == 0 for c in crossings)


def step_time_rows(settings):
    """Alarms per 1 000 steps of each method on jobs that nobody has called faulty."""
    jobs = [as_peers(t) for t in read_step_times() if t.size >= 3 * GROUP]
    e = settings["edetector"]
    methods = {
        "flat MAD (seed)": lambda x: _mad_alarms(x, 0.0).sum(),
        "stage MAD, 5 %, 3 steps": lambda x: _in_a_row(_mad_alarms(x, 0.05), 3).sum(),
        "best-relative < 0.75": lambda x: (x.min(axis=1, keepdims=True) / x < 0.75).sum(),
        "CUSUM on log-ratio": lambda x: _cusum_alarms(x, settings["cusum"]).sum(),
        "e: rank bet": lambda x: _edetector_alarms(
            x, EDetectorSettings(**e, use_pooled=False, use_majority=False)
        ),
        "e: pooled bet": lambda x: _edetector_alarms(
            x, EDetectorSettings(**e, use_rank=False, use_majority=False, use_far=False)
        ),
        "e: rank + pooled": lambda x: _edetector_alarms(
            x, EDetectorSettings(**e, use_majority=False, use_far=False, use_sums=False)
        ),
        "e: rank + pooled, no peeling": lambda x: _edetector_alarms(
            x,
            EDetectorSettings(
                **e, use_majority=False, use_far=False, use_sums=False, use_peeling=False
            ),
        ),
        "e: all bets (ingero)": lambda x: _edetector_alarms(x, EDetectorSettings(**e)),
    }
    n_steps = sum(x.size for x in jobs)
    for name, count in methods.items():
        n_alarms = int(sum(count(x) for x in jobs))
        yield {
            "method": name,
            "dataset": "step_times",
            "alarms_per_1000_steps": round(1e3 * n_alarms / n_steps, 4),
            "n_alarms": n_alarms,
            "n_steps": n_steps,
            "n_runs": len(jobs),
        }


def simulated_rows(settings):
    """First alarms of healthy simulated workers over what the budget allows; above 1 it is broken."""
    for name, draw in false_alarms.NOISES.items():
        found = false_alarms.measure(draw, settings["simulated_ops"], settings["alpha_simulated"])
        for tier, (n_alarms, exposed) in zip(("alarm", "notice"), found, strict=True):
            yield {
                "method": "e: all bets (ingero)",
                "dataset": f"simulated: {name}",
                "tier": tier,
                "n_alarms": n_alarms,
                "n_worker_ops": exposed,
                "times_budget": round(n_alarms / exposed / settings["alpha_simulated"], 3),
                "false_alarms_per_10k": round(1e4 * n_alarms / exposed, 5),
                "n_runs": 1,
            }


def hang_rows(settings):
    """The hang attributor on dumps of jobs whose injected ranks are known."""
    del settings
    for folder in sorted(path for path in DUMPS.iterdir() if path.is_dir()):
        log = (folder / "fault_injection.log").read_text()
        truth = {int(n) for n in re.findall(r"Rank (\d+)", log)}
        named = set(find_hang(read_job(folder)).missing_ranks)
        hits = len(named & truth)
        yield {
            "method": "hang attributor",
            "dataset": f"flight recorder: {folder.name}",
            "precision": ratio(hits, len(named)),
            "recall": ratio(hits, len(truth)),
            "verdict_accuracy": float(named == truth),
            "named": sorted(named),
            "truth": sorted(truth),
            "n_runs": 1,
        }
