"""Drift over hours: the healthy recording over and over, its compute slower by some percent per hour of trace time.

Nobody is to be flagged where all drift together: peers are compared with each other, not with their past. A worker that
drifts alone is to be noticed soon after what it loses for good passes the notice tier's bar.
"""

import numpy as np
from benchmarks.detect import methods
from benchmarks.detect.data import rows_with

from ingero.job_traces.convert import build_job_trace
from ingero.job_traces.model import TraceRows

LAPS = 8
"""Times that the recording's steps are gone through."""
ALL_PER_HOUR, ONE_PER_HOUR = 0.05, 0.03
N_RUNS = 3


def long_trace(source, mask, per_hour):
    """A job of LAPS recordings in which the compute of a mask gets slower, and the hour at which each step begins."""
    rows, n_steps = source.rows, source.steps.size
    step_h = source.mean_step_s / 3600.0
    hours = (np.arange(LAPS)[None, :] * n_steps + source.step_idx[:, None]) * step_h
    factor = 1.0 + per_hour * hours * mask[:, None]
    extra = (factor - 1.0) * rows.duration_s[:, None]
    start, duration = source.graph.replay(extra)
    laps = [rows_with(rows, start[:, lap], duration[:, lap]) for lap in range(LAPS)]
    step = source.step_idx[:, None] + np.arange(LAPS) * n_steps
    names = ("dp", "stage", "optype", "start_s", "duration_s")
    columns = {name: np.concatenate([getattr(lap, name) for lap in laps]) for name in names}
    return build_job_trace(
        TraceRows(step=step.T.ravel(), optypes=rows.optypes, **columns), "hours", 4
    )


def drift_rows(settings, source):
    """What was said of jobs that drift: all together, and one worker alone."""
    rng = np.random.default_rng([settings["seed"], 98])
    judge = dict(methods.METHODS)[methods.WINNER]
    trace = long_trace(source, source.is_compute, ALL_PER_HOUR)
    answer = judge(trace, settings)
    total_h = float(trace.steps["end_ns"][-1]) / 3.6e12
    yield {
        "method": methods.WINNER,
        "dataset": f"all drift together, {ALL_PER_HOUR:.0%} per hour",
        "hours": round(total_h, 2),
        "n_alarms": len(answer.alarms),
        "n_notices": len(answer.notices),
        "verdicts": sorted(answer.verdicts),
        "n_runs": 1,
    }
    bar = settings["edetector"]["notice_slowdown"]
    passed, alarms, others = [], 0, 0
    for at in rng.permutation(len(source.workers))[:N_RUNS]:
        who = source.workers[int(at)]
        trace = long_trace(source, source.at(*who), ONE_PER_HOUR)
        answer = judge(trace, settings)
        alarms += len(answer.alarms)
        others += len(set(answer.notices) - {who})
        if who in answer.notices:
            passed.append(1.0 + ONE_PER_HOUR * answer.notices[who] / 3600.0)
    yield {
        "method": methods.WINNER,
        "dataset": f"one drifts, {ONE_PER_HOUR:.0%} per hour",
        "hours": round(float(trace.steps["end_ns"][-1]) / 3.6e12, 2),
        "bar": 1.0 + bar,
        "n_noticed": len(passed),
        "noticed_at_median": round(float(np.median(passed)), 4) if passed else None,
        "noticed_at_max": round(max(passed), 4) if passed else None,
        "n_alarms": alarms,
        "n_others": others,
        "n_runs": N_RUNS,
    }
