"""Simulated jobs, and what the judge says of them."""

import numpy as np
from tests.support.synthetic_jobs import JobShape, build_work, normal_noise, run_job

from ingero.detect.judge import Judge, JudgeSettings
from ingero.job_traces.convert import build_job_trace
from ingero.model.collectives import COLLECTIVE_OP, ClockKind, CollectiveOp, CollectiveRun

SHAPE = JobShape(n_dp=4, n_stages=3, n_microbatches=12, n_steps=8)
QUIET = normal_noise(0.02)


def simulate(shape=SHAPE, noise=QUIET, seed=0, change=None, links=None):
    rng = np.random.default_rng(seed)
    work = build_work(shape, noise, rng)
    if change is not None:
        work = change(work, rng)
    return build_job_trace(run_job(shape, work, links), "job", n_gpus_per_worker=2)


def slow(factor, *workers, since=2, until=None):
    def change(work, rng):
        for dp, stage in workers:
            work[since:until, dp, stage] *= factor
        return work

    return change


def judge(trace, with_history=False, **changes):
    found = Judge(JudgeSettings(**changes))
    for runs in trace.runs:
        found.observe(runs, 0)
    found.settle(0, final=True)
    (judgement,) = found.judgements(with_history=with_history)
    return judgement


def kinds(judgement):
    table = {}
    for verdict in judgement.verdicts:
        place = tuple(int(value) for _, value in verdict.rank.labels)
        table.setdefault(verdict.kind.value, set()).add(place)
    return table


def small_run(rank, comm, comm_rank, n_ranks, rows, clock=ClockKind.DEVICE):
    ops = np.zeros(len(rows), COLLECTIVE_OP)
    for at, (seq, entry, inside, own) in enumerate(rows):
        ops[at] = (seq, entry, inside, own, 1 << 20, CollectiveOp.ALL_REDUCE, 0)
    return CollectiveRun(rank, comm, comm_rank, n_ranks, clock, ops)
