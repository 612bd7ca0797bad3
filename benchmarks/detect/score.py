"""From answers and truth to the table's figures."""

import numpy as np

Z95 = 1.959964


def wilson(hits, n):
    """95 % confidence interval of a share (Wilson 1927); None without trials."""
    if not n:
        return None
    share = hits / n
    middle = (share + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * np.sqrt(share * (1 - share) / n + Z95**2 / (4 * n**2))
    return [round(max(middle - half, 0.0), 4), round(min(middle + half, 1.0), 4)]


def ratio(hits, n):
    return None if not n else round(hits / n, 4)


def judge_case(case, answer):
    """One run's counts.

    For a case that expects alarms ("culprit", "network") the alarms are compared with the truth; for "drag" the
    notices, and any alarm is false; otherwise everything named is false.
    """
    truth = set(case.slow) if case.expect in {"culprit", "network", "drag"} else set()
    named = set(answer.notices) if case.expect == "drag" else set(answer.alarms)
    when = answer.notices if case.expect == "drag" else answer.alarms
    false = named - truth
    if case.expect == "drag":
        false |= set(answer.alarms) - truth
        named |= set(answer.alarms)
        when = {**answer.alarms, **answer.notices}
    hits = named & truth
    is_right = named == truth
    if case.expect.startswith("imbalance"):
        is_right = is_right and case.expect in answer.verdicts
    return {
        "hits": len(hits),
        "missed": len(truth - named),
        "false": len(false),
        "alarmed_truth": len(set(answer.alarms) & truth),
        "is_right": bool(is_right),
        "other_drags": len(set(answer.notices) - set(answer.alarms) - set(case.slow)),
        "delay_s": [max(when[w] - case.onset_s, 0.0) for w in hits if not np.isnan(when[w])],
        "ops": [answer.n_ops[w] for w in hits if w in answer.n_ops],
        "worker_steps": len(case.trace.workers) * int(case.trace.steps.size),
        "step_s": float(np.median(case.trace.steps["end_ns"] - case.trace.steps["begin_ns"]) / 1e9),
    }


def summarise(method, dataset, runs):
    """One row of the table."""
    hits, missed, false = (sum(run[k] for run in runs) for k in ("hits", "missed", "false"))
    delays = [d for run in runs for d in run["delay_s"]]
    ops = [n for run in runs for n in run["ops"]]
    right = sum(run["is_right"] for run in runs)
    worker_steps = sum(run["worker_steps"] for run in runs)
    step_s = float(np.median([run["step_s"] for run in runs]))
    return {
        "method": method,
        "dataset": dataset,
        "precision": ratio(hits, hits + false),
        "precision_ci": wilson(hits, hits + false),
        "recall": ratio(hits, hits + missed),
        "recall_ci": wilson(hits, hits + missed),
        "false_alarms_per_10k": round(1e4 * false / worker_steps, 3),
        "alarms_on_slow": sum(run["alarmed_truth"] for run in runs),
        "detect_ops_median": float(np.median(ops)) if ops else None,
        "detect_s_median": round(float(np.median(delays)), 3) if delays else None,
        "detect_steps_median": round(float(np.median(delays)) / step_s, 4) if delays else None,
        "detected_in_3_steps": None
        if hits and not delays  # named without a time
        else ratio(
            sum(d <= 3 * run["step_s"] for run in runs for d in run["delay_s"]), hits + missed
        ),
        "other_drags_per_10k": round(
            1e4 * sum(run["other_drags"] for run in runs) / worker_steps, 3
        ),
        "detect_steps_max": round(max(d / run["step_s"] for run in runs for d in run["delay_s"]), 4)
        if delays
        else None,
        "verdict_accuracy": ratio(right, len(runs)),
        "verdict_accuracy_ci": wilson(right, len(runs)),
        "n_runs": len(runs),
    }
