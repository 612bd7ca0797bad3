"""How soon an episode is over once the worker is as fast as its peers again: a Judge fed a quarter of a step at a time.

A worker is slower for four steps and then works as before. Counted is the trace time from the start of the first
ordinary step to the first time the verdicts are read that does not name the worker any more: as a culprit, and at
all.
"""

from dataclasses import replace

import numpy as np
from benchmarks.detect.data import Change
from benchmarks.detect.methods import place_of

from ingero.detect.judge import Judge, JudgeSettings
from ingero.detect.ranks.settings import EDetectorSettings
from ingero.model.verdicts import VerdictKind

FACTORS = (1.10, 1.20, 1.50, 2.00)
SLOW_STEPS = 4
PARTS = 4
"""Looks per step."""


def entered(run, after_ns, until_ns):
    """The part of a run that its rank entered in a span of time."""
    entry = run.ops["entry_ns"]
    return replace(run, ops=run.ops[(entry > after_ns) & (entry <= until_ns)])


def looks(trace, settings):
    """What each worker is called at each look: pairs of trace time (ns) and worker (dp, stage) → verdict kind."""
    options = EDetectorSettings(**settings["edetector"])
    judge = Judge(JudgeSettings(detector=options, reorder_ns=0))
    begins, ends = trace.steps["begin_ns"], trace.steps["end_ns"]
    shares = np.arange(1, PARTS + 1) / PARTS
    times = (begins[:, None] + (ends - begins)[:, None] * shares).astype(np.int64).ravel()
    before = -1
    for now in times.tolist():
        for runs in trace.runs:
            fed = [entered(run, before, now) for run in runs]
            judge.observe([run for run in fed if run.ops.size], now)
        judge.settle(now)
        before = now
        yield now, {place_of(v.rank): v.kind for j in judge.judgements() for v in j.verdicts}


def recovery_rows(settings, source):
    """Steps from the recovery to the end of the alarm, and to the end of any report, per factor."""
    rng = np.random.default_rng([settings["seed"], 99])
    n_steps = settings["slice_steps"]
    for factor in FACTORS:
        changes, who = [], []
        for _ in range(settings["runs_per_scenario"]):
            first = int(rng.integers(0, source.steps.size - n_steps + 1))
            worker = source.workers[int(rng.integers(len(source.workers)))]
            in_time = (source.step_idx >= first) & (source.step_idx < first + SLOW_STEPS)
            factors = np.where(source.at(*worker) & in_time, factor, 1.0)
            changes.append(Change("recovery", factors, {worker: factor}, first_step=first))
            who.append(worker)
        found = [
            delays(case.trace, worker, settings)
            for case, worker in zip(source.build(changes), who, strict=True)
        ]
        for tier, at in (("alarm", 0), ("any", 1)):
            steps = [run[at] for run in found if run[at] is not None]
            yield {
                "method": "e: all bets (ingero)",
                "dataset": f"recovery from ×{factor:.2f}",
                "report": tier,
                "clear_steps_median": round(float(np.median(steps)), 3) if steps else None,
                "clear_steps_max": round(max(steps), 3) if steps else None,
                "n_named": len(steps),
                "n_open": sum(step == np.inf for step in steps),
                "n_runs": len(found),
            }


def delays(trace, worker, settings):
    """Steps from recovery until no alarm, and until no report; None where there was none, infinite if it stands at the end."""
    step_ns = float(np.median(trace.steps["end_ns"] - trace.steps["begin_ns"]))
    recovered = int(trace.steps["begin_ns"][SLOW_STEPS])
    named = {VerdictKind.CULPRIT}, {VerdictKind.CULPRIT, VerdictKind.DRAG}
    said = [(now, kinds[worker]) for now, kinds in looks(trace, settings)]
    found = []
    for kinds in named:
        when = [now for now, kind in said if kind in kinds]
        over = [now for now, kind in said if now >= recovered and now > max(when, default=0)]
        delay = (over[0] - recovered) / step_ns if over else np.inf
        found.append(delay if when else None)
    return found
