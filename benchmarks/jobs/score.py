"""From recordings, answers and labels to the table's figures."""

import numpy as np
from benchmarks.detect.score import ratio, wilson
from benchmarks.jobs.methods import METHODS, relabel

from ingero.job_traces.operations import read_labels
from ingero.job_traces.readers import read_trace
from ingero.units import NS_PER_S

HANGS = ("pause", "kill")
MIN_STEPS = 5
SLOWED = 1.3
"""The least slowdown whose rank has to be named."""
LIVE = "ingero, live"


def judge_recording(path, settings, methods=METHODS):
    """What each of these methods says of a recording: who was named, and when after the onset (negative: before it)."""
    labels = read_labels(path)
    trace = relabel(read_trace(path))
    onset_s = labels["onset_s"] or 0.0
    said = {}
    for name, method in methods:
        alarms = method(trace, settings).alarms
        said[name] = {str(rank): round(at - onset_s, 2) for (rank, _), at in sorted(alarms.items())}
    return {
        "n_ops": trace.n_ops,
        "n_steps": int(trace.steps.size),
        "step_ratio": find_step_ratio(trace.steps, labels["onset_s"]),
        "said": said,
    }


def find_step_ratio(steps, onset_s):
    """The median step's time once the fault is there by what it was before; None without enough of either.

    A fault that the job hardly feels is there all the same: its rank counts as one that should be named.
    """
    if onset_s is None:
        return None
    begin_s, took_s = steps["begin_ns"] / NS_PER_S, (steps["end_ns"] - steps["begin_ns"]) / NS_PER_S
    parts = [took_s[(begin_s + took_s < onset_s)], took_s[begin_s >= onset_s]]
    if min(part.size for part in parts) < MIN_STEPS:
        return None
    before, after = (float(np.median(part)) for part in parts)
    return round(after / before, 2)


def count_slowed(rows):
    """Runs of which it is known that the fault made steps at least `SLOWED` times as long, and those rightly named."""
    slowed = [
        row for row in rows if row["rank"] is not None and (row.get("step_ratio") or 0.0) >= SLOWED
    ]
    return len(slowed), sum(row["scores"][LIVE]["right"] for row in slowed)


def read_live(outcome):
    """Who was named by Fleet, and when after the onset where that is known of it."""
    named = {*outcome["culprits"], *outcome["missing_ranks"], *outcome["wrongly_named"]}
    wrong, delay = set(outcome["wrongly_named"]), outcome["detection_s"]
    return {str(r): (0.0 if r in wrong else delay if delay is not None else -1.0) for r in named}


def find_disturbed(run, outcome, settings):
    """Ranks without the fault that other work on this machine kept from running, much more than the median rank."""
    waited = outcome.get("kept_waiting") or [0.0]
    limit = float(np.median(waited)) + settings["disturbed_share"]
    return [rank for rank, share in enumerate(waited) if rank != run.rank and share > limit]


def score_one(run, said):
    """Counts of one method's answer to one run: a naming of anybody before the onset is a naming of an innocent."""
    named = {int(rank): at for rank, at in said.items()}
    right = run.rank is not None and run.rank in named and named[run.rank] >= 0
    innocents = {rank for rank, at in named.items() if rank != run.rank or at < 0}
    return {
        "right": right,
        "innocents": sorted(innocents),
        "delay_s": named[run.rank] if right else None,
    }


def score_cause(run, outcome, settings):
    """Whether the first cause is right, and how the excess is divided; None where nobody was asked."""
    diagnosis = outcome.get("diagnosis")
    expected = settings["causes"].get(run.kind)
    if diagnosis is None or expected is None or diagnosis["rank"] != run.rank:
        return None
    causes = diagnosis["causes"]
    explained = sum(cause["share"] for cause in causes if cause["cause"] != "unexplained")
    first = causes[0]["cause"] if causes else "unexplained"
    return {
        "expected": expected,
        "first": first,
        "is_right": first == expected,
        "is_wrong": first not in {expected, "unexplained"},
        "explained": round(min(explained, 1.0), 3),
        "right_share": round(sum(c["share"] for c in causes if c["cause"] == expected), 3),
        "after_verdict_s": diagnosis["after_verdict_s"],
    }


def is_uneven(outcome):
    """Whether Fleet said at the end that ranks are slow in turns, or a whole stage is: nobody is named for that."""
    return any(kind.startswith("imbalance") for kind in outcome.get("verdicts", {}).values())


def median(values):
    values = [value for value in values if value is not None]
    return round(float(np.median(values)), 2) if values else None


def summarise(rows):
    """One line per method: over all runs with a fault, and over all without."""
    table = []
    for name in (LIVE, *(name for name, _ in METHODS)):
        asked = [row for row in rows if name in row["scores"]]
        hit = [row["scores"][name] for row in asked if row["rank"] is not None]
        healthy = [row["scores"][name] for row in asked if row["rank"] is None]
        n_right = sum(score["right"] for score in hit)
        n_cried = sum(bool(score["innocents"]) for score in healthy)
        table.append({
            "method": name,
            "n_faulty": len(hit),
            "right": n_right,
            "right_share": ratio(n_right, len(hit)),
            "right_ci": wilson(n_right, len(hit)),
            "right_alone": sum(score["right"] and not score["innocents"] for score in hit),
            "innocents_named": sum(len(score["innocents"]) for score in hit + healthy),
            "innocents_disturbed": sum(
                len({*row["scores"][name]["innocents"]} & {*row["disturbed"]}) for row in asked
            ),
            "delay_s_median": median(score["delay_s"] for score in hit),
            "n_healthy": len(healthy),
            "healthy_with_alarm": n_cried,
            "healthy_with_alarm_ci": wilson(n_cried, len(healthy)),
        })
    return table


def summarise_faults(rows):
    """One line per fault, of ours live: who, when and why."""
    table = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of = [row for row in rows if row["kind"] == kind]
        live = [row["scores"][LIVE] for row in of if LIVE in row["scores"]]
        causes = [row["cause"] for row in of if row["cause"] is not None]
        table.append({
            "fault": kind,
            "n": len(of),
            "failed": sum("failed" in row for row in of),
            "right": sum(score["right"] for score in live),
            "innocents_named": sum(len(score["innocents"]) for score in live),
            "uneven": sum(is_uneven(row) for row in of),
            "step_ratio_median": median(row.get("step_ratio") for row in of),
            "delay_s_median": median(score["delay_s"] for score in live),
            "asked_why": len(causes),
            "first_cause_right": sum(cause["is_right"] for cause in causes),
            "first_cause_wrong": sum(cause["is_wrong"] for cause in causes),
            "unexplained": sum(cause["first"] == "unexplained" for cause in causes),
            "share_explained_median": median(cause["explained"] for cause in causes),
            "after_verdict_s_median": median(cause["after_verdict_s"] for cause in causes),
        })
    return table
