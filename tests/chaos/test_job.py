"""The job of the fault runs: what it makes is what agents push, and its slow rank is one."""

from tests.chaos.job import N_RANKS, Job

from ingero.detect.judge import Judge
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S
from ingero.wire.collectives import build_collectives, read_collectives


def test_what_the_job_makes_goes_over_the_wire_and_has_the_slow_rank_named():
    clock = ManualClock()
    job, judge = Job(seed=1, mono_ns=clock.mono_ns), Judge()
    job.slow = 5
    clock.advance(4 * NS_PER_S)
    runs = [job.take(rank) for rank in range(N_RANKS)]
    read = read_collectives(build_collectives(runs, 1))
    assert (len(read.runs), read.n_refused) == (N_RANKS, 0)
    judge.observe(read.runs, 0)
    judge.settle(0, final=True)
    (judgement,) = judge.judgements()
    assert [verdict.rank.rank for verdict in judgement.culprits] == [5]
