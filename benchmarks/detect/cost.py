"""What AR's slow worker cost: the Judge's charges against the slowdowns that the recording's authors published.

Two of their files, unchanged: ``mw-AR.json`` (the job simulated without the slow worker's excess) and
``result-AR.json`` (the job simulated without anybody's, whole and step by step, and with only one replica's or
stage's).
"""

import json
from pathlib import Path

import numpy as np
from benchmarks.detect.graph import HIDDEN, Graph

from ingero.cli.commands.replay.offline import judge_trace
from ingero.job_traces.convert import build_job_trace

DATA = Path(__file__).parent / "data"


def step_lengths(rows):
    """Seconds of each step, in the order of step numbers."""
    steps, idx = np.unique(rows.step, return_inverse=True)
    ends = np.zeros(steps.size)
    np.maximum.at(ends, idx, rows.start_s + rows.duration_s)
    return ends


def unrecorded_waits(graph):
    """Seconds that each (dp, stage) stood still outside every recorded operation, shape (dp, stage)."""
    rows = graph.rows
    hidden = rows.optype == rows.optypes.index(HIDDEN)
    waits = np.zeros((rows.dp.max() + 1, rows.stage.max() + 1))
    np.add.at(waits, (rows.dp[hidden], rows.stage[hidden]), rows.duration_s[hidden])
    return waits


def by_place(judgement, amount, shape):
    """A verdict's nanoseconds as seconds of each (dp, stage)."""
    table = np.zeros(shape)
    for verdict in judgement.verdicts:
        labels = dict(verdict.rank.labels)
        table[int(labels["dp"]), int(labels["stage"])] = amount(verdict) / 1e9
    return table


def cost_rows(settings, source):
    """One row: lost GPU-seconds, slowdowns, and what makes up the difference, per waiting GPU and step."""
    del settings
    without, whole = (
        json.loads((DATA / name).read_text()) for name in ("mw-AR.json", "result-AR.json")
    )
    trace = build_job_trace(source.recorded, "AR", 4)
    (judgement,) = judge_trace(trace)
    (healthy,) = judge_trace(build_job_trace(source.rows, "AR without its slow worker", 4))
    (culprit,) = judgement.culprits
    labels = dict(culprit.rank.labels)
    n_steps = int(trace.steps.size)
    n_waiting = sum(rank.n_gpus for rank in trace.workers) - culprit.rank.n_gpus
    theirs_s = without["tori"] - without["trem"]
    recorded, healed = step_lengths(source.recorded), step_lengths(source.rows)
    hidden = unrecorded_waits(Graph(source.recorded))
    is_waiting = np.ones(hidden.shape, bool)
    is_waiting[int(labels["dp"]), int(labels["stage"])] = False

    def per_step(table):
        return float(table[is_waiting].mean()) / n_steps

    charged_s = culprit.lost_gpu_ns / 1e9 / n_waiting / n_steps
    unrecorded_s = per_step(hidden - unrecorded_waits(source.graph))
    anyway_s = per_step(by_place(healthy, lambda v: v.wait_ns, hidden.shape))
    names = [str(step) for step in source.steps]
    published = np.array([whole["blocking_step_slowdown"][name] for name in names])
    yield {
        "method": "cost",
        "named": sorted(
            (int(dict(v.rank.labels)["dp"]), int(dict(v.rank.labels)["stage"]))
            for v in judgement.culprits
        ),
        "dataset": "AR",
        "lost_gpu_s": round(culprit.lost_gpu_ns / 1e9, 1),
        "published_lost_gpu_s": round(theirs_s * n_steps * n_waiting, 1),
        "ratio": round(charged_s / theirs_s, 4),
        "charged_s_per_step": round(charged_s, 3),
        "unrecorded_s_per_step": round(unrecorded_s, 3),
        "anyway_s_per_step": round(anyway_s, 3),
        "reconciled_s_per_step": round(charged_s + unrecorded_s - anyway_s, 3),
        "published_s_per_step": round(theirs_s, 3),
        "excess_s_per_step": round(culprit.excess_ns / 1e9 / n_steps, 3),
        "our_replay_s_per_step": round(source.saved_s_per_step, 3),
        "slowdown": round(float(recorded.mean() / healed.mean()), 4),
        "published_slowdown_worker": round(without["tori"] / without["trem"], 4),
        "published_slowdown_all": round(whole["blocking_slowdown"], 4),
        "published_slowdown_by_dp": whole["blocking_decompose_by_dp_rank"],
        "published_slowdown_by_stage": whole["blocking_decompose_by_stage"],
        "published_launch_slowdown": round(whole["launch_slowdown"], 4),
        "step_slowdown_max_difference": round(
            float(np.abs(recorded / healed / published - 1.0).max()), 4
        ),
        "waited_gpu_s": round(judgement.total_wait_gpu_ns / 1e9, 1),
        "charged_plus_unattributed_gpu_s": round(
            (judgement.charged_gpu_ns + judgement.unattributed_gpu_ns) / 1e9, 1
        ),
        "n_runs": 1,
    }


def describe(row):
    """Markdown: the comparison, and why its two sides differ."""
    of_dp, of_stage = (
        ", ".join(f"{name}: {value:.2f}" for name, value in sorted(row[key].items()))
        for key in ("published_slowdown_by_dp", "published_slowdown_by_stage")
    )
    yield "| AR, the cost of its slow worker | here | published by the recording's authors |\n|---|---|---|"
    yield (
        f"| lost GPU-seconds of those who waited | {row['lost_gpu_s']:,} (charged by the Judge, ratio {row['ratio']:.3f}) |"
        f" {row['published_lost_gpu_s']:,} (`mw-AR.json`: steps less steps without it) |"
    )
    yield (
        f"| seconds a step, per waiting GPU | {row['charged_s_per_step']} | {row['published_s_per_step']} |"
    )
    yield f"| – that the recording does not show as waiting | + {row['unrecorded_s_per_step']} | |"
    yield f"| – that are waited in the healthy job too | − {row['anyway_s_per_step']} | |"
    yield (
        f"| – the same by this account | {row['reconciled_s_per_step']} | {row['published_s_per_step']} |"
    )
    yield (
        f"| seconds a step saved, by replaying the graph without it | {row['our_replay_s_per_step']} |"
        f" {row['published_s_per_step']} |"
    )
    yield (
        f"| slowdown of the job | {row['slowdown']:.3f} | {row['published_slowdown_worker']:.3f} by this worker,"
        f" {row['published_slowdown_all']:.3f} by all (`result-AR.json`) |"
    )
    yield (
        f"| who | culprits (dp, stage): {row['named']} | slowdown by replica {of_dp}; by stage {of_stage} |"
    )
    yield (
        f"\nWhy they differ. The Judge charges what is seen as waiting inside operations. The last stage of three replicas stands still outside"
        f" any recorded operation, {row['unrecorded_s_per_step']} s a step on average over all who wait, and is not charged for; a healthy pipeline"
        f" waits too ({row['anyway_s_per_step']} s), and is charged while a culprit is there. With both counted the two agree to"
        f" {abs(row['reconciled_s_per_step'] / row['published_s_per_step'] - 1):.1%}. The replay here starts from the recorded steps and"
        f" sets the worker's compute to its peers' median; theirs first takes launch delays out (slowdown {row['published_launch_slowdown']})"
        f" and compares every step with one ideal step: the slowdowns of single steps differ by up to {row['step_slowdown_max_difference']:.1%}."
    )
