"""Simulated jobs with a slow rank and an action on its node: what the ranks report, and how long the job really took."""

from dataclasses import dataclass, field
from functools import cache

import numpy as np

from ingero.model.collectives import COLLECTIVE_OP, ClockKind, CollectiveOp, CollectiveRun, Rank

OPS_A_STEP = 4
INSIDE_S = 0.002
NS = 10**9
START_S = 1_000.0


@dataclass(frozen=True)
class JobPlan:
    """A job of ``n_steps``; rank ``slow`` takes ``factor`` times as long from ``fault_s`` on, on its node."""

    n_ranks: int = 8
    n_steps: int = 900
    step_s: float = 0.4
    factor: float = 1.8
    slow: int = 2
    fault_s: float = 60.0
    acted_s: float | None = None
    standstill_s: float = 45.0
    is_requeued: bool = True
    checkpoint_steps: int = 1
    push_s: float = 5.0
    seed: int = 3


@dataclass
class JobHistory:
    """What happened. Times in seconds since the job's start, reports as (when, runs)."""

    plan: JobPlan
    took_s: float = 0.0
    resumed_step: int | None = None
    n_repeated_steps: int = 0
    reports: list = field(default_factory=list)

    @property
    def gpu_s(self):
        return self.plan.n_ranks * self.took_s


def node_of(plan, rank, run):
    """The run after the action has the spare in the place of the slow rank's node."""
    return "spare" if run and rank == plan.slow else f"n{rank}"


@cache
def simulate(plan):
    """Run the job step by step: every rank waits for the slowest at every operation."""
    rng = np.random.default_rng(plan.seed)
    history = JobHistory(plan)
    own_s = plan.step_s / OPS_A_STEP - INSIDE_S
    now_s, step, run = 0.0, 0, 0
    ops = [[] for _ in range(plan.n_ranks)]
    is_acted = False
    while step < plan.n_steps:
        for _ in range(OPS_A_STEP):
            own = own_s * (1 + 0.01 * rng.standard_normal(plan.n_ranks))
            if now_s >= plan.fault_s and not run:
                own[plan.slow] *= plan.factor
            entries = now_s + own
            leave_s = entries.max() + INSIDE_S
            for rank in range(plan.n_ranks):
                ops[rank].append((entries[rank], leave_s - entries[rank], own[rank]))
            now_s = leave_s
        step += 1
        if plan.acted_s is not None and now_s >= plan.acted_s and not is_acted:
            is_acted = True
            if plan.is_requeued:
                report(history, ops, run)
                kept = step - step % plan.checkpoint_steps
                history.n_repeated_steps, history.resumed_step = step - kept, kept
                step, run, now_s = kept, 1, now_s + plan.standstill_s
                ops = [[] for _ in range(plan.n_ranks)]
    history.took_s = now_s
    report(history, ops, run)
    history.reports.sort(key=lambda one: one[0])
    return history


def report(history, ops, run):
    """What each agent pushes: operations in the order of entry, at the push after each was left."""
    plan = history.plan
    for rank in range(plan.n_ranks):
        rows = np.zeros(len(ops[rank]), COLLECTIVE_OP)
        entry, inside, own = np.array(ops[rank]).T
        rows["seq"] = np.arange(len(rows))
        rows["entry_ns"] = ((START_S * (rank + 1) + entry) * NS).astype(
            np.int64
        )  # a clock of its own
        rows["inside_ns"] = (inside * NS).astype(np.int64)
        rows["own_ns"] = (own * NS).astype(np.int64)
        rows["n_bytes"], rows["op"] = 1 << 20, CollectiveOp.ALL_REDUCE
        who = Rank("c1", node_of(plan, rank, run), rank, resource=(("slurm.job.id", "4711"),))
        pushes = np.ceil((entry + inside) / plan.push_s)
        pushes[pushes == pushes[-1]] = pushes[-1]
        for push in np.unique(pushes):
            at_s = min(push * plan.push_s, entry[-1] + inside[-1])
            some = rows[pushes == push]
            history.reports.append((
                at_s,
                CollectiveRun(
                    who, f"{0xAB + run:016x}", rank, plan.n_ranks, ClockKind.DEVICE, some
                ),
            ))
