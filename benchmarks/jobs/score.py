"""From recordings, answers and labels to the table's figures."""

import numpy as np
from benchmarks.detect.score import ratio, wilson
from benchmarks.jobs.methods import METHODS, relabel

from ingero.job_traces.operations import read_labels
from ingero.job_traces.readers import read_trace

HANGS = ("pause", "kill")
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
    return {"n_ops": trace.n_ops, "n_steps": int(trace.steps.size), "said": said}


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
            "delay_s_median": median(score["delay_s"] for score in live),
            "asked_why": len(causes),
            "first_cause_right": sum(cause["is_right"] for cause in causes),
            "first_cause_wrong": sum(cause["is_wrong"] for cause in causes),
            "unexplained": sum(cause["first"] == "unexplained" for cause in causes),
            "share_explained_median": median(cause["explained"] for cause in causes),
            "after_verdict_s_median": median(cause["after_verdict_s"] for cause in causes),
        })
    return table
